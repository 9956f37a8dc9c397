"""SIGKILL to one rank in each phase of a run: the others end, the error names the rank, and the last checkpoint is there."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.faults.test_engines import ENGINES, require_package_of
from tests.support.processes import run_group
from tests.support.training import fresh_accelerator

from accelerate import Accelerator, notebook_launcher
from accelerate.checkpointing import manifest, state
from accelerate.checkpointing.catalog import newest_valid
from accelerate.checkpointing.parts import ModelPart
from accelerate.launchers import ProcessFailedError
from accelerate.strategies.base import Strategy
from accelerate.utils import ProjectConfiguration

pytestmark = pytest.mark.multiprocess

PHASES: dict[str, tuple[int, Any, str]] = {
    "prepare: the model is wrapped": (1, Strategy, "prepare_model"),
    "load: the checkpoint is looked for": (1, state, "_find"),
    "load: the files are verified": (0, state, "_verify"),
    "load: the weights are read": (1, ModelPart, "read"),
    "load: the ranks agree": (0, state, "_agree_to_load"),
    "load: the weights are restored": (1, ModelPart, "restore"),
    "save: the stage is made": (0, state, "make_stage"),
    "save: the snapshot is taken": (1, state.Snapshot, "__init__"),
    "save: the files are written": (1, state.StagedSave, "_write"),
    "save: the ranks have written": (0, state.StagedSave, "_publish"),
    "save: the manifest is written": (0, manifest.atomic, "swap_folder"),
    "save: the checkpoint is there": (0, state.StagedSave, "_rotate"),
    "save: older ones are removed": (0, manifest.atomic, "remove_folder"),
}
"""Phase -> (the rank that is killed when it gets there, the owner of what it calls there, its name)."""
EARLY = {"launch: nothing was made": 1, "launch: the group is there": 0}
PUBLISHED = ("save: the checkpoint is there", "save: older ones are removed")
CASES = [
    *((phase, True) for phase in (*EARLY, *PHASES)),
    *((phase, False) for phase in PHASES if phase.startswith("save")),
]
"""(phase, whether the save is blocking)"""


def make_run(project: str) -> tuple[Accelerator, Callable[[], None]]:
    configuration = ProjectConfiguration(project_dir=project, automatic_checkpoint_naming=True, total_limit=1)
    accelerator = fresh_accelerator(project_config=configuration, cpu=True)
    model = torch.nn.Linear(3, 3)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))

    def step() -> None:
        accelerator.backward(model(torch.ones(2, 3)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return accelerator, step


def die(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_once(project: str) -> None:
    accelerator, step = make_run(project)
    step()
    accelerator.save_state()
    accelerator.end_training()


def go_on(project: str, phase: str, blocking: bool) -> None:
    """Go on from a checkpoint, and save another one; one rank is killed on the way."""
    rank = int(os.environ["RANK"])
    if EARLY.get(phase) == rank:
        if phase == "launch: the group is there":
            Accelerator(cpu=True)
        die()
    victim, owner, name = PHASES.get(phase, (None, None, ""))
    if victim == rank:
        patch.object(owner, name, die).start()
    accelerator, step = make_run(project)
    accelerator.load_state()
    step()
    accelerator.save_state(blocking=blocking)
    accelerator.wait_for_save()
    accelerator.end_training()


def load_and_save(project: str) -> tuple[int, str]:
    accelerator, step = make_run(project)
    accelerator.load_state()
    loaded = accelerator.progress.step
    step()
    name = accelerator.save_state().name
    accelerator.end_training()
    return loaded, name


@pytest.mark.parametrize(("phase", "blocking"), CASES)
def test_a_rank_is_killed(phase: str, blocking: bool, tmp_path: Path) -> None:
    project = str(tmp_path)
    run_group(save_once, 2, project)
    victim = EARLY[phase] if phase in EARLY else PHASES[phase][0]
    with pytest.raises(ProcessFailedError) as caught:
        notebook_launcher(go_on, (project, phase, blocking), num_processes=2)
    text = str(caught.value)
    assert f"rank {victim} of 2 failed on {socket.gethostname()} " in text
    assert "SIGKILL" in text
    found = newest_valid(project).value
    assert found is not None
    assert found.step == (2 if phase in PUBLISHED else 1)
    # The next one, on another number of processes, goes on, and removes what is left.
    ((loaded, name),) = run_group(load_and_save, 1, project)
    assert loaded == found.step
    assert [path.name for path in tmp_path.rglob("checkpoint_*")] == [name]
    assert not list(tmp_path.rglob(".*"))


def save_into(folder: str, killed_in: str | None) -> int:
    """Load what is in a folder, train a step and save into the folder; rank 0 is killed where it would call a function."""
    if killed_in is not None and os.environ["RANK"] == "0":
        patch.object(manifest.atomic, killed_in, die).start()
    accelerator = fresh_accelerator(cpu=True)
    model = torch.nn.Linear(3, 3)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    if any(not entry.name.startswith(f".{Path(folder).name}.partial-") for entry in Path(folder).iterdir()):
        accelerator.load_state(folder)
    loaded = accelerator.progress.step
    accelerator.backward(model(torch.ones(2, 3)).square().mean())
    optimizer.step()
    accelerator.save_state(folder)
    accelerator.end_training()
    return loaded


def test_a_rank_is_killed_while_it_saves_into_a_folder_that_exists(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    before = folder.stat()
    # Before the new files are decided to be the checkpoint, and before they are moved into place.
    for killed_in in ("swap_folder", "move_files", "swap_folder", "move_files"):
        with pytest.raises(ProcessFailedError, match="SIGKILL"):
            notebook_launcher(save_into, (str(folder), killed_in), num_processes=2)
    assert run_group(save_into, 2, str(folder), None) == [2, 2]
    assert run_group(save_into, 1, str(folder), None) == [3]
    assert (folder.stat().st_ino, folder.stat().st_mode) == (before.st_ino, before.st_mode)
    assert not list(tmp_path.rglob(".*"))


# --- engines ----------------------------------------------------------------------------------------------------------


ENGINE_PHASES: dict[str, tuple[Any, str]] = {
    "prepare": (Strategy, "prepare_model"),
    "load": (state, "_agree_to_load"),
    "save": (state.StagedSave, "_write"),
}
"""Phase -> (the owner of what rank 1 has done when it is killed there, its name)."""


def die_after(owner: Any, name: str) -> None:
    """Let this process be killed when it has done something."""
    plain = getattr(owner, name)
    patch.object(owner, name, lambda *args, **kwargs: (plain(*args, **kwargs), die())).start()


def save_with(name: str, project: str, phase: str | None) -> int:
    """Train a step under an engine and save; rank 1 is killed on the way."""
    if phase is not None and os.environ["RANK"] == "1":
        die_after(*ENGINE_PHASES[phase])
    configuration = ProjectConfiguration(project_dir=project, automatic_checkpoint_naming=True, total_limit=1)
    accelerator, step = ENGINES[name][0](configuration)
    if list(Path(project).glob("checkpoints/*")):
        accelerator.load_state()
    loaded = accelerator.progress.step
    step()
    accelerator.save_state()
    accelerator.end_training()
    return loaded


@pytest.mark.parametrize(
    ("name", "phases"),
    [("fsdp2", ("prepare", "load", "save")), ("zero 3", ("load", "save")), ("megatron", ("save",))],
)
def test_a_rank_of_an_engine_is_killed(name: str, phases: tuple[str, ...], tmp_path: Path) -> None:
    require_package_of(name)
    project = str(tmp_path)
    run_group(save_with, 2, name, project, None)
    for phase in phases:
        with pytest.raises(ProcessFailedError, match=r"rank 1 of 2 failed on .*SIGKILL"):
            notebook_launcher(save_with, (name, project, phase), num_processes=2)
        found = newest_valid(project).value
        assert found is not None
        assert (found.name, found.step) == ("checkpoint_0", 1), phase
    assert run_group(save_with, 2, name, project, None) == [1, 1]
    assert [path.name for path in tmp_path.glob("checkpoints/*")] == ["checkpoint_1"]
    assert {path.name for path in tmp_path.rglob(".*")} <= {".metadata"}
