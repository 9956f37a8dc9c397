"""The table of known hardware, and the choice of what this process uses."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

import torch

from accelerate._base.enums import DistributedType
from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import Choice
from accelerate.devices import cpu, cuda, hpu, mlu, mps, musa, neuron, npu, sdaa, xpu
from accelerate.devices.base import DeviceBackend

_BACKENDS: dict[str, DeviceBackend] = {
    module.BACKEND.type: module.BACKEND for module in (cpu, cuda, hpu, mlu, mps, musa, neuron, npu, sdaa, xpu)
}
_PLUGINS = "accelerate.devices"


def register(backend: DeviceBackend) -> None:
    """Add a kind of hardware, or replace the one with the same `type`.

    A package outside this one names an instance in its entry-point group `accelerate.devices` instead.
    """
    _BACKENDS[backend.type] = backend


def unregister(device_type: str) -> None:
    """Forget a kind of hardware that was registered."""
    _BACKENDS.pop(device_type, None)


@cache
def _load_plugins() -> None:
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
    try:
        known = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(
            f"There is no device {str(device)!r}: neither torch nor this library knows its type. "
            f"Write one of {', '.join(sorted(_BACKENDS))}."
        ) from error
    return DeviceBackend(
        type=known.type,
        label=DistributedType.MULTI_GPU,
        # torch's own question raises an error for a device that no group backend was registered for.
        group_backend=torch.distributed.Backend.default_device_backend_map.get(known.type, "gloo"),
        rng_key=f"torch_{known.type}_manual_seed",
    )


def default() -> Choice[DeviceBackend]:
    """Choose the hardware of this process: the available backend with the highest priority."""
    for backend in all_backends():
        if backend.priority >= 0 and backend.is_available():
            return Choice(backend, f"{backend.device_count()} device(s) of type {backend.type!r} found")
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is not None:
        return Choice(get(current), f"torch.accelerator reports {current.type!r}")
    return Choice(_BACKENDS["cpu"], "no accelerator found")
