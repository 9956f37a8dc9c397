"""Run case scripts under both interpreters, in alternating sessions, and collect what they print."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

CASES = Path(__file__).resolve().parent / "cases"
OURS, REFERENCE = "ours", "reference"


class CaseFailure(RuntimeError):
    """A case script ended with an error or without a result."""


@dataclass(frozen=True)
class Script:
    """One command to measure: a script of `cases/`, its arguments and its number of processes.

    Args:
        only_ours: Do not run it under the reference, which would take minutes or cannot do it.
    """

    name: str
    arguments: tuple[str, ...] = ()
    processes: int = 1
    sessions: int = 2
    only_ours: bool = False
    timeout: int = 120


@dataclass
class Samples:
    """All rounds of one script under one interpreter."""

    series: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)

    def add(self, result: dict[str, object]) -> None:
        series = result.pop("series")
        assert isinstance(series, dict)
        for name, values in series.items():
            self.series.setdefault(name, []).extend(values)
        self.facts.update(result)

    def median(self, name: str) -> float:
        return statistics.median(self.series[name])

    def quiet(self, name: str) -> float:
        """Return the mean of the fastest tenth of the rounds.

        Other programs and the machine's clock only ever slow a round down, so the fastest rounds are the ones that show
        the code. Two equal loops differ by under 1 % here, and by several in the median.
        """
        fastest = sorted(self.series[name])[: max(1, len(self.series[name]) // 10)]
        return statistics.fmean(fastest)

    def extra(self, name: str, base: str = "plain") -> float:
        """Return what a quiet round of `name` takes more than one of `base`."""
        return self.quiet(name) - self.quiet(base)

    def ratio(self, name: str, base: str = "plain") -> float:
        """Return a quiet round of `name` divided by one of `base`."""
        return self.quiet(name) / self.quiet(base)

    def paired_ratio(self, name: str, base: str = "plain") -> float:
        """Return the median over the rounds of what `name` took, divided by what `base` took in the same round.

        For loops that wait for another process, or whose speed is a matter of where their memory lies: how fast a round
        can be is then a matter of luck, and the fastest tenth of two equal loops differ by 4 %. The two loops of one round
        meet the same state of the machine.
        """
        pairs = zip(self.series[name], self.series[base], strict=True)
        return statistics.median(value / other for value, other in pairs)


@dataclass(frozen=True)
class Interpreters:
    """The interpreters to compare; the reference may be missing."""

    ours: Path
    reference: Path | None

    def items(self) -> list[tuple[str, Path]]:
        pairs = [(OURS, self.ours), (REFERENCE, self.reference)]
        return [(name, path) for name, path in pairs if path is not None]


def measure(script: Script, interpreters: Interpreters) -> dict[str, Samples]:
    """Run a script under each interpreter in turn, several times, and pool the rounds."""
    measured = [pair for pair in interpreters.items() if pair[0] == OURS or not script.only_ours]
    samples = {name: Samples() for name, _ in measured}
    for session in range(script.sessions):
        order = list(measured)
        for name, python in order if session % 2 == 0 else reversed(order):
            samples[name].add(run_once(script, name, python))
    return samples


def run_once(script: Script, name: str, python: Path) -> dict[str, object]:
    """Run a script once and return the result that it printed."""
    command = [str(python)]
    if script.processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={script.processes}"]
    command += [str(CASES / script.name), *script.arguments]
    finished = subprocess.run(
        command, env=environment(name), capture_output=True, text=True, check=False, timeout=script.timeout
    )
    for line in finished.stdout.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, object] = json.loads(line.removeprefix("RESULT "))
            return result
    raise CaseFailure(f"{' '.join(command)} ended with code {finished.returncode}:\n{finished.stderr[-3000:]}")


def environment(name: str) -> dict[str, str]:
    """Return the variables of a measured process: one thread, and no path from the reference to our package."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    # An installed package has its bytecode; a source tree gets it at the first import, unless this variable forbids it.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    if name == REFERENCE:
        variables.pop("PYTHONPATH", None)
    return variables


def default_interpreters(reference: Path | None) -> Interpreters:
    """Take the running interpreter as ours."""
    return Interpreters(Path(sys.executable), reference)


def log(words: Sequence[str]) -> None:
    print(*words, file=sys.stderr, flush=True)
