"""Modules that FSDP 2 shards, and the full parameters that they may hold between two passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from accelerate._base.enums import MeshAxis
from accelerate.optimizer import remap_optimizers
from accelerate.runtime.torch_private_fsdp import sharded_behind

# A gathered parameter is a plain tensor, or split over ranks that compute one layer together. Transformers names the axis
# over which experts are split "ep".
_AXES_OF_LAYERS = ((MeshAxis.TP.value,), ("ep",))


class ShardedUnits:
    """The sharded modules of models; this library or another one may have called `fully_shard`.

    After a forward pass without a backward pass, modules may still hold the full parameters. Optimizers must not update
    those, because FSDP frees them before the next pass.
    """

    def __init__(self) -> None:
        self._units: WeakSet[Any] = WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        return {"_units": None}  # an accelerator can be pickled, but its models are not a part of it

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._units = WeakSet()

    def add(self, model: nn.Module) -> None:
        """Add the sharded modules of a model, and free the parameters that they hold gathered."""
        from torch.distributed.fsdp import FSDPModule

        self._units.update(module for module in model.modules() if isinstance(module, FSDPModule))
        self.free_gathered()

    def free_gathered(self, *_: Any) -> None:
        """Free the gathered parameters of all modules."""
        for unit in self._units:
            unit.reshard()

    def trained(self, parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the sharded parameters in place of gathered ones."""
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        gathered = self._gathered(given)
        return [gathered.get(parameter, parameter) for parameter in given]

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer that was created from gathered parameters update the sharded ones.

        Parameters that a forward pass gathered before the update, for instance an evaluation between backward pass and
        step, are freed after it: the next pass would compute with the old values.
        """
        gathered = self._gathered([entry for group in optimizer.param_groups for entry in group["params"]])
        if gathered:
            remap_optimizers([optimizer], gathered)
        with suppress(AttributeError):  # an optimizer that never called torch's constructor has no hooks
            optimizer.register_step_post_hook(self.free_gathered)

    def _gathered(self, parameters: Iterable[torch.Tensor]) -> Mapping[Any, nn.Parameter]:
        """Return the sharded parameter behind each gathered one; nothing if all of `parameters` are sharded."""
        if not self._units:
            return {}
        from torch.distributed.tensor import DTensor

        if all(
            isinstance(entry, DTensor) and entry.device_mesh.mesh_dim_names not in _AXES_OF_LAYERS
            for entry in parameters
        ):
            return {}
        return sharded_behind(self._units)
