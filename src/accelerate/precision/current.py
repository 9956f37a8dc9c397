"""The number format in force, for code that has no `Accelerator` at hand."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accelerate._base.enums import DistributedType
from accelerate.config.plugins.training import AutocastKwargs, GradScalerKwargs
from accelerate.precision import registry
from accelerate.precision.scaler import SharedGradScaler
from accelerate.runtime import current


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a gradient scaler for the device of this process.

    Args:
        distributed_type: Accepted for compatibility; the device decides.
        **kwargs: Options of `torch.amp.GradScaler`.
    """
    return SharedGradScaler(current.runtime().device.type, **kwargs)


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return the autocast context of the run's number format, or nothing where `native_amp` is False."""
    name = current.ACCELERATOR.get("_mixed_precision", "no")
    if not native_amp:
        return nullcontext()
    return registry.make(name, current.runtime().backend, autocast_kwargs, GradScalerKwargs()).autocast()
