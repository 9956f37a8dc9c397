"""Test cases, comparisons and programs started from a test; the decorators that skip tests are shown here as well."""

from __future__ import annotations

import asyncio
import contextlib
import io
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate._base.errors import UsageError
from accelerate.config import env as environment
from accelerate.test_utils.requirements import *  # noqa: F403
from accelerate.test_utils.requirements import backend

if TYPE_CHECKING:
    import torch

    torch_device: str
    device_count: int
    DEFAULT_LAUNCH_COMMAND: list[str]

# --- the device -------------------------------------------------------------------------------------------------------


def get_backend() -> tuple[str, int, Callable[[], int]]:
    """Return the device type of a run here, how many of them there are, and what counts their used memory."""
    kind, count = backend()
    return kind, count, memory_allocated_func


def memory_allocated_func() -> int:
    """Return the bytes that torch has allocated on the current accelerator; 0 on the CPU."""
    from accelerate.devices import registry

    module = registry.get(backend()[0]).module
    counter = getattr(module, "memory_allocated", None)
    return int(counter()) if counter is not None else 0


def __getattr__(name: str) -> Any:
    """Find out about the device when it is first asked for, because that loads torch."""
    makers: dict[str, Callable[[], Any]] = {
        "torch_device": lambda: backend()[0],
        "device_count": lambda: backend()[1],
        "DEFAULT_LAUNCH_COMMAND": lambda: get_launch_command(num_processes=backend()[1], monitor_interval=0.1),
    }
    if name not in makers:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return makers[name]()


# --- programs ---------------------------------------------------------------------------------------------------------


class SubprocessCallException(Exception):
    """Report a command of `run_command` that failed."""


@dataclass
class RunOutput:
    """How a command ended, and the lines that it printed."""

    returncode: int
    stdout: list[str] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)


def run_command(
    command: Sequence[str | Path], return_stdout: bool = False, env: Mapping[str, str] | None = None
) -> str | None:
    """Run a command to its end.

    Args:
        return_stdout: Return what it printed.
        env: Its environment; that of this process where none is given.

    Raises:
        SubprocessCallException: It failed; the text holds what it printed.
    """
    words = [str(word) for word in command]
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=dict(env) if env is not None else None, check=False
    )
    text = done.stdout.decode(errors="replace")
    if done.returncode:
        raise SubprocessCallException(
            f"The command {' '.join(words)!r} ended with code {done.returncode}. It printed:\n{text}"
        )
    return text if return_stdout else None


def execute_subprocess_async(
    cmd: Sequence[str | Path],
    env: Mapping[str, str] | None = None,
    stdin: Any = None,
    timeout: float = 180,
    quiet: bool = False,
    echo: bool = True,
) -> RunOutput:
    """Run a command, show its lines as they come, and return them.

    Args:
        timeout: Seconds after which the command is ended.
        quiet: Do not show its lines.
        echo: Show the command first.

    Raises:
        UsageError: (a `RuntimeError`) It failed or did not end in time; the text holds its last lines.
    """
    words = [str(word) for word in cmd]
    if echo:
        sys.stdout.write(f"\nRunning: {' '.join(words)}\n")
    variables = dict(env) if env is not None else None
    result, late = asyncio.run(_stream(words, variables, stdin, timeout, quiet))
    if late or result.returncode:
        ending = f"did not end within {timeout} seconds" if late else f"ended with code {result.returncode}"
        said = "\n".join(result.stderr or result.stdout)
        raise UsageError(f"The command {' '.join(words)!r} {ending}. It said:\n{said}")
    return result


