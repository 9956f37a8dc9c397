"""Linear layers whose weights torchao stores in few bits and widens when it computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from accelerate._base.errors import ConfigurationError
from accelerate._base.imports import require
from accelerate.offload.bnb import is_named
from accelerate.offload.places import DISK, HOST, Place, is_offload


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


def refuse_offload(places: Mapping[str, Place]) -> None:
    """Refuse places whose weights are fetched for each call: torchao's tensors stay on the device that they run on.

    Raises:
        ConfigurationError: If there is one.
    """
    accelerated = any(not is_offload(place) for place in places.values())
    refused = (DISK, HOST) if accelerated else (DISK,)
    wrong = {name: place for name, place in places.items() if str(place) in refused}
    if wrong:
        raise ConfigurationError(
            f"The device map offloads {wrong!r}, and weights that torchao quantised run where they are stored. Put them "
            "on a device, or write BnbQuantizationConfig(load_in_8bit=True), whose weights may be offloaded."
        )
