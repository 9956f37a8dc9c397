"""The number formats: full precision, and autocast to a half precision on any device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accelerate._base.enums import DistributedType
from accelerate._base.errors import ConfigurationError
from accelerate.collectives.nested import convert_to_fp32
from accelerate.config.knob import KwargsHandler
from accelerate.config.plugins.training import AutocastKwargs, GradScalerKwargs
from accelerate.devices.base import DeviceBackend
from accelerate.precision.scaler import SharedGradScaler
from accelerate.runtime import current

Place = Callable[[torch.nn.Module], torch.nn.Module]
_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp8": "bfloat16"}


class Precision:
    """Run in the dtype that the program chose: no context, no scaler, nothing wrapped."""

    name = "no"
    scaler: torch.amp.GradScaler | None = None
    native_amp = False
    fp8_enabled = False
    delayed_fp8_autocast = False
    joins_optimizer = False
    """Whether `join` replaces a model and its optimizer together."""
    handler: AutocastKwargs | None = None
    """Options of the context in which forward passes run."""

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return the context in which a forward pass runs."""
        return nullcontext()

    def join(
        self, models: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer], place: Place
    ) -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
        """Return what takes the place of models and optimizers that are prepared together.

        Args:
            place: Moves a model to its device.
        """
        return models, optimizers

    def convert(self, model: torch.nn.Module, *, gathered: bool = False) -> torch.nn.Module:
        """Replace layers by ones that train in this format; returns the same model.

        Args:
            gathered: The weights are sharded, and brought together layer by layer in each pass.
        """
        return model

    def wrap_forward(self, model: torch.nn.Module) -> torch.nn.Module:
        """Make every forward pass of `model` run in the context; returns the same model."""
        return model


class EnginePrecision(Precision):
    """An engine computes in the format by itself.

    Args:
        name: "no", "fp16" or "bf16".
    """

    def __init__(self, name: str) -> None:
        self.name = name


class AutocastForward:
    """A model's forward inside autocast, with outputs in float32.

    It stands in the instance's `forward` and keeps the original under `__wrapped__`, so signatures stay readable and
    the model can be pickled, copied and unwrapped.
    """

    __wrapped__: Callable[..., Any]

    def __init__(
        self, forward: Callable[..., Any], device_type: str, dtype: torch.dtype, options: dict[str, Any]
    ) -> None:
        self.device_type = device_type
        self.dtype = dtype
        self.options = options
        functools.update_wrapper(self, forward)
        self.__dict__.pop("__annotations__", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, self.dtype, **self.options):
            outputs = self.__wrapped__(*args, **kwargs)
        return convert_to_fp32(outputs)


class MixedPrecision(Precision):
    """Autocast to a half precision dtype; float16 comes with a gradient scaler.

    Args:
        name: "fp16", "bf16", or "fp8", around whose layers the others compute in bfloat16.
        backend: The hardware of this process.
        autocast: Options of `torch.autocast`.
        scaler: Options of `torch.amp.GradScaler`.

    Raises:
        ConfigurationError: If this hardware has no autocast to that dtype.
    """

    native_amp = True
    scales_losses = False
    """Whether small gradients need a scaler in another format than float16 too."""
    dtype: torch.dtype

    def __init__(
        self, name: str, backend: DeviceBackend, autocast: AutocastKwargs | None, scaler: GradScalerKwargs | None
    ) -> None:
        self.name = name
        self.device_type = backend.type
        dtype_name = _DTYPES[name]
        self.dtype = getattr(torch, dtype_name)
        if not backend.supports_autocast(dtype_name):
            raise ConfigurationError(
                f"mixed_precision={name!r} was asked for, but {backend.type!r} devices here cannot compute in "
                f"{dtype_name}. Write mixed_precision='no', or another format."
            )
        self.handler = autocast
        if name == "fp16" or self.scales_losses:
            options = scaler.to_kwargs() if scaler is not None else {}
            self.scaler = SharedGradScaler(backend.type, **options)

    def _options(self, handler: AutocastKwargs | None) -> dict[str, Any]:
        handler = handler if handler is not None else self.handler
        return handler.to_kwargs() if handler is not None else {}

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return an autocast context with the given or the configured options."""
        return torch.autocast(self.device_type, self.dtype, **self._options(handler))

    def wrap_forward(self, model: torch.nn.Module) -> torch.nn.Module:
        """Run every forward pass of `model` in autocast; a model that already does is left alone."""
        if isinstance(model.__dict__.get("forward"), AutocastForward):
            return model
        original = model.forward
        # In the instance's own dictionary: a module refuses nothing there, and the class keeps its forward.
        model.__dict__["_original_forward"] = original
        model.__dict__["forward"] = AutocastForward(original, self.device_type, self.dtype, self._options(None))
        return model


def _make_fp8(
    backend: DeviceBackend, autocast: AutocastKwargs | None, scaler: GradScalerKwargs | None, recipe: Any
) -> Precision:
    # Most runs do without, and its options are many.
    from accelerate.precision import fp8

    return fp8.make(backend, autocast, scaler, recipe)


FORMATS: dict[
    str, Callable[[DeviceBackend, AutocastKwargs | None, GradScalerKwargs | None, KwargsHandler | None], Precision]
] = {
    "no": lambda backend, autocast, scaler, recipe: Precision(),
    "fp16": lambda backend, autocast, scaler, recipe: MixedPrecision("fp16", backend, autocast, scaler),
    "bf16": lambda backend, autocast, scaler, recipe: MixedPrecision("bf16", backend, autocast, scaler),
    "fp8": _make_fp8,
}


def make(
    name: str,
    backend: DeviceBackend,
    autocast: AutocastKwargs | None = None,
    scaler: GradScalerKwargs | None = None,
    recipe: KwargsHandler | None = None,
) -> Precision:
    """Make the number format called `name` for one kind of hardware.

    Args:
        recipe: How 8-bit floats are trained, and by which library; None chooses among those that are installed.

    Raises:
        ConfigurationError: If no such format is registered or the hardware lacks it.
    """
    if name not in FORMATS:
        raise ConfigurationError(
            f"mixed_precision={name!r} has no implementation in this installation. "
            f"Write one of {', '.join(sorted(FORMATS))}."
        )
    return FORMATS[name](backend, autocast, scaler, recipe)


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
    if not native_amp:
        return nullcontext()
    name = current.ACCELERATOR.get("_mixed_precision", "no")
    # Around layers in 8-bit floats.
    name = "bf16" if name == "fp8" else name
    return make(name, current.runtime().backend, autocast_kwargs, GradScalerKwargs()).autocast()
