"""The tensors of a model: found by name, identified in memory, tied to each other, and put on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import nn

from accelerate._base.errors import ConfigurationError, WeightsMismatchError
from accelerate.devices import registry
from accelerate.offload.places import META, Place, as_device
from accelerate.runtime.torch_private import keeps_identity

M = TypeVar("M", bound=nn.Module)

TreeNode: TypeAlias = tuple[str, nn.Module | torch.Tensor]
"""A module or a tensor of a model, with its dotted name."""
TiedCache: TypeAlias = dict[int, dict[torch.device, torch.Tensor]]
"""Address of a weight that somebody keeps alive -> device -> the copy there that all modules share."""

# Parameter classes of bitsandbytes, which need their own constructor and quantise in `.to`.
_QUANTISED_CLASSES = frozenset({"Int8Params", "FP4Params", "Params4bit"})


def resolve_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype of a name such as `"float16"` or `"torch.float16"`."""
    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ConfigurationError(
            f"There is no dtype {dtype!r}: torch has no such name. Write one like 'float16' or 'bfloat16'."
        )
    return found


class ModuleTree:
    """All modules of a model under all their names, parents before children.

    torch's own iterators take ten times as long on a hundred thousand modules. The lists are parallel: an object for
    each module would keep the garbage collector busy.
    """

    def __init__(self, model: nn.Module) -> None:
        self.prefixes: list[str] = []
        """The beginning of the names in each module: `"layer.0."`."""
        self.modules: list[nn.Module] = []
        self.parents: list[int] = []
        """The number of the module that holds each one; the root has -1."""
        self._add("", model, -1)

    def _add(self, prefix: str, module: nn.Module, parent: int) -> None:
        number = len(self.modules)
        self.prefixes.append(prefix)
        self.modules.append(module)
        self.parents.append(parent)
        if module._modules:
            for name, child in module._modules.items():
                if child is not None:
                    self._add(f"{prefix}{name}.", child, number)

    def tied_parameters(self) -> list[list[str]]:
        """Return the groups of names under which one and the same parameter is found, each group sorted."""
        seen: set[int] = set()
        groups: dict[int, list[str]] = {}
        for module in self.modules:
            for parameter in module._parameters.values():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                elif parameter is not None:
                    groups[id(parameter)] = []
        if groups:  # only now names are worth making
            for prefix, module in zip(self.prefixes, self.modules, strict=True):
                for name, parameter in module._parameters.items():
                    if id(parameter) in groups:
                        groups[id(parameter)].append(prefix + name)
        return sorted(sorted(group) for group in groups.values())


def has_children(module: nn.Module) -> bool:
    """Return whether a module has a child."""
    return bool(module._modules) and any(child is not None for child in module._modules.values())


def parts_of(module: nn.Module | torch.Tensor, name: str = "", buffers: bool = True) -> list[TreeNode]:
    """Return what a module is made of: its own parameters, its children, then its own buffers, by full name."""
    if isinstance(module, torch.Tensor):
        return []
    prefix = f"{name}." if name else ""
    found: list[TreeNode] = [(prefix + key, held) for key, held in module._parameters.items() if held is not None]
    found += [(prefix + key, child) for key, child in module._modules.items() if child is not None]
    if buffers and module._buffers:
        found += [(prefix + key, held) for key, held in module._buffers.items() if held is not None]
    return found


def is_splittable(module: nn.Module | torch.Tensor, no_split: Iterable[str]) -> bool:
    """Return whether the parts of a module may go to different devices."""
    if isinstance(module, torch.Tensor) or type(module).__name__ in no_split:
        return False
    return has_children(module)


def as_class_names(no_split_module_classes: str | Iterable[str] | None) -> set[str]:
    """Return the class names that a user gave as one name, as several, or not at all."""
    if no_split_module_classes is None:
        return set()
    return {no_split_module_classes} if isinstance(no_split_module_classes, str) else set(no_split_module_classes)


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


def table_of(owner: nn.Module, name: str) -> dict[str, Any]:
    """Return the table of a module that holds a tensor: `setattr` would refuse some tensors under a parameter's name."""
    return owner._parameters if name in owner._parameters else owner._buffers


def is_empty(value: object) -> bool:
    """Return whether a value is a tensor without data."""
    return isinstance(value, torch.Tensor) and value.device == META


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Return whether two devices are the same one, where a missing index means 0."""
    return first_device.type == second_device.type and (first_device.index or 0) == (second_device.index or 0)


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return what identifies the memory behind a tensor: device, address and number of bytes."""
    if tensor.device == META:
        return tensor.device, 0, tensor.nbytes
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def address_of(tensor: object) -> int | None:
    """Return where the data of a tensor lies, or None where it has no memory of its own."""
    if not isinstance(tensor, torch.Tensor) or tensor.device == META or tensor.numel() == 0:
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
    table = table_of(owner, name)
    old: torch.Tensor | None = table[name]
    target = as_device(device)
    source = old if value is None else value
    shared = tied_params_map.get(address_of(source) or 0) if tied_params_map else None
    if shared is not None and target in shared:
        table[name] = shared[target]
        return
    if value is not None:
        check_shape(tensor_name, old, tuple(value.shape))
    elif is_empty(old) and target != META:
        raise ConfigurationError(
            f"{tensor_name!r} is on the meta device, which holds no data, so there is nothing to put on "
            f"{str(target)!r}. Pass its content as `value`."
        )
    new = source
    with torch.no_grad():
        if source is not None and (value is None or not is_rebuilt(old)):
            new = source.to(target, _target_dtype(old, source, dtype), non_blocking=non_blocking)
        if new is not old:
            table[name] = new if table is owner._buffers else as_parameter(old, new, target)
    placed: torch.Tensor | None = table[name]
    if placed is not None:
        if fp16_statistics is not None:
            placed.SCB = fp16_statistics.to(target)  # type: ignore[attr-defined]  # read by 8-bit linear layers
        if shared is not None:
            shared[target] = placed
    if clear_cache and old is not None and old.device.type not in ("cpu", "meta"):
        registry.get(old.device).empty_cache()


