"""A small language model with tied weights, trained plainly and under FSDP on the same samples."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.support.training import WEIGHTS, Outcome, assert_near, copy_weights, fresh_accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin, GradScalerKwargs

WORDS, WIDTH, SAMPLES, STEP_SAMPLES = 17, 8, 48, 16
BY_CLASS = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
BY_SIZE = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 400}


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = hidden + self.down(torch.tanh(self.up(self.norm(hidden))))
        return out


class Words(nn.Module):
    """Predict the next word; the first and the last layer share their weights."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(()))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(words) * self.scale
        for layer in self.layers:
            hidden = layer(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


def make_words(dtype: torch.dtype = torch.float64) -> Words:
    """Return the same model each time."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Words().to(dtype)


def make_text() -> TensorDataset:
    words = torch.randint(0, WORDS, (SAMPLES, 6), generator=torch.Generator().manual_seed(1))
    return TensorDataset(words, (words * 3 + 1) % WORDS)


def loss_of(model: nn.Module, words: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(words).flatten(0, 1), following.flatten())


def train_words_plainly(clip: float, epochs: int = 2, dtype: torch.dtype = torch.float64) -> Outcome:
    """Train on one process with plain PyTorch; `rates` are the norms of the gradients."""
    model, data = make_words(dtype), make_text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    outcome = Outcome({})
    for _ in range(epochs):
        for begin in range(0, SAMPLES, STEP_SAMPLES):
            loss = loss_of(model, *data[begin : begin + STEP_SAMPLES])
            loss.backward()
            outcome.losses.append(loss.item())
            outcome.rates.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
            optimizer.step()
            optimizer.zero_grad()
    outcome.weights = copy_weights(model)
    return outcome


@dataclass(frozen=True)
class Sharded:
    """How the model is trained under FSDP."""

    version: int
    options: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    by_window: bool = False
    clip: float = 0.5
    precision: str = "no"
    optimizer_first: bool = False
    sizes: dict[str, int] = field(default_factory=dict)
    on_meta: bool = False
    arrives_sharded: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "no" else torch.float32

    def accelerator(self) -> Accelerator:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plugin = FullyShardedDataParallelPlugin(fsdp_version=self.version, **self.options)
        normalize = {"normalize": "window"} if self.by_window else {}
        return fresh_accelerator(
            fsdp_plugin=None if self.arrives_sharded else plugin,
            mixed_precision=self.precision,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=self.accumulation, **normalize),
            kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)] if self.precision == "fp16" else None,
            parallelism_config=ParallelismConfig(**self.sizes) if self.sizes else None,
        )


def train_words(case: Sharded) -> tuple[Outcome, dict[str, Any]]:
    """Train under FSDP; return what came out, with the weights on the first rank, and what was seen of the model."""
    accelerator = case.accelerator()
    user = make_words(case.dtype)
    if case.on_meta and not accelerator.is_main_process:
        user = user.to("meta")
        user.head.weight = user.embedding.weight
    optimizer: Any = torch.optim.AdamW(user.parameters(), lr=0.01)
    batch = STEP_SAMPLES // accelerator.num_processes // (1 if case.by_window else case.accumulation)
    loader: Any = DataLoader(make_text(), batch_size=batch)
    if case.optimizer_first:
        optimizer, model, loader = accelerator.prepare(optimizer, user, loader)
    else:
        model, optimizer, loader = accelerator.prepare(user, optimizer, loader)
    local = sum(getattr(entry, "to_local", lambda entry=entry: entry)().numel() for entry in model.parameters())
    outcome, seen = Outcome({}), []
    for _ in range(2):
        for words, following in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, words, following)
                accelerator.backward(loss)
                seen.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
                if accelerator.sync_gradients:
                    outcome.rates.append(float(accelerator.clip_grad_norm_(model.parameters(), case.clip)))
                    outcome.losses.append(sum(seen) / len(seen))
                    seen.clear()
                optimizer.step()
                optimizer.zero_grad()
    outcome.weights = accelerator.get_state_dict(model)
    facts = {
        "strategy": accelerator.strategy.name,
        "numbers here": local,
        "is the user's": accelerator.unwrap_model(model) is user,
        "tied": user.head.weight is user.embedding.weight,
        "type": str(accelerator.distributed_type),
    }
    return outcome, facts


def near(found: WEIGHTS, expected: WEIGHTS, tolerance: float) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert_near(name, found[name], value, tolerance)
