"""The one table of vendors, the choice of what this process uses, and the questions about them that programs import.

Nothing here loads torch before it is asked for a device: the launcher reads the table without torch.
"""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from accelerate._base.enums import DistributedType
from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import Choice
from accelerate.devices.base import DeviceBackend
from accelerate.devices.xla import XLA

if TYPE_CHECKING:
    import torch

_PLUGINS = "accelerate.devices"
_FLOAT16 = frozenset({"float16"})
_BFLOAT16 = frozenset({"bfloat16"})
AMD_NODES = "sys/class/kfd/kfd/topology/nodes"
"""Where AMD's driver lists what can compute, the CPU too."""


class CpuBackend(DeviceBackend):
    """The CPU: one device without an index; torch's own generator is its random state; nothing to wait for or to free."""

    def is_available(self) -> bool:
        """Return True: a process always has its CPU."""
        return True

    def device_count(self) -> int:
        """Return 1: all cores together are one device."""
        return 1

    def device(self, index: int | None = None) -> torch.device:
        """Return the CPU device without an index, so that it equals the device of every CPU tensor."""
        return super().device()

    def set_device(self, device: torch.device) -> None:
        """Do nothing: there is one CPU device."""

    def get_rng_state(self) -> Any:
        """Return None: torch's global generator is saved on its own."""
        return None

    def set_rng_state(self, state: Any) -> None:
        """Do nothing: torch's global generator is restored on its own."""

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: `torch.manual_seed` covers the CPU."""


class CudaBackend(DeviceBackend):
    """GPUs of NVIDIA and, under the same name, of AMD."""

    def is_fork_safe(self) -> bool:
        """Return whether they are NVIDIA's: AMD's runtime does not survive a fork."""
        import torch

        return torch.version.hip is None

    def instead_of_fp8(self) -> str | None:
        """Return "fp16" for devices before compute capability 8.9."""
        from accelerate.devices.nvidia import check_cuda_fp8_capability

        return None if check_cuda_fp8_capability() else "fp16"


class GaudiBackend(DeviceBackend):
    """Intel's Gaudi."""

    def instead_of_fp8(self) -> str | None:
        """Return "bf16" for the first generation."""
        return "bf16" if is_habana_gaudi1() else None


class MpsBackend(DeviceBackend):
    """Metal: one device without an index."""

    def is_available(self) -> bool:
        """Return whether Metal is built in and usable."""
        import torch

        return torch.backends.mps.is_available()

    def device_count(self) -> int:
        """Return 1: Metal shows one device to a process."""
        return 1

    def device(self, index: int | None = None) -> torch.device:
        """Return the Metal device, which has no index."""
        return super().device()

    def manual_seed_all(self, seed: int) -> None:
        """Seed the one Metal generator."""
        import torch

        torch.mps.manual_seed(seed)


