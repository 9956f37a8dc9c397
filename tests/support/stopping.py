"""A training script that saves, stops and goes on, and what it wrote down."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.support.launching import launch_command, launch_environment

TRAIN = """
import json, os, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

here = Path(sys.argv[1])
words = dict(word.split("=") for word in sys.argv[2:])
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
set_seed(3)
accelerator = Accelerator(
    project_config=ProjectConfiguration(project_dir=str(here / "run"), automatic_checkpoint_naming=True, total_limit=2)
)
rank = accelerator.process_index
if words.get("early"):
    (here / f"early-{rank}").write_text(str(os.getpid()))
    while not (here / "go").exists():
        time.sleep(0.02)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
rows = torch.arange(24.0).reshape(24, 1)
workers = int(words.get("workers", 0))
loader = DataLoader(rows, batch_size=4 // accelerator.num_processes, shuffle=True, num_workers=workers)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
(here / f"pid-{rank}.part").write_text(str(os.getpid()))
(here / f"pid-{rank}.part").rename(here / f"pid-{rank}")

def note(kind, **facts):
    with (here / f"log-{rank}").open("a") as stream:
        stream.write(json.dumps({"kind": kind, "attempt": attempt, **facts}) + chr(10))

def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.02)
        assert not accelerator.should_stop

def stop():
    path = accelerator.save_state()
    note("saved", path=str(path), step=accelerator.progress.step)
    try:
        accelerator.exit_for_restart()
    except SystemExit as leaving:
        note("exit", code=leaving.code)
        raise

if words.get("resume"):
    note("resumed", found=accelerator.resume())
for epoch in accelerator.epochs(3):
    for batch in loader:
        accelerator.backward((model(batch) - 2 * batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        step = accelerator.progress.step
        note("batch", epoch=epoch, step=step, rows=batch.flatten().tolist(), seen=accelerator.progress.samples)
        if words.get("save") and step % int(words["save"]) == 0:
            accelerator.save_state()
        if words.get("kill") == f"{rank}@{step}" and attempt == 0:
            os.kill(os.getpid(), 9)
        if words.get("signal") and int(words["signal"]) == step and not (here / "signalled").exists():
            (here / "signalled").touch()
            os.kill(os.getpid(), 10)
        if words.get("evaluate") == f"{rank}@{step}":
            (here / "evaluating").touch()
            wait_for("go")
        if accelerator.should_stop:
            stop()
        if words.get("pause"):
            (here / f"running-{rank}").touch()  # listens
            time.sleep(float(words["pause"]))
weights = [parameter.tolist() for parameter in accelerator.unwrap_model(model).parameters()]
note("end", weights=weights, step=accelerator.progress.step, samples=accelerator.progress.samples)
accelerator.end_training()
"""


class Run:
    """One launch of the script, in a folder that later launches share."""

    def __init__(
        self, folder: Path, *options: str, words: Sequence[str] = (), env: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        script = folder / "train.py"
        script.write_text(TRAIN)
        self.process = subprocess.Popen(
            launch_command("--cpu", *options, str(script), str(folder), *words),
            env=launch_environment(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> tuple[int, str]:
        """Return the exit code and what was written to the error stream."""
        try:
            _, errors = self.process.communicate(timeout=600)
        finally:
            self.process.kill()
        return self.process.returncode, errors

    def await_file(self, *names: str) -> None:
        """Wait until the script has made these files."""
        until(lambda: all((self.folder / name).exists() for name in names) or self.process.poll() is not None)
        assert self.process.poll() is None, self.wait()

    def pid_of(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())


def until(condition: Callable[[], bool], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def notes(folder: Path, kind: str, ranks: Iterable[int] = (0, 1)) -> list[list[dict[str, Any]]]:
    """Return what each rank wrote down of one kind."""
    lines = [(folder / f"log-{rank}").read_text().splitlines() for rank in ranks]
    return [[fact for fact in map(json.loads, entry) if fact["kind"] == kind] for entry in lines]


def rows_that_count(folder: Path, ranks: Iterable[int] = (0, 1)) -> dict[int, list[float]]:
    """Return the sorted rows of each epoch; of a step that was trained again the last time counts."""
    last: dict[tuple[int, int], list[float]] = {}
    for rank, entries in enumerate(notes(folder, "batch", ranks)):
        for entry in entries:
            last[entry["step"], rank] = [entry["epoch"], *entry["rows"]]
    epochs: dict[int, list[float]] = {}
    for epoch, *rows in last.values():
        epochs.setdefault(int(epoch), []).extend(rows)
    return {epoch: sorted(rows) for epoch, rows in sorted(epochs.items())}


def checkpoints(folder: Path) -> list[str]:
    place = folder / "run" / "checkpoints"
    return sorted(entry.name for entry in place.iterdir()) if place.is_dir() else []
