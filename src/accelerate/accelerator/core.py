"""Assemble the parts of a run behind one object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch

from accelerate._base.enums import DistributedType, FP8BackendType, RNGType
from accelerate._base.errors import CheckpointError, ConfigurationError
from accelerate._base.helpers import warn_once
from accelerate.accelerator.assembly import judge_accumulation, judge_dynamo, judge_loaders, sort_handlers
from accelerate.accelerator.checkpoints import CheckpointMixin
from accelerate.accelerator.collecting import CollectingMixin
from accelerate.accelerator.exporting import ExportMixin
from accelerate.accelerator.parallelism import ParallelismMixin
from accelerate.accelerator.preparing import PreparingMixin
from accelerate.accelerator.progressing import ProgressMixin
from accelerate.accelerator.tracking import TrackingMixin
from accelerate.accelerator.training import TrainingMixin
from accelerate.accelerator.window import AccumulationWindow
from accelerate.config.knob import KwargsHandler
from accelerate.config.plugins.training import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accelerate.parallelism_config import ParallelismConfig
from accelerate.precision import formats as precisions
from accelerate.runtime import current, process_control, process_group
from accelerate.runtime.gradient_clock import GradientState, Progress
from accelerate.state import AcceleratorState, ProcessControl, resolve_precision
from accelerate.strategies import registry as strategies
from accelerate.strategies.base import EngineRequest, StrategyContext

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

__all__ = ["Accelerator"]


class Accelerator(
    ProcessControl,
    PreparingMixin,
    TrainingMixin,
    CollectingMixin,
    CheckpointMixin,
    ExportMixin,
    ProgressMixin,
    TrackingMixin,
    ParallelismMixin,
):
    """Run one training loop on one device or many.

    Args:
        device_placement: Move models, optimizer states and batches to the device.
        split_batches: Split each batch over the processes; the same as in `dataloader_config`.
        mixed_precision: "no", "fp16", "bf16" or "fp8"; None takes the launcher's choice.
        gradient_accumulation_steps: Batches per optimizer step.
        cpu: Use the CPU even if an accelerator is there.
        dataloader_config: How loaders are shared between processes.
        deepspeed_plugin: Settings of DeepSpeed, or several by name.
        fsdp_plugin: Settings of sharded data parallelism.
        torch_tp_plugin: Settings of tensor parallelism, in their older form.
        megatron_lm_plugin: Settings of Megatron-LM.
        rng_types: Random generators whose states all ranks take from rank 0 at each epoch.
        log_with: Experiment trackers, by name or as objects.
        project_dir: Folder of the run.
        project_config: Folder of the run and naming of its checkpoints.
        gradient_accumulation_plugin: Finer settings of accumulation.
        step_scheduler_with_optimizer: Let schedulers follow the optimizer.
        kwargs_handlers: Options of parts: DDP, autocast, scaler, process group, profiler.
        dynamo_backend: Compile models with this backend.
        dynamo_plugin: Compile models with these settings.
        deepspeed_plugins: Another name of `deepspeed_plugin`.
        parallelism_config: Sizes of the axes of parallelism.
        global_batch_size: Samples per optimizer step on all processes together. Batches, order, weights of losses and
            schedules then do not depend on the number of processes; the batch size of a loader is the most that one
            process takes at once.

    Example:
        ```python
        import torch
        from accelerate import Accelerator

        accelerator = Accelerator()
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            loss = model(batch).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        ```
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[str | RNGType] | None = None,
        log_with: str | GeneralTracker | Sequence[str | GeneralTracker] | None = None,
        project_dir: str | PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: ParallelismConfig | None = None,
        global_batch_size: int | None = None,
    ) -> None:
        # Everything that can be judged without a process group is judged first.
        precision_name = resolve_precision(mixed_precision)
        handlers = sort_handlers(kwargs_handlers, precision_name)
        self.dataloader_config = judge_loaders(dataloader_config, split_batches, global_batch_size)
        accumulation = judge_accumulation(gradient_accumulation_steps, gradient_accumulation_plugin, global_batch_size)
        dynamo = judge_dynamo(dynamo_backend, dynamo_plugin)
        if deepspeed_plugin is not None and deepspeed_plugins is not None:
            raise ConfigurationError("deepspeed_plugin and deepspeed_plugins are one argument. Give one of them.")
        parallelism = _parallelism(parallelism_config, torch_tp_plugin)
        plugins = {
            "deepspeed": deepspeed_plugin if deepspeed_plugin is not None else deepspeed_plugins,
            "fsdp": fsdp_plugin,
            "megatron": megatron_lm_plugin,
        }
        self.project_configuration = project_config if project_config is not None else ProjectConfiguration()
        if project_dir is not None and self.project_dir is None:
            self.project_configuration.set_directories(str(project_dir))

        init_options = handlers["init_handler"].to_kwargs() if handlers["init_handler"] is not None else {}
        self.state = AcceleratorState(
            mixed_precision=mixed_precision,
            cpu=cpu,
            dynamo_plugin=dynamo,
            deepspeed_plugin=plugins["deepspeed"],
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            parallelism_config=parallelism,
            _from_accelerator=True,
            **init_options,
        )
        plugins["fsdp"] = self.state.fsdp_plugin
        # After the state, so that only the main process says which trackers are missing.
        self.log_with = self._choose_trackers(log_with)
        runtime = current.runtime()
        if parallelism is not None:
            parallelism.fit(runtime.world_size)
            self.state.device_mesh = parallelism.get_device_mesh(runtime.device.type)
        for name, handler in handlers.items():
            setattr(self, name, handler)
        self.precision = precisions.make(
            self.state.mixed_precision, runtime.backend, self.autocast_handler, self.scaler_handler
        )
        request = EngineRequest.from_plugins(parallelism=parallelism, **plugins)
        context = StrategyContext(
            runtime,
            self.precision,
            dynamo,
            parallelism=parallelism,
            fsdp=plugins["fsdp"],
            **({"ddp": self.ddp_handler} if self.ddp_handler is not None else {}),
        )
        self.strategy = strategies.select(request, runtime).value(context)
        self.gradient_state = GradientState(accumulation)

        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.rng_types = list(rng_types) if rng_types is not None else [RNGType.GENERATOR.value]
        self.global_batch_size = global_batch_size
        self.trackers: list[GeneralTracker] = []
        self.step = 0
        self.flag_tensor = None
        self._window = AccumulationWindow()
        self._progress = Progress()
        self._models: list[torch.nn.Module] = []
        self._prepared_models: list[torch.nn.Module] = []
        self._optimizers = []
        self._schedulers = []
        self._dataloaders = []
        self._init_checkpoints()

    # The handlers that `sort_handlers` fills in.
    ddp_handler: Any
    scaler_handler: Any
    init_handler: Any
    autocast_handler: Any
    profile_handler: Any
    fp8_recipe_handler: Any
    ao_recipe_handler: Any
    te_recipe_handler: Any
    msamp_recipe_handler: Any

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return the device of this process."""
        return self.state.device

    @property
    def distributed_type(self) -> DistributedType:  # type: ignore[override]
        """Return the regime of this run."""
        return self.state.distributed_type

    @property
    def num_processes(self) -> int:  # type: ignore[override]
        """Return the number of processes."""
        return self.state.num_processes

    @property
    def process_index(self) -> int:  # type: ignore[override]
        """Return the global rank of this process."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:  # type: ignore[override]
        """Return the rank of this process on its machine."""
        return self.state.local_process_index

    @property
    def multi_device(self) -> bool:
        """Return whether several processes train replicas on accelerators, one each."""
        runtime = current.runtime()
        return self.use_distributed and self.strategy.caps.replicates and runtime.device.type != "cpu"

    @property
    def mixed_precision(self) -> str:
        """Return the number format of this run."""
        return self.state.mixed_precision

    @property
    def native_amp(self) -> bool:
        """Return whether forward passes run in autocast."""
        return self.precision.native_amp

    @property
    def fp8_enabled(self) -> bool:
        """Return whether this run computes in fp8."""
        return self.mixed_precision == "fp8"

    @property
    def has_fp8_handler(self) -> bool:
        """Return whether a recipe for fp8 was given."""
        return self.fp8_backend is not FP8BackendType.NO

    @property
    def fp8_backend(self) -> FP8BackendType:
        """Return which library computes in fp8."""
        given = {
            FP8BackendType.AO: self.ao_recipe_handler,
            FP8BackendType.TE: self.te_recipe_handler,
            FP8BackendType.MSAMP: self.msamp_recipe_handler,
        }
        if self.fp8_recipe_handler is not None:
            return FP8BackendType(self.fp8_recipe_handler.backend)
        return next((kind for kind, recipe in given.items() if recipe is not None), FP8BackendType.NO)

    @property
    def project_dir(self) -> str | None:
        """Return the folder of the run."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Return the folder of the run's logs."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """Return the number of the next checkpoint."""
        return self.project_configuration.iteration

    @property
    def deepspeed_plugin(self) -> Any:
        """Return the DeepSpeed settings in force, None without DeepSpeed."""
        return self.state.deepspeed_plugin

    @property
    def is_fsdp2(self) -> bool:
        """Return whether weights are sharded with version 2 of FSDP."""
        return self.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Return whether axes of parallelism can be combined in this run."""
        return self.is_fsdp2

    @property
    def should_save_model(self) -> bool:
        """Return whether this process writes the model."""
        return True if self.parallelism_config is not None else self.is_local_main_process

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function to run on the main process only; the others get None."""
        return self._on(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function to run on the first process of each machine only."""
        return self._on(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable[..., Any]) -> Any:
        """Decorate a function to run on the last process only."""
        return self._on(lambda: self.is_last_process, function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Decorate a function to run on the process with this rank only."""
        return self._on(lambda: self.process_index == process_index, function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorate a function to run on the processes with this local rank only."""
        return self._on(lambda: self.local_process_index == local_process_index, function)

    @staticmethod
    def _on(condition: Callable[[], bool], function: Callable[..., Any] | None) -> Any:
        if function is None:
            return lambda given: process_control.only_if(condition, given)
        return process_control.only_if(condition, function)

    def reset(self) -> None:
        """Forget this run: free what was prepared, leave the process group and reset all state.

        The next `Accelerator` starts anew, with other settings if wanted. For tests and notebooks.
        """
        self._stop_listening()
        with suppress(CheckpointError):  # it was logged
            self.wait_for_save()
        self.free_memory()
        process_group.leave()
        AcceleratorState._reset_state()
        current.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        return self

    def __repr__(self) -> str:
        return (
            f"Accelerator({self.strategy.name}, process {self.process_index} of {self.num_processes}, "
            f"device={self.device}, mixed_precision={self.mixed_precision!r})"
        )


def _parallelism(config: ParallelismConfig | None, torch_tp_plugin: Any) -> ParallelismConfig | None:
    if torch_tp_plugin is not None and config is None:
        warn_once(
            "torch_tp_plugin is deprecated; write parallelism_config=ParallelismConfig(tp_size=...).", FutureWarning
        )
        return ParallelismConfig(tp_size=torch_tp_plugin.tp_size)
    return config if config is not None else ParallelismConfig.from_environment()
