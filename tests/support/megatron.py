"""Tiny Transformers models with an odd vocabulary, and a loop that trains them with or without Megatron."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from tests.support.training import fresh_accelerator
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, MegatronLMPlugin

WORDS = 101
STEPS = 20
LENGTH = 13
ROWS = 4
"""Rows of an optimizer step, on all replicas together."""


def make_model(kind: str, dropout: float = 0.0) -> Any:
    """Return the same model for the same kind; its vocabulary and its sequences cannot be halved."""
    torch.manual_seed(0)
    common = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**common, **sizes, **drops))
    if kind == "t5":
        sizes = {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 48, "d_kv": 8}
        config = transformers.T5Config(**sizes, vocab_size=WORDS, dropout_rate=dropout, decoder_start_token_id=0)
        return transformers.T5ForConditionalGeneration(config)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 32,
    }
    if kind == "llama":
        config = transformers.LlamaConfig(**common, **sizes, num_key_value_heads=2, attention_dropout=dropout)
        return transformers.LlamaForCausalLM(config)
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = transformers.MegatronBertConfig(vocab_size=WORDS, **sizes, **drops)
    heads = {
        "bert": transformers.MegatronBertForPreTraining,
        "bert words": transformers.MegatronBertForMaskedLM,
        "bert classes": transformers.MegatronBertForSequenceClassification,
    }
    if kind == "bert classes":
        config.num_labels = 3
    return heads[kind](config)


def draw(kind: str, config: str, **sizes: Any) -> Any:
    """Return a model with weights that are large enough for attention to choose."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.normal_(std=0.3)
    return model


def make_rows(kind: str, count: int = 16) -> list[dict[str, torch.Tensor]]:
    """Return the same samples for the same kind."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for words in torch.randint(3, WORDS, (count, LENGTH), generator=generator):
        row = {"input_ids": words, "labels": words.clone()}
        if kind in ("gpt2", "llama"):
            row["labels"][:3] = -100
        elif kind == "t5":
            row["labels"] = words[:7].clone()
        elif kind == "bert classes":
            row["labels"] = words[0] % 3
        else:
            # As many in each row, because replicas average their means.
            row["labels"] = torch.where(torch.arange(LENGTH) % 4 == 2, words, -100)
            if kind == "bert":
                row["next_sentence_label"] = words[0] % 2
        rows.append(row)
    return rows


@dataclass(frozen=True)
class Case:
    """What is trained, and how.

    Args:
        options: Those of the plugin; None trains without Megatron.
        clip: The norm to which the loop clips; without Megatron it does what the plugin says otherwise.
    """

    kind: str = "gpt2"
    options: tuple[tuple[str, Any], ...] | None = None
    optimizer: str = "adamw"
    accumulation: int = 1
    clip: float | None = None
    dropout: float = 0.0
    precision: str = "no"
    steps: int = STEPS
    shuffle: bool = False

    @property
    def plugin(self) -> MegatronLMPlugin | None:
        return None if self.options is None else MegatronLMPlugin(**dict(self.options))


def case(kind: str = "gpt2", *, steps: int = STEPS, **options: Any) -> Case:
    """Return a case with options of the plugin."""
    return Case(kind, tuple(sorted(options.items())), steps=steps)


@dataclass
class Run:
    """The prepared objects of a case."""

    case: Case
    accelerator: Accelerator
    model: Any
    optimizer: Any
    loader: Any
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return all weights, on the ranks that get them."""
        found: dict[str, torch.Tensor] = self.accelerator.get_state_dict(self.model)
        return {name: value.clone() for name, value in found.items()}


def prepare(case: Case, **options: Any) -> Run:
    """Prepare model, optimizer and loader, so that a step has the same rows however they are shared."""
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)
    accelerator = fresh_accelerator(
        megatron_lm_plugin=case.plugin,
        gradient_accumulation_steps=case.accumulation,
        dataloader_config=config,
        mixed_precision=case.precision,
        **options,
    )
    model = make_model(case.kind, case.dropout)
    if case.optimizer == "sgd":
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parts = dict(case.options or ()).get("num_micro_batches", 1) * case.accumulation
    replicas = accelerator.strategy.data_shard()[1]
    loader = DataLoader(make_rows(case.kind), batch_size=ROWS // parts // replicas, shuffle=case.shuffle)
    torch.manual_seed(5)
    return Run(case, accelerator, *accelerator.prepare(model, optimizer, loader))


def train(run: Run, stop: int | None = None, then: Callable[[], Any] | None = None) -> list[float]:
    """Train as any loop does; return the loss of each optimizer step.

    Args:
        stop: End after so many steps, counted from the beginning of the run, after calling `then`.
    """
    accelerator, case = run.accelerator, run.case
    losses: list[float] = []
    parts: list[torch.Tensor] = []
    last = case.steps if stop is None else stop
    run.model.train()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This schedule advances")
        while accelerator.progress.step < last:
            for batch in run.loader:
                with accelerator.accumulate(run.model):
                    loss = run.model(**batch).loss
                    accelerator.backward(loss)
                    parts.append(accelerator.gather(loss.detach().reshape(1)).mean())
                    if accelerator.sync_gradients:
                        if case.clip is not None or case.options is None:
                            norm = accelerator.clip_grad_norm_(run.model.parameters(), case.clip or 1.0)
                            run.norms.append(float(norm))
                        losses.append(torch.stack(parts).mean().item())
                        parts.clear()
                    run.optimizer.step()
                    run.optimizer.zero_grad()
                if accelerator.progress.step >= last:
                    break
        if then is not None:
            then()
    return losses
