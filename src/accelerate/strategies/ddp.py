"""Data parallelism: every rank holds the whole model, gradients are averaged in the backward pass."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.nn.parallel import DistributedDataParallel

from accelerate._base.enums import DistributedType
from accelerate._base.errors import CheckpointError, ConfigurationError
from accelerate._base.helpers import Choice
from accelerate._base.untrusted import parse_json, read_limited, shown
from accelerate.checkpointing.files import FolderWriter
from accelerate.checkpointing.parts import LoadOptions, Part, Prepared, indexed
from accelerate.collectives.base import communicator
from accelerate.runtime.current import Runtime
from accelerate.runtime.torch_private import bucket_order, can_restore_bucket_order, restore_bucket_order
from accelerate.strategies.base import Capabilities, EngineRequest, Strategy, StrategyContext


class DDPStrategy(Strategy):
    """torch's `DistributedDataParallel` on any hardware that has a process group."""

    name: ClassVar[str] = "ddp"
    caps: ClassVar[Capabilities] = Capabilities(replicates=True, joinable=True, holds_back_gradients=True)

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._wrapped: list[weakref.ref[DistributedDataParallel]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_wrapped": []}  # weak references cannot be pickled

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
        self._wrapped.append(weakref.ref(wrapped))
        return wrapped

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return DDP's own context, or nothing for a model that is not wrapped."""
        suspend = getattr(model, "no_sync", None)
        return suspend() if suspend is not None else nullcontext()

    def checkpoint_parts(self, prepared: Prepared) -> list[Part]:
        """Add the order of the buckets, on which the last bit of a sum of more than two gradients depends."""
        parts = super().checkpoint_parts(prepared)
        if self.runtime.world_size > 2:
            models = [model for held in self._wrapped if (model := held()) is not None]
            parts += [BucketOrderPart(model, i, self.runtime.rank) for i, model in enumerate(models)]
        return parts


class BucketOrderPart:
    """The order of the gradients in DDP's buckets.

    A new DDP model has another order until its second step, so the first step after a resume would round differently.
    """

    everywhere = True

    def __init__(self, model: DistributedDataParallel, index: int, rank: int) -> None:
        self.name = f"bucket order {index}"
        self.model = model
        self.file = indexed("bucket_order", index, ".json")
        self.rank = rank

    def snapshot(self) -> list[str]:
        return bucket_order(self.model)

    def write(self, payload: list[str], folder: FolderWriter) -> None:
        if self.rank == 0 and payload:
            folder.write_json(self.file, payload)

    def read(self, folder: Path, options: LoadOptions) -> list[str]:
        path = folder / self.file
        if not path.is_file():
            return []
        try:
            found: Any = parse_json(read_limited(path))
        except ValueError as error:
            raise CheckpointError(f"{str(path)!r} is not JSON ({error}). Use another checkpoint.") from error
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise CheckpointError(
                f"{str(path)!r} holds {shown(found)} instead of a list of parameter names. Use another checkpoint."
            )
        return found

    def restore(self, payload: Sequence[str]) -> None:
        ranks = communicator()
        # Machines without a shared disk may lack the file.
        orders: list[list[str]] = ranks.gather_object([*payload])
        if not orders[0]:
            return
        can_restore = can_restore_bucket_order(self.model, orders[0])
        if all(ranks.gather_object(can_restore)):
            restore_bucket_order(self.model, orders[0])


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
