"""The contract of all strategies, lived by that of one XLA device."""

from __future__ import annotations

import pytest
import torch
from tests.contracts import test_checkpoint_parts as parts
from tests.contracts import test_strategies as lives

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.* is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def run_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lives.RUNS, "xla", (1, dict))
    monkeypatch.setitem(lives.REFUSED, ("xla", "fp16"), "XLA devices train in bf16")


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_model_lives_the_same_life(precision: str) -> None:
    found = lives.life_of_a_model("xla", precision)
    assert found.pop("spread") == 0.0
    assert found.pop("output") == torch.float32
    assert [check for check, held in found.items() if not held] == []


def test_parts_are_saved_and_brought_back_one_by_one() -> None:
    found = parts.life_of_the_parts("xla")
    broken = [f"{part}: not {check}" for part, checks in found.items() for check, held in checks.items() if not held]
    assert broken == []
    assert len(found) >= 6
