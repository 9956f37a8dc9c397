"""Feed every target with generated inputs, by hypothesis and by atheris, and keep those that find something.

    python -m tests.hostile.fuzz --inputs 1000000 --seconds 2400

Each target runs in a process of its own, with a limit of memory and of time for each input. What a target neither takes nor
refuses by a clear error goes to its folder of the corpus, which the tests replay.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

CORPUS = Path(__file__).with_name("corpus")
SUFFIX = ".input"
SECONDS_FOR_ONE, SECONDS_OF_WAITING = 10.0, 100.0
BYTES_FOR_ONE = 512 * 2**20
"""By how much the memory of a process may grow for one input, which is a few kilobytes long."""
_MOST_MEMORY = 8 * 2**30
_MOST_GENERATED = 10_000
_LONGEST = 4096
_SEEDS = 200
_GRACE = 300.0
"""For imports, and for a last input that takes its time."""
_KEPT = 20
"""Of the inputs that reach new code, how many the corpus keeps for each target."""
# What an input costs, compared to others: the cheaper it is, the more of them are made.
_SHARES = {"yaml_config": 0.3, "torch_file": 0.3, "pending_manifest": 0.5, "manifest": 0.8}


class TooSlow(BaseException):
    """An input that is not dealt with in time."""


class TooMuch(BaseException):
    """An input that takes too much memory."""


@contextmanager
def limits() -> Iterator[None]:
    """Let a block neither hang nor take memory without bound.

    What counts is the time of the processor, so that a busy machine is no finding; and a long time for what only waits.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"not dealt with in {SECONDS_FOR_ONE} seconds, or waiting for {SECONDS_OF_WAITING}")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    timers = {
        signal.SIGPROF: (signal.ITIMER_PROF, SECONDS_FOR_ONE),
        signal.SIGALRM: (signal.ITIMER_REAL, SECONDS_OF_WAITING),
    }
    handlers = {number: signal.signal(number, stop) for number in timers}
    others = {timer: signal.setitimer(timer, seconds) for timer, seconds in timers.values()}
    try:
        yield
    finally:
        for timer, values in others.items():
            signal.setitimer(timer, *values)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    if grown > BYTES_FOR_ONE:
        raise TooMuch(f"{grown} bytes were taken")


@contextmanager
def scratch() -> Iterator[Path]:
    """Make a folder in memory, where the system has one."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="accelerate-fuzz-", dir=place) as folder:
        yield Path(folder)


def keep(name: str, data: bytes) -> Path:
    """Write an input to the corpus of a target."""
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (hashlib.sha256(data).hexdigest()[:12] + SUFFIX)
    path.write_bytes(data)
    return path


# --- one target, in a process of its own ----------------------------------------------------------------------------------


def generate(name: str, count: int, seconds: float, use: Callable[[bytes], object]) -> int:
    """Feed a target with inputs of hypothesis, and return how many there were."""
    from hypothesis import HealthCheck, Phase, given, settings
    from tests.hostile.inputs import INPUTS

    done, end = 0, time.monotonic() + seconds
    failing: list[bytes] = []

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        print_blob=False,
    )
    @given(INPUTS[name]())
    def feed(data: bytes) -> None:
        nonlocal done
        if time.monotonic() > end:
            return
        done += 1
        try:
            with limits():
                use(data)
        except BaseException:
            failing.append(data)
            raise

    try:
        feed()
    except BaseException:
        if failing:
            print(f"FINDING {keep(name, failing[-1])}", flush=True)
        raise
    return done


def work(name: str, count: int, seconds: float, found: Path) -> None:
    """Feed one target in this process, which ends with it.

    Args:
        found: A folder that gets the inputs which reach new code.
    """
    end = time.monotonic() + seconds
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY, _MOST_MEMORY))
    # Removed by whoever started this process: libFuzzer ends it on the spot.
    folder, seeds = found.with_suffix(".files"), found.with_suffix(".seeds")
    folder.mkdir()
    seeds.mkdir()
    os.environ["HF_HOME"] = str(folder)
    try:
        import atheris
    except ImportError:  # no wheel for this system: hypothesis makes all inputs
        atheris = None
    with nullcontext() if atheris is None else atheris.instrument_imports(include=["accelerate"]):
        from tests.hostile.targets import TARGETS, is_refused

        for path in sorted((CORPUS / name).glob(f"*{SUFFIX}")):  # a target imports what it needs
            is_refused(TARGETS[name], path.read_bytes(), folder)

    def feed(data: bytes) -> bool:
        return is_refused(TARGETS[name], data, folder)

    refused = 0
    kept: list[bytes] = []

    def feed_generated(data: bytes) -> None:
        nonlocal refused
        if len(kept) < _SEEDS and len(data) <= _LONGEST:
            kept.append(data)
        refused += feed(data)

    share = count if atheris is None else min(_MOST_GENERATED, count // 5)
    generated = generate(name, share, seconds if atheris is None else seconds / 3, feed_generated)
    print(f"GENERATED {generated} REFUSED {refused}", flush=True)
    if atheris is None or count <= generated:
        return
    for number, data in enumerate(kept):
        (seeds / str(number)).write_bytes(data)
    left = max(1, int(end - time.monotonic()))
    options = [f"-runs={count - generated}", f"-max_total_time={left}", f"-timeout={SECONDS_OF_WAITING:.0f}"]
    options += [f"-max_len={_LONGEST}", "-rss_limit_mb=4096", "-print_final_stats=1"]
    options += [f"-artifact_prefix={found}/finding-"]
    known = [str(CORPUS / name)] if (CORPUS / name).is_dir() else []
    atheris.Setup([sys.argv[0], *options, str(found), *known, str(seeds)], feed)
    atheris.Fuzz()


# --- all targets ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What came out of one target."""

    name: str
    generated: int
    refused: int
    mutated: int
    seconds: float
    findings: list[Path]
    log: str

    def __str__(self) -> str:
        total = f"{self.generated + self.mutated:>9,} inputs"
        kinds = f"({self.generated:,} by hypothesis, {self.refused:,} of them refused; {self.mutated:,} by atheris)"
        verdict = "no finding" if not self.findings and not self.log else "FAILED"
        return f"{self.name:<18}{total} {kinds:<66}{self.seconds:>6.0f} s  {verdict}"


