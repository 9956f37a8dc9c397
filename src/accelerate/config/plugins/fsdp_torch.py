"""The objects of torch that names and numbers in FSDP's options stand for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate._base.constants import FSDP_BACKWARD_PREFETCH, FSDP_SHARDING_STRATEGY, FSDP_STATE_DICT_TYPE
from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import warn_once

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy, StateDictType

E = TypeVar("E", bound=Enum)

_DTYPES = {"fp8": "bfloat16", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def _member(enum: type[E], names: Iterable[str], option: str, value: object) -> E:
    """Return the member that a name in any case, a number (also as text) or the member itself stands for."""
    if isinstance(value, enum):
        return value
    # Both lists are in the order of torch's numbers; torch's own names differ by an underscore.
    numbers = {name: number for number, name in enumerate(names, start=1)}
    text = str(value).upper()
    number = numbers.get(text, int(text) if text.isdecimal() else 0)
    if number not in numbers.values():
        raise ConfigurationError(
            f"FullyShardedDataParallelPlugin({option}={value!r}) is not known to FSDP. "
            f"Write one of {', '.join(repr(name) for name in numbers)}."
        )
    return next(member for member in enum if member.value == number)


def sharding_strategy(option: str, value: object) -> ShardingStrategy:
    """Return what FSDP 1 shards.

    Args:
        option: The option that holds the value, for the message.

    Raises:
        ConfigurationError: It is no strategy.
    """
    from torch.distributed.fsdp import ShardingStrategy

    return _member(ShardingStrategy, FSDP_SHARDING_STRATEGY, option, value)


def backward_prefetch(value: object) -> BackwardPrefetch | None:
    """Return when FSDP 1 fetches the next weights in backward; None for never.

    Raises:
        ConfigurationError: It is no such moment.
    """
    from torch.distributed.fsdp import BackwardPrefetch

    if str(value).upper() == "NO_PREFETCH":
        return None
    return _member(BackwardPrefetch, FSDP_BACKWARD_PREFETCH[:2], "backward_prefetch", value)


def state_dict_type(value: object) -> StateDictType:
    """Return the form of weights in checkpoints.

    Raises:
        ConfigurationError: It is no such form.
    """
    from torch.distributed.fsdp import StateDictType

    return _member(StateDictType, FSDP_STATE_DICT_TYPE, "state_dict_type", value)


def state_dict_configs(kind: StateDictType, *given: Any) -> tuple[Any, Any]:
    """Return the options that go with a form of weights, of the model and of the optimizer.

    Args:
        given: The options there are already; one that fits the form is kept.
    """
    from torch.distributed import fsdp

    full = (fsdp.FullStateDictConfig, fsdp.FullOptimStateDictConfig)
    sharded = (fsdp.ShardedStateDictConfig, fsdp.ShardedOptimStateDictConfig)
    if kind is fsdp.StateDictType.LOCAL_STATE_DICT:
        return None, None
    classes: tuple[Any, Any] = full if kind is fsdp.StateDictType.FULL_STATE_DICT else sharded
    arguments = {"offload_to_cpu": True, **({"rank0_only": True} if classes is full else {})}
    model, optimizer = (
        old if isinstance(old, cls) else cls(**arguments) for old, cls in zip(given, classes, strict=True)
    )
    return model, optimizer


def dtype_of(value: object) -> torch.dtype:
    """Return the type of numbers that a precision's name, a type's name or the type itself stands for.

    Raises:
        ConfigurationError: It is none.
    """
    import torch

    if isinstance(value, torch.dtype):
        return value
    text = str(value).removeprefix("torch.")
    found = getattr(torch, _DTYPES.get(text, text), None)
    if not isinstance(found, torch.dtype):
        raise ConfigurationError(
            f"FullyShardedDataParallelPlugin cannot compute in {value!r}, which names no type of numbers. "
            f"Write one of {', '.join(_DTYPES)} or a torch.dtype."
        )
    return found


def precision_policy(version: int, value: object, buffer_dtype: torch.dtype | None = None) -> Any:
    """Make the object by which FSDP learns in which types of numbers to compute.

    Args:
        value: One type for all, or a dictionary with one for each part.
        buffer_dtype: The type of buffers where it differs; FSDP 1 alone asks for it.

    Raises:
        ConfigurationError: A part is not known to this version, or a type is none.
    """
    last = "buffer_dtype" if version == 1 else "output_dtype"
    parts = ("param_dtype", "reduce_dtype", last)
    given = value if isinstance(value, dict) else dict.fromkeys(parts, value)
    unknown = [part for part in given if part not in parts]
    if unknown:
        raise ConfigurationError(
            f"mixed_precision_policy={value!r} has {unknown!r}, which FSDP {version} does not know. "
            f"Write a dictionary with the keys {', '.join(parts)}."
        )
    dtypes = {part: dtype_of(dtype) for part, dtype in given.items() if dtype is not None}
    if version == 1 and buffer_dtype is not None:
        dtypes["buffer_dtype"] = buffer_dtype
    return precision_class(version)(**dtypes)


def precision_class(version: int) -> Any:
    """Return the class of a version's precision policies."""
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    return MixedPrecision if version == 1 else MixedPrecisionPolicy


