"""Fixtures for every test: a clean environment and clean states, and a report of what a test left behind."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Groups are forked from this process: threads of a pool that it has used would be missing in the children, which then
# wait for them for ever. One thread needs no pool.
torch.set_num_threads(1)

# A shell that starts the tests in its background lets them ignore Ctrl-C, and every program that they start inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path[:0] = [path for path in (str(Path(__file__).resolve().parents[1]),) if path not in sys.path]

from tests.support.processes import close_process_group, forget_inherited_state

# Set by pytest itself, or by a library once at its first import: no test can be blamed for these.
FOREIGN_VARIABLES = (
    "PYTEST_",
    "KMP_",
    "TORCHINDUCTOR_",
    "_TORCHINDUCTOR_",
    "TORCH_",
    "TRITON_",
    "PYTORCH_",
    "CUDA_MODULE_LOADING",
    "MPLBACKEND",
    "TOKENIZERS_PARALLELISM",
    "NCCL_ASYNC_ERROR_HANDLING",
)


def leaked_variables(before: dict[str, str]) -> list[str]:
    """Restore the environment and return what a test changed there, as "NAME: old -> new"."""
    now = dict(os.environ)
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    os.environ.clear()
    os.environ.update(before)
    own = [name for name in changed if not name.startswith(FOREIGN_VARIABLES)]
    return [f"{name}: {before.get(name)!r} -> {now.get(name)!r}" for name in own]


SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))


def leaked_handlers(before: dict[signal.Signals, object]) -> list[str]:
    """Restore what is done at a signal, and return what a test changed: programs that later tests start would inherit it."""
    changed = [number for number in SIGNALS if signal.getsignal(number) is not before[number]]
    leaks = [f"{number.name}: {before[number]!r} -> {signal.getsignal(number)!r}" for number in changed]
    for number in changed:
        signal.signal(number, before[number])  # type: ignore[arg-type]
    return leaks


def pytest_configure(config: pytest.Config) -> None:
    """Let torch 2.9 warn of the flat parameters of FSDP 1: it does so of any that are collected as garbage."""
    config.addinivalue_line("filterwarnings", "ignore:Deallocating Tensor that still has live PyObject:UserWarning")


def pytest_collection_finish() -> None:
    """Leave modules and tests out of garbage collection: many tests collect, and would search all of them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def leave_nothing_behind() -> Iterator[None]:
    """Reset states, process group and environment after each test, and fail the test that left one."""
    before = dict(os.environ)
    handlers: dict[signal.Signals, object] = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    leaks = [f"environment variable {change}" for change in leaked_variables(before)]
    leaks += ["a torch.distributed process group"] if close_process_group() else []
    forget_inherited_state()  # a run that listens for signals gives them back here
    leaks += [f"a handler of {change}" for change in leaked_handlers(handlers)]
    if leaks:
        pytest.fail("the test left behind: " + "; ".join(leaks), pytrace=False)


@pytest.fixture
def signals_come_back() -> Iterator[None]:
    """Undo what a program that leaves for a restart does: it ignores signals on its way out."""
    before: dict[signal.Signals, object] = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    leaked_handlers(before)


@pytest.fixture
def empty_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test in an empty folder with a script `train.py`, and without the user's configuration."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