def run_target(name: str, count: int, seconds: float, found: Path) -> Outcome:
    """Feed one target in another process."""
    folder = found / name
    folder.mkdir()
    arguments = ["--worker", name, "--inputs", str(count), "--seconds", str(seconds), "--found", str(folder)]
    begin = time.monotonic()
    with (found / f"{name}.log").open("w+", errors="replace") as log:
        command = [sys.executable, "-m", "tests.hostile.fuzz", *arguments]
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=CORPUS.parents[2])
        try:
            code = process.wait(seconds + _GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        log.seek(0)
        text = log.read()
    counted = re.search(r"^GENERATED (\d+) REFUSED (\d+)", text, flags=re.MULTILINE)
    generated, refused = (int(counted[1]), int(counted[2])) if counted is not None else (0, 0)
    mutated = sum(int(number) for number in re.findall(r"stat::number_of_executed_units:\s*(\d+)", text))
    findings = [Path(path) for path in re.findall(r"^FINDING (.+)$", text, flags=re.MULTILINE)]
    findings += [keep(name, path.read_bytes()) for path in folder.glob("finding-*")]
    wrong = code != 0 or not generated
    return Outcome(name, generated, refused, mutated, time.monotonic() - begin, findings, text[-3000:] if wrong else "")


def run_all(names: list[str], inputs: int, seconds: float, jobs: int, found: Path) -> list[Outcome]:
    """Feed all targets, and say what came out of each as soon as it is known."""
    shares = {name: _SHARES.get(name, 1.0) for name in names}
    # The slow ones first, so that no processor is idle at the end.
    waiting = sorted(names, key=lambda name: shares[name], reverse=True)
    outcomes: list[Outcome] = []
    begin = time.monotonic()

    def run_next() -> Outcome:
        left = seconds - (time.monotonic() - begin)
        budget = max(10.0, left * jobs / max(len(waiting), jobs))  # what others have not used is theirs who come later
        name = waiting.pop()
        return run_target(name, math.ceil(inputs * shares[name] / sum(shares.values())), budget, found)

    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(run_next) for _ in names]):
            outcomes.append(future.result())
            done = sum(outcome.generated + outcome.mutated for outcome in outcomes)
            passed = time.monotonic() - begin
            print(f"{outcomes[-1]}   [{len(outcomes)}/{len(names)}, {done:,} inputs, {passed:.0f} s]", flush=True)
            if outcomes[-1].log:
                print(outcomes[-1].log, flush=True)
            for path in outcomes[-1].findings:
                print(f"  kept as {path.relative_to(CORPUS.parents[2])}", flush=True)
    return outcomes


def minimise(names: list[str], found: Path) -> None:
    """Add to the corpus of each target the smallest inputs that reach code which no other one reaches."""
    for name in names:
        new = sorted((found / name).glob("*"), key=lambda path: path.stat().st_size)
        new = [path for path in new if not path.name.startswith("finding-") and path.stat().st_size <= _LONGEST]
        # The names of libFuzzer are of the time at which an input was found; spread over all sizes.
        for path in new[:: max(1, len(new) // _KEPT)][:_KEPT]:
            keep(name, path.read_bytes())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--inputs", type=int, default=1_000_000, help="How many in all; %(default)s if not given.")
    parser.add_argument("--seconds", type=float, default=2400.0, help="How long at most; %(default)s if not given.")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="Processes at the same time.")
    parser.add_argument("--targets", nargs="*", help="All if not given.")
    parser.add_argument("--keep", action="store_true", help="Add inputs that reach new code to the corpus.")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.worker, options.inputs, options.seconds, options.found)
        return 0
    from tests.hostile.targets import TARGETS

    names = options.targets or list(TARGETS)
    with scratch() as found:
        outcomes = run_all(names, options.inputs, options.seconds, options.jobs, found)
        if options.keep:
            minimise(names, found)
    done = sum(outcome.generated + outcome.mutated for outcome in outcomes)
    failed = [outcome.name for outcome in outcomes if outcome.findings or outcome.log]
    print(
        f"{done:,} inputs over {len(outcomes)} targets; " + (f"FAILED: {', '.join(failed)}" if failed else "no finding")
    )
    # A fuzzer may stop some inputs early.
    is_short = not failed and done < 0.99 * options.inputs
    if is_short:
        print(f"The time was too short for {options.inputs:,} inputs: give more with FUZZ_SECONDS=, or fewer inputs.")
    return 1 if failed or is_short else 0


if __name__ == "__main__":
    sys.exit(main())
