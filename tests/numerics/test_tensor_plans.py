"""Every style of a tensor-parallel plan gives the losses, gradient norms and weights of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.gpt import Plan, TinyGPT, gpt_step, make_tokens, train_gpt, train_plain_gpt
from tests.support.training import assert_same_outcome, group_once
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from accelerate.utils import TorchTensorParallelConfig

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

LAYOUTS = {
    "tp": Plan({"tp_size": 4}, accumulation=1),
    "replicas of tp": Plan({"dp_replicate_size": 2, "tp_size": 2}),
    "fsdp2 of tp": Plan({"dp_shard_size": 2, "tp_size": 2}, fsdp=True),
}
TOKENS, POSITIONS = "embedding.tokens", "embedding.positions"
TO_SEQUENCE = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
FROM_SEQUENCE = ColwiseParallel(input_layouts=Shard(1))
# Activations between the layers are split along the sequence, as in torch's tutorial.
SEQUENCE = {
    TOKENS: TO_SEQUENCE,
    POSITIONS: TO_SEQUENCE,
    "blocks.*.norm": "sequence_parallel",
    **{f"blocks.*.{name}": FROM_SEQUENCE for name in ("query", "key", "value", "up")},
    **{f"blocks.*.{name}": RowwiseParallel(output_layouts=Shard(1)) for name in ("out", "down")},
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
STYLES: dict[str, tuple[dict[str, Any], bool]] = {
    "embedding by rows": ({TOKENS: "embedding_rowwise", POSITIONS: "embedding_rowwise", "head": "colwise_rep"}, False),
    "embedding by columns": ({TOKENS: "embedding_colwise", "head": "rowwise_split_input"}, False),
    "tied by rows": ({TOKENS: "embedding_rowwise", "head": "colwise_gather_output"}, True),
    "tied by columns": ({TOKENS: "embedding_colwise", "head": "rowwise_rep"}, True),
    "gathered or replicated": (
        {"blocks.0.up": "colwise_rep", "blocks.0.down": "rowwise_rep"}
        | {"blocks.1.up": "replicate", "blocks.1.down": "replicated"},
        False,
    ),
    "sequence parallel": (SEQUENCE, False),
    "sequence parallel, tied": (SEQUENCE, True),
}
CASES = [(layout, style) for layout in LAYOUTS for style in STYLES]
SCALED = [(layout, style) for layout in LAYOUTS for style in ("embedding by rows", "sequence parallel")]


def plan_of(layout: str, style: str, **changes: Any) -> Plan:
    layers = {name: rule for name, rule in TinyGPT.tp_plan.items() if name != "head"}
    changed, tied = STYLES[style]
    handlers = {"tp_handler": TorchTensorParallelConfig(plan={**layers, **changed})}
    return replace(LAYOUTS[layout], tied=tied, handlers=handlers, **changes)


def clipped(plan: Plan) -> dict[str, float]:
    """Clip the gradients of one step, and return the norms that the call and the whole gradients have."""
    accelerator = plan.accelerator()
    model = TinyGPT(plan.dtype, plan.tied)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    gpt_step(accelerator, model, make_tokens(4), plan)
    accelerator.unscale_gradients(optimizer)
    before = whole_gradients(model)
    found = {"true norm": norm_of(before), "norm": accelerator.clip_grad_norm_(model.parameters(), 0.25).item()}
    found["clipped norm"] = norm_of(whole_gradients(model))
    largest = max(gradient.abs().max().item() for gradient in whole_gradients(model))
    accelerator.clip_grad_value_(model.parameters(), largest / 4)
    expected = [gradient * (0.25 / found["norm"]) for gradient in before]
    pairs = zip(whole_gradients(model), expected, strict=True)
    found["values"] = max((left - right.clamp(-largest / 4, largest / 4)).abs().max().item() for left, right in pairs)
    return found


def whole_gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    found = (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    return [(gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone() for gradient in found]


def norm_of(gradients: list[torch.Tensor]) -> float:
    return torch.nn.utils.get_total_norm(gradients).item()


def everything() -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for layout, style in CASES:
        found[layout, style] = train_gpt(plan_of(layout, style))
    for layout, style in SCALED:
        found[layout, style, "fp16"] = clipped(plan_of(layout, style, precision="fp16", accumulation=1))
    return found


@pytest.mark.parametrize(("layout", "style"), CASES)
def test_a_style_trains_as_one_process(layout: str, style: str) -> None:
    found = [result[layout, style] for result in group_once(everything, 4)]
    assert_same_outcome(found[0], train_plain_gpt(STYLES[style][1]), 1e-9)
    for other in found[1:]:
        assert other.rates == pytest.approx(found[0].rates)


@pytest.mark.parametrize(("layout", "style"), SCALED)
def test_scaled_gradients_are_clipped_by_the_norm_of_the_model(layout: str, style: str) -> None:
    for found in (result[layout, style, "fp16"] for result in group_once(everything, 4)):
        assert found["norm"] == pytest.approx(found["true norm"], rel=1e-5)
        assert found["clipped norm"] == pytest.approx(0.25, rel=1e-4)
        assert found["values"] < 1e-6
