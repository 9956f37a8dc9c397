"""Questions about the hardware at hand, under the names that programs import.

They wait with the import of torch until they are asked. With `check_device`, a check also tries the device itself.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

from accelerate._base.imports import is_torch_version


def _torch_module(name: str) -> ModuleType | None:
    """Return `torch.<name>`, or None where this torch has none."""
    import torch

    return getattr(torch, name, None)


@functools.cache
def _vendor_available(name: str, package: str | None, check_device: bool) -> bool:
    """Say whether the vendor's package is there and its device module says that it is available."""
    if package is not None:
        if importlib.util.find_spec(package) is None:
            return False
        importlib.import_module(package)
    module = _torch_module(name)
    if module is None:
        return False
    if not check_device:
        return bool(module.is_available())
    try:
        # Some runtimes answer with an error, not with zero, where the driver finds no device.
        return int(module.device_count()) > 0 and bool(module.is_available())
    except RuntimeError:
        return False


def is_cuda_available() -> bool:
    """Say whether a CUDA (or ROCm) device is at hand, without starting CUDA in this process."""
    import torch

    # The count asks the driver's own library where it can, so a later fork of this process can still use CUDA.
    return torch.cuda.device_count() > 0


def is_rocm_available() -> bool:
    """Say whether an AMD device is at hand and torch was built for it."""
    import torch

    return torch.version.hip is not None and is_cuda_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Say whether an Apple GPU is at hand and torch, in at least `min_version`, was built for it."""
    import torch

    return is_torch_version(">=", min_version) and torch.backends.mps.is_available() and torch.backends.mps.is_built()


def is_xpu_available(check_device: bool = False) -> bool:
    """Say whether an Intel GPU is at hand."""
    return is_torch_version(">", "2.6") and _vendor_available("xpu", None, check_device)


def is_xccl_available() -> bool:
    """Say whether torch was built with the collectives of Intel GPUs."""
    import torch.distributed

    check = getattr(torch.distributed, "is_xccl_available", None)
    return is_torch_version(">=", "2.7") and check is not None and bool(check())


def is_npu_available(check_device: bool = False) -> bool:
    """Say whether an Ascend NPU is at hand."""
    return _vendor_available("npu", "torch_npu", check_device)


def is_mlu_available(check_device: bool = False) -> bool:
    """Say whether a Cambricon MLU is at hand."""
    return _vendor_available("mlu", "torch_mlu", check_device)


def is_musa_available(check_device: bool = False) -> bool:
    """Say whether a Moore Threads GPU is at hand."""
    return _vendor_available("musa", "torch_musa", check_device)


def is_sdaa_available(check_device: bool = False) -> bool:
    """Say whether a Tecorigin SDAA is at hand."""
    return _vendor_available("sdaa", "torch_sdaa", check_device)


def is_neuron_available(check_device: bool = False) -> bool:
    """Say whether an AWS Neuron core is at hand."""
    return _vendor_available("neuron", "torch_neuronx", check_device)


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Say whether an Intel Gaudi is at hand.

    Args:
        init_hccl: Also load its collectives, which `torch.distributed` needs.
    """
    if importlib.util.find_spec("habana_frameworks") is None or not _vendor_available(
        "hpu", "habana_frameworks.torch", False
    ):
        return False
    if init_hccl:
        importlib.import_module("habana_frameworks.torch.distributed.hccl")
    return True


def is_habana_gaudi1() -> bool:
    """Say whether the Gaudi at hand is of the first generation."""
    if not is_hpu_available():
        return False
    experimental = importlib.import_module("habana_frameworks.torch.utils.experimental")
    return bool(experimental._get_device_type() == experimental.synDeviceType.synDeviceGaudi)


def is_fp16_available() -> bool:
    """Say whether the hardware can train in fp16: all can but the first Gaudi."""
    return not is_habana_gaudi1()