async def _stream(
    words: list[str], variables: dict[str, str] | None, stdin: Any, timeout: float, quiet: bool
) -> tuple[RunOutput, bool]:
    process = await asyncio.create_subprocess_exec(
        *words, stdin=stdin, env=variables, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    result = RunOutput(0)

    async def read(stream: asyncio.StreamReader | None, lines: list[str], shown: Any) -> None:
        while stream is not None and (line := await stream.readline()):
            lines.append(line.decode(errors="replace").rstrip("\n"))
            if not quiet:
                shown.write(f"{lines[-1]}\n")

    async def finish() -> None:
        await asyncio.gather(
            read(process.stdout, result.stdout, sys.stdout), read(process.stderr, result.stderr, sys.stderr)
        )
        await process.wait()

    try:
        await asyncio.wait_for(finish(), timeout)
    except (TimeoutError, asyncio.TimeoutError):
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return result, True
    result.returncode = process.returncode or 0
    return result, False


def get_launch_command(**kwargs: object) -> list[str]:
    """Return the words of `accelerate launch` with options: `True` is a switch, `None` leaves one out.

    Example:
        `get_launch_command(num_processes=2, cpu=True)` gives
        `["accelerate", "launch", "--num_processes=2", "--cpu"]`.
    """
    words = ["accelerate", "launch"]
    for name, value in kwargs.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None:
            words.append(f"--{name}={value}")
    return words


def path_in_accelerate_package(*components: str) -> Path:
    """Return a path inside the installed package."""
    return Path(__file__).resolve().parents[1].joinpath(*components)


def pytest_xdist_worker_id() -> int:
    """Return the number of the pytest-xdist worker that runs this test; 0 without one."""
    name = environment.get("PYTEST_XDIST_WORKER", "gw0")
    return int(name.removeprefix("gw") or 0)


def get_torch_dist_unique_port() -> int:
    """Return a port that no other pytest-xdist worker takes."""
    return 29500 + pytest_xdist_worker_id()


# --- comparisons and cases --------------------------------------------------------------------------------------------


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Say whether all processes hold the same values; every process must ask."""
    from accelerate.collectives.ops import gather
    from accelerate.state import PartialState

    state = PartialState()
    own = tensor.detach().clone()[None].to(state.device)
    return all(bool((other == own[0]).all()) for other in gather(own))


@contextlib.contextmanager
def assert_exception(exception_class: type[BaseException], msg: str | None = None) -> Iterator[None]:
    """Check that the block raises an exception of this class whose text contains `msg`.

    Raises:
        AssertionError: It raises nothing, or its text is another one.
    """
    try:
        yield
    except exception_class as error:
        if msg is not None and msg not in str(error):
            raise AssertionError(f"The text {str(error)!r} does not contain {msg!r}.") from error
        return
    raise AssertionError(f"No {exception_class.__name__} was raised.")


def capture_call_output(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return what a call prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        func(*args, **kwargs)
    return printed.getvalue()


class AccelerateTestCase(unittest.TestCase):
    """Forget the states of this library after each test."""

    def tearDown(self) -> None:
        """Reset the states."""
        from accelerate.state import AcceleratorState, GradientState

        super().tearDown()
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


class TempDirTestCase(unittest.TestCase):
    """Give a class of tests the folder `tmpdir`, emptied before each test unless `clear_on_setup` is false."""

    clear_on_setup = True
    tmpdir: Path

    @classmethod
    def setUpClass(cls) -> None:
        """Make the folder."""
        super().setUpClass()
        cls.tmpdir = Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        """Remove the folder."""
        super().tearDownClass()
        shutil.rmtree(cls.tmpdir, ignore_errors=True)

    def setUp(self) -> None:
        """Empty the folder."""
        super().setUp()
        if self.clear_on_setup:
            for entry in self.tmpdir.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


class MockingTestCase(unittest.TestCase):
    """Start mocks for one test and stop them after it."""

    def add_mocks(self, mocks: Any) -> None:
        """Start mocks; each is stopped when the test ends."""
        self.mocks = list(mocks) if isinstance(mocks, (list, tuple)) else [mocks]
        for patcher in self.mocks:
            patcher.start()
            self.addCleanup(patcher.stop)