def offload_class(version: int) -> Any:
    """Return the class of a version's offload policies."""
    from torch.distributed.fsdp import CPUOffload, OffloadPolicy

    return CPUOffload if version == 1 else OffloadPolicy


def offload_policy(version: int, wanted: bool) -> Any:
    """Make the object by which FSDP learns whether weights rest on the CPU."""
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy

    if version == 2 and wanted:
        # Memory can be pinned for an accelerator only.
        return CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())
    return offload_class(version)(**({"offload_params": wanted} if version == 1 else {}))


def wrap_policy(value: object) -> Any:
    """Return the function of torch that a policy's name stands for; None for no policy.

    Raises:
        ConfigurationError: It is neither a function nor a known name.
    """
    from torch.distributed.fsdp import wrap

    if callable(value):
        return value
    known: dict[str, Any] = {
        "TRANSFORMER_BASED_WRAP": wrap.transformer_auto_wrap_policy,
        "SIZE_BASED_WRAP": wrap.size_based_auto_wrap_policy,
        "NO_WRAP": None,
    }
    name = str(value).upper()
    if name not in known:
        raise ConfigurationError(
            f"FullyShardedDataParallelPlugin(auto_wrap_policy={value!r}) is not a known policy. "
            f"Write one of {', '.join(repr(policy) for policy in known)}, or a function."
        )
    return known[name]


def wraps_by_size(policy: object) -> bool:
    """Say whether a policy is torch's own by size."""
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    return policy is size_based_auto_wrap_policy


def bind_policy(
    policy: Any, model: nn.Module, names: Iterable[str] | None, min_num_params: int | None
) -> Callable[..., bool] | None:
    """Give a policy what it needs to know of a model; one that needs nothing comes back as it is.

    Raises:
        ConfigurationError: The model has no layer of a class that was named.
    """
    from torch.distributed.fsdp import wrap

    if policy is wrap.transformer_auto_wrap_policy:
        chosen = list(names if names is not None else getattr(model, "_no_split_modules", None) or ())
        if not chosen:
            warn_once(
                f"TRANSFORMER_BASED_WRAP finds no layers to shard on their own: {type(model).__name__} does not name "
                "them. Set transformer_cls_names_to_wrap; until then the model is sharded as one.",
                stacklevel=3,
            )
        classes = {_layer_class(model, name) for name in chosen}
        return functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls=classes)
    if policy is wrap.size_based_auto_wrap_policy:
        return functools.partial(policy, min_num_params=min_num_params) if min_num_params else None
    return policy  # type: ignore[no-any-return]


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class of this name among a module and its children, depth first; None if there is none."""
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)


def _layer_class(model: nn.Module, name: str) -> type[nn.Module]:
    found = get_module_class_from_name(model, name)
    if found is None:
        there = sorted({type(part).__name__ for part in model.modules()})
        raise ConfigurationError(
            f"transformer_cls_names_to_wrap holds {name!r}, but {type(model).__name__} has no layer of that class. "
            f"Its classes are {', '.join(there)}."
        )
    return found


def empty_on_current_device(module: nn.Module) -> None:
    """Give the weights of one module memory without values, on the device of this process."""
    import torch

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is not None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    module.to_empty(device=device or torch.device("cpu"), recurse=False)
