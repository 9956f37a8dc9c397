"""Pipeline-parallel inference: a model cut into one stage per process, for batches cut into chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from accelerate._base.errors import ConfigurationError
from accelerate.collectives import communicator
from accelerate.offload.places import Place
from accelerate.parallel.pipeline import cuts
from accelerate.parallel.pipeline.run import Pipeline, find_batch_size
from accelerate.runtime import current

__all__ = ["build_pipeline", "find_pippy_batch_size", "generate_device_map", "pippy_forward", "prepare_pippy"]

M = TypeVar("M", bound=nn.Module)


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: str | Iterable[str] | None = None,
    max_memory: Mapping[int, int | str] | None = None,
) -> dict[str, Place]:
    """Return the process of every module, in the order of the model, with shares as even as its blocks allow.

    Args:
        no_split_module_classes: Class names of the blocks that stay whole.
        max_memory: The bytes that each process may take; without it, even shares.
    """
    if num_processes == 1:
        return {"": 0}
    if max_memory is not None:
        return cuts.limited_device_map(model, max_memory, no_split_module_classes)
    return cuts.even_device_map(model, num_processes, no_split_module_classes)


def find_pippy_batch_size(args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> int | None:
    """Return the first batch size found among the arguments, then among the keyword arguments."""
    return find_batch_size(args or (), kwargs or {})


def build_pipeline(
    model: nn.Module,
    split_points: Sequence[str],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    num_chunks: int,
) -> Pipeline:
    """Return the stage of this process, traced for a chunk of inputs.

    Args:
        split_points: The modules that each stage but the first starts with.
        args: Arguments for one chunk, the same on every process.
        kwargs: Keyword arguments for one chunk.

    Raises:
        ConfigurationError: If torch cannot trace the model, or a cut does not make a stage.
    """
    stage = Pipeline(model, model.forward, list(split_points), num_chunks)
    if args or kwargs:
        stage.learn(args or (), dict(kwargs or {}))
    return stage


def pippy_forward(forward: Callable[..., Any], num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any) -> Any:
    """Run a batch through a pipeline: the first process gives it, the last one gets the output.

    Args:
        forward: What `build_pipeline` returned.
        num_chunks: As it was built with.
        gather_output: Give every process the output; the others get None otherwise.
    """
    if not isinstance(forward, Pipeline) or forward.num_chunks != num_chunks:
        raise ConfigurationError(
            f"pippy_forward was called with {forward!r} and num_chunks={num_chunks!r}, which is not a pipeline of so "
            "many chunks. Pass what `build_pipeline(..., num_chunks)` returned, and the same number."
        )
    return forward(args, kwargs, gather_output)


def prepare_pippy(
    model: M,
    split_points: str | Sequence[str] | None = "auto",
    no_split_module_classes: str | Iterable[str] | None = None,
    example_args: Sequence[Any] | None = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool | None = False,
) -> M:
    """Cut a model into one stage per process and make its forward pass a pipeline, for inference.

    Every process passes the same model. A forward pass takes its inputs from the first process; what the others pass is
    not read. A batch is cut into `num_chunks` chunks, padded if it has to be, and the padding is cut off the output.

    Args:
        split_points: The modules that each stage but the first starts with; `"auto"` makes stages of even size.
        no_split_module_classes: Class names of the blocks that stay whole in an automatic cut.
        example_args: Arguments for one chunk, from which the model is traced now. Other shapes, and all of them without
            an example, are traced when they first come.
        example_kwargs: Keyword arguments for one chunk.
        num_chunks: How many chunks a batch is cut into; the number of processes if not given.
        gather_output: Give every process the output; only the last one gets it otherwise, and the others None.

    Raises:
        ConfigurationError: If the model cannot be traced or cut into as many stages as there are processes.

    Example:
        ```python
        model = prepare_pippy(model, example_args=(chunk,))
        output = model(batch)  # None, but on the last process
        ```
    """
    num_stages = communicator().world_size
    chunks = num_stages if num_chunks is None else num_chunks
    if chunks < 1:
        raise ConfigurationError(f"num_chunks={num_chunks!r} leaves nothing to send. Give 1 chunk or more.")
    points = _points(model, split_points, no_split_module_classes, num_stages)
    marked: Any = model  # to a type checker, a module holds tensors and modules alone
    marked.hf_split_points = points
    marked._original_forward, marked._original_call = model.forward, model.__call__
    if num_stages == 1:  # nothing to cut: the program for many processes runs on one
        return model.to(current.runtime().device)
    stage = build_pipeline(model, points, example_args, example_kwargs, chunks)
    marked.pippy_stage = stage

    @functools.wraps(model.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return pippy_forward(stage, chunks, bool(gather_output), *args, **kwargs)

    model.forward = forward
    return model


def _points(
    model: nn.Module,
    split_points: str | Sequence[str] | None,
    no_split: str | Iterable[str] | None,
    num_stages: int,
) -> list[str]:
    if split_points == "auto" or split_points is None:
        return cuts.split_points(model, generate_device_map(model, num_stages, no_split), num_stages)
    names = [split_points] if isinstance(split_points, str) else split_points
    return cuts.check_points(model, names, num_stages)
