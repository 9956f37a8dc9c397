"""Train for many steps while processes are killed at random, and compare with a run that nobody disturbed.

python benchmarks/soak.py --steps 100000 --kills 20

The disturbed run must end with every sample trained with exactly as often as in the undisturbed one, and with the same weights
to the last bit. No process may gather memory, file handles, threads or temporary files while it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

PROGRAM = Path(__file__).with_name("soak_program.py")
PROCESSES = 2
BYTES_PER_STEP = 100
"""What a process may gain in memory at each step; 1,000 objects of Python that stay would be far more."""
SECONDS_BETWEEN_LOOKS = 0.2
Vitals = dict[str, int]


class SoakFailure(Exception):
    """Report what went wrong."""


@dataclass
class Run:
    """One run of the program, with what its processes said of themselves."""

    name: str
    folder: Path
    steps: int
    save_every: int
    kills: int = 0
    seed: int = 0
    killed: list[str] = field(default_factory=list)
    launcher: list[Vitals] = field(default_factory=list)
    seconds: float = 0.0

    def vitals(self, rank: int) -> list[Vitals]:
        file = self.folder / f"vitals-{rank}.jsonl"
        lines = file.read_text().splitlines() if file.is_file() else []
        found = []
        for line in lines:
            with suppress(ValueError):  # killed while it wrote
                found.append(json.loads(line))
        return found

    def _step(self) -> int:
        """Return the last step that the first rank has told of."""
        return (self.vitals(0)[-1:] or [{"step": 0}])[0]["step"]

    def execute(self, deadline: float) -> dict[str, Any]:
        """Run the program to its end, kill its processes meanwhile, and return its result."""
        temporary = self.folder / "temporary"
        temporary.mkdir(parents=True)
        command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", str(PROCESSES)]
        command += ["--max_restarts", str(10 * self.kills + 1), "--auto_resume", "--num_cpu_threads_per_process", "1"]
        command += [str(PROGRAM), str(self.folder), "--steps", str(self.steps), "--save-every", str(self.save_every)]
        # torch makes a cache for its compiler in the folder of temporary files, also where nothing is compiled.
        variables = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "compiled")}
        began = time.monotonic()
        with (self.folder / "output.log").open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **variables}
            )
            try:
                self._watch(process, deadline)
            finally:
                _end(process)
        self.seconds = time.monotonic() - began
        if process.returncode != 0:
            tail = (self.folder / "output.log").read_text(errors="replace")[-3000:]
            raise SoakFailure(f"the {self.name} run ended with {process.returncode}:\n{tail}")
        left = [str(file.relative_to(self.folder)) for file in temporary.rglob("*")]
        left += [str(file.relative_to(self.folder)) for file in self.folder.rglob(".*")]
        if left:
            raise SoakFailure(f"the {self.name} run left files behind: {left}")
        if len(self.killed) != self.kills:
            raise SoakFailure(f"the {self.name} run was killed {len(self.killed)} times instead of {self.kills}")
        result: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return result

    def _watch(self, process: subprocess.Popen[bytes], deadline: float) -> None:
        choices = random.Random(self.seed)
        killer = self._killer(process, choices)
        with tqdm(total=self.steps, desc=self.name, unit="step") as bar:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise SoakFailure(f"the {self.name} run did not end in time; it stands at step {bar.n}")
                bar.update(max(0, self._step() - bar.n))
                next(killer, None)
                time.sleep(SECONDS_BETWEEN_LOOKS)

    def _killer(self, process: subprocess.Popen[bytes], choices: random.Random) -> Any:
        """Kill one process or all at random moments of the whole run: while they train, save, load or start."""
        for moment in sorted(choices.uniform(0.0, 0.8 * self.steps) for _ in range(self.kills)):
            # One of three kills comes soon after the one before, while the processes start again.
            is_soon = bool(self.killed) and choices.random() < 1 / 3
            while not is_soon and self._step() < moment:
                yield
            patience = time.monotonic() + choices.uniform(0.0, 8.0 if is_soon else 1.5)
            while time.monotonic() < patience or not _children(process.pid):
                yield
            workers = _children(process.pid)
            victims = [choices.choice(workers)] if choices.random() < 2 / 3 else workers
            step = self._step()
            for victim in victims:
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
            self.killed.append(f"{len(victims)} process(es) after step {step}")
            with suppress(psutil.Error):
                launcher = psutil.Process(process.pid)
                memory, handles = launcher.memory_info().rss, launcher.num_fds()
                self.launcher.append(
                    {"step": step, "memory": memory, "handles": handles, "threads": launcher.num_threads()}
                )
            yield

    def growth(self) -> dict[str, int]:
        """Return how much the longest-lived process of each rank has gained between its first and its last fifth.

        Raises:
            SoakFailure: If it is more than a process may gain.
        """
        found: dict[str, int] = {"steps": 0, "memory": 0, "handles": 0, "threads": 0}
        for rank in range(PROCESSES):
            lives: defaultdict[int, list[Vitals]] = defaultdict(list)
            for entry in self.vitals(rank):
                lives[entry["pid"]].append(entry)
            life = max(lives.values(), key=len, default=[])
            self._compare(life, f"rank {rank} of the {self.name} run", found)
        if len(self.launcher) > 2:
            self._compare(self.launcher[1:], f"the launcher of the {self.name} run", {})
        return found

    def _compare(self, life: list[Vitals], who: str, found: dict[str, int]) -> None:
        part = max(len(life) // 5, 1)
        # The first look is left out: what is made once, at the first save, is no growth.
        first, last = life[1 : part + 1] or life[:1], life[-part:]
        if not last:
            raise SoakFailure(f"{who} said nothing of itself")
        steps = max(last[-1]["step"] - first[0]["step"], 1)
        # What is leaked stays, so the least of several looks has it too.
        gains = {
            name: min(entry[name] for entry in last) - min(entry[name] for entry in first)
            for name in ("memory", "handles", "threads")
        }
        allowed = {"memory": max(BYTES_PER_STEP * steps, 2**23), "handles": 0, "threads": 0}
        for name, gain in gains.items():
            if gain > allowed[name]:
                raise SoakFailure(f"{who} gained {gain} of {name} in {steps} steps")
            found[name] = max(found.get(name, 0), gain)
        found["steps"] = max(found.get("steps", 0), steps)


def _children(pid: int) -> list[int]:
    """Return the processes that train: children of the launcher, and of those, that run the program."""
    with suppress(psutil.Error):
        return [
            child.pid
            for child in psutil.Process(pid).children(recursive=True)
            if str(PROGRAM) in " ".join(child.cmdline())
        ]
    return []


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        workers = _children(process.pid)
        process.kill()
        process.wait()
        for worker in workers:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


def compare(whole: dict[str, Any], disturbed: dict[str, Any]) -> None:
    """Raise unless the disturbed run ended as the other."""
    if disturbed != whole:
        raise SoakFailure(f"the disturbed run ended with {disturbed}, and the undisturbed one with {whole}")
    if not whole["fewest"] == whole["most"] == whole["epochs"]:
        raise SoakFailure(f"samples were not trained with equally often: {whole}")


def main() -> int:
    """Run both, and return 0 if they ended alike."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=100_000, help="optimizer steps, a multiple of 100 (default: %(default)s)"
    )
    parser.add_argument("--save-every", type=int, default=500, help="steps between two saves (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=20, help="how often processes are killed (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=60, help="give up after this time (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "soak.json")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    folder = Path(tempfile.mkdtemp(prefix="accelerate-soak-"))
    sizes = {"steps": options.steps, "save_every": options.save_every}
    whole = Run("undisturbed", folder / "whole", **sizes)
    disturbed = Run("disturbed", folder / "disturbed", **sizes, kills=options.kills, seed=options.seed)
    try:
        expected, found = whole.execute(deadline), disturbed.execute(deadline)
        compare(expected, found)
        report = {
            **found,
            "saves": options.steps // options.save_every,
            "kills": len(disturbed.killed),
            "seconds": {run.name: round(run.seconds) for run in (whole, disturbed)},
            "growth": {run.name: run.growth() for run in (whole, disturbed)},
        }
    except SoakFailure as failure:
        print(f"soak: {failure}\nwhat the runs left is in {folder}; kills: {disturbed.killed}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
