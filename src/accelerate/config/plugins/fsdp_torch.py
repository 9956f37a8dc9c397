"""The objects of torch that names and numbers in FSDP's options stand for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from accelerate._base.constants import FSDP_BACKWARD_PREFETCH, FSDP_SHARDING_STRATEGY, FSDP_STATE_DICT_TYPE
from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import warn_once
from accelerate._base.untrusted import number_in, shown

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.fsdp import StateDictType

_DTYPES = {"fp8": "bfloat16", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
# The enum of an option and the names of its members, in the order of torch's numbers; torch's own names differ by an
# underscore.
_ENUMS = {
    "sharding_strategy": ("ShardingStrategy", FSDP_SHARDING_STRATEGY),
    "reshard_after_forward": ("ShardingStrategy", FSDP_SHARDING_STRATEGY),
    "backward_prefetch": ("BackwardPrefetch", FSDP_BACKWARD_PREFETCH[:2]),
    "state_dict_type": ("StateDictType", FSDP_STATE_DICT_TYPE),
}


def enum_member(option: str, value: object) -> Any:
    """Return the member of torch's enum that a name in any case, a number (also as text) or the member stands for.

    Raises:
        ConfigurationError: It stands for none.
    """
    from torch.distributed import fsdp

    enum_name, names = _ENUMS[option]
    enum = getattr(fsdp, enum_name)
    if isinstance(value, enum):
        return value
    numbers = {name: number for number, name in enumerate(names, start=1)}
    text = str(value).upper()
    number = numbers.get(text, number_in(text))
    if number not in numbers.values():
        raise ConfigurationError(
            f"FullyShardedDataParallelPlugin({option}={shown(value)}) is not known to FSDP. "
            f"Write one of {', '.join(repr(name) for name in numbers)}."
        )
    return next(member for member in enum if member.value == number)


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
    return policy_class("mixed_precision_policy", version)(**dtypes)


def policy_class(option: str, version: int) -> Any:
    """Return the class that a version of FSDP has for an option, `mixed_precision_policy` or `cpu_offload`."""
    from torch.distributed.fsdp import CPUOffload, MixedPrecision, MixedPrecisionPolicy, OffloadPolicy

    classes: dict[str, tuple[type, type]] = {
        "mixed_precision_policy": (MixedPrecision, MixedPrecisionPolicy),
        "cpu_offload": (CPUOffload, OffloadPolicy),
    }
    return classes[option][version - 1]


def offload_policy(version: int, wanted: bool) -> Any:
    """Make the object by which FSDP learns whether weights rest on the CPU."""
    import torch
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

    if version == 1:
        return CPUOffload(offload_params=wanted)
    # Memory can be pinned for an accelerator only.
    return CPUOffloadPolicy(pin_memory=torch.accelerator.is_available()) if wanted else OffloadPolicy()


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
        classes = {type(part).__name__: type(part) for part in model.modules()}
        for name in chosen:
            if name not in classes:
                raise ConfigurationError(
                    f"transformer_cls_names_to_wrap holds {name!r}, but {type(model).__name__} has no layer of that class. "
                    f"Its classes are {', '.join(sorted(classes))}."
                )
        layers = {get_module_class_from_name(model, name) for name in chosen}
        return functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls=layers)
    if policy is wrap.size_based_auto_wrap_policy:
        return functools.partial(policy, min_num_params=min_num_params) if min_num_params else None
    return policy  # type: ignore[no-any-return]


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class of this name among a module and its children, depth first; None if there is none."""
    return next((type(part) for part in module.modules() if type(part).__name__ == name), None)


def empty_on_current_device(module: nn.Module) -> None:
    """Give the weights of one module memory without values, on the device of this process."""
    import torch

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is not None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    module.to_empty(device=device or torch.device("cpu"), recurse=False)
