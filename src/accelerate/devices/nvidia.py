"""What only the NVIDIA driver knows: device names, driver version, link support, near cores."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
from pathlib import Path
from typing import Any

from packaging.version import parse

from accelerate._base.errors import UsageError
from accelerate._base.imports import require

_logger = logging.getLogger(__name__)

# From this driver on, RTX 40 boards no longer fail when they are asked to talk peer to peer.
_DRIVER_WITH_P2P = "550.40.07"
_BOARDS_WITHOUT_P2P = "RTX 40"
_FP8_CAPABILITY = (8, 9)


def _query(field: str) -> list[str]:
    """Ask `nvidia-smi` for one field of every device."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return [line.strip() for line in output.splitlines() if line.strip()]


def get_gpu_info() -> tuple[list[str], int]:
    """Return the names of the NVIDIA devices of this machine and their number."""
    names = _query("name")
    return names, len(names)


def get_driver_version() -> str:
    """Return the version of the NVIDIA driver of this machine."""
    versions = _query("driver_version")
    if not versions:
        raise UsageError("`nvidia-smi` lists no device, so there is no driver version to read. Install the driver.")
    return versions[0]


def check_cuda_p2p_ib_support() -> bool:
    """Say whether several devices of this machine may talk peer to peer.

    They may, unless there are several RTX 40 boards with a driver older than 550.40.07. Where nothing can be found
    out, the answer is yes.
    """
    try:
        names, count = get_gpu_info()
        if count < 2 or not any(_BOARDS_WITHOUT_P2P in name for name in names):
            return True
        return parse(get_driver_version()) >= parse(_DRIVER_WITH_P2P)
    except (OSError, subprocess.SubprocessError, ValueError, UsageError):
        return True


def link_variables() -> dict[str, str]:
    """Return what keeps several devices of this machine from a way of talking that their boards do not have."""
    return {} if check_cuda_p2p_ib_support() else {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


@functools.cache
def check_cuda_fp8_capability() -> bool:
    """Say whether the current CUDA device computes in 8-bit floats (compute capability 8.9 or later)."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= _FP8_CAPABILITY


def _near_cores_nvidia(index: int) -> list[int]:
    """Return the cores near an NVIDIA device; `index` counts the devices that this process sees."""
    import torch

    nvml: Any = require("pynvml", why="Pinning a process to the cores near its GPU")
    nvml.nvmlInit()
    try:
        # The driver counts all devices of the machine and torch the visible ones, so the device is found by its name.
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        masks = nvml.nvmlDeviceGetCpuAffinity(handle, (os.cpu_count() or 1) // 64 + 1)
    finally:
        nvml.nvmlShutdown()
    return [word * 64 + bit for word, mask in enumerate(masks) for bit in range(64) if mask >> bit & 1]


def _near_cores_amd(index: int) -> list[int]:
    """Return the cores near an AMD device."""
    smi: Any = require("amdsmi", why="Pinning a process to the cores near its GPU")
    smi.amdsmi_init()
    try:
        node = smi.amdsmi_topo_get_numa_node_number(smi.amdsmi_get_processor_handles()[index])
    finally:
        smi.amdsmi_shut_down()
    return _cores_of_node(Path(f"/sys/devices/system/node/node{node}/cpulist"))


def _cores_of_node(listing: Path) -> list[int]:
    """Read the cores of a memory node from the kernel's own list, such as `0-3,8`."""
    cores: list[int] = []
    for part in listing.read_text().strip().split(",") if listing.exists() else ():
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Pin this process to the cores near its device.

    Args:
        verbose: Log the cores as information; otherwise they are logged for debugging.

    Raises:
        MissingPackageError: The package that asks the driver is missing.
    """
    import torch

    if torch.version.hip is not None:
        cores = _near_cores_amd(local_process_index)
    else:
        cores = _near_cores_nvidia(local_process_index)
    if not cores:
        return
    os.sched_setaffinity(0, cores)
    level = logging.INFO if verbose else logging.DEBUG
    _logger.log(level, "Process %d is pinned to the cores %s", local_process_index, sorted(os.sched_getaffinity(0)))


@functools.cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Pin this process to the cores near its device, once; see `override_numa_affinity`."""
    override_numa_affinity(local_process_index, verbose)
