"""Start real process groups for tests: a function on N processes, or a script through torchrun."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import logging
import os
import pickle
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.multiprocessing

from accelerate.devices.machine import get_free_port

T = TypeVar("T")
StartMethod = Literal["fork", "spawn", "forkserver"]

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
ROOT = Path(__file__).resolve().parents[2]
SECONDS_FOR_THE_OTHERS = 2.0
# Not SIGUSR1: the library listens for that one, and puts back what Python knows of, which a fault handler is not.
_SHOW_STACK = signal.SIGUSR2


class ProcessGroupFailure(AssertionError):
    """A process of the group raised, died or did not end in time."""


def run_group(
    function: Callable[..., T],
    world_size: int,
    *args: Any,
    env: Mapping[str, str] | None = None,
    timeout: float = 600,
    start_method: StartMethod = "fork",
) -> list[T]:
    """Run `function(*args)` in `world_size` new processes and return the results in rank order.

    The rank variables are set, the process group is not: the function starts it (or `Accelerator` does).

    Args:
        env: variables set in every process, on top of the rank variables.
        start_method: "fork" takes any function, "spawn" an importable one; so does "forkserver", whose processes are
            forked from one that has imported what they need and done nothing else.

    Raises:
        ProcessGroupFailure: with the traceback of the ranks that failed, the first failure first.
    """
    if start_method == "fork":
        _preload()
    members = _start(function, args, world_size, dict(env or {}), start_method)
    try:
        return _collect(members, timeout)
    finally:
        for member in members:
            member.close()


@cache
def _preload() -> None:
    """Import once what nearly every group needs: its processes inherit it, and each would take a second for it."""
    for name in ("torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.tensor.parallel"):
        importlib.import_module(name)
    importlib.import_module("accelerate.strategies.registry").all_strategies()


def run_script(
    path_or_source: str | Path,
    world_size: int,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 600,
) -> subprocess.CompletedProcess[str]:
    """Run a script (a path, or its source text) by torchrun and return what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(path_or_source) if "\n" not in str(path_or_source) else Path(folder, "script.py")
        if path.parent == Path(folder):
            path.write_text(str(path_or_source))
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={world_size}"]
        command += ["--master_addr=127.0.0.1", f"--master_port={get_free_port()}", str(path), *args]
        return subprocess.run(
            command, env=script_environment(env), timeout=timeout, capture_output=True, text=True, check=False
        )


_GLOO_NOTE = re.compile(r"(\[Gloo\] Rank |\d+| is connected to | peer ranks\. |Expected number of [a-z ]* is : )*")


def without_gloo_notes(output: str) -> str:
    """Leave out what torch 2.9 and 2.10 write to stdout when a group meets; the notes of two processes may be in one line."""
    if "[Gloo]" not in output:
        return output
    return "".join(line for line in output.splitlines(keepends=True) if not _GLOO_NOTE.fullmatch(line.rstrip("\n")))


def run_warm_script(
    path: str | Path,
    world_size: int,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 600,
    *,
    folder: Path | None = None,
    strict: bool = False,
) -> str:
    """Run a script in processes forked from this one, and return what they wrote to stdout, in rank order.

    What this process has imported need not be loaded again: most of the time of a small script. The script sees what it
    would see under torchrun, and one process what it would see under python.

    Args:
        folder: The working folder of the processes, if not that of this one.
        strict: Warnings are errors, as under `python -W error`.

    Raises:
        ProcessGroupFailure: A process raised or ended with another code than 0; its stderr is part of the message.
    """
    with tempfile.TemporaryDirectory() as output:
        given = (Path(path).absolute(), list(args), Path(output), folder or Path.cwd(), strict)
        run_group(_run_as_main, world_size, *given, env=env, timeout=timeout)
        return "".join(without_gloo_notes(Path(output, f"{rank}.out").read_text()) for rank in range(world_size))


