"""Options of the training loop and of torch's own objects in it: loaders, autocast, scaler, DDP, profiler, compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from accelerate._base.enums import DDPCommunicationHookType, DynamoBackend, ProfilerActivity
from accelerate._base.errors import ConfigurationError
from accelerate.config.knob import TEXT, KwargsHandler, Settings, knob, member_of, shared
from accelerate.config.sections.compute import DynamoOptions
from accelerate.config.sections.engines import DeepSpeedOptions

if TYPE_CHECKING:
    import torch

_HOOK = member_of(DDPCommunicationHookType)


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Say over how many batches gradients are summed and when the sum is applied."""

    num_steps: int | None = shared(
        DeepSpeedOptions, "gradient_accumulation_steps", help="Batches per optimizer step; 1 if nobody says more."
    )
    adjust_scheduler: bool = knob(True, help="Step the scheduler only when the optimizer steps.")
    sync_with_dataloader: bool = knob(True, help="Close the window at the end of the loader, even if it is short.")
    sync_each_batch: bool = knob(
        False,
        help="Communicate gradients after every batch: slower, but it saves the memory of unsynchronised ones.",
    )
    normalize: Literal["steps", "window"] = knob(
        "steps",
        help='What a window\'s gradients are divided by: `"steps"` is always `num_steps`; `"window"` is the number of '
        "batches that the window really has, so that a short last window is a true mean.",
        choices=("steps", "window"),
    )

    def normalise(self) -> None:
        """Refuse a number of steps that no window can have."""
        if self.num_steps is not None and self.num_steps < 1:
            raise ConfigurationError(
                f"GradientAccumulationPlugin(num_steps={self.num_steps!r}) cannot work: a window has at least one batch. "
                "Write num_steps=1 to step at every batch."
            )


@dataclass
class DataLoaderConfiguration(Settings):
    """Say how `prepare` spreads a data loader over the processes."""

    split_batches: bool = knob(
        False, help="Cut each batch into one part per process, instead of giving each process whole batches."
    )
    dispatch_batches: bool | None = knob(
        help="Read on the main process and send to the others; None decides by the kind of dataset."
    )
    even_batches: bool = knob(
        True,
        help="Repeat samples from the start so that all processes get equally many batches of equal size.",
    )
    use_seedable_sampler: bool = knob(
        False, help="Shuffle by seed and epoch alone, the same on every number of processes."
    )
    data_seed: int | None = knob(help="The seed of that shuffle; None takes torch's initial seed.")
    non_blocking: bool = knob(False, help="Move batches to the device without waiting.")
    use_stateful_dataloader: bool = knob(False, help="Build on torchdata's `StatefulDataLoader`.")
    custom_classes: tuple[type, ...] = knob(
        (),
        help="Loader classes that are no torch `DataLoader`; `prepare` takes them for loaders and uses them as they are.",
    )
    restore_position: bool = knob(True, help="Let loading a checkpoint bring each loader back to its position.")

    def normalise(self) -> None:
        """Bring the classes into a tuple and refuse what is no class."""
        classes = self.custom_classes
        self.custom_classes = (classes,) if isinstance(classes, type) else tuple(classes)
        for entry in self.custom_classes:
            if not isinstance(entry, type):
                raise ConfigurationError(
                    f"DataLoaderConfiguration(custom_classes=...) holds {entry!r}, which is not a class, so no loader "
                    "can be recognised by it. List the classes of the loaders, such as `custom_classes=(MyLoader,)`."
                )


