"""Models made on another device than the CPU, without memory or time for values that nobody needs."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..runtime.torch_private import has_registration_hooks
from .places import META
from .tensors import set_module_tensor_to_device

Initialiser = Callable[..., torch.Tensor]


@contextmanager
def parameters_on(device: torch.device) -> Iterator[None]:
    """Put every parameter that a module gets on a device; on the meta device, initialisers do nothing."""
    register = nn.Module.register_parameter
    moved: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    @functools.wraps(register)
    def register_on_device(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        # A parameter that is there already keeps its identity, so tied weights stay tied.
        if param is None or param.device == device:
            register(module, name, param)
            return
        seen, twin = moved.get(id(param), (None, None))
        if seen is not None and twin is not None and seen() is param:
            register(module, name, twin)  # type: ignore[arg-type]  # given under two names
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
        with initialisers_skipped():
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
