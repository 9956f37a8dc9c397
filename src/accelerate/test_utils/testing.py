"""Test cases, comparisons and the names under which programs import the other helpers."""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.test_utils.processes import *  # noqa: F403
from accelerate.test_utils.processes import get_launch_command
from accelerate.test_utils.requirements import *  # noqa: F403
from accelerate.test_utils.requirements import backend

if TYPE_CHECKING:
    import torch

    torch_device: str
    device_count: int
    DEFAULT_LAUNCH_COMMAND: list[str]


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
