"""DeepSpeed's own Adam for states in host memory, which takes minutes to compile when it is used for the first time."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from tests.support.training import assert_near, group_once
from tests.support.zero import Case, prepare, train, train_case

pytest.importorskip("deepspeed")
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(not os.environ.get("ACCELERATE_TEST_CPU_ADAM"), reason="`make test-cpu-adam` compiles it"),
]


def work() -> dict[Any, Any]:
    """Train with torch's AdamW, which an offloaded optimizer is replaced for."""
    found: dict[Any, Any] = {"plain": train_case(Case(None, clip=0.5)).losses}
    for stage in (2, 3):
        case = Case(stage, clip=0.5, config={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
        run = prepare(case)
        outcome = train(run, case)
        found[stage] = (outcome.losses, type(run.model.basic_optimizer).__name__, outcome.rates)
        found["values", stage] = [group["weight_decay"] for group in run.optimizer.param_groups]
    return found


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", [2, 3])
def test_the_optimizer_of_torch_is_replaced(stage: int) -> None:
    for found in group_once(work, 2):
        losses, name, rates = found[stage]
        assert name == "DeepSpeedCPUAdam"
        assert_near("losses", torch.tensor(losses), torch.tensor(found["plain"]), 1e-5)
        assert rates[-1] < rates[0]
        assert found["values", stage] == [0.1, 0.0]
