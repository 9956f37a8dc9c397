"""Models made on another device than the CPU, without memory or time for values that nobody needs."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from accelerate.config import env
from accelerate.offload.places import META, Place, as_device
from accelerate.offload.tensors import set_module_tensor_to_device
from accelerate.runtime.torch_private import has_registration_hooks

Initialiser = Callable[..., torch.Tensor]

_PARAMETERS_ALONE: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Embedding,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
)
"""Layers that have no buffers, and take the device of their parameters as an argument."""


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Make models without memory for their parameters, which land on the meta device.

    Args:
        include_buffers: Put buffers on the meta device too; ACCELERATE_INIT_INCLUDE_BUFFERS decides if not given.

    Example:
        ```python
        with init_empty_weights():
            model = nn.Sequential(*[nn.Linear(10000, 10000) for _ in range(1000)])
        ```
    """
    with init_on_device(META, include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: Place, include_buffers: bool | None = None) -> Iterator[None]:
    """Make models whose parameters are put on a device as they are made.

    Args:
        include_buffers: Put buffers there too; ACCELERATE_INIT_INCLUDE_BUFFERS decides if not given.
    """
    target = as_device(device)
    if env.flag("ACCELERATE_INIT_INCLUDE_BUFFERS") if include_buffers is None else include_buffers:
        with target, initialisers_skipped():
            yield
        return
    with parameters_on(target):
        yield


@contextmanager
def parameters_on(device: torch.device) -> Iterator[None]:
    """Put every parameter that a module gets on a device; on the meta device, initialisers do nothing."""
    register = nn.Module.register_parameter
    moved: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    @functools.wraps(register)
    def register_on_device(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        # A parameter that is there already keeps its identity, so tied weights stay tied.
        if param is None or param.device == device:
            if type(param) is nn.Parameter and _is_new(module, name):
                module._parameters[name] = param
            else:
                register(module, name, param)
            return
        seen, twin = moved.get(id(param), (None, None))
        if seen is not None and twin is not None and seen() is param:
            register(module, name, twin)  # given under two names
            return
        if device == META and type(param) is nn.Parameter and not vars(param) and param.is_contiguous():
            bare = torch.empty(param.shape, dtype=param.dtype, device=META)
            empty = nn.Parameter(bare, requires_grad=param.requires_grad)
            if _is_new(module, name):
                module._parameters[name] = empty
            else:
                register(module, name, empty)
        else:
            register(module, name, param)
            set_module_tensor_to_device(module, name, device, clear_cache=False)
        placed = module._parameters.get(name)
        if placed is not None:
            moved[id(param)] = (weakref.ref(param), placed)

    nn.Module.register_parameter = register_on_device  # type: ignore[method-assign,assignment]
    try:
        with initialisers_skipped(), _layers_made_empty() if device == META else nullcontext():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _is_new(module: nn.Module, name: str) -> bool:
    """Return whether torch would accept a name without a word; asking it takes a third of the time of a layer."""
    own = module.__dict__
    if "_parameters" not in own or not name or "." in name or has_registration_hooks():
        return False
    taken = name in own or name in own["_buffers"] or name in own["_modules"] or hasattr(type(module), name)
    return not taken


@contextmanager
def _layers_made_empty() -> Iterator[None]:
    """Let the layers of torch that hold nothing but parameters make them on the meta device at once.

    All others make theirs on the CPU first, which takes most of the time of a linear layer.
    """
    usual = {layer: layer.__init__ for layer in _PARAMETERS_ALONE}
    for layer, make in usual.items():
        layer.__init__ = _on_meta(make)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer, make in usual.items():
            layer.__init__ = make  # type: ignore[method-assign]


def _on_meta(make: Callable[..., None]) -> Callable[..., None]:
    before_device = list(inspect.signature(make).parameters).index("device")

    @functools.wraps(make)
    def initialise(*args: Any, **kwargs: Any) -> None:
        if len(args) <= before_device and kwargs.get("device") is None:
            kwargs["device"] = META
        make(*args, **kwargs)

    return initialise


@contextmanager
def initialisers_skipped() -> Iterator[None]:
    """Let the functions of `torch.nn.init` pass over tensors without data, on which they only take time."""
    functions: dict[str, Initialiser] = {
        name: function
        for name, function in vars(nn.init).items()
        if name.endswith("_") and not name.startswith("_") and callable(function)
    }
    for name, function in functions.items():
        setattr(nn.init, name, _unless_empty(function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(nn.init, name, function)


def _unless_empty(function: Initialiser) -> Initialiser:
    @functools.wraps(function)
    def initialise(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = args[0] if args else kwargs.get("tensor")
        if isinstance(tensor, torch.Tensor) and tensor.device == META:
            return tensor
        return function(*args, **kwargs)

    return initialise
