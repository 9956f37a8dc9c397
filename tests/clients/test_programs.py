"""Programs of Transformers, Diffusers, PEFT, TRL, sentence-transformers and datasets give what they give on release 1.15."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.clients import DIFFERENCES, PROGRAMS, PROGRAMS_FOLDER, Program, compare, read_recorded, run_program

import accelerate

pytestmark = [pytest.mark.clients, pytest.mark.multiprocess]


def a_resumed_run_ends_like_the_one_never_stopped(parts: dict[str, Any]) -> None:
    straight, resumed = parts["straight"], parts["resumed"]
    assert resumed["losses"] == straight["losses"][-len(resumed["losses"]) :]
    assert resumed["weights"] == straight["weights"]


def shards_train_like_replicas(parts: dict[str, Any]) -> None:
    expected = parts["replicas"]["straight"]
    for version in ("FSDP 1", "FSDP 2"):
        assert parts[version]["type"] == "FSDP"
        for run in ("straight", "resumed"):
            for name, value in expected.items():
                assert parts[version][run][name] == pytest.approx(value, rel=1e-5), (version, run, name)


def offloaded_layers_make_the_same_image(parts: dict[str, Any]) -> None:
    assert parts["sequential offload"]["images"] == parts["plain"]["images"]
    assert parts["sequential offload"]["weights elsewhere"] > 0
    assert parts["sequential offload"]["hooks removed"] == parts["plain"]


# What is right where release 1.15 gives something else.
RIGHT = {
    "no_trainer": a_resumed_run_ends_like_the_one_never_stopped,
    "diffusion": a_resumed_run_ends_like_the_one_never_stopped,
    "trainer_fsdp": shards_train_like_replicas,
    "diffusion_pipelines": offloaded_layers_make_the_same_image,
}
RUNS = [(program, processes) for program in PROGRAMS for processes in program.processes]


@pytest.mark.parametrize(
    ("program", "processes"), [pytest.param(*run, id=f"{run[0].name}-on-{run[1]}") for run in RUNS]
)
def test_a_program_gives_what_it_gives_on_release_1_15(program: Program, processes: int, tmp_path: Path) -> None:
    outcome = run_program(program, processes, tmp_path / "run")
    assert outcome.version == accelerate.__version__
    comparison = compare(program, processes, outcome.parts, read_recorded(program, processes))
    assert comparison.unexplained == {}
    if program.name in RIGHT:
        RIGHT[program.name](outcome.parts)
    assert comparison.equal + comparison.close > 0
    # A reason that explains nothing any more is to go.
    assert set(comparison.explained) == {
        entry for entry in DIFFERENCES if entry.program == program.name and processes in entry.processes
    }


def test_every_program_is_listed() -> None:
    files = {path.stem for path in PROGRAMS_FOLDER.glob("*.py") if "run(main)" in path.read_text()}
    assert files == {program.name for program in PROGRAMS}
