"""One tensor of a module: found by name, and put on a device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

from accelerate._base.errors import ConfigurationError
from accelerate.devices import registry
from accelerate.offload.places import META, Place, as_device

TiedCache: TypeAlias = dict[int, dict[torch.device, torch.Tensor]]
"""Address of a weight that somebody keeps alive -> device -> the copy there that all modules share."""


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of the buffers that a state dict leaves out.

    Args:
        fqns: Give names from `module` downwards; otherwise the bare name within each sub-module.
    """
    found = set(module._non_persistent_buffers_set)
    if recurse:
        for prefix, child in module.named_modules():
            own = child._non_persistent_buffers_set
            found |= {f"{prefix}.{name}" if prefix else name for name in own} if fqns else set(own)
    return found


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, then the buffers of a module by name."""
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    hidden = get_non_persistent_buffers(module, recurse, fqns=True) if remove_non_persistent else set()
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in hidden:
            yield name, buffer


def owner_of(module: nn.Module, tensor_name: str) -> tuple[nn.Module, str]:
    """Return the sub-module that holds a tensor, and the tensor's name there.

    Raises:
        ConfigurationError: If there is no such tensor.
    """
    path, _, name = tensor_name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        owner = None
    if owner is None or not (name in owner._parameters or name in owner._buffers):
        raise ConfigurationError(
            f"There is no tensor {tensor_name!r} in {type(module).__name__}: it is neither a parameter nor a buffer. "
            "Write a name that `named_parameters()` or `named_buffers()` gives."
        )
    return owner, name


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Return whether two devices are the same one, where a missing index means 0."""
    return first_device.type == second_device.type and (first_device.index or 0) == (second_device.index or 0)


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return what identifies the memory behind a tensor: device, address and number of bytes."""
    if tensor.device.type == "meta":
        return tensor.device, 0, tensor.nbytes
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def identity_in_memory(tensor: torch.Tensor) -> Hashable | None:
    """Return what two names of one tensor have in common, None for a tensor without data.

    Different parts of one memory are different tensors.
    """
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return None
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def address_of(tensor: object) -> int | None:
    """Return where the data of a tensor lies, or None where it has no memory of its own."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta" or tensor.numel() == 0:
        return None
    try:
        return tensor.data_ptr() or None
    except RuntimeError:  # fake, functional and other wrapper tensors have no address
        return None


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Place,
    value: torch.Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: TiedCache | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put one parameter or buffer on a device, with its own value or a new one.

    Args:
        tensor_name: The dotted name, seen from `module`.
        value: The new content; needed to bring a tensor back from the meta device.
        dtype: The dtype to store; without it a new value takes the dtype of the tensor that it replaces. Integer
            values keep their dtype, since they are quantised.
        fp16_statistics: The scales of a weight that is quantised to 8 bits.
        tied_params_map: The copies that modules share: found there, a tensor is not copied again.
        clear_cache: Give the memory that the old tensor took on an accelerator back to the system.

    Raises:
        ConfigurationError: If there is no such tensor, no value for a tensor on meta, or a value of another shape.
    """
    owner, name = owner_of(module, tensor_name)
    old: torch.Tensor | None = owner._parameters[name] if name in owner._parameters else owner._buffers[name]
    target = as_device(device)
    source = old if value is None else value
    shared = tied_params_map.get(address_of(source) or 0) if tied_params_map else None
    if shared is not None and target in shared:
        _store(owner, name, shared[target])
        return
    _check_replacement(tensor_name, old, target, value)
    with torch.no_grad():
        new = _converted(old, target, value, _target_dtype(old, value, dtype), non_blocking)
        if new is not old:
            _store(owner, name, new if name in owner._buffers else as_parameter(old, new, target))
    placed = owner._parameters[name] if name in owner._parameters else owner._buffers[name]
    if fp16_statistics is not None and placed is not None:
        placed.SCB = fp16_statistics.to(target)  # type: ignore[attr-defined]  # read by 8-bit linear layers
    if shared is not None and placed is not None:
        shared[target] = placed
    if clear_cache and old is not None and old.device.type not in ("cpu", "meta"):
        registry.get(old.device).empty_cache()


def _store(owner: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    # Written into the tables: `setattr` would refuse a buffer-like tensor under a parameter's name.
    table: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
    table[name] = tensor


def _check_replacement(name: str, old: torch.Tensor | None, target: torch.device, value: torch.Tensor | None) -> None:
    if value is None and old is not None and old.device == META and target != META:
        raise ConfigurationError(
            f"{name!r} is on the meta device, which holds no data, so there is nothing to put on {str(target)!r}. "
            "Pass its content as `value`."
        )
    if value is not None:
        check_shape(name, old, tuple(value.shape))


def check_shape(name: str, old: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    """Check that a value of a shape can take the place of a tensor.

    Raises:
        ConfigurationError: If the shapes differ.
    """
    if old is None or type(old).__name__ in _REBUILD:
        return
    if shape != tuple(old.shape):
        raise ConfigurationError(
            f"A value of shape {shape!r} was given for {name!r}, whose shape is {tuple(old.shape)!r}: "
            "the checkpoint belongs to another configuration of the model. Build the model with the sizes of the checkpoint."
        )


def _target_dtype(
    old: torch.Tensor | None, value: torch.Tensor | None, dtype: str | torch.dtype | None
) -> torch.dtype | None:
    if dtype is None:
        return old.dtype if old is not None and value is not None else None
    source = old if value is None else value
    quantised = source is not None and not (source.is_floating_point() or source.is_complex())
    wanted = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    return None if quantised else wanted


def _converted(
    old: torch.Tensor | None,
    target: torch.device,
    value: torch.Tensor | None,
    dtype: torch.dtype | None,
    non_blocking: bool,
) -> torch.Tensor | None:
    if value is None:
        return None if old is None else old.to(target, dtype, non_blocking=non_blocking)
    if old is not None and type(old).__name__ in _REBUILD:
        return value  # these classes quantise on their way to the device
    return value.to(target, dtype, non_blocking=non_blocking)


def as_parameter(old: torch.Tensor | None, new: torch.Tensor | None, target: torch.device) -> torch.Tensor | None:
    """Make `new` a parameter of the class, the flags and the attributes of `old`."""
    if new is None or old is None:
        return None if new is None else nn.Parameter(new, requires_grad=new.is_floating_point())
    rebuild = _REBUILD.get(type(old).__name__, _same_class)
    return rebuild(old, new, target)


def is_rebuilt(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of a class that quantises on its way to a device."""
    return type(tensor).__name__ in _REBUILD