def moves_in_place(module: nn.Module, device: torch.device) -> bool:
    """Return whether a module's tensors are the same objects after a move to a device."""
    sources = {tensor.device: tensor for tensor in chain(module.parameters(), module.buffers())}
    return all(
        check_device_same(source, device) or keeps_identity(tensor, device) for source, tensor in sources.items()
    )


def move_module(module: M, device: torch.device) -> M:
    """Move a module to a device, with the tensors that are one under several names still one.

    `Module.to` makes a new parameter for each name on a device whose tensors are of another kind, so that tied weights
    would be trained apart from each other, and what was noted on a parameter would be lost.
    """
    if moves_in_place(module, device):
        return module.to(device)
    held = [
        (table, name, tensor)
        for part in module.modules()
        for table in cast("tuple[dict[str, Any], ...]", (part._parameters, part._buffers))
        for name, tensor in table.items()
        if tensor is not None
    ]
    module = module.to(device)
    moved: dict[int, torch.Tensor] = {}
    for table, name, old in held:
        new = table.get(name)
        if new is not None and new is not old:
            table[name] = moved.setdefault(id(old), new)
            table[name].__dict__.update(old.__dict__)
    return module


def check_shape(name: str, old: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    """Check that a value of a shape can take the place of a tensor.

    Raises:
        WeightsMismatchError: If the shapes differ.
    """
    if old is not None and not is_rebuilt(old) and shape != tuple(old.shape):
        raise WeightsMismatchError(
            f"A value of shape {shape!r} was given for {name!r}, whose shape is {tuple(old.shape)!r}: "
            "the checkpoint belongs to another configuration of the model. Build the model with the sizes of the checkpoint."
        )


def _target_dtype(
    old: torch.Tensor | None, source: torch.Tensor, dtype: str | torch.dtype | None
) -> torch.dtype | None:
    """Return what a value is cast to: integers are quantised, and keep their dtype."""
    if dtype is None:
        return None if old is None or source is old else old.dtype
    return resolve_dtype(dtype) if source.is_floating_point() or source.is_complex() else None


def is_rebuilt(tensor: torch.Tensor | None) -> bool:
    """Return whether a tensor is of a class that quantises on its way to a device."""
    return type(tensor).__name__ in _QUANTISED_CLASSES


def as_parameter(old: torch.Tensor | None, new: torch.Tensor | None, target: torch.device) -> torch.Tensor | None:
    """Make `new` a parameter of the class, the flags and the attributes of `old`."""
    if new is None or old is None:
        return None if new is None else nn.Parameter(new, requires_grad=new.is_floating_point())
    kind = type(old)
    if is_rebuilt(old):
        make: Callable[..., torch.Tensor] = kind
        stale = ("SCB", "CB", "quant_state") if new.is_floating_point() else ()
        kept = {key: item for key, item in vars(old).items() if key not in stale}
        return make(new, requires_grad=old.requires_grad, **kept).to(target)
    requires_grad = old.requires_grad and (new.is_floating_point() or new.is_complex())
    if issubclass(kind, nn.Parameter) and kind is not nn.Parameter:
        made = torch.Tensor._make_subclass(kind, new.detach().as_subclass(torch.Tensor), requires_grad)
    else:  # also for sharded and quantised tensors, whose own class `nn.Parameter` keeps
        made = nn.Parameter(new.detach(), requires_grad=requires_grad)
    vars(made).update({key: item for key, item in vars(old).items() if key not in vars(made)})
    return made


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return the groups of names under which one and the same parameter is found, each group sorted."""
    return ModuleTree(model).tied_parameters()


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Make every name of a group hold one parameter again: the first that has data."""
    for group in tied_params:
        slots = [owner_of(model, name) for name in group]
        held = [owner._parameters.get(name) for owner, name in slots]
        first = next((parameter for parameter in held if parameter is not None and parameter.device != META), None)
        if first is not None:
            for owner, name in slots:
                owner._parameters[name] = first


def tied_cache(tied: Iterable[torch.Tensor]) -> TiedCache:
    """Return a cache with an empty entry for every tied weight that has data."""
    addresses = {address_of(weight) for weight in tied}
    return {address: {} for address in addresses if address is not None}


def prune_tied_cache(cache: TiedCache, weights: Iterable[torch.Tensor]) -> None:
    """Drop the entries whose source nobody in `weights` keeps alive: another tensor may get its address."""
    for address in cache.keys() - {address_of(weight) for weight in weights}:
        del cache[address]


def copy_to_host(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state dict on the CPU in which weights that were one tensor are one tensor still."""
    copies: dict[tuple[Any, ...], torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    for name, weight in state_dict.items():
        key = (address_of(weight) or name, weight.shape, weight.stride(), weight.dtype)
        found[name] = copies.setdefault(key, weight if weight.device == META else weight.to("cpu"))
    return found


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether the configuration of a Transformers model says that weights are tied."""
    config = getattr(model, "config", None)
    if config is None or "PreTrainedModel" not in [base.__name__ for base in type(model).__mro__]:
        return False
    head = getattr(model, "get_output_embeddings", lambda: None)()
    words = getattr(config, "tie_word_embeddings", False) and head is not None
    halves = getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False)
    modules = any(hasattr(module, "_tie_weights") for module in model.modules())
    return bool(words or halves or modules)
