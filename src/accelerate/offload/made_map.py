"""Device maps made from a word: how the model is to be spread over the devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from accelerate._base.errors import ConfigurationError
from accelerate.offload.memory import get_balanced_memory
from accelerate.offload.places import Place
from accelerate.offload.planner import infer_auto_device_map
from accelerate.offload.sizes import Dtype

_WORDS = ("auto", "balanced", "balanced_low_0", "sequential")


def make_device_map(
    model: nn.Module,
    word: str,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split: str | Iterable[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    offload_buffers: bool = False,
) -> dict[str, Place]:
    """Return a place for each module.

    Args:
        word: `"auto"` or `"balanced"` for an even spread, `"balanced_low_0"` for a light first accelerator,
            `"sequential"` to fill one device after the other.

    Raises:
        ConfigurationError: If it is another word.
    """
    if word not in _WORDS:
        raise ConfigurationError(
            f"The device map {word!r} is not known. Write one of {', '.join(map(repr, _WORDS))}, or a dictionary."
        )
    limits = max_memory
    if word != "sequential":
        low_zero = word == "balanced_low_0"
        limits = get_balanced_memory(model, max_memory, no_split, dtype, special_dtypes, low_zero=low_zero)
    return infer_auto_device_map(model, limits, no_split, dtype, special_dtypes, offload_buffers=offload_buffers)
