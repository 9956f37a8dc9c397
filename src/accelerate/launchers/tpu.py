"""How a function of a notebook runs on XLA devices: in the notebook itself, or in a process for each device."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from accelerate._base.errors import ConfigurationError, UsageError
from accelerate._base.helpers import Choice
from accelerate._base.imports import installed_version, require
from accelerate.config import env
from accelerate.devices.machine import Machine
from accelerate.devices.xla import PJRT_DEVICE, USE_SPMD, XLA, asked_kind, uses_spmd
from accelerate.launch.failure import Failure, OutOfMemoryKills, first_failure, read_failures, report
from accelerate.launch.host import Host
from accelerate.launch.tpu import device_cores
from accelerate.launch.xla_processes import record_folder, run_on_all_devices

Way = Literal["here", "together", "processes"]
"""One device in the notebook, all devices in the notebook (SPMD), or a process for each."""
_TPU = "TPU"
_RESULT_FILE = "result"


def computes_on_xla(machine: Machine) -> bool:
    """Say whether a notebook on this machine is for XLA devices."""
    if env.flag("ACCELERATE_USE_CPU") or not env.flag("USE_TORCH_XLA", default=True):
        return False
    return machine.device_type == XLA.type or bool(env.get(PJRT_DEVICE) or env.get("TPU_NAME"))


def choose_way(host: Host, num_processes: int | None, precision: str) -> Choice[Way]:
    """Decide where the function runs, and why.

    Raises:
        ConfigurationError: The number of processes, or the precision, cannot be had here.
    """
    if precision in ("fp16", "fp8"):
        raise ConfigurationError(
            f"mixed_precision={precision!r} on XLA devices, which train in bfloat16 and have neither a scaler for float16 "
            "nor fp8. Write mixed_precision='bf16', or 'no'."
        )
    around = host.environment
    kind = asked_kind(around) or _TPU
    if uses_spmd(around):
        if num_processes not in (None, 1):
            raise ConfigurationError(
                f"num_processes={num_processes} together with {USE_SPMD}={around[USE_SPMD]}, by which this process drives "
                f"all XLA devices. Leave num_processes out, or unset {USE_SPMD}."
            )
        return Choice("here", f"{USE_SPMD} is set")
    cores = device_cores(host, kind, around)
    devices = None if cores is None else sum(cores)
    if num_processes is not None and num_processes not in (1, devices):
        has = f"this machine has {devices}" if devices is not None else "only its plugin knows how many there are"
        raise ConfigurationError(
            f"num_processes={num_processes}, and torch_xla starts one process or one for each XLA device; {has} "
            f"({PJRT_DEVICE}={kind}). Leave num_processes out for all devices, or write 1."
        )
    if num_processes == 1 or devices == 1:
        return Choice("here", "one process")
    if not cores:
        return _without_count(kind, cores)
    if max(cores) > 1:
        return Choice("together", f"{max(cores)} devices belong to one process of torch_xla, as threads")
    return Choice("processes", f"{devices} devices")


def _without_count(kind: str, cores: list[int] | None) -> Choice[Way]:
    if cores is None:
        return Choice("processes", f"the devices of {kind} are known to its plugin")
    raise ConfigurationError(
        f"{PJRT_DEVICE} or TPU_NAME asks for a {kind}, and this machine lists no chip of one. Choose a notebook with a "
        f"TPU, or set {PJRT_DEVICE}=CPU for a trial run on the CPU."
    )


# --- in the notebook --------------------------------------------------------------------------------------------------


def load(host: Host) -> Any:
    """Import torch_xla, told before what it computes on."""
    kind = asked_kind(host.environment) or _TPU
    if not env.get(PJRT_DEVICE):
        env.put(PJRT_DEVICE, kind)  # it would choose by itself, with a warning
    return require("torch_xla", why="A notebook on XLA devices")


def drive_all_devices(torch_xla: Any, reason: str) -> None:
    """Let this process drive all devices from now on, and say so.

    Raises:
        UsageError: It has used one of them before.
    """
    if torch_xla._XLAC._xla_runtime_is_initialized():
        raise UsageError(
            "This process has used an XLA device already (a tensor, a model or a query that was sent there), and can no "
            f"longer drive all of them. Restart the kernel and move what touches the device into the function, or set "
            f"{USE_SPMD}=1 at its start."
        )
    # For as long as the process lives: its runtime cannot go back.
    env.put(USE_SPMD, "1")
    sys.stderr.write(
        f"notebook_launcher: this process drives all XLA devices together (SPMD), because {reason}; a batch is the "
        "global one, shared out among the devices.\n"
    )


# --- processes --------------------------------------------------------------------------------------------------------


class ResultToFile:
    """A function whose result goes into a file, for whoever started the process.

    Args:
        function: What is called, without arguments; what it returns can be pickled.
        folder: Where each process has a folder.
    """

    def __init__(self, function: Callable[[], Any], folder: str) -> None:
        self.function = function
        self.folder = folder

    def __call__(self, index: int) -> None:
        """Call it as the process with this index."""
        result = self.function()
        Path(self.folder, str(index), _RESULT_FILE).write_bytes(pickle.dumps(result))


def check_can_fork(torch_xla: Any) -> None:
    """Refuse to fork a process that has used the device.

    Raises:
        UsageError: It has.
    """
    if torch_xla._XLAC._xla_runtime_is_initialized():
        raise UsageError(
            "This process has set up 'xla' already (a tensor, a model or a query that was sent there), and forked "
            "processes cannot use it then. Restart the kernel and move what touches the device into the function that is "
            "launched."
        )


def run_processes(worker: Callable[[], Any]) -> tuple[list[Any], Failure | None, str]:
    """Call a function in a process for each device, forked from this one.

    Returns:
        The results by rank; where a process failed, none, with the failure of the first one and the report of it.

    Raises:
        ConfigurationError: The function or its arguments cannot be sent to a process.
    """
    memory = OutOfMemoryKills.now()
    with record_folder(None) as folder:
        target = ResultToFile(worker, str(folder))
        try:
            pickle.dumps(target)
        except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
            raise ConfigurationError(
                f"torch_xla sends the function and its arguments to its processes, and they cannot be sent: {error}. Define "
                "the function in a cell of its own, outside of others, and give it arguments that can be pickled."
            ) from error
        code = run_on_all_devices(target, folder, start_method="fork")
        failures, world_size = read_failures(folder)
        if code and failures:
            root = first_failure(failures)
            return [], root, report([root], world_size, memory).lstrip("\n-")
        return [_read_result(place) for place in _by_rank(folder)], None, ""


def _by_rank(folder: Path) -> list[Path]:
    return sorted((entry for entry in folder.iterdir() if entry.name.isdecimal()), key=lambda entry: int(entry.name))


def _read_result(place: Path) -> Any:
    file = place / _RESULT_FILE
    return pickle.loads(file.read_bytes()) if file.exists() else None


# --- the package ------------------------------------------------------------------------------------------------------


def install_xla(upgrade: bool = False) -> None:
    """Install torch_xla in a notebook of Colab, in the version that belongs to its torch.

    Args:
        upgrade: Replace one that is installed by the newest of that version.

    Raises:
        UsageError: This is no notebook of Colab, or pip fails.
    """
    if "google.colab" not in sys.modules:
        raise UsageError(
            "install_xla was called outside of a Colab notebook, whose Python alone it changes. Install the package into "
            "this environment with `pip install torch_xla`."
        )
    torch = installed_version("torch")
    # One release of torch_xla is built for one of torch; the extra brings the driver of TPUs.
    package = f"torch_xla[tpu]=={torch.major}.{torch.minor}.*"
    command = [sys.executable, "-m", "pip", "install", *(["--upgrade"] if upgrade else []), package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise UsageError(
            f"`pip install {package}` ended with exit code {done.returncode}: {said[-1].strip() if said else 'no message'}. "
            f"A torch_xla that belongs to torch {torch} may not exist: choose a runtime with a TPU, or install another torch."
        )
