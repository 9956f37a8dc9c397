"""Data parallelism: every rank holds the whole model, gradients are averaged in the backward pass."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch.nn.parallel import DistributedDataParallel

from accelerate._base.enums import DistributedType
from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import Choice
from accelerate.runtime.current import Runtime
from accelerate.strategies.base import Capabilities, EngineRequest, Strategy


class DDPStrategy(Strategy):
    """torch's `DistributedDataParallel` on any hardware that has a process group."""

    name: ClassVar[str] = "ddp"
    caps: ClassVar[Capabilities] = Capabilities(replicates=True, joinable=True, holds_back_gradients=True)

    @classmethod
    def selected(cls, request: EngineRequest, runtime: Runtime) -> Choice[bool]:
        """Take every run with several processes."""
        return Choice(runtime.is_distributed, f"there are {runtime.world_size} processes")

    @classmethod
    def label(cls, runtime: Runtime) -> DistributedType:
        return runtime.backend.label

    def check_model(self, model: torch.nn.Module, *, evaluation: bool) -> None:
        """Refuse to wrap a model that is already split over ranks; evaluation leaves it as it is."""
        if not evaluation:
            _check_plain(model)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap a model that has something to train; others need no exchange of gradients."""
        if isinstance(model, DistributedDataParallel):
            return model
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        _check_plain(model)  # prepared for evaluation before
        options = self.context.ddp.to_kwargs()
        for hook_option in ("comm_hook", "comm_wrapper", "comm_state_option"):
            options.pop(hook_option, None)
        device_ids = self.runtime.backend.ddp_device_ids(self.runtime.device)
        if len({parameter.device for parameter in model.parameters()}) > 1:
            device_ids = None  # a model over several devices places its inputs itself
        wrapped = DistributedDataParallel(model, device_ids=device_ids, **options)
        self.context.ddp.register_comm_hook(wrapped)
        return wrapped

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return DDP's own context, or nothing for a model that is not wrapped."""
        suspend = getattr(model, "no_sync", None)
        return suspend() if suspend is not None else nullcontext()


def _check_plain(model: torch.nn.Module) -> None:
    # Importing DTensor takes a second; unless it is imported already, no parameter is one.
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return
    sharded = next((name for name, value in model.named_parameters() if isinstance(value, tensor.DTensor)), None)
    if sharded is not None:
        raise ConfigurationError(
            f"The parameter {sharded!r} of {type(model).__name__} is a DTensor, but DDP averages gradients of plain tensors "
            "only. Describe how the model is sharded: parallelism_config=ParallelismConfig(dp_shard_size=..., tp_size=...)."
        )
