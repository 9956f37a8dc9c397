"""Two runs that save into one folder by mistake, and runs that take the place of one that ended."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from tests.support.disks import contents
from tests.support.processes import run_group, script_environment
from tests.support.stopping import until
from tests.support.training import assert_same_weights, copy_weights, fresh_accelerator

from accelerate import Accelerator, load_checkpoint_in_model
from accelerate._base.errors import CheckpointError, ConfigurationError
from accelerate.checkpointing.catalog import catalog, inspect
from accelerate.devices.machine import get_free_port
from accelerate.runtime import claims
from accelerate.utils import ProjectConfiguration

pytestmark = pytest.mark.multiprocess


def make_run(project: str) -> tuple[Accelerator, torch.nn.Module]:
    configuration = ProjectConfiguration(project_dir=project, automatic_checkpoint_naming=True, total_limit=1)
    accelerator = fresh_accelerator(project_config=configuration)
    torch.manual_seed(0)
    model: torch.nn.Module = accelerator.prepare(torch.nn.Linear(2, 2))
    return accelerator, model


class Signs:
    """What two runs tell each other: files in a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def give(self, accelerator: Accelerator, name: str) -> None:
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (self.folder / name).write_text(str(os.getpid()))

    def await_sign(self, name: str) -> None:
        until(lambda: (self.folder / name).exists())


def first_run(project: str, signs: Signs) -> list[str]:
    """Save, let the other one try, save again, and end."""
    accelerator, _ = make_run(project)
    accelerator.save_state()
    signs.give(accelerator, "first has saved")
    signs.await_sign("second was refused")
    before = [info.name for info in accelerator.checkpoints()]
    accelerator.save_state(blocking=False)
    accelerator.wait_for_save()
    accelerator.save_state(Path(project) / "unused")  # numbered, whatever is given
    names = [*before, *(info.name for info in accelerator.checkpoints())]
    accelerator.end_training()
    (signs.folder / "first has ended").touch()
    return names


def second_run(project: str, signs: Signs) -> list[str]:
    """Try to save into the folder of the other one."""
    signs.await_sign("first has saved")
    accelerator, model = make_run(project)
    with pytest.raises(ConfigurationError) as begun:  # it does not go on from what is there
        accelerator.save_state()
    weights = copy_weights(model)  # the same as those of the first one
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, -1.0)
    accelerator.load_state()  # reading is free
    assert_same_weights(copy_weights(model), weights)
    before = contents(Path(project))
    said = [str(begun.value)]
    for blocking in (True, False):
        with pytest.raises(CheckpointError) as caught:
            accelerator.save_state(blocking=blocking)
        said.append(str(caught.value))
    assert contents(Path(project)) == before
    # A folder of its own in the same project, for weights or for a state, is nobody else's business.
    other = fresh_accelerator(project_dir=project)
    other.prepare(torch.nn.Linear(2, 2))
    other.save_state(Path(project, "mine"))
    other.save_model(torch.nn.Linear(2, 2), Path(project, "weights"))
    signs.give(accelerator, "second was refused")
    signs.await_sign("first has ended")
    accelerator, _ = make_run(project)
    accelerator.load_state()
    accelerator.save_state()
    accelerator.end_training()
    return said


def two_runs(project: str, signs: str, ports: list[int]) -> list[str]:
    """Four processes are two runs of two processes."""
    number, rank = divmod(int(os.environ["RANK"]), 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ["MASTER_PORT"] = str(ports[number])
    return (first_run, second_run)[number](project, Signs(signs))


def test_the_second_run_is_refused_and_told_who_is_first(tmp_path: Path) -> None:
    project, signs = tmp_path / "project", tmp_path / "signs"
    signs.mkdir()
    first, other, said, same = run_group(two_runs, 4, str(project), str(signs), [get_free_port(), get_free_port()])
    assert first == other == ["checkpoint_0", "checkpoint_2"]
    holder = (signs / "first has saved").read_text()
    assert said == same, "all ranks of the second run are told the same"
    begun, *refused = said
    assert f"process {holder} on {socket.gethostname()!r} saves into '{project}/checkpoints'" in begun
    assert len(refused) == 2
    for text in refused:
        assert f"'{project}/checkpoints' is in use: process {holder} on {socket.gethostname()!r} saves into it" in text
        assert "Give this run a folder of its own" in text
    assert [(info.name, info.is_valid) for info in catalog(project)] == [("checkpoint_3", True)]
    assert inspect(project / "mine", checksums=True).is_valid
    assert not list(project.rglob(".*"))


def record_and_save(project: str, signs: str) -> list[str]:
    """Two runs of one process write their logs to one project; the first one saves into it all the while."""
    number = int(os.environ["RANK"])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    configuration = ProjectConfiguration(project_dir=project, automatic_checkpoint_naming=True)
    accelerator = fresh_accelerator(project_config=configuration, log_with="tensorboard", cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.init_trackers("run")
    between = Signs(signs)
    if number == 0:
        accelerator.save_state()
    accelerator.log({f"loss of {number}": 1.0}, step=0)
    between.give(accelerator, f"{number} has begun")
    between.await_sign(f"{1 - number} has begun")
    accelerator.log({f"loss of {number}": 0.5}, step=1)
    if number == 0:
        accelerator.save_state()
    accelerator.end_training()
    return [info.name for info in accelerator.checkpoints()]


def test_two_runs_write_their_logs_to_one_project_while_one_saves(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    project, signs = tmp_path / "project", tmp_path / "signs"
    signs.mkdir()
    saved, _ = run_group(record_and_save, 2, str(project), str(signs))
    assert saved == ["checkpoint_0", "checkpoint_1"]
    assert [info.is_valid for info in catalog(project)] == [True, True]
    recorded = {}
    for file in project.rglob("events.out.tfevents.*"):
        events = accumulator(str(file)).Reload()
        for tag in events.Tags()["scalars"]:
            recorded[tag] = [entry.value for entry in events.Scalars(tag)]
    assert recorded == {"loss of 0": [1.0, 0.5], "loss of 1": [1.0, 0.5]}
    assert not list(project.rglob(".*"))


# --- a disk on each machine -------------------------------------------------------------------------------------------


def save_on_each_machine(disks: str) -> tuple[int, str]:
    """Save on two machines of one process each; return this process, and what the save said that was refused."""
    rank = os.environ["RANK"]
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    disk = Path(disks, rank)
    configuration = ProjectConfiguration(
        project_dir=str(disk), automatic_checkpoint_naming=True, save_on_each_node=True
    )
    accelerator = fresh_accelerator(project_config=configuration, cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_state()
    held = json.loads((disk / ".checkpoints.accelerate-claim").read_text())
    assert (held["host"], held["process"]) == (socket.gethostname(), os.getpid())

    # Another run holds the folder on the disk of one machine: the whole run is refused.
    claims._SECONDS_TO_DIE = 0.2
    if rank == "0":
        claims.claim(Path(disks, "1", "state"))
    accelerator.wait_for_everyone()
    other = fresh_accelerator(project_config=ProjectConfiguration(save_on_each_node=True), cpu=True)
    other.prepare(torch.nn.Linear(2, 2))
    with pytest.raises(CheckpointError) as caught:
        other.save_state(disk / "state")
    assert not (disk / "state").exists()
    other.end_training()
    return os.getpid(), str(caught.value).partition("Rank 1")[2]


def test_each_machine_claims_the_folder_on_its_own_disk(tmp_path: Path) -> None:
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
    (holder, said), (_, same) = run_group(save_on_each_machine, 2, str(tmp_path))
    assert said == same
    assert f"'{tmp_path}/1/state' is in use: process {holder} on {socket.gethostname()!r}" in said
    for rank in ("0", "1"):
        assert [(info.name, info.is_valid) for info in catalog(tmp_path / rank)] == [("checkpoint_0", True)]
    assert not list(tmp_path.rglob(".*"))


# --- another machine --------------------------------------------------------------------------------------------------

SECONDS_TO_ANSWER = 300  # it loads torch, and may wait a minute for a sign of life

ELSEWHERE = """
import sys
import torch
from accelerate import Accelerator, load_checkpoint_in_model
accelerator = Accelerator(cpu=True)
accelerator.prepare(torch.nn.Linear(2, 2))
print("ready", flush=True)
for line in sys.stdin:
    try:
        accelerator.save_state(line.strip())
        print("saved", flush=True)
    except RuntimeError as error:
        print(error, flush=True)
"""


class OtherMachine:
    """A process that this one cannot see by its number, on a machine of another name."""

    def __init__(self) -> None:
        command = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c"]
        script = 'hostname "$0" && exec "$@"'
        self.process = subprocess.Popen(
            [*command, script, "other-machine", sys.executable, "-c", ELSEWHERE],
            env=script_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())
        self._lines.put("")  # it has ended

    def hear(self) -> str:
        """Return its next line, an empty one if it has ended; a machine that is silent for long fails."""
        return self._lines.get(timeout=SECONDS_TO_ANSWER)

    def save(self, folder: Path) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{folder}\n")
        self.process.stdin.flush()
        return self.hear()

    def send(self, number: signal.Signals) -> None:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            child.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._listener.join()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def machine() -> Iterator[OtherMachine]:
    if shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("another machine needs root and unshare")
    found = OtherMachine()
    try:
        if found.hear() != "ready":
            pytest.skip("another machine cannot be had here")
        yield found
    finally:
        found.end()
        claims.release()


def test_a_run_on_another_machine_lives_while_its_pulse_does(
    machine: OtherMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "state"
    accelerator = fresh_accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    assert machine.save(folder) == "saved"
    with pytest.raises(CheckpointError, match="is in use: process 1 on 'other-machine' saves into it and still runs"):
        accelerator.save_state(folder)
    assert "cannot be seen from here: waiting for a sign of life" in caplog.text
    assert machine.save(folder) == "saved"

    # It stands still for so long that it counts as dead. When it goes on it finds that the folder is another's.
    monkeypatch.setattr(claims, "_SECONDS_OF_SILENCE", 0.5)
    machine.send(signal.SIGSTOP)
    accelerator.save_state(folder)
    kept = contents(folder)
    machine.send(signal.SIGCONT)
    assert f"is in use: process {os.getpid()} on {socket.gethostname()!r}" in machine.save(folder)
    assert contents(folder) == kept

    assert machine.save(tmp_path / "other") == "saved"
    machine.send(signal.SIGKILL)
    accelerator.save_state(tmp_path / "other")
    accelerator.end_training()
    assert sorted(entry.name for entry in tmp_path.iterdir() if "pulse" not in entry.name) == ["other", "state"]


# --- weights ----------------------------------------------------------------------------------------------------------


def save_weights(folder: str, rounds: int) -> int:
    """Save weights that are all one number, again and again; return how often that was refused."""
    value, refused = float(os.environ["RANK"]), 0
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(*(torch.nn.Linear(9, 9, bias=False) for _ in range(6)))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    for _ in range(rounds):
        try:
            accelerator.save_model(model, folder, max_shard_size=400)
        except CheckpointError:
            refused += 1
    return refused


def save_by_path_and_by_address(folder: str, signs: str) -> None:
    """One program holds a folder; the other saves into it by its path, and by an address of the same place."""
    number = os.environ["RANK"]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    claims._SECONDS_TO_DIE = 0.2
    accelerator, between = fresh_accelerator(cpu=True), Signs(signs)
    if number == "0":
        claims.claim(Path(folder))
        between.give(accelerator, "it is held")
        between.await_sign("it is through")
        claims.release()
        return
    between.await_sign("it is held")
    with pytest.raises(CheckpointError, match="is in use"):
        accelerator.save_model(torch.nn.Linear(2, 2), folder)
    assert not Path(folder).exists()
    accelerator.save_model(torch.nn.Linear(2, 2), f"file://{folder}")
    between.give(accelerator, "it is through")


def test_an_address_is_not_protected(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    folder, signs = tmp_path / "weights", tmp_path / "signs"
    signs.mkdir()
    run_group(save_by_path_and_by_address, 2, str(folder), str(signs))
    load_checkpoint_in_model(torch.nn.Linear(2, 2), folder, strict=True)


def test_weights_that_two_programs_save_at_once_are_those_of_one(tmp_path: Path) -> None:
    for number in range(3):
        folder = tmp_path / str(number)
        refused = run_group(save_weights, 2, str(folder), 10)
        assert max(refused) < 10
        model = torch.nn.Sequential(*(torch.nn.Linear(9, 9, bias=False) for _ in range(6)))
        load_checkpoint_in_model(model, folder, strict=True)
        values = torch.cat([parameter.flatten() for parameter in model.parameters()]).unique().tolist()
        assert values in ([0.0], [1.0])
        assert not list(tmp_path.rglob(".*"))
