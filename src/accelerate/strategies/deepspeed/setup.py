"""What DeepSpeed needs of a process before its first engine: a device of its own choice, a group, a rank."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

from accelerate._base.errors import ConfigurationError
from accelerate._base.imports import require
from accelerate.config import env
from accelerate.runtime import current, process_group
from accelerate.runtime.current import Runtime

_LOG = logging.getLogger(__name__)
_DEVICE = "DS_ACCELERATOR"
_COMPILED = "deepspeed_shm_comm"


def set_up_process(runtime: Runtime) -> None:
    """Make this process one that DeepSpeed can work in.

    Raises:
        ConfigurationError: If DeepSpeed was imported before and has chosen another device.
        MissingPackageError: If it is not installed.
    """
    choose_device(runtime.device.type)
    # DeepSpeed 0.19 calls functions that torch 2.13 has renamed; nobody who reads it could change that.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # DeepSpeed looks here alone, and some launchers do not set it.
    if env.get("LOCAL_RANK") is None:
        env.put("LOCAL_RANK", str(runtime.local_rank))
    deepspeed = require("deepspeed", why="DeepSpeedPlugin", extra="deepspeed")
    skip_compilation(deepspeed)
    process_group.join_alone(runtime.backend.group_backend)
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    current.remember("groups of DeepSpeed", _forget_groups)


def skip_compilation(deepspeed: Any) -> None:
    """Let DeepSpeed do without an operator that it would compile when its first group is made on a CPU.

    Nothing but inference with split layers uses it. Its compilation takes up to a minute and needs a compiler, and a
    process that is killed meanwhile leaves a lock at which every later one waits for ever (torch 2.13).
    """
    deepspeed.ops.__compatible_ops__[_COMPILED] = False


def _forget_groups() -> bool:
    """Let DeepSpeed forget the groups of a process group that was left, which it keeps (deepspeed 0.19)."""
    groups = require("deepspeed.utils.groups", why="DeepSpeedPlugin", extra="deepspeed")
    groups._release_process_group_references()
    return True


def choose_device(device_type: str) -> None:
    """Tell DeepSpeed to work on the CPU where this process does; elsewhere it finds the device by itself.

    Raises:
        ConfigurationError: If it has chosen already.
    """
    if device_type != "cpu":
        return
    if env.get(_DEVICE) is None:
        env.put(_DEVICE, "cpu")
        _LOG.info("DeepSpeed runs on the CPU (%s=cpu), because this process does.", _DEVICE)
    if "deepspeed.accelerator" in sys.modules or "deepspeed" in sys.modules:
        chosen = (
            require("deepspeed.accelerator", why="DeepSpeedPlugin", extra="deepspeed").get_accelerator().device_name()
        )
        if chosen != "cpu":
            raise ConfigurationError(
                f"This process runs on the CPU, but DeepSpeed, which was imported before, has chosen {chosen!r}. Set "
                f"{_DEVICE}=cpu in the environment, or make the Accelerator before deepspeed is imported."
            )
