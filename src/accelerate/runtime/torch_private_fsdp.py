"""Access to private parts of torch's FSDP 1 and 2; `torch_private` has the rest and says what holds for both files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from accelerate.runtime.torch_private import private


def flat_parameter_names(parameter: torch.nn.Parameter) -> tuple[str, ...]:
    """Return the names, below their module, of the parameters that FSDP 1 holds in one flat parameter.

    torch has no public way from a flat parameter to what is in it.
    """
    from torch.distributed.fsdp import FlatParameter

    return tuple(private(parameter, "_fqns")) if isinstance(parameter, FlatParameter) else ()


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a parameter that this rank holds.

    Args:
        held: All elements that this rank holds, possibly of several parameters.
        offset: Index of the first element of this parameter in `held`.
        begin: Index of that element in the flattened parameter.
        count: Number of elements.
        whole: Number of elements of the unsharded parameter.
    """

    held: torch.Tensor
    offset: int
    begin: int
    count: int
    whole: int

    def take(self, stretch: torch.Tensor, at: int) -> None:
        """Copy the elements of this piece from a range of the flattened parameter that starts at `at`."""
        first, last = max(self.begin, at), min(self.begin + self.count, at + stretch.numel())
        if first < last:
            to = self.offset + first - self.begin
            with torch.no_grad():
                self.held[to : to + last - first].copy_(stretch[first - at : last - at])


def flat_shard(unit: torch.nn.Module) -> torch.Tensor | None:
    """Return what this rank holds of the parameters of one wrapper of FSDP 1, joined; None where it has none.

    torch has no public way to it.
    """
    handle = private(unit, "_handle")
    return None if handle is None else handle.flat_param.data


def flat_pieces(unit: torch.nn.Module) -> dict[str, Piece]:
    """Return this rank's piece of every parameter that one wrapper of FSDP 1 holds, by its name below the wrapper.

    torch has no public way to it without gathering the parameters.
    """
    handle = private(unit, "_handle")
    if handle is None:
        return {}
    flat = handle.flat_param
    held = flat.data
    described = (private(flat, name) for name in ("_fqns", "_shard_param_infos", "_numels"))
    return {
        name: Piece(held, info.offset_in_shard or 0, info.intra_param_start_idx or 0, info.numel_in_shard or 0, whole)
        for name, info, whole in zip(*described, strict=True)
    }


class HeldBackGradients(ABC):
    """Unsharded gradients of one FSDP unit, accumulated on this rank until the window ends and they are reduced.

    torch has no public way to them: a parameter gets its gradient when it is reduced.
    """

    @abstractmethod
    def parameters(self) -> list[Any]:
        """Return the key of each parameter of the unit."""

    @abstractmethod
    def read(self) -> dict[Any, torch.Tensor]:
        """Return the accumulated gradients."""

    @abstractmethod
    def write(self, gradients: Mapping[Any, torch.Tensor]) -> None:
        """Replace the accumulated gradients; a parameter that is not in `gradients` gets none."""


class _OfVersion2(HeldBackGradients):
    """Gradients of one unit of FSDP 2, by the identity of the parameter in the model.

    Up to torch 2.14 FSDP accumulates gradients in `unsharded_accumulated_grad`. Since 2.15 autograd accumulates them in
    the unsharded parameter, which does not exist before the first all-gather.
    """

    def __init__(self, unit: Any) -> None:
        self.state = private(unit, "_get_fsdp_state")()
        # Before torch 2.13 a unit has one group, or None.
        groups = getattr(self.state, "_fsdp_param_groups", None)
        groups = [private(self.state, "_fsdp_param_group")] if groups is None else groups
        self.entries = [parameter for group in groups if group for parameter in private(group, "fsdp_params")]

    def parameters(self) -> list[Any]:
        return [id(private(parameter, "sharded_param")) for parameter in self.entries]

    def read(self) -> dict[Any, torch.Tensor]:
        found: dict[Any, torch.Tensor] = {}
        for key, parameter in zip(self.parameters(), self.entries, strict=True):
            gradient = vars(parameter).get(_ACCUMULATED)
            if gradient is None:
                gradient = getattr(_unsharded_parameter(parameter), "grad", None)
            if _CREATE_UNSHARDED in vars(parameter):
                gradient = vars(parameter)[_CREATE_UNSHARDED].gradient
            if gradient is not None:
                found[key] = found[key] + gradient if key in found else gradient
        return found

    def write(self, gradients: Mapping[Any, torch.Tensor]) -> None:
        rest = dict(gradients)
        for key, parameter in zip(self.parameters(), self.entries, strict=True):
            given = rest.pop(key, None)  # once, where weights were tied after sharding
            gradient = None if given is None else given.to(private(parameter, "device"), copy=True)
            vars(parameter).pop(_CREATE_UNSHARDED, None)
            # The gradient of the next pass is added to this one, as if that pass had followed.
            if _ACCUMULATED in vars(parameter):
                setattr(parameter, _ACCUMULATED, gradient)
                gradient = None
            unsharded = _unsharded_parameter(parameter)
            if unsharded is not None:
                _set_gradient(unsharded, gradient)
            elif gradient is not None:
                vars(parameter)[_CREATE_UNSHARDED] = _PendingGradient(parameter, gradient)


_ACCUMULATED = "unsharded_accumulated_grad"
_CREATE_UNSHARDED = "init_unsharded_param"


def _unsharded_parameter(parameter: Any) -> Any:
    """Return the tensor that autograd uses as the parameter; None before the first all-gather."""
    return private(parameter, "_unsharded_param") if private(parameter, "all_gather_outputs") else None


def _set_gradient(unsharded: torch.Tensor, gradient: torch.Tensor | None) -> None:
    dtype = getattr(unsharded, "grad_dtype", None)
    unsharded.grad = gradient if gradient is None or dtype is None else gradient.to(dtype)


class _PendingGradient:
    """Gradient to set once the unsharded parameter exists.

    An instance replaces the method that creates this parameter until the method is called.
    """

    def __init__(self, parameter: Any, gradient: torch.Tensor) -> None:
        self._parameter, self.gradient = parameter, gradient
        self._create = private(parameter, _CREATE_UNSHARDED)

    def __call__(self) -> None:
        del vars(self._parameter)[_CREATE_UNSHARDED]
        self._create()
        _set_gradient(private(self._parameter, "_unsharded_param"), self.gradient)


class _OfVersion1(HeldBackGradients):
    """Gradients of one wrapper of FSDP 1, by the names of the parameters below the wrapper."""

    def __init__(self, unit: torch.nn.Module) -> None:
        self._handle: Any = private(unit, "_handle")

    def parameters(self) -> list[Any]:
        return list(private(self._handle.flat_param, "_fqns")) if self._handle is not None else []

    def read(self) -> dict[Any, torch.Tensor]:
        flat = self._handle.flat_param if self._handle is not None else None
        if flat is None or flat.grad is None or flat.grad.size() != private(flat, "_unpadded_unsharded_size"):
            return {}
        return dict(zip(self.parameters(), private(self._handle, "_get_unflat_views")(flat.grad), strict=True))

    def write(self, gradients: Mapping[Any, torch.Tensor]) -> None:
        if self._handle is None:
            return
        flat = self._handle.flat_param
        flat.grad = None
        own = [gradients.get(name) for name in self.parameters()]
        given = next((gradient for gradient in own if gradient is not None), None)
        if given is not None:
            size = private(flat, "_unpadded_unsharded_size")
            joined = torch.zeros(size, dtype=given.dtype, device=self._handle.device)
            for part, gradient in zip(private(self._handle, "_get_unflat_views")(joined), own, strict=True):
                if gradient is not None:
                    part.copy_(gradient)
            # torch checks that a gradient has the size of its parameter, which is sharded now.
            held, flat.data = flat.data, torch.empty_like(joined)
            flat.grad = joined
            flat.data = held
        if private(self._handle, "_use_orig_params"):
            private(self._handle, "_use_unsharded_grad_views")()


def held_back_gradients(model: torch.nn.Module) -> Iterator[tuple[str, HeldBackGradients]]:
    """Return the gradients that wait in each unit of a model that FSDP shards, with the name of the unit."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    states: set[Any] = set()
    for name, unit in model.named_modules():
        if isinstance(unit, FSDPModule):
            held = _OfVersion2(unit)
            # Modules that were sharded together are one unit.
            if held.state not in states:
                states.add(held.state)
                yield name, held
        elif isinstance(unit, FullyShardedDataParallel):
            yield name, _OfVersion1(unit)


def sharded_behind(units: Iterable[torch.nn.Module]) -> dict[torch.Tensor, torch.nn.Parameter]:
    """Return the sharded parameter behind each full one that FSDP 2 registers with the modules while it is gathered.

    torch 2.9 to 2.13 keep the full parameter, without memory, for the next pass, and have no public way from it to the
    sharded one.
    """
    entries = (entry for unit in units for entry in _OfVersion2(unit).entries)
    found = ((getattr(entry, "_unsharded_param", None), entry.sharded_param) for entry in entries)
    return {full: sharded for full, sharded in found if full is not None}


def is_flattened(parameter: torch.Tensor) -> bool:
    """Return whether FSDP 1 holds a parameter in shards, as a flat parameter or as a view into one.

    torch marks views with a private attribute.
    """
    from torch.distributed.fsdp import FlatParameter

    is_view = private("torch.distributed.fsdp._common_utils", "_is_fsdp_flattened")
    return isinstance(parameter, FlatParameter) or bool(is_view(parameter))
