"""Tensor parallelism: layers of a model split over the ranks of a mesh, by a plan."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from accelerate._base.enums import MeshAxis
from accelerate._base.errors import ConfigurationError
from accelerate.offload.tensors import find_tied_parameters
from accelerate.parallel.mesh import has_axis

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

# What Transformers calls a module that stays whole.
_WHOLE = frozenset({"replicate", "replicated"})


def model_has_dtensor(model: torch.nn.Module) -> bool:
    """Return whether a parameter of the model is a DTensor, split over processes."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def get_model_tp_size(model: torch.nn.Module) -> int | None:
    """Return over how many processes the model's layers are split, or None for a model that says nothing of it."""
    direct = getattr(model, "tp_size", None)
    if direct is not None:
        return int(direct)
    described = getattr(getattr(model, "config", None), "distributed_config", None)
    size = described.get("tp_size") if isinstance(described, dict) else getattr(described, "tp_size", None)
    return None if size is None else int(size)


def check_tp_size(model: torch.nn.Module, expected: int) -> None:
    """Refuse a model whose layers were split over another number of ranks than `expected`.

    Raises:
        ConfigurationError: If the numbers differ.
    """
    size = get_model_tp_size(model)
    if size is not None and size != expected:
        raise ConfigurationError(
            f"{type(model).__name__} was loaded over tp_size={size} ranks, but the run has tp_size={expected}. "
            f"Write ParallelismConfig(tp_size={size}, ...), or load the model for {expected} ranks."
        )


def tensor_parallel_step(
    mesh: DeviceMesh | None, plan: Mapping[str, Any] | None = None
) -> Callable[[torch.nn.Module], torch.nn.Module] | None:
    """Return the step that splits layers over the axis "tp"; None where that axis is not in use.

    It stands before activation checkpointing, compilation and sharding: each of those acts on what it makes.
    """
    if mesh is None or not has_axis(mesh, MeshAxis.TP):
        return None
    axis = mesh[MeshAxis.TP.value]

    def split_over_ranks(model: torch.nn.Module) -> torch.nn.Module:
        return split_layers(model, axis, plan)

    return split_over_ranks


def split_layers(model: torch.nn.Module, mesh: DeviceMesh, plan: Mapping[str, Any] | None = None) -> torch.nn.Module:
    """Split the layers of a model over a mesh in place; one that was loaded split stays as it is.

    Args:
        mesh: The axis of tensor parallelism alone.
        plan: Dotted name of a module, with `*` for any part -> name of a style, or a `ParallelStyle` of torch; the
            model's own `tp_plan` or `_tp_plan` if None.

    Raises:
        ConfigurationError: If there is no plan, or it cannot be applied to this model; nothing has been changed then.
    """
    if model_has_dtensor(model):
        check_tp_size(model, mesh.size())
        return model
    styles = _styles_of(model, plan if plan is not None else plan_of(model))
    ties = find_tied_parameters(model)
    _split_tied_embeddings(model, styles, ties)
    if styles:
        _check_heads(model, mesh.size())
    from torch.distributed.tensor.parallel import parallelize_module

    for name, style in styles.items():
        parallelize_module(model.get_submodule(name), mesh, style)
    for names in ties:
        _tie_again(model, names)
    return model


def plan_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return how a model says that its layers can be split, as Transformers' models do.

    Raises:
        ConfigurationError: If it says nothing.
    """
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not plan:
        raise ConfigurationError(
            f"{type(model).__name__} has no tp_plan, so nothing says how its layers are split over ranks. Give the model "
            "an attribute tp_plan = {'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise', ...}, or pass "
            "ParallelismConfig(tp_handler=TorchTensorParallelConfig(plan=...)), or set tp_size=1."
        )
    return dict(plan)


def _style_table() -> dict[str, Callable[[], ParallelStyle]]:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    def gathered() -> ParallelStyle:
        return ColwiseParallel(output_layouts=Replicate())

    def from_whole() -> ParallelStyle:
        return RowwiseParallel(input_layouts=Replicate())

    return {
        "colwise": ColwiseParallel,
        "colwise_rep": gathered,
        "colwise_gather_output": gathered,
        "rowwise": RowwiseParallel,
        "rowwise_rep": from_whole,
        "rowwise_split_input": from_whole,
        "embedding_rowwise": from_whole,
        "embedding_colwise": gathered,
        "sequence_parallel": SequenceParallel,
    }


def _styles_of(model: torch.nn.Module, plan: Mapping[str, Any]) -> dict[str, ParallelStyle]:
    """Return the style of each module that the plan names."""
    table = _style_table()
    names = [name for name, _ in model.named_modules()]
    found: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        if isinstance(style, str) and style in _WHOLE:
            continue
        if isinstance(style, str) and style not in table:
            raise ConfigurationError(
                f"The plan of {type(model).__name__} splits {pattern!r} in the style {style!r}, which is not known here. "
                f"Write one of {', '.join(table)} or a ParallelStyle of torch, or let Transformers split the model: "
                "from_pretrained(..., distributed_config=DistributedConfig(tp_plan='auto', ...))."
            )
        matching = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigurationError(
                f"The plan of {type(model).__name__} names {pattern!r}, but the model has no such module. Its modules "
                f"are {', '.join(names[1:9])}, ..."
            )
        found.update({name: table[style]() if isinstance(style, str) else style for name in matching})
    return found


def _split_tied_embeddings(model: torch.nn.Module, styles: dict[str, ParallelStyle], ties: list[list[str]]) -> None:
    """Split an embedding in the same way as the output layer whose weight it shares."""
    for names in ties:
        owners = [name.rpartition(".")[0] for name in names]
        whole = [owner for owner in owners if owner not in styles]
        if len(whole) == len(owners):
            continue
        for owner in whole:
            if not isinstance(model.get_submodule(owner), torch.nn.Embedding):
                raise ConfigurationError(
                    f"The parameters {names!r} of {type(model).__name__} are one, but the plan splits only some of them. "
                    f"Add {owner!r} to the plan, or take the others out of it."
                )
            styles[owner] = _style_table()["embedding_rowwise"]()


def _check_heads(model: torch.nn.Module, size: int) -> None:
    """Refuse a number of heads that cannot be shared evenly, before layers compute with parts of heads."""
    config = getattr(model, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            raise ConfigurationError(
                f"{type(model).__name__} has {name}={heads}, which cannot be shared evenly by tp_size={size} ranks. "
                f"Choose a tp_size that divides {heads}."
            )


def _tie_again(model: torch.nn.Module, names: list[str]) -> None:
    """Make parameters that were one before they were split one again."""
    first = model.get_parameter(names[0])
    for name in names[1:]:
        owner, _, leaf = name.rpartition(".")
        other = model.get_parameter(name)
        if getattr(first, "placements", None) != getattr(other, "placements", None):
            raise ConfigurationError(
                f"The parameters {names!r} of {type(model).__name__} are one, but the plan splits them in different ways. "
                "Give them styles that cut the same dimension, such as 'embedding_rowwise' and 'colwise_rep'."
            )
        setattr(model.get_submodule(owner), leaf, first)
