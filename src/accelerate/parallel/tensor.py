"""Tensor parallelism: layers of a model split over the ranks of a mesh, by a plan."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
        plan: Dotted name of a module or parameter, with `*` for any part -> name of a style, or a `ParallelStyle` of
            torch; the model's own `tp_plan` or `_tp_plan` if None.

    Raises:
        ConfigurationError: If there is no plan, or it cannot be applied to this model; nothing has been changed then.
    """
    if model_has_dtensor(model):
        check_tp_size(model, mesh.size())
        return model
    styles = _styles_of(model, plan if plan is not None else plan_of(model), is_given=plan is not None)
    ties = find_tied_parameters(model)
    _split_tied_embeddings(model, styles.modules, ties)
    if styles.modules:
        _check_heads(model, mesh.size())
    from torch.distributed.tensor.parallel import parallelize_module

    from accelerate.parallel.tensor_styles import PARAMETER_STYLES, check_parameter, split_parameter

    for name, kind in styles.parameters.items():
        check_parameter(model, name, kind, mesh.size())
    for name, kind in styles.parameters.items():
        owner, _, leaf = name.rpartition(".")
        placement = PARAMETER_STYLES[kind](model.get_parameter(name).dim())
        split_parameter(model.get_submodule(owner), leaf, placement, mesh)
    for name, style in styles.modules.items():
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


@dataclass
class _Styles:
    """Styles of the modules and of the single parameters that a plan names."""

    modules: dict[str, ParallelStyle]
    parameters: dict[str, str]


def _styles_of(model: torch.nn.Module, plan: Mapping[str, Any], *, is_given: bool) -> _Styles:
    """Return the style of each module and parameter that the plan names.

    Args:
        is_given: The plan was written for this model. Transformers' plans also name layers that only some models have.
    """
    from accelerate.parallel.tensor_styles import MODULE_STYLES, PARAMETER_STYLES

    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters()]
    found = _Styles({}, {})
    unused = []
    for pattern, style in plan.items():
        if isinstance(style, str) and style in _WHOLE:
            continue
        matching = fnmatch.filter(modules, pattern)
        single = [] if matching else fnmatch.filter(parameters, pattern)
        if not matching and not single:
            unused.append(pattern)
        table: Mapping[str, Any] = PARAMETER_STYLES if single else MODULE_STYLES
        if isinstance(style, str) and style not in (table if matching or single else {**table, **PARAMETER_STYLES}):
            raise ConfigurationError(
                f"The plan of {type(model).__name__} splits {pattern!r} in the style {style!r}, which is not supported "
                f"for a {'parameter' if single else 'module'}. Use one of {', '.join(table)} or a ParallelStyle of torch, "
                "or let Transformers split the model: "
                "from_pretrained(..., distributed_config=DistributedConfig(tp_plan='auto', ...))."
            )
        found.modules.update({name: table[style](model) if isinstance(style, str) else style for name in matching})
        found.parameters.update(dict.fromkeys(single, style))
    if unused and (is_given or not (found.modules or found.parameters)):
        raise ConfigurationError(
            f"The plan of {type(model).__name__} names {unused[0]!r}, but the model has no such module. Its modules "
            f"are {', '.join(modules[1:9])}, ..."
        )
    return found


def _split_tied_embeddings(model: torch.nn.Module, styles: dict[str, ParallelStyle], ties: list[list[str]]) -> None:
    """Split an embedding in the same way as the output layer whose weight it shares."""
    from accelerate.parallel.tensor_styles import MODULE_STYLES

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
            styles[owner] = MODULE_STYLES["embedding_rowwise"](model)


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
