"""Options that are handed on to objects of torch: autocast, scaler, DDP, process group, profiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from accelerate._base.enums import DDPCommunicationHookType, ProfilerActivity
from accelerate._base.errors import ConfigurationError
from accelerate.config.knob import INTEGER, NUMBER, YES_NO, knob, member_of
from accelerate.config.settings import KwargsHandler

if TYPE_CHECKING:
    import torch

_HOOK = member_of(DDPCommunicationHookType)


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of `torch.autocast`.

    Args:
        enabled: Whether autocast does anything.
        cache_enabled: Whether cast weights are kept for the block; None leaves it to torch.
    """

    enabled: bool = knob(True, help="Compute in the lower precision where that is safe.", codec=YES_NO)
    cache_enabled: bool | None = knob(help="Keep cast weights within a block.", codec=YES_NO)


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of `torch.amp.GradScaler`.

    Args:
        init_scale: The scale at the start.
        growth_factor: What it is multiplied with after `growth_interval` steps without an overflow.
        backoff_factor: What it is multiplied with after an overflow.
        growth_interval: Steps without an overflow until it grows.
        enabled: Whether gradients are scaled at all.
    """

    init_scale: float = knob(65536.0, help="Scale of the loss at the start.", codec=NUMBER)
    growth_factor: float = knob(2.0, help="Factor of growth of the scale.", codec=NUMBER)
    backoff_factor: float = knob(0.5, help="Factor of the scale after an overflow.", codec=NUMBER)
    growth_interval: int = knob(2000, help="Steps without an overflow until the scale grows.", codec=INTEGER)
    enabled: bool = knob(True, help="Scale the loss.", codec=YES_NO)


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of `torch.nn.parallel.DistributedDataParallel`, and the compression of its gradients.

    Args:
        comm_hook: How gradients are compressed on the way.
        comm_wrapper: A second compression around `comm_hook`: none, fp16 or bf16.
        comm_state_option: Arguments of `PowerSGDState`, for the PowerSGD hooks.

    The other options are torch's own.
    """

    dim: int = knob(0, help="Dimension along which batches are split.", codec=INTEGER)
    broadcast_buffers: bool = knob(True, help="Send buffers from rank 0 before each forward.", codec=YES_NO)
    bucket_cap_mb: int = knob(25, help="Size of a bucket of gradients in MiB.", codec=INTEGER)
    find_unused_parameters: bool = knob(False, help="Look for parameters without a gradient.", codec=YES_NO)
    check_reduction: bool = knob(False, help="Check that all gradients are reduced.", codec=YES_NO)
    gradient_as_bucket_view: bool = knob(False, help="Let gradients be views of buckets.", codec=YES_NO)
    static_graph: bool = knob(False, help="Promise that the graph never changes.", codec=YES_NO)
    comm_hook: DDPCommunicationHookType = knob(
        DDPCommunicationHookType.NO, help="Compression of the gradients.", codec=_HOOK
    )
    comm_wrapper: Literal[DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16] = (
        knob(
            DDPCommunicationHookType.NO,
            help="Second compression around the first.",
            codec=_HOOK,
            choices=(DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16),
        )
    )
    comm_state_option: dict[str, Any] = knob(help="Arguments of PowerSGDState.", default_factory=dict)

    def normalise(self) -> None:
        """Turn the names of hooks into their enum."""
        for name in ("comm_hook", "comm_wrapper"):
            value = getattr(self, name)
            if value not in DDPCommunicationHookType:
                raise ConfigurationError(
                    f"DistributedDataParallelKwargs({name}={value!r}) names no known hook. "
                    f"Write one of {', '.join(DDPCommunicationHookType.list())}."
                )
            setattr(self, name, DDPCommunicationHookType(value))

    def to_dict(
        self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Return a copy of the values that are arguments of DDP itself."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: torch.nn.Module) -> None:
        """Register the chosen compression with a model that DDP already wraps; none does nothing."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        hooks: dict[DDPCommunicationHookType, Callable[..., Any]] = {
            DDPCommunicationHookType.FP16: default_hooks.fp16_compress_hook,
            DDPCommunicationHookType.BF16: default_hooks.bf16_compress_hook,
            DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
            DDPCommunicationHookType.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
        }
        wrappers: dict[DDPCommunicationHookType, Callable[..., Any]] = {
            DDPCommunicationHookType.FP16: default_hooks.fp16_compress_wrapper,
            DDPCommunicationHookType.BF16: default_hooks.bf16_compress_wrapper,
        }
        hook = hooks.get(self.comm_hook)
        if hook is None:
            return
        wrapper = wrappers.get(self.comm_wrapper)
        stateful = self.comm_hook in (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD)
        state = powerSGD_hook.PowerSGDState(None, **self.comm_state_option) if stateful else None
        register: Any = model
        register.register_comm_hook(state=state, hook=hook if wrapper is None else wrapper(hook))


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Options of `torch.distributed.init_process_group`.

    Args:
        backend: The backend; a default instance leaves the choice to the device.
        init_method: The address where the processes meet.
        timeout: How long a collective may take: 600 seconds with nccl and 1800 otherwise, where it is not given.
    """

    backend: str | None = knob("nccl", help="Backend of the process group.")
    init_method: str | None = knob(help="Address where the processes meet.")
    timeout: timedelta | None = knob(help="How long a collective may take.")

    def normalise(self) -> None:
        """Give the timeout its default, which depends on the backend."""
        if self.timeout is None:
            self.timeout = timedelta(seconds=600 if self.backend == "nccl" else 1800)


@dataclass
class ProfileKwargs(KwargsHandler):
    """Options of `torch.profiler.profile`.

    Args:
        activities: What to record, such as `["cpu"]`; None records what torch finds.
        schedule_option: Arguments of `torch.profiler.schedule`.
        on_trace_ready: What to do with a finished trace.
        output_trace_dir: Where each process writes its trace.

    The other options are torch's own.
    """

    activities: list[ProfilerActivity] | None = knob(help="What to record.")
    schedule_option: dict[str, int] | None = knob(help="Which steps to record.")
    on_trace_ready: Callable[..., Any] | None = knob(help="What to do with a finished trace.")
    record_shapes: bool = knob(False, help="Record the shapes of inputs.", codec=YES_NO)
    profile_memory: bool = knob(False, help="Record the memory of tensors.", codec=YES_NO)
    with_stack: bool = knob(False, help="Record the source of each operation.", codec=YES_NO)
    with_flops: bool = knob(False, help="Estimate the operations per second.", codec=YES_NO)
    with_modules: bool = knob(False, help="Record the modules that operations belong to.", codec=YES_NO)
    output_trace_dir: str | None = knob(help="Folder of the traces.")

    def _profiler_activity(self, name: str) -> Any:
        from torch.profiler import ProfilerActivity as Known

        members = {member.lower(): value for member, value in Known.__members__.items()}
        if name not in members:
            raise ConfigurationError(
                f"ProfileKwargs(activities=[{name!r}]) names nothing that this torch can record. "
                f"Write some of {', '.join(sorted(members))}."
            )
        return members[name]

    def build(self) -> torch.profiler.profile:
        """Make the profiler.

        Raises:
            ConfigurationError: An activity is unknown.
        """
        import torch.profiler

        return torch.profiler.profile(
            activities=None if self.activities is None else [self._profiler_activity(name) for name in self.activities],
            schedule=None if self.schedule_option is None else torch.profiler.schedule(**self.schedule_option),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )
