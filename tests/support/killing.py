"""Training runs that are killed with SIGKILL in the middle of saves, and go on on other numbers of processes.

The processes of a run are forked from one that has everything loaded, so that a run takes a fraction of a second.
"""

from __future__ import annotations

import gc
import os
import pickle
import random
import select
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tests.support.processes import close_process_group, forget_inherited_state
from tests.support.training import WEIGHTS, copy_weights, make_data, make_model
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.devices.machine import get_free_port
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration

# torch loads a good part of itself when the first optimizer is made: here, once, and not in every process forked later.
torch.optim.AdamW(torch.nn.Linear(1, 1).parameters())

SAMPLES = 22
STEP_SAMPLES = 6
EPOCHS = 7
KILLS = 5
SECONDS_FOR_SURVIVORS = 2.0
SECONDS_FOR_A_RUN = 400.0
_WORDS = ("begin", "done", "loaded")


@dataclass(frozen=True)
class Plan:
    """A run that is killed several times: all of its choices follow from a seed."""

    seed: int
    solo: bool
    numbered: bool

    @classmethod
    def of(cls, seed: int) -> Plan:
        """Every third run stays on one process; every other one saves to one folder again and again."""
        return cls(seed, solo=seed % 3 == 0, numbered=seed % 2 == 0)

    def world_size(self, choices: random.Random) -> int:
        return 1 if self.solo else choices.choice((1, 2, 2, 3))

    def project(self, folder: Path) -> ProjectConfiguration:
        return ProjectConfiguration(
            project_dir=str(folder), automatic_checkpoint_naming=self.numbered, total_limit=1 if self.numbered else None
        )

    def source(self, folder: Path) -> Path | None:
        """Return what is given to `load_state` and `save_state`."""
        return None if self.numbered else folder / "last"


class Witness:
    """What all processes together have trained with: samples of each epoch, in their order."""

    def __init__(self) -> None:
        self.epochs: list[list[int]] = [[] for _ in range(EPOCHS)]

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": [list(numbers) for numbers in self.epochs]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = [list(numbers) for numbers in state["epochs"]]


@dataclass
class Outcome:
    """What a run that was not killed leaves."""

    epochs: list[list[int]]
    weights: WEIGHTS


class Run:
    """One process of a training run."""

    def __init__(self, plan: Plan, folder: Path, blocking: bool, say: Any) -> None:
        self.plan, self.folder, self.blocking, self.say = plan, folder, blocking, say
        self.accelerator = Accelerator(
            global_batch_size=STEP_SAMPLES,
            project_config=plan.project(folder),
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=plan.seed),
        )
        data = make_data(SAMPLES)
        rows = [(index, *data[index]) for index in range(SAMPLES)]
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        loader = DataLoader(rows, batch_size=2, shuffle=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.witness = Witness()
        self.accelerator.register_for_checkpointing(self.witness)

    def train(self, *, resumes: bool, saves_every: int = 1) -> Outcome:
        accelerator = self.accelerator
        if resumes:
            accelerator.load_state(self.plan.source(self.folder))
            self.say(f"loaded {accelerator.progress.step}")
        for epoch in accelerator.epochs(EPOCHS):
            for numbers, inputs, targets in self.loader:
                with accelerator.accumulate(self.model):
                    loss = torch.nn.functional.mse_loss(self.model(inputs), targets)
                    accelerator.backward(loss)
                    self.witness.epochs[epoch] += accelerator.gather_for_metrics(numbers).tolist()
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                if saves_every and accelerator.sync_gradients and accelerator.progress.step % saves_every == 0:
                    self.save()
        accelerator.wait_for_save()
        return Outcome(self.witness.epochs, copy_weights(accelerator.unwrap_model(self.model)))

    def save(self) -> None:
        step = self.accelerator.progress.step
        self.say(f"begin {step}")
        self.accelerator.save_state(self.plan.source(self.folder), blocking=self.blocking)
        if self.blocking:
            self.say(f"done {step}")


@dataclass
class Member:
    """A process of a group, and what it says."""

    pid: int
    voice: int
    heard: bytes = b""
    code: int | None = None

    def poll(self) -> bool:
        """Return whether it has ended."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code is not None


def start_group(
    world_size: int, plan: Plan, folder: Path, *, blocking: bool, resumes: bool, saves_every: int = 1
) -> list[Member]:
    """Fork the processes of a run."""
    port = get_free_port()
    sys.stdout.flush()
    sys.stderr.flush()
    members = []
    for rank in range(world_size):
        ears, voice = os.pipe()
        pid = os.fork()
        if pid == 0:
            training = {"resumes": resumes, "saves_every": saves_every}
            _be_member(rank, world_size, port, lambda say: Run(plan, folder, blocking, say), training, voice)
        os.close(voice)
        members.append(Member(pid, ears))
    return members


def _be_member(
    rank: int, world_size: int, port: int, make: Callable[[Any], Run], training: dict[str, Any], voice: int
) -> None:
    code = 1
    run: Run | None = None
    try:
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ.update({name: str(value) for name, value in ranks.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
        torch.set_num_threads(1)
        # A process group that the parent has left, and not yet collected, would wait here for threads that only it has.
        gc.freeze()
        forget_inherited_state()
        run = make(lambda text: os.write(voice, f"{text}\n".encode()))
        outcome = run.train(**training)
        (run.folder / f"outcome-{rank}").write_bytes(pickle.dumps(outcome))
        run.accelerator.end_training()
        close_process_group()
        code = 0
    except BaseException:
        os.write(voice, b"failed\n" + traceback.format_exc().encode())
    finally:
        os._exit(code)


def listen(members: list[Member], until: Any) -> list[str]:
    """Read what rank 0 says until it says something that fits, or ends."""
    leader = members[0]
    deadline = time.monotonic() + SECONDS_FOR_A_RUN
    while not leader.poll() or _can_be_read(leader.voice, 0):
        if _can_be_read(leader.voice, 0.2):
            text = os.read(leader.voice, 4096)
            if not text:
                break
            leader.heard += text
        lines = leader.heard.decode().splitlines()
        if until(lines):
            break
        if time.monotonic() > deadline:
            raise AssertionError(f"a run stands still after {lines[-3:]}")
    return leader.heard.decode().splitlines()


def _can_be_read(descriptor: int, seconds: float) -> bool:
    return bool(select.select([descriptor], [], [], seconds)[0])


def end_group(members: list[Member], seconds: float) -> None:
    """Wait for the processes, and kill those that do not end."""
    deadline = time.monotonic() + seconds
    while sum(member.poll() for member in members) < len(members) and time.monotonic() < deadline:
        time.sleep(0.01)
    for member in members:
        if not member.poll():
            os.kill(member.pid, signal.SIGKILL)
            _, status = os.waitpid(member.pid, 0)
            member.code = os.waitstatus_to_exitcode(status)
    for member in members:
        while _can_be_read(member.voice, 0) and (text := os.read(member.voice, 1 << 16)):
            member.heard += text
        os.close(member.voice)


@dataclass
class Killer:
    """Start a run, kill it in a save, start it again on another number of processes, and at last let it finish."""

    plan: Plan
    folder: Path
    durations: list[float] = field(default_factory=lambda: [0.05])
    moments: list[str] = field(default_factory=list)
    known: int = 0
    """The step of the last checkpoint that is known to be complete."""

    def execute(self) -> list[Outcome]:
        """Return what each process of the last run left."""
        choices = random.Random(self.plan.seed)
        for _ in range(KILLS):
            self._leg(choices)
        world_size = self.plan.world_size(choices)
        members = start_group(world_size, self.plan, self.folder, blocking=True, resumes=True, saves_every=5)
        listen(members, lambda _: False)
        end_group(members, SECONDS_FOR_A_RUN)
        self._check(members)
        self._learn(members[0], blocking=True)
        return [pickle.loads((self.folder / f"outcome-{rank}").read_bytes()) for rank in range(world_size)]

    def execute_undisturbed(self) -> Outcome:
        """Return what the same run leaves if nobody kills it, on one process."""
        members = start_group(1, self.plan, self.folder, blocking=True, resumes=False, saves_every=0)
        listen(members, lambda _: False)
        end_group(members, SECONDS_FOR_A_RUN)
        self._check(members)
        outcome: Outcome = pickle.loads((self.folder / "outcome-0").read_bytes())
        return outcome

    def _leg(self, choices: random.Random) -> None:
        """Train until a random moment of a save; the very first save is left in peace."""
        resumes = self.known > 0
        world_size, blocking = self.plan.world_size(choices), choices.random() < 0.6 or not resumes
        target = choices.randint(1 if resumes else 2, 3)
        part, victims = choices.uniform(0, 1.1), range(world_size)
        if choices.random() < 0.5:
            victims = range(choice := choices.randrange(world_size), choice + 1)
        members = start_group(world_size, self.plan, self.folder, blocking=blocking, resumes=resumes)
        began: list[float] = []

        def is_time(lines: list[str]) -> bool:
            saves = sum(line.startswith("begin") for line in lines)
            if saves > len(began):
                began.append(time.monotonic())
            return saves >= target

        if not is_time(listen(members, is_time)):
            end_group(members, SECONDS_FOR_SURVIVORS)
            said = [member.heard.decode() for member in members]
            raise AssertionError("\n".join(["a run ended before it was killed", *self.moments, *said]))
        self.durations += [after - before for before, after in pairwise(began)]
        time.sleep(part * statistics.median(self.durations))
        for victim in victims:
            if not members[victim].poll():
                os.kill(members[victim].pid, signal.SIGKILL)
        end_group(members, SECONDS_FOR_SURVIVORS)
        last = self._learn(members[0], blocking)
        self.moments.append(f"{world_size} process(es), killed {list(victims)}, {last}, after {part:.2f} of a save")
        # The others fail when one is killed; without a victim nobody may.
        if not any(member.code == -signal.SIGKILL for member in members):
            self._check(members)

    def _learn(self, leader: Member, blocking: bool) -> str:
        """Check that no complete checkpoint was lost, note which are complete now, and return the last word."""
        lines = [line for line in leader.heard.decode().splitlines() if line.startswith(_WORDS)]
        for line in lines:
            word, step = line.split()
            if word == "loaded":
                assert int(step) >= self.known, "\n".join([*self.moments, f"{line}, but {self.known} was saved"])
            # A save in the background is complete when the next but one begins: that waits for the one between them.
            complete = int(step) - (0 if word != "begin" else 1 if blocking else 2)
            self.known = max(self.known, complete if word != "begin" or complete > self._loaded(lines) else 0)
        return lines[-1]

    @staticmethod
    def _loaded(lines: list[str]) -> int:
        return next((int(line.split()[1]) for line in lines if line.startswith("loaded")), 0)

    def _check(self, members: list[Member]) -> None:
        said = [member.heard.decode() for member in members]
        assert all(member.code == 0 for member in members), "\n".join([*self.moments, *said])