@dataclass
class ProjectConfiguration(Settings):
    """Say where a run keeps its checkpoints and logs."""

    project_dir: str | None = knob(help="The folder of the run.")
    logging_dir: str | None = knob(help="The folder of its logs; `project_dir` where it is not given.")
    automatic_checkpoint_naming: bool = knob(
        False, help="Name checkpoints `checkpoints/checkpoint_<iteration>` below `project_dir`."
    )
    total_limit: int | None = knob(help="How many of those to keep; None keeps all.")
    iteration: int = knob(0, help="The number of the next one.")
    save_on_each_node: bool = knob(
        False, help="Write on the first process of each machine, for machines without a shared disk."
    )

    def normalise(self) -> None:
        """Let the logs go to the project folder where nothing else is said."""
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set the project folder and, where it is not set, the folder of the logs."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of `torch.autocast`."""

    enabled: bool = knob(True, help="Compute in the lower precision where that is safe.")
    cache_enabled: bool | None = knob(help="Keep cast weights for the block; None leaves it to torch.")


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of `torch.amp.GradScaler`."""

    init_scale: float = knob(65536.0, help="The scale of the loss at the start.")
    growth_factor: float = knob(
        2.0, help="What it is multiplied with after `growth_interval` steps without an overflow."
    )
    backoff_factor: float = knob(0.5, help="What it is multiplied with after an overflow.")
    growth_interval: int = knob(2000, help="Steps without an overflow until it grows.")
    enabled: bool = knob(True, help="Scale the loss at all.")


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of `torch.nn.parallel.DistributedDataParallel`, and the compression of its gradients."""

    dim: int = knob(0, help="Dimension along which batches are split.")
    broadcast_buffers: bool = knob(True, help="Send buffers from rank 0 before each forward.")
    bucket_cap_mb: int = knob(25, help="Size of a bucket of gradients in MiB.")
    find_unused_parameters: bool = knob(False, help="Look for parameters without a gradient.")
    check_reduction: bool = knob(False, help="Check that all gradients are reduced.")
    gradient_as_bucket_view: bool = knob(False, help="Let gradients be views of buckets.")
    static_graph: bool = knob(False, help="Promise that the graph never changes.")
    comm_hook: DDPCommunicationHookType = knob(
        DDPCommunicationHookType.NO, help="How gradients are compressed on the way.", codec=_HOOK
    )
    comm_wrapper: Literal[DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16] = (
        knob(
            DDPCommunicationHookType.NO,
            help="A second compression around `comm_hook`: none, fp16 or bf16.",
            codec=_HOOK,
            choices=(DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16),
        )
    )
    comm_state_option: dict[str, Any] = knob(
        help="Arguments of `PowerSGDState`, for the PowerSGD hooks.", default_factory=dict
    )

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
    """Options of `torch.distributed.init_process_group`."""

    backend: str | None = knob("nccl", help="The backend; a default instance leaves the choice to the device.")
    init_method: str | None = knob(help="The address where the processes meet.")
    timeout: timedelta | None = knob(
        help="How long a collective may take: 600 seconds with nccl and 1800 otherwise, where it is not given."
    )

    def normalise(self) -> None:
        """Give the timeout its default, which depends on the backend."""
        if self.timeout is None:
            self.timeout = timedelta(seconds=600 if self.backend == "nccl" else 1800)


@dataclass
class ProfileKwargs(KwargsHandler):
    """Options of `torch.profiler.profile`."""

    activities: list[ProfilerActivity] | None = knob(
        help='What to record, such as `["cpu"]`; None records what torch finds.'
    )
    schedule_option: dict[str, int] | None = knob(help="Arguments of `torch.profiler.schedule`.")
    on_trace_ready: Callable[..., Any] | None = knob(help="What to do with a finished trace.")
    record_shapes: bool = knob(False, help="Record the shapes of inputs.")
    profile_memory: bool = knob(False, help="Record the memory of tensors.")
    with_stack: bool = knob(False, help="Record the source of each operation.")
    with_flops: bool = knob(False, help="Estimate the operations per second.")
    with_modules: bool = knob(False, help="Record the modules that operations belong to.")
    output_trace_dir: str | None = knob(help="Where each process writes its trace.")

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


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Say how models are compiled; what is not given comes from the `ACCELERATE_DYNAMO_*` variables."""

    backend: DynamoBackend = shared(
        DynamoOptions,
        "dynamo_backend",
        codec=member_of(DynamoBackend, upper=True),
        choices=(),
        fallback=DynamoBackend.NO,
    )
    mode: str = shared(DynamoOptions, "dynamo_mode", codec=TEXT, choices=(), fallback="default")
    fullgraph: bool = shared(DynamoOptions, "dynamo_use_fullgraph", fallback=False)
    dynamic: bool | None = shared(
        DynamoOptions, "dynamo_use_dynamic", help="Compile for changing shapes; None lets torch decide."
    )
    options: Any = knob(help="Options of the compiler.")
    disable: bool = knob(False, help="Turn compiling into a no-op, for a test.")
    use_regional_compilation: bool = shared(DynamoOptions, "dynamo_use_regional_compilation", fallback=False)

    def normalise(self) -> None:
        """Turn the backend's name, in any case, into its enum."""
        try:
            self.backend = DynamoBackend(str(self.backend).upper())
        except ValueError as error:
            raise ConfigurationError(
                f"TorchDynamoPlugin(backend={self.backend!r}) names no known compiler. "
                f"Write one of {', '.join(name.lower() for name in DynamoBackend.list())}."
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of the values, the backend as torch writes it."""
        values = super().to_dict()
        # Plugins may be edited after construction, so the backend may be text again.
        values["backend"] = str(values["backend"]).lower()
        return values

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `torch.compile` that were set."""
        values = super().to_kwargs()
        values.pop("use_regional_compilation", None)
        return values
