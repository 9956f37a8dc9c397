"""A small language model and Transformers' Trainer, for XLA devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)


def gpt2() -> Any:
    set_seed(0)
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))


def llama() -> Any:
    set_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=False))


def trainer(folder: Path, kind: type[Trainer] = Trainer, model: Callable[[], Any] = gpt2, **options: Any) -> Trainer:
    rows = [(torch.arange(16) + start) % 50 for start in range(64)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-3,
        "max_steps": 12,
        "logging_steps": 2,
        "save_steps": 8,
        "report_to": [],
        "disable_tqdm": True,
        **options,
    }
    return kind(model=model(), args=TrainingArguments(**settings), train_dataset=data, eval_dataset=data[:16])


def losses(found: Trainer) -> list[float]:
    return [entry["loss"] for entry in found.state.log_history if "loss" in entry]


class ShardingTrainer(Trainer):
    """Makes the optimizer of the wrapped model, which Transformers 5.22 leaves out for XLA's FSDP."""

    def _wrap_model(self, *args: Any, **kwargs: Any) -> Any:
        wrapped = super()._wrap_model(*args, **kwargs)
        if wrapped is not self.model and self.optimizer is None:
            self.create_optimizer(wrapped)
        return wrapped
