"""Functions that write and read the parts of a state in a folder that is there, one process at a time.

`Accelerator.save_state` makes a transaction of the same parts; these functions are for programs that keep their own
folders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from accelerate.checkpointing.files import FolderWriter
from accelerate.checkpointing.parts import (
    LoadOptions,
    ModelPart,
    OptimizerPart,
    Part,
    ScalerPart,
    SchedulerPart,
    WeightsPart,
    load_options,
)
from accelerate.checkpointing.run_parts import CustomPart, LoaderPart, RandomPart
from accelerate.runtime import current

FilePath = str | PathLike[str]


def save_accelerator_state(
    output_dir: FilePath,
    model_states: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    step: int,
    scaler: torch.amp.GradScaler | None = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Write the state of a run into a folder, and return it.

    Args:
        model_states: The weights of each model.
        process_index: The rank of this process: the first writes what all have in common.
        step: The number of the micro-batch.
        save_on_each_node: The first process of each machine writes what all have in common.
        safe_serialization: Write weights as safetensors.
    """
    parts: list[Part] = []
    parts += [WeightsPart(state, i, safe_serialization=safe_serialization) for i, state in enumerate(model_states)]
    parts += _common_parts(optimizers, schedulers, dataloaders, process_index, scaler)
    parts.append(RandomPart(SimpleNamespace(step=step), process_index, current.runtime().backend))
    return _write(output_dir, parts, process_index, save_on_each_node)


def load_accelerator_state(
    input_dir: FilePath,
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    scaler: torch.amp.GradScaler | None = None,
    map_location: str | None = None,
    load_kwargs: Mapping[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Read what `save_accelerator_state` wrote.

    Args:
        process_index: The rank of this process.
        map_location: Where tensors are put while they are read: "cpu" or "on_device".
        load_kwargs: Arguments of `torch.load`; `{"weights_only": False}` lets files run code.
        **load_model_func_kwargs: Arguments of `load_state_dict` of models.

    Returns:
        What the caller has to take over: the `step`.
    """
    options = load_options(map_location, load_kwargs or {}, load_model_func_kwargs, rank=process_index)
    counter = SimpleNamespace(step=None)
    parts: list[Part] = [ModelPart(model, i) for i, model in enumerate(models)]
    parts += _common_parts(optimizers, schedulers, dataloaders, process_index, scaler)
    parts.append(RandomPart(counter, process_index, current.runtime().backend))
    found = [part.read(Path(input_dir), options) for part in parts]
    for part, payload in zip(parts, found, strict=True):
        part.restore(payload)
    return {} if counter.step is None else {"step": counter.step}


def save_custom_state(obj: Any, path: FilePath, index: int = 0, save_on_each_node: bool = False) -> None:
    """Write the state of an object with `state_dict` into a folder."""
    _write(path, [CustomPart(obj, index)], current.runtime().rank, save_on_each_node)


def load_custom_state(obj: Any, path: FilePath, index: int = 0) -> None:
    """Read what `save_custom_state` wrote into an object with `load_state_dict`."""
    part = CustomPart(obj, index)
    part.restore(part.read(Path(path), LoadOptions()))


def _common_parts(
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    rank: int,
    scaler: torch.amp.GradScaler | None,
) -> list[Part]:
    parts: list[Part] = [OptimizerPart(optimizer, i) for i, optimizer in enumerate(optimizers)]
    parts += [SchedulerPart(scheduler, i) for i, scheduler in enumerate(schedulers)]
    parts += [LoaderPart(loader, i, rank=rank) for i, loader in enumerate(dataloaders)]
    if scaler is not None:
        parts.append(ScalerPart(scaler))
    return parts


def _write(path: FilePath, parts: Sequence[Part], rank: int, save_on_each_node: bool) -> Path:
    leads = (current.runtime().local_rank if save_on_each_node else rank) == 0
    with closing(FolderWriter(Path(path))) as folder:
        for part in parts:
            if part.everywhere or leads:
                part.write(part.snapshot(), folder)
        folder.finish()
    return Path(path)
