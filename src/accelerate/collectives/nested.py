"""Walk nested containers of tensors within one process, with their types preserved."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelerate._base.errors import ConfigurationError, WrongTypeError

_HALVES = (torch.float16, torch.bfloat16)


class Child(NamedTuple):
    """One entry of a container: how it is written after the container's name, and its value."""

    step: str
    value: Any


def is_namedtuple(data: Any) -> bool:
    """Return whether the value is an instance of a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def is_dataclass_instance(data: Any) -> bool:
    """Return whether the value is an instance of a dataclass, not the class itself."""
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Build a list, tuple or named tuple of the type of `obj` from the values."""
    values = list(generator)
    if is_namedtuple(obj):
        return type(obj)(*values)
    if isinstance(obj, torch.Size) and not all(isinstance(value, int) for value in values):
        return tuple(values)
    return type(obj)(values)


def children(data: Any) -> list[Child] | None:
    """Return the entries of a container, or None for a value that is not one.

    Containers are lists, tuples, named tuples, mappings and dataclass instances.
    """
    if isinstance(data, Mapping):
        return [Child(f"[{key!r}]", value) for key, value in data.items()]
    if is_namedtuple(data):
        return [Child(f".{name}", value) for name, value in zip(data._fields, data, strict=True)]
    if isinstance(data, (list, tuple)):
        return [Child(f"[{index}]", value) for index, value in enumerate(data)]
    if is_dataclass_instance(data):
        return [Child(f".{name}", getattr(data, name)) for name in _field_names(data)]
    return None


def rebuilt(data: Any, values: list[Any]) -> Any:
    """Return a container like `data` that holds the values, given in the order of `children`."""
    if isinstance(data, (list, tuple)):
        return honor_type(data, values)
    if isinstance(data, Mapping):
        return _rebuilt_mapping(data, dict(zip(data, values, strict=True)))
    names = _field_names(data)
    if all(getattr(data, name) is value for name, value in zip(names, values, strict=True)):
        return data
    result = copy.copy(data)
    for name, value in zip(names, values, strict=True):
        # Frozen dataclasses forbid assignment on themselves, and `replace` would run __post_init__ a second time.
        object.__setattr__(result, name, value)
    return result


