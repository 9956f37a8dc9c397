"""One process for each XLA device: every rank holds the whole model, gradients are averaged when a window closes."""

from __future__ import annotations

from contextlib import AbstractContextManager, suppress
from typing import Any, ClassVar

import torch

from accelerate._base.enums import DistributedType
from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import Choice, log_once
from accelerate.checkpointing.torch_files import on_host
from accelerate.collectives.base import communicator
from accelerate.devices.xla import XLA
from accelerate.runtime.current import Runtime
from accelerate.runtime.gradient_clock import GradientState
from accelerate.strategies.base import Capabilities, EngineRequest, Strategy, StrategyContext
from accelerate.strategies.parallel import AVERAGER, GradientAverager, suspended


class XlaStrategy(Strategy):
    """Train on the XLA device of this process, and average gradients over the processes if there are several.

    Operations are recorded and run when a step ends: after the body of a loop over a prepared loader, or, outside of such
    a loop, after the optimizer's step.
    """

    name: ClassVar[str] = "xla"
    caps: ClassVar[Capabilities] = Capabilities(replicates=True, holds_back_gradients=True)

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        if self.compiles:
            # torch_xla's own backend of torch.compile fails in backward passes (2.9).
            raise ConfigurationError(
                f"dynamo_backend={context.dynamo.backend.value!r} was given, but this process computes on XLA devices, where "
                "XLA compiles every step in any case. Leave it out."
            )

    @classmethod
    def selected(cls, request: EngineRequest, runtime: Runtime) -> Choice[bool]:
        """Take every run on XLA devices."""
        return Choice(runtime.backend is XLA, f"{runtime.world_size} process(es), each with an XLA device")

    @classmethod
    def label(cls, runtime: Runtime) -> DistributedType:
        return runtime.backend.label

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Give all ranks the weights of the first, and average gradients."""
        has_gradients = any(parameter.requires_grad for parameter in model.parameters())
        if not self.runtime.is_distributed or not has_gradients or AVERAGER in model.__dict__:
            return model
        group: Any = communicator()
        for value in (*model.parameters(), *model.buffers()):
            group.broadcast(value)
        model.__dict__[AVERAGER] = GradientAverager(model.parameters(), group.average)
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let it end the step of a loop that no prepared loader drives, and use no fused kernels: XLA fuses by itself."""
        for group in optimizer.param_groups:
            if group.get("fused"):
                group["fused"] = False
                name = type(optimizer).__name__
                log_once(__name__, f"{name}(fused=True) has no kernels for XLA devices and runs as fused=False.")
        # One that never called torch's constructor has no hooks: its steps end in loops over prepared loaders alone.
        with suppress(AttributeError):
            optimizer.register_step_post_hook(_end_step_outside_of_loops)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        return suspended(model)

    def full_state_dict(self, model: torch.nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """Return all weights in host memory."""
        XLA.end_step()
        weights: dict[str, Any] = on_host(super().full_state_dict(model, unwrap=unwrap))
        return weights


def _end_step_outside_of_loops(*_: Any) -> None:
    if not getattr(GradientState().active_dataloader, "ends_steps", False):
        XLA.end_step()
