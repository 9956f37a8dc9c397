"""Quantised linear layers: in 8 or 4 bits with bitsandbytes, or with weights that torchao stores in few bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

import torch
from torch import nn

from accelerate._base.errors import ConfigurationError
from accelerate._base.imports import (
    is_4bit_bnb_available,
    is_8bit_bnb_available,
    is_bitsandbytes_multi_backend_available,
    require,
)
from accelerate.config.plugins.quantization import BnbQuantizationConfig
from accelerate.devices import registry
from accelerate.offload.memory import Dtype
from accelerate.offload.places import DISK, HOST, META, Place, as_device, check_device_map, is_offload
from accelerate.offload.plan import auto_device_map
from accelerate.offload.store import offload_weight, scales_name
from accelerate.offload.stored import FilePath
from accelerate.offload.tensors import find_tied_parameters, owner_of, set_module_tensor_to_device, table_of

M = TypeVar("M", bound=nn.Module)


def bitsandbytes(config: BnbQuantizationConfig) -> Any:
    """Return the package, in a release that has the layers that are asked for.

    Raises:
        MissingPackageError: If it is not installed.
        ConfigurationError: If it is too old.
    """
    package = require("bitsandbytes", why="Storing weights in 8 or 4 bits", extra="quantization")
    usable = is_8bit_bnb_available() if config.load_in_8bit else is_4bit_bnb_available()
    if not usable:
        bits = 8 if config.load_in_8bit else 4
        raise ConfigurationError(
            f"bitsandbytes {package.__version__!r} has no layers for {bits} bits. Install a newer one: "
            "`pip install -U bitsandbytes`."
        )
    return package


def is_named(name: str, listed: Iterable[str]) -> bool:
    """Return whether a module, or one above it, is in a list by its name or by the last parts of it."""
    inside = f".{name}."
    return any(f".{key}." in inside for key in listed)


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Return the modules that keep their precision: the output head, and those that share a weight."""
    tie = getattr(model, "tie_weights", None)
    if callable(tie):
        tie()
    tied = [name.rpartition(".")[0] for group in find_tied_parameters(model) for name in group]
    prefix = getattr(model, "base_model_prefix", None)
    is_base = isinstance(prefix, str) and not hasattr(model, prefix)
    children = [name for name, _ in model.named_children()]
    head = children[-1:] if children and not (is_base and not tied) else []
    return list(dict.fromkeys([*tied, *head]))


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """Return the device of the first parameter of a module.

    Raises:
        ConfigurationError: If it has none.
    """
    first = next(parameter.parameters(), None)
    if first is None:
        raise ConfigurationError(
            f"{type(parameter).__name__} has no parameters, so it is on no device. Pass a model with weights."
        )
    return first.device


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Return whether a model has layers of bitsandbytes that compute in 4 bits."""
    return any(type(module).__name__ == "Linear4bit" for module in model.modules())


def replace_with_bnb_layers(
    model: M,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: Iterable[str] | None = None,
    current_key_name: list[str] | None = None,
) -> M:
    """Put layers of bitsandbytes in the places of plain linear layers, with the weights of these.

    A weight that is there is quantised once it moves to a device; one on the meta device when it is loaded.

    Args:
        modules_to_not_convert: Names of modules that stay as they are, with all below them.
        current_key_name: The parts of the name of `model` in a larger one.
    """
    package = bitsandbytes(bnb_quantization_config)
    kept = list(modules_to_not_convert or ())
    for path, parent in list(model.named_modules()):
        for key, child in list(parent.named_children()):
            name = ".".join([*(current_key_name or ()), *filter(None, [path]), key])
            # Sub-classes may use their weight in other ways, as the output layer of nn.MultiheadAttention does.
            if type(child) is nn.Linear and not is_named(name, kept):
                setattr(parent, key, _quantising_layer(package, bnb_quantization_config, child))
    if not any(type(module).__name__ in ("Linear8bitLt", "Linear4bit") for module in model.modules()):
        raise ConfigurationError(
            f"{type(model).__name__} has no linear layer to quantise besides {kept!r}, which are left as they are. "
            "Load it without quantisation, or name fewer modules in skip_modules."
        )
    return model


def _quantising_layer(package: Any, config: BnbQuantizationConfig, linear: nn.Linear) -> nn.Module:
    sizes = (linear.in_features, linear.out_features, linear.bias is not None)
    # On the meta device: the layer would make weights of its own, only to lose them.
    with META:
        if config.load_in_8bit:
            made = package.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=config.llm_int8_threshold)
            weight = package.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
        else:
            packing = {
                "compress_statistics": config.bnb_4bit_use_double_quant,
                "quant_type": config.bnb_4bit_quant_type,
            }
            made = package.nn.Linear4bit(*sizes, compute_dtype=config.bnb_4bit_compute_dtype, **packing)
            weight = package.nn.Params4bit(linear.weight.data, requires_grad=False, module=made, **packing)
    made.weight = weight
    made.bias = linear.bias
    made.train(linear.training)
    layer: nn.Module = made.requires_grad_(False)
    return layer


def special_dtypes(model: nn.Module, config: BnbQuantizationConfig) -> dict[str, Dtype]:
    """Return the dtype of every floating-point parameter that is not quantised."""
    found: dict[str, Dtype] = {}
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ in ("Int8Params", "Params4bit") or not parameter.is_floating_point():
            continue
        kept = is_named(name, config.keep_in_fp32_modules or ())
        assert isinstance(config.torch_dtype, torch.dtype)  # made one by the settings
        found[name] = torch.float32 if kept else config.torch_dtype
    return found


def get_quantized_model_device_map(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    device_map: str | Mapping[str, Place] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
) -> dict[str, Place]:
    """Return a place for each module of a model whose layers were replaced, counted with their quantised sizes.

    Args:
        device_map: A place for each module, or a word as for `load_checkpoint_and_dispatch`; without it everything goes
            to the accelerator of this host, or to the CPU if it has none.

    Raises:
        ConfigurationError: If the word is unknown, or layers in 4 bits would have to be offloaded.
    """
    backend = registry.default().value
    if device_map is None:
        return {"": HOST if backend.type == HOST else backend.device().index or 0}
    places: Mapping[str, Place]
    if isinstance(device_map, str):
        dtype, special = bnb_quantization_config.target_dtype, special_dtypes(model, bnb_quantization_config)
        places = auto_device_map(model, device_map, max_memory, no_split_module_classes, dtype, special)
    else:
        check_device_map(model, device_map)
        places = device_map
    layers = [name for name, module in model.named_modules() if type(module).__name__ == "Linear4bit"]
    wrong = {
        name: place
        for name, place in _offloaded(places).items()
        if any(not name or f"{layer}.".startswith(f"{name}.") for layer in layers)
    }
    if bnb_quantization_config.load_in_4bit and wrong:  # their scales would not come along
        raise ConfigurationError(
            f"The device map offloads {wrong!r}, which have layers in 4 bits: these run where they are stored, and "
            "cannot be fetched for each call. Put them on a device, or write load_in_8bit=True, which may be offloaded."
        )
    return dict(places)


def _offloaded(places: Mapping[str, Place]) -> dict[str, Place]:
    """Return the modules whose weights are fetched for each call."""
    accelerated = any(not is_offload(place) for place in places.values())
    refused = (DISK, HOST) if accelerated else (DISK,)
    return {name: place for name, place in places.items() if str(place) in refused}


def quantize_and_offload_8bit(
    model: nn.Module,
    param: torch.Tensor,
    param_name: str,
    new_dtype: torch.dtype | None,
    offload_folder: FilePath,
    offload_index: MutableMapping[str, Any],
    fp16_statistics: torch.Tensor | None,
) -> None:
    """Write a weight to the disk, in 8 bits with its scales if its layer computes in 8 bits, and leave it on meta.

    Args:
        param: The weight: to be quantised, or quantised already if `fp16_statistics` are given.
        offload_index: Gets an entry for each file.
        fp16_statistics: The scales of a quantised weight.
    """
    scales: Any = fp16_statistics
    if fp16_statistics is None:
        # The parameter class of the layer quantises when it moves to a device, so the weight visits one.
        device = registry.default().value.device(0)
        set_module_tensor_to_device(model, param_name, device, value=param, dtype=new_dtype)
        owner, key = owner_of(model, param_name)
        param = table_of(owner, key)[key].detach()
        scales, new_dtype = getattr(table_of(owner, key)[key], "SCB", None), param.dtype
    offload_weight(param, param_name, offload_folder, offload_index)
    if isinstance(scales, torch.Tensor):
        offload_weight(scales, scales_name(param_name), offload_folder, offload_index)
    set_module_tensor_to_device(model, param_name, META, dtype=new_dtype)


def check_places(model: nn.Module, device: torch.device) -> None:
    """Refuse a quantised model that is offloaded, or that lies on another device than the process that prepares it.

    Raises:
        ConfigurationError: Its weights in few bits cannot be brought back or moved while it trains.
    """
    places = getattr(model, "hf_device_map", None) or {}
    kinds = {str(place) for place in places.values()}
    given = f"This {type(model).__name__} in 8 or 4 bits has hf_device_map={dict(places)!r}"
    # Newer versions of bitsandbytes also compute on the CPU.
    is_partly_offloaded = HOST in kinds and len(kinds) > 1 and not is_bitsandbytes_multi_backend_available()
    if DISK in kinds or is_partly_offloaded or (kinds == {HOST} and device.type != HOST):
        raise ConfigurationError(
            f"{given}: modules on the CPU or the disk are offloaded, and quantised weights that are offloaded cannot be "
            "trained. Load the model whole on the device of the process."
        )
    if len(kinds) != 1 or HOST in kinds:
        return
    place = next(iter(places.values()))
    found = torch.device(device.type, place) if isinstance(place, int) else as_device(place)
    # As in release 1.15, a process on the CPU may hold a model that lies on the first accelerator.
    is_other_kind = device.type not in (HOST, found.type)
    if is_other_kind or (found.index or 0) != (device.index or 0):
        raise ConfigurationError(
            f"{given}, and this process trains on {str(device)!r}: quantised weights stay on the device that they were "
            f"loaded to. Load it with device_map={{'': PartialState().device}}, or device_map={{'': "
            "Accelerator().local_process_index}."
        )


def kept_modules(model: nn.Module, config: BnbQuantizationConfig) -> list[str]:
    """Return the modules that are not quantised: those the user names, or the output head and tied ones."""
    skipped = get_keys_to_not_convert(model) if config.skip_modules is None else config.skip_modules
    return [*skipped, *(config.keep_in_fp32_modules or ())]


def cast_the_rest(model: nn.Module, config: BnbQuantizationConfig) -> None:
    """Give the parameters that are not quantised the dtype that the settings say."""
    dtypes = special_dtypes(model, config)
    for name, parameter in model.named_parameters():
        dtype = dtypes.get(name)
        if isinstance(dtype, torch.dtype) and parameter.device != META:
            parameter.data = parameter.data.to(dtype)


def place_packed(
    model: nn.Module,
    weight_name: str,
    value: torch.Tensor,
    statistics: Mapping[str, torch.Tensor],
    device: torch.device,
) -> None:
    """Give a layer that computes in 4 bits a weight that is packed already.

    Args:
        statistics: What was stored beside the weight, by name.

    Raises:
        ConfigurationError: If there is nothing beside it.
    """
    owner, key = owner_of(model, weight_name)
    if not statistics:
        raise ConfigurationError(
            f"The checkpoint holds {weight_name!r} as {str(value.dtype)!r} and nothing beside it in the same file, so it "
            "cannot be unpacked to 4 bits. Load the checkpoint that is not quantised, or save the quantised model to one "
            "file (`max_shard_size=`)."
        )
    made: Any = type(owner._parameters[key])
    owner._parameters[key] = made.from_prequantized(
        data=value, quantized_stats=dict(statistics), requires_grad=False, device=device, module=owner
    )


def is_torchao_config(config: object) -> bool:
    """Return whether an object is one of torchao's ways to quantise."""
    return type(config).__module__.partition(".")[0] == "torchao"


def quantize_weights(model: nn.Module, config: Any, skipped: Iterable[str]) -> None:
    """Quantise the weights of plain linear layers in place.

    Args:
        config: A configuration of torchao, such as `Int8WeightOnlyConfig()`.
        skipped: Names of modules that stay as they are, with all below them.
    """
    torchao = require("torchao.quantization", why="Quantising weights with torchao", extra="quantization")
    kept = list(skipped)
    torchao.quantize_(
        model, config, filter_fn=lambda module, name: type(module) is nn.Linear and not is_named(name, kept)
    )


def refuse_torchao_offload(places: Mapping[str, Place]) -> None:
    """Refuse places whose weights are fetched for each call: torchao's tensors stay on the device that they run on.

    Raises:
        ConfigurationError: If there is one.
    """
    wrong = _offloaded(places)
    if wrong:
        raise ConfigurationError(
            f"The device map offloads {wrong!r}, and weights that torchao quantised run where they are stored. Put them "
            "on a device, or write BnbQuantizationConfig(load_in_8bit=True), whose weights may be offloaded."
        )
