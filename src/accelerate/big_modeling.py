"""Models larger than the memory of a device: made empty, loaded to their places, and run from there."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from accelerate._base.errors import ConfigurationError
from accelerate._base.lazy import attach_passing_names
from accelerate.config import env
from accelerate.config.plugins.quantization import BnbQuantizationConfig
from accelerate.devices import registry
from accelerate.hooks.align import AlignDevicesHook, SkipKeys
from accelerate.hooks.attach import (
    attach_align_device_hook,
    first_accelerator,
    guard_moves,
    hook_device_map,
    take_off_dispatch,
    weights_of_offloaded,
)
from accelerate.hooks.base import CpuOffload, UserCpuOffloadHook, add_hook_to_module, attach_layerwise_casting_hooks
from accelerate.offload import quantised
from accelerate.offload.loading import load_checkpoint_in_model
from accelerate.offload.places import DISK, META, Place, as_device, check_device_map, flatten_device_map
from accelerate.offload.plan import auto_device_map
from accelerate.offload.store import OffloadedWeightsLoader, offload_state_dict, warn_of_other_weights
from accelerate.offload.stored import FilePath
from accelerate.offload.tensors import (
    TiedCache,
    copy_to_host,
    find_tied_parameters,
    move_module,
    set_module_tensor_to_device,
    tied_cache,
)
from accelerate.offload.weight_files import has_offload_index
from accelerate.runtime.torch_private import parameter_registration_hooks

__all__ = [
    "attach_layerwise_casting_hooks",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "init_empty_weights",
    "init_on_device",
    "load_and_quantize_model",
    "load_checkpoint_and_dispatch",
]

attach_passing_names(__name__)

M = TypeVar("M", bound=nn.Module)

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
    """Make models whose parameters are put on a device as they are made; on the meta device, initialisers do nothing.

    Args:
        include_buffers: Put buffers there too; ACCELERATE_INIT_INCLUDE_BUFFERS decides if not given.
    """
    target = as_device(device)
    everything = env.flag("ACCELERATE_INIT_INCLUDE_BUFFERS") if include_buffers is None else include_buffers
    patches: list[tuple[Any, str, Callable[..., Any]]] = [
        (nn.init, name, _unless_empty(function))
        for name, function in vars(nn.init).items()
        if name.endswith("_") and not name.startswith("_") and callable(function)
    ]
    if not everything:
        patches.append((nn.Module, "register_parameter", _register_on(target)))
        if target == META:
            # Other layers make their parameters on the CPU first, which takes most of the time of a linear layer.
            patches += [(layer, "__init__", _on_meta(layer.__init__)) for layer in _PARAMETERS_ALONE]
            patches += [
                (layer, "reset_parameters", _unless_on_meta(layer.__dict__["reset_parameters"]))
                for layer in _PARAMETERS_ALONE
                if "reset_parameters" in layer.__dict__
            ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
    for owner, name, replacement in patches:
        setattr(owner, name, replacement)
    try:
        with target if everything else nullcontext():
            yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _unless_empty(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Let an initialiser pass over tensors without data, on which it only takes time."""

    @functools.wraps(function)
    def initialise(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = args[0] if args else kwargs.get("tensor")
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            return tensor
        return function(*args, **kwargs)

    return initialise


def _on_meta(make: Callable[..., None]) -> Callable[..., None]:
    """Let the constructor of a layer make its parameters on the meta device at once."""
    before_device = list(inspect.signature(make).parameters).index("device")

    @functools.wraps(make)
    def initialise(*args: Any, **kwargs: Any) -> None:
        if len(args) <= before_device and kwargs.get("device") is None:
            kwargs["device"] = META
        make(*args, **kwargs)

    return initialise


def _unless_on_meta(reset: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    """Let a layer skip its initialization on the meta device, where only the arguments of the calls take time."""

    @functools.wraps(reset)
    def reset_parameters(module: nn.Module) -> None:
        weight = module._parameters.get("weight")
        if weight is None or not weight.is_meta:
            reset(module)

    return reset_parameters


def _register_on(device: torch.device) -> Callable[..., None]:
    """Return a `register_parameter` that puts every parameter that a module gets on a device."""
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

    return register_on_device


def _is_new(module: nn.Module, name: str) -> bool:
    """Return whether torch would accept a name without a word; asking it takes a third of the time of a layer."""
    own = module.__dict__
    if "_parameters" not in own or not name or "." in name or parameter_registration_hooks:
        return False
    taken = name in own or name in own["_buffers"] or name in own["_modules"] or hasattr(type(module), name)
    return not taken


def _running_device(model: nn.Module, execution_device: Place | None) -> Place:
    """Return where a model runs: as given, or where its first parameter is."""
    if execution_device is not None:
        return execution_device
    first = next(model.parameters(), None)
    return registry.default().value.device() if first is None or first.device == META else first.device


def cpu_offload(
    model: M,
    execution_device: Place | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: Iterable[str] | None = None,
    *,
    offload_memory: int | str | None = None,
) -> M:
    """Keep the weights on the CPU, and bring those of each module to the device while it runs.

    Args:
        execution_device: Where the model runs; where its first parameter is if not given.
        state_dict: The weights on the CPU, if they are at hand.
        preload_module_classes: Class names of modules that use the weights of their children without calling them.
        offload_memory: What weights may take on the device, in bytes or as text like `"2GB"`; measured if not given.
    """
    device = _running_device(model, execution_device)
    held = copy_to_host(model.state_dict()) if state_dict is None else state_dict
    tied = tied_cache(held[name] for group in find_tied_parameters(model) for name in group if name in held)
    weights = OffloadedWeightsLoader(held)
    _attach_offload(model, device, weights, offload_buffers, preload_module_classes, tied, offload_memory)
    return model


def disk_offload(
    model: M,
    offload_dir: FilePath,
    execution_device: Place | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Iterable[str] | None = None,
    *,
    offload_memory: int | str | None = None,
) -> M:
    """Keep the weights in a folder, and read those of each module while it runs.

    Args:
        offload_dir: A folder that has an index already is used as it is; otherwise the weights are written to it.
        offload_memory: What weights may take in memory, in bytes or as text like `"2GB"`; measured if not given.
    """
    if has_offload_index(offload_dir):
        warn_of_other_weights(offload_dir, model.state_dict())
    else:
        offload_state_dict(offload_dir, model.state_dict())
    device = _running_device(model, execution_device)
    weights = OffloadedWeightsLoader(save_folder=offload_dir)
    weights.add_aliases(find_tied_parameters(model))
    _attach_offload(model, device, weights, offload_buffers, preload_module_classes, None, offload_memory)
    return model


def _attach_offload(
    model: nn.Module,
    device: Place,
    weights: Mapping[str, torch.Tensor],
    offload_buffers: bool,
    preload: Iterable[str] | None,
    tied: TiedCache | None,
    offload_memory: int | str | None,
) -> None:
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(
        model,
        execution_device=device,
        offload=True,
        weights_map=weights,
        offload_buffers=offload_buffers,
        preload_module_classes=preload,
        tied_params_map=tied,
        offload_memory=offload_memory,
    )


def cpu_offload_with_hook(
    model: M, execution_device: Place | None = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[M, UserCpuOffloadHook]:
    """Keep a whole model on the CPU until it runs; it stays on the device until its handle sends it back.

    Args:
        prev_module_hook: The handle of the model that runs before this one in a pipeline, and makes room for it.

    Example:
        ```python
        first, first_hook = cpu_offload_with_hook(first, 0)
        second, second_hook = cpu_offload_with_hook(second, 0, prev_module_hook=first_hook)
        second(first(x))  # `first` goes back to the CPU before `second` comes
        second_hook.offload()
        ```
    """
    hook = CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def dispatch_model(
    model: M,
    device_map: Mapping[str, Place],
    main_device: Place | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: FilePath | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: SkipKeys = None,
    preload_module_classes: Iterable[str] | None = None,
    force_hooks: bool = False,
    *,
    offload_memory: int | str | None = None,
) -> M:
    """Put the modules of a model where a device map says, and make it run from there.

    Args:
        device_map: A place for each module: a device, `"cpu"` or `"disk"`. The nearest entry at or above a module
            decides, and `""` is for everything that is left.
        main_device: Where modules on the CPU and the disk run; the first accelerator of the map if not given.
        state_dict: The weights of the modules on the CPU, if they are at hand.
        offload_dir: The folder for the modules on the disk.
        offload_index: Where each weight on the disk is found, such as in safetensors files.
        skip_keys: Names of keyword arguments that are not moved between devices.
        preload_module_classes: Class names of modules that use the weights of their children without calling them.
        force_hooks: Use hooks even if all modules lie on one device.
        offload_memory: What weights of offloaded modules may take while the model runs, in bytes or as text like
            `"2GB"`; measured if not given. They are read ahead of the module that runs, within this budget.

    Raises:
        ConfigurationError: If a tensor has no place, or modules on the disk have no folder.
    """
    check_device_map(model, device_map)
    if hasattr(model, "hf_device_map"):
        take_off_dispatch(model, device_map, state_dict, offload_dir, offload_index)
    places = {str(place) for place in device_map.values()}
    if len(places) > 1 or DISK in places or force_hooks:
        parts = flatten_device_map(model, device_map)
        main = first_accelerator(device_map) if main_device is None else main_device
        weights = weights_of_offloaded(model, parts, main, state_dict, offload_dir, offload_index)
        hook_device_map(model, parts, main, weights, offload_buffers, skip_keys, preload_module_classes, offload_memory)
        guard_moves(model)
    else:
        move_module(model, as_device(next(iter(device_map.values()))))
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def load_checkpoint_and_dispatch(
    model: M,
    checkpoint: FilePath,
    device_map: str | Mapping[str, Place] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    offload_folder: FilePath | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: SkipKeys = None,
    preload_module_classes: Iterable[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    offload_memory: int | str | None = None,
) -> M:
    """Load a checkpoint into a model, usually an empty one, with each weight where it will be used.

    Args:
        checkpoint: A weights file, an index of shards, or a folder with one of these.
        device_map: A place for each module; or `"auto"`/`"balanced"` to spread the model evenly, `"balanced_low_0"`
            to keep the first accelerator light, `"sequential"` to fill one after the other. Without it the weights
            are only loaded.
        max_memory: The memory that a made map may use on each device.
        no_split_module_classes: Class names of the blocks that stay whole in a made map.
        offload_folder: Where the index of weights on the disk is written. A safetensors checkpoint is used in place;
            other formats, and smaller dtypes, are converted once to this folder.
        offload_memory: What weights of offloaded modules may take while the model runs, in bytes or as text like
            `"2GB"`; measured if not given.

    Raises:
        ConfigurationError: If the map is an unknown word, or the checkpoint does not fit.

    Example:
        ```python
        with init_empty_weights():
            model = Model(config)
        model = load_checkpoint_and_dispatch(model, "checkpoint", device_map="auto", offload_folder="offload")
        ```
    """
    places = device_map
    if isinstance(places, str):
        places = auto_device_map(
            model, places, max_memory, no_split_module_classes, dtype, offload_buffers=offload_buffers
        )
    load_checkpoint_in_model(
        model,
        checkpoint,
        device_map=places,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_state_dict=bool(offload_state_dict),
        offload_buffers=offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if places is None:
        return model
    return dispatch_model(
        model,
        places,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
        offload_memory=offload_memory,
    )


def load_and_quantize_model(
    model: M,
    bnb_quantization_config: BnbQuantizationConfig | Any,
    weights_location: FilePath | None = None,
    device_map: str | Mapping[str, Place] | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    offload_folder: FilePath | None = None,
    offload_state_dict: bool = False,
) -> M:
    """Store the weights of linear layers in 8 or 4 bits, as they are loaded or where they are.

    Args:
        model: An empty model, whose weights are loaded and quantised one by one, or one with weights.
        bnb_quantization_config: How bitsandbytes quantises; or a configuration of torchao for weights, such as
            `Int8WeightOnlyConfig()`.
        weights_location: A checkpoint, quantised or not; needed for an empty model.
        device_map: As for `load_checkpoint_and_dispatch`; without it everything goes to one device.
        offload_folder: Where weights for the disk are written, in 8 bits.

    Raises:
        ConfigurationError: If an empty model has no weights to load, or weights in 4 bits would be offloaded.

    Example:
        ```python
        with init_empty_weights():
            model = Model(config)
        model = load_and_quantize_model(model, BnbQuantizationConfig(load_in_8bit=True), "checkpoint", device_map="auto")
        ```
    """
    config = bnb_quantization_config
    empty = quantised.get_parameter_device(model) == META
    if empty and weights_location is None:
        raise ConfigurationError(
            f"{type(model).__name__} is on the meta device and weights_location={weights_location!r}, so there is "
            "nothing to quantise. Pass the checkpoint as weights_location."
        )
    if quantised.is_torchao_config(config):
        return _load_for_torchao(model, config, weights_location, device_map, no_split_module_classes, max_memory)
    kept = quantised.kept_modules(model, config)
    quantised.replace_with_bnb_layers(model, config, kept)
    places = quantised.get_quantized_model_device_map(model, config, device_map, max_memory, no_split_module_classes)
    if weights_location is not None:
        # What stays in float32 must not pass through a smaller dtype on its way.
        dtype = None if config.keep_in_fp32_modules else config.torch_dtype
        load_checkpoint_in_model(
            model,
            weights_location,
            device_map=places,
            offload_folder=offload_folder,
            dtype=dtype,
            offload_state_dict=offload_state_dict,
            offload_8bit_bnb=config.load_in_8bit and DISK in places.values(),
        )
    quantised.cast_the_rest(model, config)
    return dispatch_model(model, places, offload_dir=offload_folder)


def _load_for_torchao(
    model: M,
    config: Any,
    weights_location: FilePath | None,
    device_map: str | Mapping[str, Place] | None,
    no_split: str | Iterable[str] | None,
    max_memory: Mapping[int | str, int | str] | None,
) -> M:
    kept = quantised.get_keys_to_not_convert(model)
    places: Mapping[str, Place]
    if isinstance(device_map, str):
        places = auto_device_map(model, device_map, max_memory, no_split)
    else:
        places = {"": _running_device(model, None)} if device_map is None else device_map
    quantised.refuse_torchao_offload(places)
    if weights_location is not None:
        load_checkpoint_in_model(model, weights_location, device_map=places)
    dispatched = dispatch_model(model, places)
    quantised.quantize_weights(dispatched, config, kept)
    return dispatched
