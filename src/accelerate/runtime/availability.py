"""Questions about packages and hardware whose answer also depends on the environment."""

from __future__ import annotations

from accelerate._base.errors import ConfigurationError
from accelerate._base.imports import has_package, is_package_available
from accelerate.config import env
from accelerate.devices.xla import XLA

USE_TORCH_XLA: bool = env.flag("USE_TORCH_XLA", default=True)
"""Whether an installed torch_xla is used, as the environment said when this module was loaded."""


def _xla_kind() -> str | None:
    """Return what torch_xla runs on ("TPU", "CPU" ...), or None where it is absent or switched off."""
    # Not asked of torch_xla: its import chooses a device where none is named, and says so in the environment.
    return XLA.kind if USE_TORCH_XLA and is_package_available("torch_xla") else None


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Say whether torch_xla is installed and not switched off by `USE_TORCH_XLA=0`.

    Args:
        check_is_tpu: Ask also that it runs on a TPU.
        check_is_gpu: Ask also that it runs on a GPU.

    Raises:
        ConfigurationError: Both were asked.
    """
    if check_is_tpu and check_is_gpu:
        raise ConfigurationError(
            "is_torch_xla_available(check_is_tpu=True, check_is_gpu=True) asks for two kinds of hardware at once, and "
            "XLA runs on one. Ask for one of them."
        )
    kind = _xla_kind()
    if kind is None:
        return False
    return (not check_is_tpu or kind == "TPU") and (not check_is_gpu or kind in ("GPU", "CUDA", "ROCM"))


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Say whether the hardware at hand computes in bf16.

    Args:
        ignore_tpu: Answer no on a TPU, which converts to bf16 by its own switch.
    """
    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    from accelerate.devices import registry

    return registry.default().value.supports_autocast("bfloat16")


def is_rich_available() -> bool:
    """Say whether rich is installed and `ACCELERATE_ENABLE_RICH` asks for it."""
    return is_package_available("rich") and env.flag("ACCELERATE_ENABLE_RICH")


def install_rich_traceback() -> None:
    """Let rich show uncaught errors, if `is_rich_available()`."""
    if is_rich_available():
        from rich.traceback import install

        install(show_locals=False)


def is_megatron_lm_available() -> bool:
    """Say whether megatron-core is installed and `ACCELERATE_USE_MEGATRON_LM` asks for it."""
    return env.flag("ACCELERATE_USE_MEGATRON_LM") and has_package("megatron.core", minimum="0.16.0")
