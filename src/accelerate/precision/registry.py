"""The table of number formats."""

from __future__ import annotations

from collections.abc import Callable

from accelerate._base.errors import ConfigurationError
from accelerate.config.plugins.training import AutocastKwargs, GradScalerKwargs
from accelerate.devices.base import DeviceBackend
from accelerate.precision.amp import MixedPrecision
from accelerate.precision.base import Precision

Factory = Callable[[DeviceBackend, AutocastKwargs | None, GradScalerKwargs | None], Precision]

FORMATS: dict[str, Factory] = {
    "no": lambda backend, autocast, scaler: Precision(),
    "fp16": lambda backend, autocast, scaler: MixedPrecision("fp16", backend, autocast, scaler),
    "bf16": lambda backend, autocast, scaler: MixedPrecision("bf16", backend, autocast, scaler),
}


def make(
    name: str, backend: DeviceBackend, autocast: AutocastKwargs | None = None, scaler: GradScalerKwargs | None = None
) -> Precision:
    """Make the number format called `name` for one kind of hardware.

    Raises:
        ConfigurationError: If no such format is registered or the hardware lacks it.
    """
    if name not in FORMATS:
        raise ConfigurationError(
            f"mixed_precision={name!r} has no implementation in this installation. "
            f"Write one of {', '.join(sorted(FORMATS))}."
        )
    return FORMATS[name](backend, autocast, scaler)
