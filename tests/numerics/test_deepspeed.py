"""Training with DeepSpeed gives the losses of ddp, and those of a loop that is written for DeepSpeed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.training import assert_near, fresh_accelerator, group_once
from tests.support.zero import BATCH, Case, Trained, make_samples, quiet, train_by_hand, train_case, train_on
from torch.utils.data import DataLoader

from accelerate.utils import GradientAccumulationPlugin

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.multiprocess

SINGLE = 2e-6
# DeepSpeed keeps weights in bfloat16, ddp computes with such copies of them: 8 bits of a loss of about 1.
HALF = 0.02
EVERY = [(stage, "no") for stage in (0, 1, 2, 3)] + [(stage, "bf16") for stage in (1, 2, 3)]
MATRIX = [(stage, precision, accumulation) for stage, precision in EVERY for accumulation in (1, 4)]
WAYS: dict[str, dict[str, Any]] = {
    "clipped": {"clip": 0.5},
    "clipped in windows": {"clip": 0.05, "accumulation": 4},
    "measured": {"clip": float("inf"), "accumulation": 3},
    "items": {"backward": "items", "accumulation": 4, "clip": 0.5},
    "items in two passes": {"backward": "items in two passes", "accumulation": 4, "clip": 0.5},
    "two passes": {"backward": "two passes"},
    "two passes in windows": {"backward": "two passes", "accumulation": 4, "clip": 0.5},
    "a short window": {
        "accumulation": 3,
        "options": {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=3, normalize="window")},
    },
    "a global batch": {"options": {"global_batch_size": 24}},
}


def own_batches() -> list[Any]:
    accelerator = fresh_accelerator(cpu=True)
    return list(accelerator.prepare(DataLoader(make_samples(), batch_size=BATCH)))


def compute() -> dict[Any, Any]:
    quiet()
    found: dict[Any, Any] = {}
    for accumulation in (1, 4):
        for precision in ("no", "bf16"):
            found[None, precision, accumulation] = train_case(Case(None, precision, accumulation, epochs=2))
    batches = own_batches()
    for stage, precision, accumulation in MATRIX:
        case = Case(stage, precision, accumulation, epochs=2)
        found[stage, precision, accumulation] = train_case(case)
        found["through us", stage, precision, accumulation] = train_on(case, batches)
        found["by hand", stage, precision, accumulation] = train_by_hand(case, batches)
    for name, way in WAYS.items():
        options = dict(way)
        if "options" in options and "accumulation" in options:
            options["accumulation"] = 1  # it is in the plugin
        for stage in (None, 0, 1, 2, 3):
            found[name, stage] = train_case(Case(stage, epochs=2, **options))
    return found


def results(rank: int = 0) -> dict[Any, Any]:
    return group_once(compute, 2)[rank]  # type: ignore[no-any-return]


def assert_alike(found: Trained, expected: Trained, tolerance: float) -> None:
    for kind in ("losses", "norms", "rates"):
        left, right = (torch.tensor(getattr(side, kind), dtype=torch.float64) for side in (found, expected))
        assert_near(kind, left, right, tolerance)
    assert (found.facts["updates"], found.facts["samples"]) == (expected.facts["updates"], expected.facts["samples"])


@pytest.mark.parametrize(("stage", "precision", "accumulation"), MATRIX)
def test_losses_are_those_of_ddp(stage: int, precision: str, accumulation: int) -> None:
    for rank in (0, 1):
        found, expected = (results(rank)[key, precision, accumulation] for key in (stage, None))
        assert_alike(found, expected, SINGLE if precision == "no" else HALF)
        assert found.facts["type"] == "DistributedType.DEEPSPEED"
        assert found.facts["precision"] == precision
        assert len(found.losses) == 16
        assert found.losses[-1] != found.losses[0]


@pytest.mark.parametrize(("stage", "precision", "accumulation"), MATRIX)
def test_losses_are_those_of_a_loop_for_deepspeed(stage: int, precision: str, accumulation: int) -> None:
    for rank in (0, 1):
        ours, by_hand = (results(rank)[who, stage, precision, accumulation] for who in ("through us", "by hand"))
        assert ours == by_hand
        assert len(ours) == 8


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_means_what_it_means_under_ddp(way: str, stage: int) -> None:
    for rank in (0, 1):
        found, expected = (results(rank)[way, key] for key in (stage, None))
        assert_alike(found, expected, 1e-5)
    assert (len(found.norms) > 0) == ("clip" in WAYS[way])
