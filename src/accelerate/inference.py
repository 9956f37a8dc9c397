"""Pipeline-parallel inference: a model cut into one stage per process, for batches cut into chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from accelerate._base.errors import ConfigurationError
from accelerate._base.lazy import attach_passing_names
from accelerate.collectives.base import communicator
from accelerate.offload.memory import compute_module_sizes, convert_file_size_to_int
from accelerate.offload.places import Place
from accelerate.offload.tensors import as_class_names, is_splittable, parts_of
from accelerate.parallel.pipeline_inference import Pipeline, find_batch_size
from accelerate.runtime import current

__all__ = ["build_pipeline", "find_pippy_batch_size", "generate_device_map", "pippy_forward", "prepare_pippy"]

attach_passing_names(__name__)

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
    pieces = _pieces(model, no_split_module_classes)
    if max_memory is None:
        limits = [_smallest_limit(pieces, num_processes)] * num_processes
    else:
        limits = [convert_file_size_to_int(max_memory[stage]) for stage in sorted(max_memory)]
    packed = _pack(pieces, limits)
    outside = [name for name, stage in packed.items() if stage >= len(limits)]
    if outside and max_memory is not None:
        raise ConfigurationError(
            f"max_memory={dict(max_memory)!r} has no room for {outside!r} of {type(model).__name__}, in the order of the "
            "model. Give more memory, more processes, or fewer classes in no_split_module_classes."
        )
    return dict(packed)


def _pieces(model: nn.Module, no_split_module_classes: str | Iterable[str] | None) -> list[tuple[str, int]]:
    """Return name and bytes of all that is not cut, in order; blocks that Transformers names for its models stay whole."""
    no_split = as_class_names(no_split_module_classes or getattr(model, "_no_split_modules", None))
    sizes = compute_module_sizes(model)
    found: list[tuple[str, int]] = []

    def visit(name: str, part: nn.Module | torch.Tensor) -> None:
        if is_splittable(part, no_split):
            for key, inner in parts_of(part, name):
                visit(key, inner)
        else:
            found.append((name, sizes.get(name, 0)))

    for name, part in parts_of(model):
        visit(name, part)
    return found


def _smallest_limit(pieces: Sequence[tuple[str, int]], num_stages: int) -> int:
    """Return the bytes of the largest stage when it is as small as it can be."""
    low, high = max((size for _, size in pieces), default=0), sum(size for _, size in pieces)
    while low < high:
        limit = (low + high) // 2
        if max(_pack(pieces, [limit] * num_stages).values()) < num_stages:
            high = limit
        else:
            low = limit + 1
    return high


def _pack(pieces: Sequence[tuple[str, int]], limits: Sequence[int]) -> dict[str, int]:
    """Return the stage of each piece, filling one stage after the other; one past the last if it fits nowhere."""
    packed: dict[str, int] = {}
    stage, used = 0, 0
    for name, size in pieces:
        while stage < len(limits) and used + size > limits[stage]:
            stage, used = stage + 1, 0
        packed[name] = stage
        used += size
    return packed


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
        stage.trace_example(args or (), dict(kwargs or {}))
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
    points = _split_points(model, split_points, no_split_module_classes, num_stages)
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


def _split_points(
    model: nn.Module,
    split_points: str | Sequence[str] | None,
    no_split: str | Iterable[str] | None,
    num_stages: int,
) -> list[str]:
    """Return the module that each stage but the first starts with, as given or such that stages are even."""
    modules = {name for name, _ in model.named_modules()}
    if split_points == "auto" or split_points is None:
        firsts: dict[Place, str] = {}
        for name, stage in generate_device_map(model, num_stages, no_split).items():
            if name in modules:  # a tensor by itself has no forward pass to cut before
                firsts.setdefault(stage, name)
        points = [firsts[stage] for stage in range(1, num_stages) if stage in firsts]
        if len(points) < num_stages - 1:
            raise ConfigurationError(
                f"{type(model).__name__} cannot be cut into {num_stages} stages: with the blocks that stay whole it "
                f"gives {len(points) + 1}. Start fewer processes, or name fewer classes in no_split_module_classes."
            )
        return points
    names = [split_points] if isinstance(split_points, str) else list(split_points)
    unknown = [name for name in names if name not in modules or not name]
    if unknown:
        raise ConfigurationError(
            f"split_points={names!r} names {unknown!r}, which {type(model).__name__} has no modules for. "
            "Write names that `model.named_modules()` gives."
        )
    if len(names) != num_stages - 1:
        raise ConfigurationError(
            f"split_points={names!r} cuts the model into {len(names) + 1} stages, and there are {num_stages} "
            f"processes, which run one each. Give {num_stages - 1} names, or start {len(names) + 1} processes."
        )
    return names
