"""All weights of a model that DeepSpeed holds, gathered where ZeRO 3 shards them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from accelerate._base.errors import ConfigurationError
from accelerate._base.imports import require
from accelerate.parallel.unwrap import extract_model_from_parallel
from accelerate.strategies.deepspeed.config_facts import tensor_parallel_size

if TYPE_CHECKING:
    from collections.abc import Iterator

_AT_ONCE = 2**28
"""Numbers that are gathered together: as much as a rank holds beyond its shards."""
_FLAG = "zero_optimization.stage3_gather_16bit_weights_on_model_save"


def gather_weights(model: torch.nn.Module, config: Any, *, refused: bool, keep: bool) -> dict[str, Any]:
    """Return the state dict of a model, in the number format that it is trained in; every rank calls it.

    Args:
        model: A model as `prepare` returned it.
        config: DeepSpeed's configuration.
        refused: Whether the program said that weights are not to be gathered.
        keep: Whether this rank gets the weights that are sharded; others get none.

    Raises:
        ConfigurationError: If the program said that weights are not to be gathered.
    """
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    if tensor_parallel_size(config) > 1 and inner is not model:
        engine: Any = model
        found: dict[str, Any] = engine._consolidated_16bit_state_dict()
        return found if keep else {}
    state: dict[str, Any] = inner.state_dict(keep_vars=True)
    if not any(hasattr(value, "ds_id") for value in state.values()):
        return inner.state_dict()
    if refused:
        raise ConfigurationError(
            f"The weights of {type(inner).__name__} are in shards, and {_FLAG}=false (zero3_save_16bit_model) says that they "
            "are not to be gathered. Set it to true, or save with save_state() and gather them later with the "
            "zero_to_fp32.py that lies beside the shards."
        )
    zero = require("deepspeed", why="Gathering weights", extra="deepspeed").zero
    gathered: dict[int, torch.Tensor] = {}
    for shards in _portions(state):
        with zero.GatheredParameters(shards):
            if keep:
                gathered |= {id(shard): shard.detach().cpu().clone() for shard in shards}
    if not keep:
        return {}
    return {
        name: gathered.get(id(value), value.detach() if hasattr(value, "detach") else value)
        for name, value in state.items()
    }


def _portions(state: dict[str, Any]) -> Iterator[list[Any]]:
    """Yield the sharded parameters, each once, in portions that are gathered together."""
    portion: dict[int, Any] = {}
    numbers = 0
    seen: set[int] = set()
    for value in state.values():
        if not hasattr(value, "ds_id") or id(value) in seen:
            continue
        seen.add(id(value))
        if portion and numbers + value.ds_numel > _AT_ONCE:
            yield list(portion.values())
            portion, numbers = {}, 0
        portion[id(value)] = value
        numbers += value.ds_numel
    if portion:
        yield list(portion.values())