CPU = CpuBackend(
    "cpu",
    DistributedType.MULTI_CPU,
    "gloo",
    priority=-1,
    rng_key="",
    autocast_dtypes=_FLOAT16 | _BFLOAT16,
    needs_device_ids=False,
)
APPLE = MpsBackend(
    "mps",
    DistributedType.NO,
    "gloo",
    priority=90,
    autocast_dtypes=_FLOAT16 | _BFLOAT16,
    needs_device_ids=False,
    # Operators that Metal lacks fall back to the CPU; torch reads this variable at first use.
    process_variables=(("PYTORCH_ENABLE_MPS_FALLBACK", "1"),),
)
VENDORS: tuple[DeviceBackend, ...] = (
    XLA,
    APPLE,
    DeviceBackend(  # Cambricon
        "mlu",
        DistributedType.MULTI_MLU,
        "cncl",
        package="torch_mlu",
        visible_devices_variable="MLU_VISIBLE_DEVICES",
        priority=80,
        autocast_dtypes=_FLOAT16,
        device_files=("dev/cambricon_dev[0-9]*",),
    ),
    DeviceBackend(  # Tecorigin
        "sdaa",
        DistributedType.MULTI_SDAA,
        "tccl",
        package="torch_sdaa",
        visible_devices_variable="SDAA_VISIBLE_DEVICES",
        priority=70,
        autocast_dtypes=_FLOAT16,
        device_files=("dev/tcaicard[0-9]*",),
    ),
    DeviceBackend(  # Moore Threads
        "musa",
        DistributedType.MULTI_MUSA,
        "mccl",
        package="torch_musa",
        visible_devices_variable="MUSA_VISIBLE_DEVICES",
        priority=60,
        autocast_dtypes=_FLOAT16,
        device_files=("dev/mtgpu.[0-9]*",),
    ),
    DeviceBackend(  # Huawei Ascend
        "npu",
        DistributedType.MULTI_NPU,
        "hccl",
        package="torch_npu",
        visible_devices_variable="ASCEND_RT_VISIBLE_DEVICES",
        priority=50,
        autocast_dtypes=_FLOAT16,
        device_files=("dev/davinci[0-9]*",),
    ),
    GaudiBackend(
        "hpu",
        DistributedType.MULTI_HPU,
        "hccl",
        package="habana_frameworks.torch",
        visible_devices_variable="HABANA_VISIBLE_MODULES",
        priority=40,
        autocast_dtypes=_FLOAT16 | _BFLOAT16,
        device_files=("dev/hl[0-9]*",),
    ),
    CudaBackend(
        "cuda",
        DistributedType.MULTI_GPU,
        "nccl",
        visible_devices_variable="CUDA_VISIBLE_DEVICES",
        priority=30,
        autocast_dtypes=_FLOAT16,
        splits_attention=True,
        device_files=("dev/nvidia[0-9]*", "proc/driver/nvidia/gpus/*", f"{AMD_NODES}/[0-9]*/properties"),
        listing_command=("nvidia-smi", "--list-gpus"),
    ),
    DeviceBackend(  # Intel GPUs
        "xpu",
        DistributedType.MULTI_XPU,
        "xccl",
        visible_devices_variable="ZE_AFFINITY_MASK",
        priority=20,
        autocast_dtypes=_FLOAT16 | _BFLOAT16,
        can_fork=False,
        listing_command=("xpu-smi", "discovery", "--dump", "1"),
    ),
    DeviceBackend(  # AWS Trainium and Inferentia
        "neuron",
        DistributedType.MULTI_NEURON,
        "neuron",
        package="torch_neuronx",
        visible_devices_variable="NEURON_RT_VISIBLE_CORES",
        priority=10,
        autocast_dtypes=_BFLOAT16,
        device_files=("dev/neuron[0-9]*",),
    ),
    CPU,
)

_BACKENDS: dict[str, DeviceBackend] = {backend.type: backend for backend in VENDORS}


# --- the registry -----------------------------------------------------------------------------------------------------


def register(backend: DeviceBackend) -> None:
    """Add a kind of hardware, or replace the one with the same `type`.

    A package outside this one names an instance in its entry-point group `accelerate.devices` instead.
    """
    _BACKENDS[backend.type] = backend


def unregister(device_type: str) -> None:
    """Forget a kind of hardware that was registered."""
    _BACKENDS.pop(device_type, None)


@functools.cache
def _load_plugins() -> None:
    from importlib.metadata import entry_points  # slow to load, and the launcher reads the table alone

    for entry in entry_points(group=_PLUGINS):
        register(entry.load())


def all_backends() -> list[DeviceBackend]:
    """Return every known backend, the preferred ones first."""
    _load_plugins()
    return sorted(_BACKENDS.values(), key=lambda backend: -backend.priority)


def get(device: str | torch.device) -> DeviceBackend:
    """Return the backend of a device or device type.

    A device type that torch knows and this table does not is described by its defaults, so a new accelerator works
    as soon as torch's own `torch.accelerator` supports it.

    Raises:
        ConfigurationError: If torch does not know such a device.
    """
    _load_plugins()
    name = str(device).partition(":")[0]
    if name in _BACKENDS:
        return _BACKENDS[name]
    import torch

    try:
        known = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(
            f"There is no device {str(device)!r}: neither torch nor this library knows its type. "
            f"Write one of {', '.join(sorted(_BACKENDS))}."
        ) from error
    # torch's own question raises an error for a device that no group backend was registered for.
    group_backend = torch.distributed.Backend.default_device_backend_map.get(known.type, "gloo")
    return DeviceBackend(known.type, DistributedType.MULTI_GPU, group_backend)


