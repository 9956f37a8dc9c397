"""A tiny language model that can be laid out in every way, and its training by plain PyTorch and by an `Accelerator`."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.support.training import Outcome, copy_weights, fresh_accelerator
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import DataLoader

from accelerate import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin, TorchDynamoPlugin

VOCABULARY, WIDTH, HEADS, LENGTH, BLOCKS = 20, 16, 4, 16, 3
SEQUENCES, STEP_SEQUENCES = 32, 8


class Block(nn.Module):
    """One layer: attention, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        # Without a bias, whose gradient is zero but for rounding, which Adam would blow up.
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        normed = self.norm(states)
        query, key, value = (
            layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.out(attended.transpose(1, 2).flatten(2))
        return states + self.down(gelu(self.up(states)))


class Embedding(nn.Module):
    """Tokens and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.tokens(tokens) + self.positions(positions)


class TinyGPT(nn.Module):
    """A language model; the same for the same seed on every rank."""

    tp_plan = {
        "blocks.*.query": "colwise",
        "blocks.*.key": "colwise",
        "blocks.*.value": "colwise",
        "blocks.*.out": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "head": "colwise_rep",
    }

    def __init__(self, dtype: torch.dtype = torch.float64, tied: bool = False, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = Embedding()
            self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.tokens.weight
        self.to(dtype)

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor | None = None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        states = self.embedding(tokens, positions)
        for block in self.blocks:
            states = block(states)
        outputs = self.head(states)
        return outputs if targets is None else self.pipeline_loss(outputs, targets)

    def pipeline_parts(self) -> list[nn.Module]:
        return [self.embedding, *self.blocks, self.head]

    def pipeline_loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(outputs.flatten(0, 1), targets.flatten())


def make_tokens(sequences: int = SEQUENCES) -> torch.Tensor:
    """Return the same sequences every time; a token more than the model sees, for the targets."""
    return torch.randint(0, VOCABULARY, (sequences, LENGTH + 1), generator=torch.Generator().manual_seed(3))


@dataclass(frozen=True)
class Plan:
    """A layout of processes, and how a step is cut into batches."""

    sizes: dict[str, int] = field(default_factory=dict)
    fsdp: bool = False
    tied: bool = False
    accumulation: int = 2
    precision: str = "no"
    handlers: dict[str, Any] = field(default_factory=dict)
    window: bool = False
    checkpointed: bool = False
    compiled: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "no" else torch.float32

    def accelerator(self) -> Any:
        options: dict[str, Any] = {}
        if self.fsdp:
            options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["Block"],
                activation_checkpointing=self.checkpointed,
            )
        if self.compiled:
            options["dynamo_plugin"] = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
        plugin = GradientAccumulationPlugin(num_steps=self.accumulation)
        config = ParallelismConfig(**self.sizes, **self.handlers)
        return fresh_accelerator(
            parallelism_config=config, mixed_precision=self.precision, gradient_accumulation_plugin=plugin, **options
        )


def train_plain_gpt(tied: bool = False, dtype: torch.dtype = torch.float64, clip: float = 0.5) -> Outcome:
    """Train on one process with plain PyTorch, one batch a step; `rates` are the norms before clipping."""
    model = TinyGPT(dtype, tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    outcome = Outcome({})
    for batch in make_tokens().split(STEP_SEQUENCES):
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        outcome.rates.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        outcome.losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    outcome.weights = copy_weights(model)
    return outcome


def train_gpt(plan: Plan, clip: float = 0.5) -> Outcome:
    """Train in a layout; ranks start from different weights where the layout must make them equal."""
    accelerator = plan.accelerator()
    model = TinyGPT(plan.dtype, plan.tied)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rows = STEP_SEQUENCES // accelerator.strategy.data_shard()[1] // plan.accumulation
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(make_tokens(), batch_size=rows))
    outcome, seen = Outcome({}), []
    for batch in loader:
        with accelerator.accumulate(model), warnings.catch_warnings():
            # torch's compiler looks at the gradient of every tensor that it meets.
            warnings.filterwarnings("ignore", message="The .grad attribute")
            loss = gpt_step(accelerator, model, batch, plan)
            seen.append(accelerator.reduce(loss.detach(), reduction="mean").item())
            if accelerator.sync_gradients:
                outcome.rates.append(accelerator.clip_grad_norm_(model.parameters(), clip).item())
                outcome.losses.append(sum(seen) / len(seen))
                seen.clear()
            optimizer.step()
            optimizer.zero_grad()
    outcome.weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    return outcome


def gpt_step(accelerator: Any, model: nn.Module, batch: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Run the passes of one batch in a layout and return the loss of this rank."""
    tokens, targets = batch[:, :-1].clone(), batch[:, 1:].clone()
    positions = torch.arange(LENGTH, device=batch.device).expand(len(tokens), -1).clone()
    buffers = [tokens, targets, positions]
    cuts = plan.sizes.get("cp_size", 1) > 1
    with accelerator.maybe_context_parallel(buffers, [1, 1, 1], set(buffers)) if cuts else nullcontext():
        loss = model(tokens, targets) if "pp_size" in plan.sizes else model(tokens, targets, positions)
        if plan.window:
            items = targets.numel()
            accelerator.backward(loss * items, num_items=items)
        else:
            accelerator.backward(loss)
    return loss
