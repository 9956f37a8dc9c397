"""What the objects of a program say about DeepSpeed's configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accelerate.config.deepspeed import Fact
from accelerate.parallel.unwrap import extract_model_from_parallel
from accelerate.strategies.deepspeed.wrappers import DummyOptim, DummyScheduler

_MICRO = "train_micro_batch_size_per_gpu"
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def tensor_parallel_size(config: Mapping[str, Any]) -> int:
    """Return over how many ranks DeepSpeed splits layers."""
    return int((config.get("tensor_parallel") or {}).get("autotp_size") or 1)


def batch_size_facts(
    loaders: Sequence[Any], earlier: Mapping[str, Any] | None, *, smallest: bool, trains: bool
) -> dict[str, Fact]:
    """Return the batch size of one process, if anything tells it.

    Args:
        loaders: Those that are prepared with the model, or were before.
        earlier: The complete configuration of the engine that was made before this one.
        smallest: Take the smallest of several batch sizes, else the largest.
        trains: Whether the model is trained; otherwise its engine has no use for a batch size.
    """
    sizes = [size for loader in loaders if (size := _batch_size(loader)) is not None]
    if sizes:
        chosen = min(sizes) if smallest else max(sizes)
        return {_MICRO: Fact(chosen, f"the loader's batch size of {chosen}", binding=False)}
    if earlier is not None:
        return {_MICRO: Fact(earlier[_MICRO], "the engine that was made before", binding=False)}
    return {} if trains else {_MICRO: Fact(1, "inference has no use for it", binding=False)}


def _batch_size(loader: Any) -> int | None:
    size = getattr(loader, "batch_size", None)
    return size if size is not None else getattr(getattr(loader, "batch_sampler", None), "batch_size", None)


def optimizer_facts(optimizer: Any) -> dict[str, Fact]:
    """Return what a placeholder says of the optimizer."""
    if not isinstance(optimizer, DummyOptim):
        return {}
    values = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **optimizer.kwargs}
    # A value that nobody gave contradicts nothing.
    defaults = {name: entry.default for name, entry in inspect.signature(DummyOptim).parameters.items()}
    return {
        f"optimizer.params.{name}": Fact(value, f"DummyOptim({name}={value!r})", binding=value != defaults.get(name))
        for name, value in values.items()
    }


def scheduler_facts(scheduler: Any, optimizer: Any) -> dict[str, Fact]:
    """Return what a placeholder says of the schedule; it rises to the learning rate of the optimizer."""
    if not isinstance(scheduler, DummyScheduler):
        return {}
    lr = optimizer.lr if isinstance(optimizer, DummyOptim) else max(group["lr"] for group in optimizer.param_groups)
    values = {
        "warmup_min_lr": (0, False),
        "warmup_max_lr": (lr, False),
        # DeepSpeed from 0.19.6 on takes no warm-up of zero steps.
        "warmup_num_steps": (max(1, scheduler.warmup_num_steps), scheduler.warmup_num_steps > 0),
        "total_num_steps": (scheduler.total_num_steps, True),
        **{name: (value, True) for name, value in scheduler.kwargs.items()},
    }
    return {
        f"scheduler.params.{name}": Fact(value, f"DummyScheduler({name}={value!r})", binding=binding)
        for name, (value, binding) in values.items()
        if value is not None
    }


def hidden_size(model: torch.nn.Module) -> int | None:
    """Return the largest width of a Transformers model, None if it does not tell."""
    config = getattr(extract_model_from_parallel(model), "config", None)
    for place in (config, getattr(config, "text_config", None)):
        size = getattr(place, "hidden_size", None) or max(getattr(place, "hidden_sizes", None) or [0])
        if size:
            return int(size)
    return None