def leaves(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that is not a container, with its path such as `['scores'][0]`."""
    entries = children(data)
    if entries is None:
        yield path, data
        return
    for step, value in entries:
        yield from leaves(value, path + step)


def _field_names(data: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(data) if hasattr(data, field.name)]


def _rebuilt_mapping(data: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(data) is dict:
        return items
    if isinstance(data, MutableMapping):
        # A copy keeps what a constructor would lose: BatchEncoding's encodings, a defaultdict's factory.
        try:
            result = copy.copy(data)
            for key, value in items.items():
                result[key] = value
            return result
        except (TypeError, ValueError, AttributeError, NotImplementedError):
            pass
    return type(data)(items)  # type: ignore[call-arg]


@dataclass
class TensorInformation:
    """Describe a tensor without its values."""

    shape: torch.Size
    dtype: torch.dtype


def is_torch_tensor(tensor: Any) -> bool:
    """Return whether the value is a tensor."""
    return isinstance(tensor, Tensor)


def is_torch_xpu_tensor(tensor: Any) -> bool:
    """Return whether the value is a tensor on an XPU."""
    return isinstance(tensor, Tensor) and tensor.is_xpu


def is_tensor_information(tensor_info: Any) -> bool:
    """Return whether the value is a `TensorInformation`."""
    return isinstance(tensor_info, TensorInformation)


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply `func(leaf, *args, **kwargs)` to every leaf that passes `test_type`, and keep the containers' types.

    Args:
        error_on_other_type: raise for a leaf that fails the test; otherwise it is kept as it is.

    Raises:
        WrongTypeError: for such a leaf, with its type.
    """

    def walk(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return honor_type(value, map(walk, value))
        if isinstance(value, Mapping):
            return rebuilt(value, [walk(entry) for entry in value.values()])
        if test_type(value):
            return func(value, *args, **kwargs)
        if is_dataclass_instance(value):
            return rebuilt(value, [walk(child.value) for child in children(value) or ()])
        if error_on_other_type:
            raise WrongTypeError(
                f"{_name(func)} was given {_short(value)} of type {type(value)!r}, which does not pass "
                f"`{_name(test_type)}`; pass nested lists, tuples, dicts or dataclasses of values that do"
            )
        return value

    return walk(data)


def send_to_device(
    tensor: Any,
    device: str | int | torch.device | None,
    non_blocking: bool = False,
    skip_keys: str | Iterable[str] | None = None,
) -> Any:
    """Move every tensor, and every object with a `to` method, of a nested structure to the device.

    Args:
        skip_keys: keys of mappings, at any depth, whose values stay where they are.
    """
    if type(device) is not torch.device:
        device = torch.device(device) if device is not None else torch.get_default_device()
    # The common cases first: nothing has to move, and nothing but exact types has to be looked at.
    kind = type(tensor)
    if kind is Tensor:
        return tensor if tensor.device == device else tensor.to(device, non_blocking=non_blocking)
    if kind is dict:
        if _all_on(tensor.values(), device):
            return dict(tensor)
    elif (kind is list or kind is tuple) and _all_on(tensor, device):
        return kind(tensor)
    skipped = frozenset([skip_keys] if isinstance(skip_keys, str) else skip_keys or ())
    return _send(tensor, device, non_blocking, skipped)


def place_batch(batch: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Move a batch that nobody else holds to the device; one that is there already is returned itself.

    Every batch of a prepared loader comes here, so the common cases look at exact types only and copy nothing.
    """
    kind = type(batch)
    if kind is list or kind is tuple:
        values = batch
    elif kind is dict:
        values = batch.values()
    else:
        return send_to_device(batch, device, non_blocking)
    for value in values:
        if type(value) is not Tensor or value.device != device:
            return send_to_device(batch, device, non_blocking)
    return batch


def _all_on(values: Iterable[Any], device: torch.device) -> bool:
    for value in values:  # noqa: SIM110 - a generator would double the cost of a small batch
        if type(value) is not Tensor or value.device != device:
            return False
    return True


def _send(value: Any, device: torch.device, non_blocking: bool, skipped: frozenset[str]) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=non_blocking)
    if hasattr(value, "to") and not isinstance(value, type) and not (skipped and isinstance(value, Mapping)):
        return _call_to(value, device, non_blocking)
    if isinstance(value, (list, tuple)):
        return honor_type(value, [_send(entry, device, non_blocking, skipped) for entry in value])
    if isinstance(value, Mapping):
        moved = [v if k in skipped else _send(v, device, non_blocking, skipped) for k, v in value.items()]
        return rebuilt(value, moved)
    if is_dataclass_instance(value):
        return rebuilt(value, [_send(child.value, device, non_blocking, skipped) for child in children(value) or ()])
    return value


def _call_to(value: Any, device: torch.device, non_blocking: bool) -> Any:
    try:
        return value.to(device, non_blocking=non_blocking)
    except TypeError:  # a `to` of the user's own, without that argument
        return value.to(device)


def get_data_structure(data: Any) -> Any:
    """Replace every tensor by its `TensorInformation`."""
    return recursively_apply(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def initialize_tensors(data_structure: Any) -> Any:
    """Replace every `TensorInformation` by an uninitialised tensor."""
    return recursively_apply(
        lambda info: torch.empty(info.shape, dtype=info.dtype), data_structure, test_type=is_tensor_information
    )


def get_shape(data: Any) -> Any:
    """Replace every tensor by its shape, as a list."""
    return recursively_apply(lambda tensor: list(tensor.shape), data)


def find_batch_size(data: Any) -> int:
    """Return the first dimension of the first tensor that has one.

    Raises:
        ConfigurationError: if the structure is empty or holds 0-d tensors only.
        WrongTypeError: if it holds values but no tensor.
    """
    seen: Any = None
    found = False
    for _, leaf in leaves(data):
        found, seen = True, leaf
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    if found and not isinstance(seen, Tensor):
        raise WrongTypeError(
            f"the batch size was asked of {_short(data)} of type {type(data)!r}, which holds no tensor to read it "
            "from; pass a structure with at least one tensor"
        )
    raise ConfigurationError(
        f"the batch size was asked of {_short(data)} of type {type(data)!r}, which is empty or has only tensors "
        "without dimensions; pass a structure with at least one tensor of one or more dimensions"
    )


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the batch size as `find_batch_size` does, or None where that raises."""
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def find_device(data: Any) -> torch.device | None:
    """Return the device of the first tensor, or None if there is no tensor."""
    return next((leaf.device for _, leaf in leaves(data) if isinstance(leaf, Tensor)), None)


def listify(data: Any) -> Any:
    """Replace every tensor by a (nested) list of Python numbers."""
    return recursively_apply(lambda tensor: tensor.detach().tolist(), data)


def concatenate(data: Any, dim: int = 0) -> Any:
    """Concatenate, tensor by tensor, a list of structures that are built alike; 0-d tensors count as one row.

    Raises:
        WrongTypeError: for leaves that are not tensors, if there is more than one structure.
    """
    first = data[0]
    if isinstance(first, Tensor):
        return torch.cat([tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in data], dim=dim)
    if isinstance(first, Mapping):
        return rebuilt(first, [concatenate([entry[key] for entry in data], dim=dim) for key in first])
    entries = [children(entry) for entry in data]
    if entries[0] is not None:
        columns = zip(*[[child.value for child in entry or ()] for entry in entries], strict=True)
        return rebuilt(first, [concatenate(list(column), dim=dim) for column in columns])
    if len(data) == 1 or all(value is None for value in data):
        return first
    raise WrongTypeError(
        f"concatenate was given {_short(first)} of type {type(first)!r}, and only tensors can be concatenated; "
        "take such entries out of the structure, or collect them in a list with `gather_object`"
    )


def slice_tensors(
    data: Any, tensor_slice: Any, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Index every tensor with `tensor_slice`.

    Args:
        process_index: not used; a function of the user's own that replaces this one may need it.
        num_processes: as `process_index`.
    """
    return recursively_apply(lambda tensor: tensor[tensor_slice], data)


def convert_to_fp32(tensor: Any) -> Any:
    """Convert every fp16 and bf16 tensor to fp32."""
    if type(tensor) is Tensor:  # what most models return: every forward pass in mixed precision comes here
        return tensor.float() if tensor.dtype in _HALVES else tensor
    return recursively_apply(lambda leaf: leaf.float(), tensor, test_type=_is_half)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Append zeros to the tensors that hold the batch, so that it divides evenly into `num_processes` chunks."""
    missing = -batch_size % num_processes

    def pad(leaf: Tensor) -> Tensor:
        if leaf.dim() <= dim or leaf.shape[dim] != batch_size or missing == 0:
            return leaf
        shape = list(leaf.shape)
        shape[dim] = missing
        return torch.cat([leaf, leaf.new_zeros(shape)], dim=dim)

    return recursively_apply(pad, tensor, error_on_other_type=True)


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _HALVES


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", repr(function))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class ConvertOutputsToFp32:
    """Call a forward and convert its fp16 and bf16 outputs to fp32; the wrapped one is `__wrapped__`.

    It pickles if the forward does.
    """

    __wrapped__: Callable[..., Any]

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> dict[str, Any]:
        return {"model_forward": self.model_forward}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A bound method's owner may be half restored here (it holds this object): look at no attribute of it yet.
        self.model_forward = self.__wrapped__ = state["model_forward"]


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> ConvertOutputsToFp32:
    """Return a forward whose half-precision outputs are fp32; one that is wrapped already is returned as it is."""
    if isinstance(model_forward, ConvertOutputsToFp32):
        return model_forward
    return ConvertOutputsToFp32(model_forward)