def _same_class(old: torch.Tensor, new: torch.Tensor, target: torch.device) -> torch.Tensor:
    requires_grad = old.requires_grad and (new.is_floating_point() or new.is_complex())
    kind = type(old)
    if issubclass(kind, nn.Parameter) and kind is not nn.Parameter:
        made = torch.Tensor._make_subclass(kind, new.detach().as_subclass(torch.Tensor), requires_grad)
    else:  # also for sharded and quantised tensors, whose own class `nn.Parameter` keeps
        made = nn.Parameter(new.detach(), requires_grad=requires_grad)
    vars(made).update({key: item for key, item in vars(old).items() if key not in vars(made)})
    return made


def _quantising(old: torch.Tensor, new: torch.Tensor, target: torch.device) -> torch.Tensor:
    make: Callable[..., torch.Tensor] = type(old)
    fresh = new.is_floating_point()
    kept = {key: item for key, item in vars(old).items() if not (fresh and key in ("SCB", "CB", "quant_state"))}
    return make(new, requires_grad=old.requires_grad, **kept).to(target)


# Parameter classes of bitsandbytes, which need their own constructor and quantise in `.to`.
_REBUILD: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.device], torch.Tensor]] = {
    "Int8Params": _quantising,
    "FP4Params": _quantising,
    "Params4bit": _quantising,
}
