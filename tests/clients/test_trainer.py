"""Transformers' Trainer runs on this package: accumulation, bf16, checkpoint, resume and prediction."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.processes import run_script, run_warm_script, script_environment

pytest.importorskip("transformers")

SCRIPT = Path(__file__).with_name("trainer_script.py")
SAVE_AT, MAX_STEPS, EVAL_SAMPLES = 6, 12, 21
CLIENTS = ["bert", "gpt2"]


@dataclass(frozen=True)
class Runs:
    """What every rank wrote of the run that was never stopped, and of the one resumed from its checkpoint."""

    world_size: int
    straight: list[dict[str, Any]]
    resumed: list[dict[str, Any]]


def launch(world_size: int, arguments: Sequence[str]) -> None:
    """Start the script as a user does: by python or by torchrun."""
    if world_size == 1:
        finished = subprocess.run(
            [sys.executable, str(SCRIPT), *arguments],
            env=script_environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
    else:
        finished = run_script(SCRIPT, world_size, arguments)
    assert finished.returncode == 0, finished.stderr[-6000:]


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    world_size: int = request.param
    folder = tmp_path_factory.mktemp("trainer")
    launch(world_size, [str(folder)])
    from transformers import Trainer  # noqa: F401 - loaded for the processes that are forked next

    run_warm_script(SCRIPT, world_size, [str(folder), "--resume"])

    def read(stage: str) -> list[dict[str, Any]]:
        return [json.loads((folder / f"{stage}-{rank}.json").read_text()) for rank in range(world_size)]

    return Runs(world_size, read("straight"), read("resumed"))


def test_it_ran_on_this_package_on_all_processes(runs: Runs) -> None:
    import accelerate

    for result in runs.straight + runs.resumed:
        assert Path(result["package"]) == Path(str(accelerate.__file__)).resolve()
        assert result["world_size"] == runs.world_size


@pytest.mark.parametrize("client", CLIENTS)
def test_losses_are_finite_and_fall(runs: Runs, client: str) -> None:
    losses = runs.straight[0][client]["losses"]
    assert len(losses) == MAX_STEPS
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-3:]) < 0.85 * sum(losses[:3])


@pytest.mark.parametrize("client", CLIENTS)
def test_the_schedule_counts_optimizer_steps(runs: Runs, client: str) -> None:
    rates = runs.straight[0][client]["rates"]
    assert rates == pytest.approx([5e-3 * (1 - step / MAX_STEPS) for step in range(MAX_STEPS)])


@pytest.mark.parametrize("client", CLIENTS)
def test_every_process_holds_the_same_weights(runs: Runs, client: str) -> None:
    for result in runs.straight:
        assert result[client]["weights"] == runs.straight[0][client]["weights"]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_resumed_run_ends_like_the_one_never_stopped(runs: Runs, client: str) -> None:
    for straight, resumed in zip(runs.straight, runs.resumed, strict=True):
        assert straight[client]["steps_run"] == straight[client]["steps"] == MAX_STEPS
        assert resumed[client]["steps_run"] == MAX_STEPS - SAVE_AT
        assert resumed[client]["steps"] == MAX_STEPS
        assert resumed[client]["losses"] == pytest.approx(straight[client]["losses"], rel=1e-6)
        assert resumed[client]["weights"].keys() == straight[client]["weights"].keys()
        for name, value in straight[client]["weights"].items():
            assert resumed[client]["weights"][name] == pytest.approx(value, rel=1e-6, abs=1e-6), name


@pytest.mark.parametrize("client", CLIENTS)
def test_predictions_hold_every_sample_once_and_in_order(runs: Runs, client: str) -> None:
    for result in runs.straight + runs.resumed:
        seen = result[client]
        assert len(seen["labels"]) == EVAL_SAMPLES
        assert seen["labels"] == seen["wanted_labels"]
        assert seen["right"] == pytest.approx(seen["right_by_hand"])
        # Batches of another shape may round bf16 products otherwise.
        assert seen["prediction_gap"] < 0.05


def test_a_short_last_batch_weighs_as_many_samples_as_it_has(runs: Runs) -> None:
    for result in runs.straight + runs.resumed:
        losses = result["bert"]["losses_by_hand"]
        assert losses[-1] > 5 * sum(losses[:-1]) / (EVAL_SAMPLES - 1)
        # On two processes the last batch is filled up with the first samples before its mean is taken.
        filled = [losses[-1], *losses[:3]] if runs.world_size == 2 else losses[-1:]
        expected = (sum(losses[:-1]) + sum(filled) / len(filled)) / EVAL_SAMPLES
        # Trainer multiplies the loss of a model that is told the number of items by the number of processes.
        assert result["bert"]["loss"] == pytest.approx(runs.world_size * expected, rel=0.01)
