"""Draw the loss of a run that is killed five times, on changing numbers of processes, over that of a run never stopped.

python tools/draw_resume.py            # runs examples/resume.py for real and writes docs/assets/resume.png
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "resume.py"
LEGS = (2, 1, 3, 2, 4, 1)
"""Processes of each leg; every leg but the last is killed."""
SECONDS = 600.0


@dataclass(frozen=True)
class Point:
    """The loss of one optimizer step, and the processes that made it."""

    step: int
    loss: float
    processes: int


def read(log: Path) -> list[Point]:
    """Return what a run has logged; a kill may have cut the last line."""
    points = []
    for line in log.read_text().splitlines() if log.exists() else ():
        try:
            points.append(Point(*json.loads(line)))
        except ValueError:
            continue
    return points


def start(processes: int, project: Path, log: Path, epochs: int, save_every: int) -> subprocess.Popen[bytes]:
    """Start the example."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", str(processes)]
    arguments = [
        "--project",
        str(project),
        "--losses",
        str(log),
        "--epochs",
        str(epochs),
        "--save-every",
        str(save_every),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*launch, str(EXAMPLE), *arguments], env=environment)


def finish(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a run.

    Raises:
        RuntimeError: If it failed.
    """
    if code := process.wait(SECONDS):
        raise RuntimeError(f"the run ended with code {code}")


def kill_at(step: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Kill all processes of a run with SIGKILL as soon as it has logged a step."""
    deadline = time.monotonic() + SECONDS
    while not any(point.step >= step for point in read(log)[-20:]):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the run ended before step {step}")
        time.sleep(0.01)
    launcher = psutil.Process(process.pid)
    for member in [*launcher.children(recursive=True), launcher]:
        member.kill()
    process.wait()


def draw(whole: list[Point], legs: list[list[Point]], path: Path) -> float:
    """Draw both curves, and return the largest difference between them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    expected = {point.step: point.loss for point in whole}
    difference = max(abs(point.loss - expected[point.step]) for leg in legs for point in leg)
    figure, axes = pyplot.subplots(figsize=(9, 4.2), layout="constrained")
    axes.plot(
        [point.step for point in whole],
        [point.loss for point in whole],
        color="0.78",
        linewidth=7,
        label="never stopped, 1 process",
        solid_capstyle="round",
    )
    colors = pyplot.get_cmap("tab10")
    for number, leg in enumerate(legs):
        count = leg[0].processes
        processes = "1 process" if count == 1 else f"{count} processes"
        steps, losses = [point.step for point in leg], [point.loss for point in leg]
        is_last = number == len(legs) - 1
        axes.plot(steps, losses, color=colors(number), linewidth=1.4, label=f"{processes}, from step {steps[0]}")
        if not is_last:
            axes.axvline(steps[-1], color=colors(number), linestyle=":", linewidth=1, zorder=0)
            axes.plot(steps[-1], losses[-1], marker="X", markersize=9, color=colors(number), markeredgecolor="black")
            axes.text(steps[-1] + 2, 0.13, "kill -9", fontsize=8, color="0.3")
    axes.set(xlabel="optimizer step", ylabel="training loss", yscale="log", ylim=(0.12, 2.6))
    axes.set_yticks([0.2, 0.5, 1, 2], ["0.2", "0.5", "1", "2"])
    axes.minorticks_off()
    axes.set_title(f"Killed five times, resumed on other numbers of processes: largest difference {difference:.0e}")
    axes.legend(fontsize=8, ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return difference


def main(output: Path, epochs: int, save_every: int, seed: int) -> None:
    """Run the example once in peace and once with kills, and draw both."""
    choices = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        finish(start(1, folder / "whole", folder / "whole.log", epochs, save_every))
        whole = read(folder / "whole.log")
        log, legs = folder / "killed.log", []
        for number, processes in enumerate(LEGS):
            before = len(read(log))
            process = start(processes, folder / "killed", log, epochs, save_every)
            if number < len(LEGS) - 1:
                even = len(whole) * (number + 1) // len(LEGS)
                kill_at(even + choices.randrange(-save_every // 2, save_every // 2), process, log)
            else:
                finish(process)
            legs.append(read(log)[before:])
        difference = draw(whole, legs, output)
        print(f"{output}: {len(whole)} steps, kills after {[leg[-1].step for leg in legs[:-1]]}, ", end="")
        print(f"went on at {[leg[0].step for leg in legs[1:]]}, largest difference {difference:.2e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "assets" / "resume.png")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    main(given.output, given.epochs, given.save_every, given.seed)