def default() -> Choice[DeviceBackend]:
    """Choose the hardware of this process: the available backend with the highest priority."""
    import torch

    for backend in all_backends():
        if backend.priority >= 0 and backend.is_available():
            return Choice(backend, backend.found())
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is not None:
        return Choice(get(current), f"torch.accelerator reports {current.type!r}")
    return Choice(_BACKENDS["cpu"], "no accelerator found")


# --- questions that programs import -----------------------------------------------------------------------------------


def get_current_device_type() -> tuple[str, str]:
    """Return the type and the label of the hardware at hand, such as `("cuda", "MULTI_GPU")`.

    Without an accelerator it is the pair of CUDA, which programs that prepare a run for another machine rely on.
    """
    found = default().value
    backend = get("cuda") if found.type == "cpu" else found
    return backend.type, backend.label.value


@functools.cache
def _is_available(device_type: str, check_device: bool = False) -> bool:
    backend = get(device_type)
    if not check_device:
        return backend.is_available()
    try:
        # Some runtimes answer with an error, not with zero, where the driver finds no device.
        return backend.is_available() and backend.device_count() > 0
    except RuntimeError:
        return False


def is_cuda_available() -> bool:
    """Say whether a CUDA (or ROCm) device is at hand, without starting CUDA in this process."""
    # The count asks the driver's own library where it can, so a later fork of this process can still use CUDA.
    return get("cuda").device_count() > 0


def is_rocm_available() -> bool:
    """Say whether an AMD device is at hand and torch was built for it."""
    import torch

    return torch.version.hip is not None and is_cuda_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Say whether an Apple GPU is at hand and torch, in at least `min_version`, was built for it."""
    from accelerate._base.imports import is_torch_version

    return is_torch_version(">=", min_version) and get("mps").is_available()


def is_xpu_available(check_device: bool = False) -> bool:
    """Say whether an Intel GPU is at hand; with `check_device`, try it."""
    return _is_available("xpu", check_device)


def is_xccl_available() -> bool:
    """Say whether torch was built with the collectives of Intel GPUs."""
    import torch.distributed

    return bool(torch.distributed.is_xccl_available())


def is_npu_available(check_device: bool = False) -> bool:
    """Say whether an Ascend NPU is at hand; with `check_device`, try it."""
    return _is_available("npu", check_device)


def is_mlu_available(check_device: bool = False) -> bool:
    """Say whether a Cambricon MLU is at hand; with `check_device`, try it."""
    return _is_available("mlu", check_device)


def is_musa_available(check_device: bool = False) -> bool:
    """Say whether a Moore Threads GPU is at hand; with `check_device`, try it."""
    return _is_available("musa", check_device)


def is_sdaa_available(check_device: bool = False) -> bool:
    """Say whether a Tecorigin SDAA is at hand; with `check_device`, try it."""
    return _is_available("sdaa", check_device)


def is_neuron_available(check_device: bool = False) -> bool:
    """Say whether an AWS Neuron core is at hand; with `check_device`, try it."""
    return _is_available("neuron", check_device)


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Say whether an Intel Gaudi is at hand.

    Args:
        init_hccl: Also load its collectives, which `torch.distributed` needs.
    """
    found = _is_available("hpu")
    if found and init_hccl:
        importlib.import_module("habana_frameworks.torch.distributed.hccl")
    return found


def is_habana_gaudi1() -> bool:
    """Say whether the Gaudi at hand is of the first generation."""
    if not is_hpu_available():
        return False
    experimental = importlib.import_module("habana_frameworks.torch.utils.experimental")
    return bool(experimental._get_device_type() == experimental.synDeviceType.synDeviceGaudi)


def is_fp16_available() -> bool:
    """Say whether the hardware can train in fp16: all can but the first Gaudi."""
    return not is_habana_gaudi1()
