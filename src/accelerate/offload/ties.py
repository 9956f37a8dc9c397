"""Parameters that several modules share, under several names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.offload.tensors import TiedCache, address_of, owner_of
from accelerate.offload.tree import Tree


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return the groups of names under which one and the same parameter is found, each group sorted."""
    return ties_in(Tree(model))


def ties_in(tree: Tree) -> list[list[str]]:
    """Return what `find_tied_parameters` does, for a model whose tree was walked already."""
    seen: set[int] = set()
    groups: dict[int, list[str]] = {}
    for module in tree.modules:
        for parameter in module._parameters.values():
            if id(parameter) not in seen:
                seen.add(id(parameter))
            elif parameter is not None:
                groups[id(parameter)] = []
    if groups:  # only now names are worth making
        for prefix, module in zip(tree.prefixes, tree.modules, strict=True):
            for name, parameter in module._parameters.items():
                if id(parameter) in groups:
                    groups[id(parameter)].append(prefix + name)
    return sorted(sorted(group) for group in groups.values())


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Make every name of a group hold one parameter again: the first that has data."""
    for group in tied_params:
        places = [owner_of(model, name) for name in group]
        held = [owner._parameters.get(name) for owner, name in places]
        first = next(
            (parameter for parameter in held if parameter is not None and parameter.device.type != "meta"), None
        )
        if first is None:
            continue
        for owner, name in places:
            owner._parameters[name] = first


def shared_weights(tied: Mapping[str, torch.Tensor]) -> TiedCache:
    """Return a cache with an empty entry for every tied weight that has data."""
    addresses = {address_of(weight) for weight in tied.values()}
    return {address: {} for address in addresses if address is not None}


def on_host(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a state dict on the CPU in which weights that were one tensor are one tensor still."""
    copies: dict[tuple[Any, ...], torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    for name, weight in state_dict.items():
        key = (address_of(weight) or name, weight.shape, weight.stride(), weight.dtype)
        found[name] = copies.setdefault(key, weight if weight.device.type == "meta" else weight.to("cpu"))
    return found


def keep_alive_only(cache: TiedCache, weights: Iterable[torch.Tensor]) -> None:
    """Drop the entries whose source nobody in `weights` keeps alive: another tensor may get its address."""
    alive = {address_of(weight) for weight in weights}
    for address in [address for address in cache if address not in alive]:
        del cache[address]


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether the configuration of a Transformers model says that weights are tied."""
    config = getattr(model, "config", None)
    if config is None or "PreTrainedModel" not in [base.__name__ for base in type(model).__mro__]:
        return False
    head = getattr(model, "get_output_embeddings", lambda: None)()
    words = getattr(config, "tie_word_embeddings", False) and head is not None
    halves = getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False)
    modules = any(hasattr(module, "_tie_weights") for module in model.modules())
    return bool(words or halves or modules)
