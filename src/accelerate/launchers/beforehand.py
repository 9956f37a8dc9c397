"""What a process must not have done before processes for a notebook's function are started from it."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from accelerate._base.errors import ConfigurationError, UsageError
from accelerate._base.helpers import Choice
from accelerate.config import env
from accelerate.devices import registry
from accelerate.devices.base import DeviceBackend
from accelerate.devices.machine import Machine
from accelerate.runtime import current

# Packages that set up the accelerator when they are imported.
_EAGER_PACKAGES = ("bitsandbytes",)


def choose_start_method(machine: Machine) -> Choice[str]:
    """Fork, so that the functions and data of the notebook are there at once, unless that cannot work here."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return Choice("spawn", f"{sys.platform} cannot fork")
    backend = _backend(machine)
    if backend is not None and not backend.is_fork_safe():
        return Choice("spawn", f"a forked process cannot use {backend.type}")
    return Choice("fork", "functions of the notebook are in a forked process at once")


def check(machine: Machine, method: Choice[str], function: Callable[..., Any]) -> None:
    """Refuse to start where the processes could not work.

    Raises:
        ConfigurationError: If an `Accelerator` or a process group exists, or the function cannot be found by name.
        UsageError: If this process has set up the accelerator already.
    """
    _check_state()
    if method.value == "spawn":
        _check_findable(function, method.reason)
    else:
        _check_device(machine)


def _check_state() -> None:
    if current.PARTIAL or current.ACCELERATOR:
        place = current.made_at()
        where = f" by {place}" if place is not None else ""
        raise ConfigurationError(
            f"An Accelerator, or another state of this library, was made{where} in the process that is to start the "
            "others, which would take it for theirs. Make it inside the function that is launched; then restart the "
            "kernel, or call `accelerator.reset()`, and launch again."
        )
    if dist.is_available() and dist.is_initialized():
        raise ConfigurationError(
            f"torch.distributed has a process group ({dist.get_backend()}) in the process that is to start the others, "
            "which would inherit it. Remove the call of `init_process_group`, or call `destroy_process_group()` first."
        )


def _check_device(machine: Machine) -> None:
    backend = _backend(machine)
    if backend is None:
        return
    guilty = env.are_libraries_initialized(*_EAGER_PACKAGES)
    if not guilty and not backend.context_exists():
        return
    cause = f"the import of {', '.join(guilty)}" if guilty else "a tensor, a model or a query that was sent there"
    raise UsageError(
        f"This process has set up {backend.type!r} already ({cause}), and forked processes cannot use it then. Restart "
        "the kernel and move what touches the device, such as that import, into the function that is launched."
    )


def _check_findable(function: Callable[..., Any], reason: str) -> None:
    if getattr(function, "__module__", None) == "__main__":
        raise ConfigurationError(
            f"{getattr(function, '__name__', function)!r} is defined in the notebook, and new processes cannot find it "
            f"there: they are spawned, because {reason}. Write the function into a file and import it."
        )


def _backend(machine: Machine) -> DeviceBackend | None:
    """Return the accelerator that processes would use, without asking its driver, which a fork may not survive."""
    if not machine.has_accelerator or env.flag("ACCELERATE_USE_CPU"):
        return None
    return next((backend for backend in registry.all_backends() if backend.type == machine.device_type), None)
