"""Transformers' Trainer under both versions of FSDP: shards, accumulation, checkpoint, resume, and the saved model."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.support.processes import run_warm_script

pytest.importorskip("transformers")
pytestmark = [pytest.mark.clients, pytest.mark.multiprocess]

SCRIPT = Path(__file__).with_name("trainer_fsdp_script.py")
SAVE_AT, MAX_STEPS = 6, 12
CLIENTS = ["bert", "gpt2"]


@dataclass(frozen=True)
class Runs:
    """Results of each rank: of the run that was never stopped, resumed from its checkpoint, and evaluated before it."""

    version: int
    folder: Path
    straight: list[dict[str, Any]]
    resumed: list[dict[str, Any]]
    evaluated: list[dict[str, Any]]


@pytest.fixture(scope="module", params=[(1, "FULL_STATE_DICT"), (2, "SHARDED_STATE_DICT")], ids=["FSDP 1", "FSDP 2"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    from transformers import Trainer  # noqa: F401 - loaded for the processes that are forked next

    version, kind = request.param
    folder = tmp_path_factory.mktemp("trainer")
    # Under FSDP 1 the Trainer of Transformers 5.23 creates no optimizer for a model that is wrapped already.
    first = [("--evaluate-first",)] if version == 2 else []
    for stage in (*first, (), ("--resume",)):
        run_warm_script(SCRIPT, 2, [str(folder), "--version", str(version), "--kind", kind, *stage])

    def read(stage: str) -> list[dict[str, Any]]:
        return [json.loads((folder / f"{stage}-{rank}.json").read_text()) for rank in range(2)]

    return Runs(version, folder, read("straight"), read("resumed"), read("evaluated") if first else [])


@pytest.mark.parametrize("client", CLIENTS)
def test_each_process_holds_a_part(runs: Runs, client: str) -> None:
    import accelerate

    for result in runs.straight:
        assert Path(result["package"]) == Path(str(accelerate.__file__)).resolve()
        seen = result[client]
        assert (seen["type"], seen["version"]) == ("DistributedType.FSDP", runs.version)
        assert 0.4 * seen["numbers"] < seen["numbers here"] < 0.65 * seen["numbers"]


@pytest.mark.parametrize("client", CLIENTS)
def test_losses_are_finite_and_fall(runs: Runs, client: str) -> None:
    losses = runs.straight[0][client]["losses"]
    assert len(losses) == MAX_STEPS
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-3:]) < 0.85 * sum(losses[:3])


@pytest.mark.parametrize("client", CLIENTS)
def test_a_resumed_run_ends_like_the_one_never_stopped(runs: Runs, client: str) -> None:
    straight, resumed = runs.straight[0][client], runs.resumed[0][client]
    assert straight["steps_run"] == straight["steps"] == resumed["steps"] == MAX_STEPS
    assert resumed["steps_run"] == MAX_STEPS - SAVE_AT
    assert resumed["losses"] == pytest.approx(straight["losses"], rel=1e-6)
    assert resumed["eval_loss"] == pytest.approx(straight["eval_loss"], rel=1e-6)
    assert resumed["weights"].keys() == straight["weights"].keys()
    for name, value in straight["weights"].items():
        assert resumed["weights"][name] == pytest.approx(value, rel=1e-6, abs=1e-6), name


@pytest.mark.parametrize("client", CLIENTS)
def test_an_evaluation_before_the_training_changes_nothing(runs: Runs, client: str) -> None:
    if not runs.evaluated:
        pytest.skip("the Trainer creates no optimizer then")
    straight, evaluated = runs.straight[0][client], runs.evaluated[0][client]
    assert evaluated["losses"] == pytest.approx(straight["losses"], rel=1e-6)
    for name, value in straight["weights"].items():
        assert evaluated["weights"][name] == pytest.approx(value, rel=1e-6, abs=1e-6), name


@pytest.mark.parametrize("client", CLIENTS)
def test_the_saved_model_is_whole(runs: Runs, client: str) -> None:
    saved = load_file(runs.folder / client / "final" / "model.safetensors")
    expected = runs.resumed[0][client]["weights"]
    assert saved
    for name, value in saved.items():
        assert value.double().sum().item() == pytest.approx(expected[name][0], rel=1e-6, abs=1e-6), name
