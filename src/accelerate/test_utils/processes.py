"""Start programs from a test and keep what they print."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate._base.errors import UsageError
from accelerate.config import env as environment

__all__ = [
    "RunOutput",
    "SubprocessCallException",
    "execute_subprocess_async",
    "get_launch_command",
    "get_torch_dist_unique_port",
    "path_in_accelerate_package",
    "pytest_xdist_worker_id",
    "run_command",
]


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
    import subprocess

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
