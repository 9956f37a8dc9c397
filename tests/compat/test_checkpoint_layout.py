"""Checkpoints that release 1.15.0 of Hugging Face Accelerate wrote, and this library earlier, load here.

The files were written by `checkpoints/make.py` under that release. The other direction is in that script too: it reads a
checkpoint of this library under the release, which `test_ours_load_there` does where an interpreter is named.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from fractions import Fraction
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.support.processes import forget_inherited_state

from accelerate._base.errors import CheckpointError
from accelerate.checkpointing.catalog import catalog

# torchdata 0.11 calls a function that torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
CHECKPOINTS = Path(__file__).parent / "checkpoints"
REFERENCE = os.environ.get("ACCELERATE_TEST_REFERENCE")
"""An interpreter that has the release, to run both directions for real."""


@pytest.fixture
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("checkpoints_make", CHECKPOINTS / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expected(name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((CHECKPOINTS / f"{name}.json").read_text())
    return facts


@pytest.mark.parametrize("name", ["safe", "plain", "stateful"])
def test_a_checkpoint_of_the_release_loads(make: ModuleType, name: str) -> None:
    facts = expected(name)
    run = make.Run(stateful=name == "stateful")
    run.accelerator.load_state(CHECKPOINTS / name)
    found = run.facts()
    assert found == {key: facts[key] for key in found}


@pytest.mark.parametrize("name", ["pickled", "earlier"])
def test_a_checkpoint_with_more_than_data_loads_where_it_was_asked_for(
    make: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = expected(name)
    run = make.Run()
    with pytest.raises(CheckpointError, match=r"custom_checkpoint_0\.pkl' is not read.*fractions\.Fraction"):
        run.accelerator.load_state(CHECKPOINTS / name)
    assert run.counter.value == 0
    for options, variable in (({"load_kwargs": {"weights_only": False}}, "0"), ({}, "1")):
        monkeypatch.setenv("ACCELERATE_ALLOW_PICKLE", variable)
        run = make.Run()
        run.accelerator.load_state(CHECKPOINTS / name, **options)
        found = run.facts()
        assert found == {key: facts[key] for key in found}
        assert run.counter.kept == Fraction(1, 3)


def test_the_state_of_a_stateful_loader_is_taken_over(make: ModuleType) -> None:
    facts = expected("stateful")
    run = make.Run(stateful=True)
    run.accelerator.load_state(CHECKPOINTS / "stateful")
    rest = [batch[:, 0].tolist() for batch in run.loader]
    assert rest == facts["rest"]
    assert sorted(chain.from_iterable(facts["seen"] + rest)) == [float(value) for value in range(0, 24, 3)]


def test_the_state_of_a_stateful_loader_says_nothing_to_a_plain_one(make: ModuleType) -> None:
    run = make.Run()
    run.accelerator.load_state(CHECKPOINTS / "stateful")
    assert len(list(run.loader)) == 4


def test_checkpoints_of_the_release_are_listed_as_unverified() -> None:
    found = catalog(CHECKPOINTS)
    assert {info.name for info in found} == {"safe", "plain", "stateful", "pickled", "earlier"}
    assert {(info.is_valid, info.problem) for info in found if info.name != "earlier"} == {(True, "no manifest")}


@pytest.mark.parametrize("safe", [True, False])
def test_our_files_have_the_names_and_keys_of_the_release(make: ModuleType, tmp_path: Path, safe: bool) -> None:
    from accelerate.checkpointing.torch_files import load

    run = make.Run(value=5)
    run.train(2)
    run.accelerator.save_state(tmp_path / "ours", safe_serialization=safe)
    theirs = CHECKPOINTS / ("safe" if safe else "plain")
    for file in theirs.iterdir():
        ours = tmp_path / "ours" / file.name
        assert ours.is_file()
        if file.suffix != ".safetensors":
            assert shape(load(ours)) == shape(load(file))


def shape(value: Any) -> Any:
    """Return the keys and types of a nested state."""
    if isinstance(value, dict):
        return {key: shape(entry) for key, entry in value.items()}
    return [shape(entry) for entry in value] if isinstance(value, list) else type(value).__name__


@pytest.mark.skipif(REFERENCE is None, reason="ACCELERATE_TEST_REFERENCE names no interpreter with the release")
@pytest.mark.parametrize("safe", [True, False])
def test_ours_load_there(make: ModuleType, tmp_path: Path, safe: bool) -> None:
    run = make.Run(value=5)
    run.train(2)
    run.accelerator.save_state(tmp_path / "ours", safe_serialization=safe)
    facts = run.facts()
    forget_inherited_state()
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(REFERENCE), str(CHECKPOINTS / "make.py"), "--read", str(tmp_path / "ours")]
    found = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=tmp_path, check=False)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout.splitlines()[-1]) == facts
    assert sys.executable != REFERENCE
