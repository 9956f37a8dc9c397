"""Optional packages that count only if the environment asks for them."""

from __future__ import annotations

import importlib.util

from accelerate._base.imports import has_package, is_package_available
from accelerate.config import env

USE_TORCH_XLA: bool = env.flag("USE_TORCH_XLA", default=True)
"""Whether an installed torch_xla is used, as the environment said when this module was loaded."""


def is_rich_available() -> bool:
    """Say whether rich is installed and `ACCELERATE_ENABLE_RICH` asks for it."""
    return is_package_available("rich") and env.flag("ACCELERATE_ENABLE_RICH")


def install_rich_traceback() -> None:
    """Let rich show uncaught errors, if `is_rich_available()`."""
    if is_rich_available():
        from rich.traceback import install

        install(show_locals=False)


def is_megatron_lm_available() -> bool:
    """Say whether Megatron-LM is installed with its trainer and `ACCELERATE_USE_MEGATRON_LM` asks for it."""
    if not env.flag("ACCELERATE_USE_MEGATRON_LM") or not has_package("megatron.core", minimum="0.8.0"):
        return False
    return importlib.util.find_spec("megatron.training") is not None