def _run_as_main(path: Path, args: list[str], output: Path, folder: Path, strict: bool) -> None:
    rank = os.environ["RANK"]
    os.chdir(folder)
    os.environ.update(script_environment())
    if os.environ["WORLD_SIZE"] == "1":
        for name in (*_RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    _forget_the_test_runner(strict)
    sys.argv = [str(path), *args]
    sys.path.insert(0, str(path.parent))
    with open(output / f"{rank}.out", "w") as out, open(output / f"{rank}.err", "w+") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        code: object = None
        with redirect_stdout(out), redirect_stderr(err):
            try:
                runpy.run_path(str(path), run_name="__main__")
            except SystemExit as end:
                code = end.code
            finally:
                atexit._run_exitfuncs()
        if code not in (None, 0):
            err.seek(0)
            raise RuntimeError(f"{path.name} ended with {code!r}\n{err.read()[-6000:]}")


def _forget_the_test_runner(strict: bool) -> None:
    """Give a forked process the exit handlers, log handlers and warning filters of a fresh one."""
    atexit._clear()
    logging.getLogger().handlers.clear()
    warnings.resetwarnings()
    if strict:
        warnings.simplefilter("error")
        return
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)


def script_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which a child python finds the package and the tests."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    defaults = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return {**os.environ, **defaults, **(env or {})}


@dataclass
class _Member:
    rank: int
    process: BaseProcess
    connection: Connection
    stack_file: str
    outcome: tuple[bool, Any] | None = field(default=None)

    def receive(self) -> None:
        try:
            self.outcome = pickle.loads(self.connection.recv_bytes())
        except EOFError:
            self.process.join(5)
            self.outcome = (False, f"the process ended without a result, exit code {self.process.exitcode}")

    def stack(self) -> str:
        """Ask a process that is still running where it stands."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, _SHOW_STACK)
            time.sleep(0.3)
        return Path(self.stack_file).read_text()

    def close(self) -> None:
        if self.outcome is None or not self.outcome[0]:
            self.process.kill()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.connection.close()
        Path(self.stack_file).unlink(missing_ok=True)


def _context(method: StartMethod) -> ForkContext | ForkServerContext | SpawnContext:
    match method:
        case "fork":
            return torch.multiprocessing.get_context("fork")
        case "spawn":
            return torch.multiprocessing.get_context("spawn")
    context: ForkServerContext = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    return context


def _start(
    function: Callable[..., Any], args: tuple[Any, ...], world_size: int, env: dict[str, str], method: StartMethod
) -> list[_Member]:
    context = _context(method)
    port = str(get_free_port())
    members = []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        handle, stack_file = tempfile.mkstemp(prefix="stack-")
        os.close(handle)
        ranks = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        process = context.Process(target=_member_main, args=(theirs, stack_file, {**ranks, **env}, function, args))
        with warnings.catch_warnings():
            # Python 3.12 warns of a fork beside threads; the children set one torch thread before they compute.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        members.append(_Member(rank, process, ours, stack_file))
    return members


def _member_main(
    connection: Connection, stack_file: str, env: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.update(env)
    # What was inherited is not garbage of this process: each collection would search hundreds of thousands of objects.
    gc.freeze()
    # The thread pool of a forked parent does not exist in the child: an OpenMP region there would wait for ever.
    torch.set_num_threads(1)
    with open(stack_file, "w") as stream:
        faulthandler.register(_SHOW_STACK, file=stream, all_threads=True)
        try:
            forget_inherited_state()
            outcome: tuple[bool, Any] = (True, function(*args))
            payload = pickle.dumps(outcome)
        except BaseException:
            payload = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(payload)
        connection.close()
        close_process_group()
        faulthandler.unregister(_SHOW_STACK)


def forget_inherited_state() -> None:
    """Reset the library's global state in this process, so far as its modules are loaded."""
    for name, reset in (("accelerate.runtime.current", "reset"), ("accelerate._base.helpers", "reset_warnings")):
        if name in sys.modules:
            getattr(importlib.import_module(name), reset)()


def close_process_group() -> bool:
    """Destroy the default process group; return whether there was one."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    distributed.destroy_process_group()
    return True


def _collect(members: list[_Member], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    failed: list[_Member] = []
    while pending := [member for member in members if member.outcome is None]:
        ready = wait([member.connection for member in pending], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for member in pending:
            if member.connection in ready:
                member.receive()
                assert member.outcome is not None
                if not member.outcome[0]:
                    deadline = min(deadline, time.monotonic() + SECONDS_FOR_THE_OTHERS)
                    failed.append(member)
    late = [member for member in members if member.outcome is None]
    if not failed and not late:
        return [member.outcome[1] for member in members if member.outcome is not None]
    parts = [f"rank {member.rank} failed:\n{member.outcome[1]}" for member in failed if member.outcome is not None]
    parts += [f"rank {member.rank} did not end; it stands at:\n{member.stack()}" for member in late]
    raise ProcessGroupFailure("\n".join(parts))
