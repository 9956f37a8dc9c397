"""Checkpoints of Transformers' Trainer go both ways between this library and release 1.15.0.

`trainer_checkpoint/make.py` wrote the recorded one under that release. Where an interpreter is named that has it, ours is
read there too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.support.processes import script_environment

from accelerate.checkpointing.torch_files import load

pytestmark = pytest.mark.clients
RECORDED = Path(__file__).parent / "trainer_checkpoint"
CHECKPOINT = "checkpoint-7"
REFERENCE = os.environ.get("ACCELERATE_TEST_REFERENCE")
"""An interpreter that has the release, to run both directions for real."""


def train(output: Path, *options: str, interpreter: str = sys.executable) -> dict[str, Any]:
    """Train under the library of an interpreter, and return the losses and weights."""
    variables = script_environment({"HF_HUB_OFFLINE": "1"})
    if interpreter != sys.executable:
        variables.pop("PYTHONPATH", None)
    command = [interpreter, str(RECORDED / "make.py"), str(output), *options]
    done = subprocess.run(command, env=variables, cwd=output.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads((output / "facts.json").read_text())
    return facts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def ours(folder: Path) -> dict[str, Any]:
    return train(folder / "ours")


def assert_same_run(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, rows in expected["weights"].items():
        assert all(a == pytest.approx(b, rel=1e-5) for a, b in zip(found["weights"][name], rows, strict=True)), name


def test_a_checkpoint_of_the_release_is_resumed_to_the_end_that_it_had_there(folder: Path) -> None:
    recorded = json.loads((RECORDED / "facts.json").read_text())
    found = train(folder / "resumed", "--resume", str(RECORDED / CHECKPOINT))
    assert (recorded["version"], found["version"]) == ("1.15.0", "2.0.0")
    assert_same_run(found, recorded)


def test_a_whole_run_has_the_numbers_of_the_release(ours: dict[str, Any]) -> None:
    assert_same_run(ours, json.loads((RECORDED / "facts.json").read_text()))


def test_our_files_have_the_names_and_keys_of_the_release(folder: Path, ours: dict[str, Any]) -> None:
    made, theirs = folder / "ours" / CHECKPOINT, RECORDED / CHECKPOINT
    files = {path.name for path in theirs.iterdir()}
    assert {path.name for path in made.iterdir()} == files | {"training_args.bin"}
    for name in ("optimizer.pt", "scheduler.pt"):
        assert shape(load(made / name)) == shape(load(theirs / name))
    sizes, states = [], []
    for checkpoint in (made, theirs):
        weights = load_file(checkpoint / "model.safetensors")
        sizes.append({name: value.shape for name, value in weights.items()})
        states.append(json.loads((checkpoint / "trainer_state.json").read_text()))
    assert sizes[0] == sizes[1]
    assert states[0].keys() == states[1].keys()


def shape(value: Any) -> Any:
    """Return the keys and types of a nested state."""
    if isinstance(value, dict):
        return {key: shape(entry) for key, entry in value.items()}
    return [shape(entry) for entry in value] if isinstance(value, list) else type(value).__name__


@pytest.mark.skipif(REFERENCE is None, reason="ACCELERATE_TEST_REFERENCE names no interpreter with the release")
def test_ours_is_resumed_there(folder: Path, ours: dict[str, Any]) -> None:
    checkpoint = str(folder / "ours" / CHECKPOINT)
    found = train(folder / "there", "--resume", checkpoint, interpreter=str(REFERENCE))
    assert found["version"] == "1.15.0"
    assert_same_run(found, ours)
