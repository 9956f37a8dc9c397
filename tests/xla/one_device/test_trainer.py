"""Transformers' Trainer on one XLA device, unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

pytestmark = [
    # Of Transformers, about torch_xla: calls that it has newer names for, and the memory of CUDA.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but:UserWarning"),
]


def model() -> GPT2LMHeadModel:
    set_seed(0)
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))


def trainer(folder: Path, kind: type[Trainer] = Trainer, **options: Any) -> Trainer:
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


def test_it_trains_saves_resumes_and_evaluates(tmp_path: Path) -> None:
    found = trainer(tmp_path)
    assert found.accelerator.device.type == "xla"
    found.train()
    assert next(found.model.parameters()).device.type == "xla"
    assert found.model.lm_head.weight is found.model.transformer.wte.weight
    curve = losses(found)
    assert curve[-1] < curve[0] - 0.2
    assert found.evaluate()["eval_loss"] < curve[-1]
    assert (tmp_path / "checkpoint-8" / "model.safetensors").is_file()
    again = trainer(tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert losses(again)[-2:] == pytest.approx(curve[-2:], abs=2e-6)


@pytest.mark.parametrize("options", [{"bf16": True}, {"gradient_accumulation_steps": 2}])
def test_with_options(tmp_path: Path, options: dict[str, Any]) -> None:
    found = trainer(tmp_path, save_strategy="no", **options)
    found.train()
    assert losses(found)[-1] < losses(found)[0] - 0.2


class ShardingTrainer(Trainer):
    """Makes the optimizer of the wrapped model, which Transformers 5.22 leaves out for XLA's FSDP."""

    def _wrap_model(self, *args: Any, **kwargs: Any) -> Any:
        wrapped = super()._wrap_model(*args, **kwargs)
        if wrapped is not self.model and self.optimizer is None:
            self.create_optimizer(wrapped)
        return wrapped


def test_the_fsdp_of_torch_xla_by_transformers(tmp_path: Path) -> None:
    """The Trainer wraps the model itself, and prepares the optimizer alone."""
    settings = {"xla": True, "xla_fsdp_settings": {"compute_dtype": "float32"}, "min_num_params": 0}
    config = {**settings, "transformer_layer_cls_to_wrap": ["GPT2Block"]}
    found = trainer(tmp_path, ShardingTrainer, fsdp="full_shard", fsdp_config=config, save_strategy="no")
    found.train()
    assert type(found.model_wrapped).__name__ == "XlaFullyShardedDataParallel"
    plain = trainer(tmp_path / "plain", save_strategy="no")
    plain.train()
    assert losses(found) == pytest.approx(losses(plain), abs=1e-5)
