"""The front door: the one object that a training loop talks to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from accelerate._base.constants import HANDLE_SIGNALS, PREEMPTED_EXIT_CODE
from accelerate._base.enums import DistributedType, FP8BackendType, RNGType
from accelerate._base.errors import CheckpointError
from accelerate._base.helpers import log_once
from accelerate._base.lazy import attach_passing_names
from accelerate.checkpointing import catalog, torch_files
from accelerate.checkpointing.catalog import CheckpointInfo
from accelerate.checkpointing.export import save_weights, weights_of
from accelerate.checkpointing.state import Checkpointer, LoadHook, SaveHook
from accelerate.checkpointing.weight_folder import open_folder
from accelerate.collectives import metrics, ops
from accelerate.config import env
from accelerate.config.knob import KwargsHandler
from accelerate.config.plugins.quantization import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accelerate.config.plugins.training import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accelerate.data_loader import skip_first_batches
from accelerate.hooks.offloaded import get_state_dict_offloaded_model, has_offloaded_params
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.parallel.unwrap import extract_model_from_parallel
from accelerate.parallelism_config import ParallelismConfig
from accelerate.runtime import current, process_control, process_group
from accelerate.runtime.gradient_clock import Progress
from accelerate.runtime.memory import clear_device_cache
from accelerate.scheduler import AcceleratedScheduler
from accelerate.session.checkpoints import RunCheckpoints
from accelerate.session.prepared import PreparedObjects, Preparer, has_device_map
from accelerate.session.progress import RunProgress
from accelerate.session.setup import resolve_options, start_run
from accelerate.session.stepper import GradientStepper, trigger_sync_in_backward
from accelerate.session.trackers import RunTrackers
from accelerate.state import AcceleratorState, AxisRank, ProcessControl, View, choose_group
from accelerate.strategies.base import AcceleratorReference
from accelerate.watch.preemption import Preemption, ignore_signals

if TYPE_CHECKING:  # most runs have no tracker: their modules are imported by the runs that do
    from accelerate.tracking import GeneralTracker
    from accelerate.tracking.registry import Chosen

__all__ = ["Accelerator"]

attach_passing_names(__name__)

Function = Callable[..., Any]


class Accelerator(ProcessControl):
    """Run one training loop on one device or many.

    Args:
        device_placement: Move models, optimizer states and batches to the device.
        split_batches: Deprecated; the same as in `dataloader_config`.
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
        kwargs_handlers: Options of parts: DDP, autocast, scaler, fp8, process group, profiler.
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
        options = resolve_options(
            device_placement=device_placement,
            split_batches=split_batches,
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=gradient_accumulation_steps,
            cpu=cpu,
            dataloader_config=dataloader_config,
            deepspeed_plugin=deepspeed_plugin,
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            rng_types=rng_types,
            project_dir=project_dir,
            project_config=project_config,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            kwargs_handlers=kwargs_handlers,
            dynamo_backend=dynamo_backend,
            dynamo_plugin=dynamo_plugin,
            deepspeed_plugins=deepspeed_plugins,
            parallelism_config=parallelism_config,
            global_batch_size=global_batch_size,
        )
        self._run = run = start_run(options, choose_group)
        run.strategy.context = replace(run.strategy.context, accelerator=AcceleratorReference(self))
        self._objects = objects = PreparedObjects()
        self.progress = progress = Progress()
        """How far the run has come: `epoch`, `step` (optimizer updates) and `samples`; saved with its checkpoints."""
        self.state = AcceleratorState()
        self.strategy, self.precision, self.gradient_state = run.strategy, run.precision, run.clock
        self.flag_tensor: torch.Tensor | None = None
        self._preparer = Preparer(run, objects, progress, self.state)
        self._stepper = GradientStepper(run, objects, progress)
        checkpointer = Checkpointer(options.project_configuration)
        self._checkpoints = RunCheckpoints(run, objects, self._stepper, progress, checkpointer)
        # Signals during start-up are kept for the first `should_stop`, under a launcher that asks for it.
        early = Preemption() if env.flag(HANDLE_SIGNALS) else None
        self._run_progress = RunProgress(run, objects, progress, self._checkpoints, early)
        self._trackers = RunTrackers(run)
        self._cp_context: Callable[..., AbstractContextManager[None]] | None = None
        if options.request.parallelism is not None:
            options.request.parallelism._validate_accelerator(self)
        if log_with is not None:
            self._trackers.choose(log_with)

    # What the program asked for; it may change these.
    device_placement = View[bool]("_run.options", "Whether models, optimizer states and batches go to the device.")
    step_scheduler_with_optimizer = View[bool]("_run.options", "Whether schedulers follow the optimizer.")
    rng_types = View[list[str | RNGType]]("_run.options", "Generators that ranks take from rank 0 at each epoch.")
    global_batch_size = View[int | None]("_run.options", "Samples per optimizer step on all processes together.")
    log_with: View[list[Chosen]] = View("_run.options", "The trackers that can be used here.")
    dataloader_config = View[DataLoaderConfiguration]("_run.options", "How loaders are shared between processes.")
    split_batches = View[bool]("dataloader_config", "Whether one batch is split over all processes.")
    dispatch_batches = View[bool | None]("dataloader_config", "Whether rank 0 reads for all; None for automatic.")
    even_batches = View[bool]("dataloader_config", "Whether all ranks get equally many batches of equal size.")
    use_seedable_sampler = View[bool]("dataloader_config", "Whether shuffles are seeded by `data_seed`.")
    non_blocking = View[bool]("dataloader_config", "Whether batches are moved to the device without waiting.")
    use_stateful_dataloader = View[bool]("dataloader_config", "Whether loaders are torchdata's stateful ones.")
    project_configuration = View[ProjectConfiguration]("_run.options", "Folder of the run, naming of checkpoints.")
    project_dir = View[str | None]("project_configuration", "The folder of the run.")
    logging_dir = View[str | None]("project_configuration", "The folder of the run's logs.")
    save_iteration = View[int]("project_configuration", "The number of the next checkpoint.", name="iteration")
    ddp_handler = View[DistributedDataParallelKwargs | None]("_run.options.handlers")
    scaler_handler = View[GradScalerKwargs | None]("_run.options.handlers")
    init_handler = View[InitProcessGroupKwargs | None]("_run.options.handlers")
    autocast_handler = View[AutocastKwargs | None]("_run.options.handlers")
    profile_handler = View[ProfileKwargs | None]("_run.options.handlers")
    fp8_recipe_handler = View[FP8RecipeKwargs | None]("_run.options.handlers")
    ao_recipe_handler = View[AORecipeKwargs | None]("_run.options.handlers")
    te_recipe_handler = View[TERecipeKwargs | None]("_run.options.handlers")
    msamp_recipe_handler = View[MSAMPRecipeKwargs | None]("_run.options.handlers")
    fp8_backend = View[FP8BackendType]("_run.options.handlers", "The library that computes in fp8.")
    has_fp8_handler = View[bool]("_run.options.handlers", "Whether there is a recipe for fp8.")

    # Where this process stands.
    device = View[torch.device]("state", "The device of this process.")
    distributed_type = View[DistributedType]("state", "The regime of this run.")
    num_processes = View[int]("state", "The number of processes.")
    process_index = View[int]("state", "The global rank of this process.")
    local_process_index = View[int]("state", "The rank of this process on its machine.")
    mixed_precision = View[str]("state", "The number format of this run.")
    deepspeed_plugin = View[Any]("state", "The DeepSpeed settings in force, None without DeepSpeed.")
    deepspeed_config = View[dict[str, Any]]("state", "DeepSpeed's configuration, complete after `prepare`.")
    deepspeed_engine_wrapped = View[Any]("strategy", "The engine that DeepSpeed trains with.", name="engine_wrapped")
    is_fsdp2 = View[bool]("state", "Whether weights are sharded with version 2 of FSDP.")
    is_composable_parallelism_enabled = View[bool]("state", "Whether axes can be combined.", name="is_fsdp2")
    parallelism_config = View[ParallelismConfig | None]("state", "The sizes of the axes of parallelism, if given.")
    torch_device_mesh = View[Any]("state", "The mesh of devices, None without one.", name="device_mesh")
    sync_gradients = View[bool]("gradient_state", "Whether the batch at hand completes a window of gradients.")
    native_amp = View[bool]("precision", "Whether forward passes run in autocast.")
    fp8_enabled = View[bool]("precision", "Whether this run computes in fp8.")
    delayed_fp8_autocast = View[bool]("precision", "Whether fp8 begins outside of an engine's wrapper: never here.")
    scaler = View[torch.amp.GradScaler | None]("precision", "The gradient scaler of float16 training.")
    has_lomo_optimizer = View[bool]("_objects", "Whether an optimizer steps inside backward (LOMO).", name="has_lomo")
    step = View[int]("_stepper", "Batches since the last end of a loader.")
    trackers: View[list[GeneralTracker]] = View("_trackers", "The trackers that are open.", name="open")

    # What other libraries read and edit, though it looks private.
    _models = View[list[torch.nn.Module]]("_objects", name="models")
    _optimizers = View[list[AcceleratedOptimizer]]("_objects", name="optimizers")
    _schedulers = View[list[AcceleratedScheduler]]("_objects", name="schedulers")
    _dataloaders = View[list[Any]]("_objects", name="loaders")
    _custom_objects = View[list[Any]]("_objects", name="custom")

    # --- the run -----------------------------------------------------------------------------------------------------

    @property
    def multi_device(self) -> bool:
        """Return whether several processes train replicas on accelerators, one each."""
        return self.use_distributed and self.strategy.caps.replicates and self._run.runtime.device.type != "cpu"

    @property
    def should_save_model(self) -> bool:
        """Return whether this process writes the model."""
        return True if self.parallelism_config is not None else self.is_local_main_process

    def reset(self) -> None:
        """Forget this run: free what was prepared, leave the process group and reset all state.

        The next `Accelerator` starts anew, with other settings if wanted. For tests and notebooks.
        """
        self._run_progress.stop_listening()
        with suppress(CheckpointError):  # it was logged
            self._checkpoints.checkpointer.close()
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

    # --- processes ---------------------------------------------------------------------------------------------------

    def on_main_process(self, function: Function | None = None) -> Any:
        """Decorate a function to run on the main process only; the others get None."""
        return process_control.run_only_if(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Function | None = None) -> Any:
        """Decorate a function to run on the first process of each machine only."""
        return process_control.run_only_if(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Function) -> Any:
        """Decorate a function to run on the last process only."""
        return process_control.run_only_if(lambda: self.is_last_process, function)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Any:
        """Decorate a function to run on the process with this rank only."""
        return process_control.run_only_if(lambda: self.process_index == process_index, function)

    def on_local_process(self, function: Function | None = None, local_process_index: int | None = None) -> Any:
        """Decorate a function to run on the processes with this local rank only."""
        return process_control.run_only_if(lambda: self.local_process_index == local_process_index, function)

    def set_trigger(self) -> None:
        """Raise this rank's flag; `check_trigger` then tells all ranks."""
        self.flag_tensor = torch.ones(1, device=self._run.runtime.device)

    def check_trigger(self) -> bool:
        """Return on all ranks whether any has raised its flag, and lower it. Every rank must call it."""
        flag = self.flag_tensor if self.flag_tensor is not None else torch.zeros(1, device=self._run.runtime.device)
        raised = bool(self._run.communicator.reduce(flag, "max").item() > 0)
        self.flag_tensor = None
        return raised

    def breakpoint(self, rank: int = 0) -> None:
        """Stop all ranks and open the debugger on one of them, at the line after this; the others wait for it.

        Every rank must call it.
        """
        process_control.open_debugger(sys._getframe(1), rank)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[Any]:
        """Profile the block; with `output_trace_dir` every rank writes its trace there."""
        return process_control.profile(profile_handler or self.profile_handler or ProfileKwargs())

    # --- prepare -----------------------------------------------------------------------------------------------------

    # The annotations are strings, and the body needs no other name: libraries execute this source in their own module.
    def prepare(self, *args: "Any", device_placement: "Sequence[bool | None] | None" = None) -> "Any":  # noqa: UP037
        """Prepare models, optimizers, schedulers and loaders, in any order and number, for this run.

        Args:
            *args: The objects; others are returned as they are.
            device_placement: For each object whether to move it to the device; None entries take the default.

        Returns:
            The prepared objects in the order given; a single one by itself.

        Raises:
            ConfigurationError: If something cannot work; nothing has been touched then.

        Example:
            ```python
            model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
            ```
        """
        layout = self.strategy.context.parallelism
        if layout is not None and layout.cp_enabled:
            args = self._prepare_cp(*args)
        if self.strategy.prepare_method is None:
            return self._preparer.prepare(args, device_placement)
        options = {} if device_placement is None else {"device_placement": device_placement}
        prepared = getattr(self, self.strategy.prepare_method)(*args, **options)
        return prepared if len(prepared) > 1 else prepared[0]

    # Other libraries wrap and replace these two.
    def _prepare_fsdp2(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> tuple[Any, ...]:
        prepared = self._preparer.prepare(args, device_placement)
        return prepared if len(args) > 1 else (prepared,)

    def _prepare_cp(self, *args: Any) -> tuple[Any, ...]:
        """Set the context that `maybe_context_parallel` returns, and return the objects to prepare."""
        from accelerate.parallel.context import split_sequences

        assert self.parallelism_config is not None
        exchange = self.parallelism_config.cp_handler.cp_comm_strategy
        self._cp_context = partial(split_sequences, self.torch_device_mesh["cp"], exchange=exchange)
        return args

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Prepare one model; `evaluation_mode` leaves out what only training needs."""
        return self._preparer.prepare_model(model, device_placement, evaluation=evaluation_mode)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare one optimizer."""
        return self._preparer.prepare_optimizer(optimizer, device_placement)

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Prepare one scheduler; it follows the prepared optimizer that it was made for."""
        return self._preparer.prepare_scheduler(scheduler)

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Prepare one loader.

        Args:
            data_loader: A `DataLoader`, or an object of one of the configured `custom_classes`.
            device_placement: Move batches to the device; None takes the default.
            slice_fn_for_dispatch: How a batch that the main process read is cut for the ranks.
        """
        return self._preparer.prepare_loader(data_loader, device_placement, slice_fn_for_dispatch)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader that starts `num_batches` batches in."""
        return skip_first_batches(dataloader, num_batches=num_batches)

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: torch.nn.Module) -> Any:
        """Return a loader for DeepSpeed's sequence parallelism; the loader itself where that is not in use."""
        return self._preparer.share_sequences(dl)

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Return whether the model is spread over several devices."""
        return has_device_map(model)

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module:
        """Return the model inside the wrappers of this run.

        Args:
            model: A prepared model.
            keep_fp32_wrapper: Keep the mixed-precision forward.
            keep_torch_compile: Keep a compiled shell.
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Forget all prepared objects and free their memory; assign the result to the names that held `objects`."""
        count = len(objects)
        del objects
        self._objects.forget()
        self.strategy.release()
        self._stepper.restart()
        self.progress.restart()
        clear_device_cache(garbage_collection=True)
        return [None] * count

    def clear(self, *objects: Any) -> list[Any]:
        """Do the same as `free_memory`."""
        return self.free_memory(*objects)

    # --- the training step -------------------------------------------------------------------------------------------

    @property
    def gradient_accumulation_steps(self) -> int:
        """Return how many batches make a window of gradients."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        self.gradient_state.set_num_steps(gradient_accumulation_steps)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Return whether any optimizer skipped its last step because a gradient overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._objects.optimizers)

    def accumulate(self, *models: torch.nn.Module) -> AbstractContextManager[None]:
        """Process one batch of a window: gradients are exchanged and optimizers step only when it is complete.

        Args:
            *models: The models whose gradients this batch computes.

        Example:
            ```python
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(batch).mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
            ```
        """
        return self._stepper.accumulate(models)

    def backward(self, loss: torch.Tensor, *, num_items: float | torch.Tensor | None = None, **kwargs: Any) -> None:
        """Compute gradients of `loss`, divided by what the accumulation window calls for.

        Args:
            loss: A mean over the batch; with `num_items` a sum.
            num_items: How many items (tokens, say) the sum is over. The window's gradients are divided by the number
                of items of all its batches on all ranks: the gradient of the mean over all items. Several backward
                passes of one batch add their items up; 0 for another loss over items that were counted already.
            **kwargs: Passed to `Tensor.backward`.

        Example:
            ```python
            loss_sum = torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
            accelerator.backward(loss_sum, num_items=(labels != -100).sum())
            ```
        """
        self._stepper.backward(loss, num_items, **kwargs)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float | None) -> None:
        """Run the backward pass of a LOMO optimizer, which updates the weights on the way.

        Raises:
            ConfigurationError: If no learning rate was given or no LOMO optimizer was prepared.
        """
        self._stepper.lomo_backward(loss, learning_rate)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes of `model` do not exchange gradients."""
        return self.strategy.no_sync(model)

    trigger_sync_in_backward = staticmethod(trigger_sync_in_backward)

    def join_uneven_inputs(
        self, joinables: Iterable[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Let ranks that run out of batches early wait for the others.

        Args:
            joinables: The models that take part.
            even_batches: Use this instead of the configured value for the prepared loaders inside the block.
        """
        return self._stepper.join_uneven_inputs(joinables, even_batches)

    def unscale_gradients(
        self, optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None
    ) -> None:
        """Divide the gradients of float16 training by the loss scale; once per step, however often it is called.

        Args:
            optimizer: One optimizer or several; all prepared ones if None.
        """
        self._stepper.unscale_gradients(optimizer)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients down so that their total norm is at most `max_norm`; returns the norm they had."""
        self._stepper.unscale_gradients(None)
        return self.strategy.clip_grad_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Limit every element of the gradients to the range from `-clip_value` to `clip_value`.

        Raises:
            ConfigurationError: If the engine keeps gradients where they cannot be clipped one by one.
        """
        self._stepper.clip_grad_value(parameters, clip_value)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a context that computes in the run's number format."""
        return self.precision.autocast(autocast_handler or self.autocast_handler)

    # --- values of all ranks -----------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all ranks joined along the first dimension, in nested structures too."""
        return ops.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the values of every sample once, in the order of the dataset.

        Samples that were repeated to fill the last batch are dropped. Tensors may have different shapes on different
        ranks; values that are not tensors are gathered too.

        Args:
            input_data: Tensors, strings, lists of samples, or nested structures of them, with one row per sample.
            use_gather_object: Take every list as a list of samples.

        Raises:
            UsageError: If it is not clear from which of several loaders, read by `zip()`, a value comes.

        Example:
            ```python
            for inputs, targets in test_loader:
                predictions = model(inputs).argmax(dim=-1)
                predictions, targets = accelerator.gather_for_metrics((predictions, targets))
                correct += (predictions == targets).sum().item()
            ```
        """
        share, *others = [loader.share for loader in self.gradient_state.dataloaders_in_step] or [None]
        return metrics.gather_for_metrics_rows(
            input_data, share, use_gather_object, repeats=self.strategy.repeats_rows(), others=others
        )

    def weighted_mean(self, value: Any, weight: Any) -> Any:
        """Return the mean over ranks of values that stand for different numbers of samples.

        Args:
            value: This rank's mean: a number, a tensor, or a nested structure of them.
            weight: How many samples (or tokens) it is the mean of.
        """
        return metrics.weighted_mean(value, weight)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum, mean, max or min over ranks, in nested structures too."""
        return ops.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Return the tensors padded along `dim` to the largest size that any rank has."""
        return ops.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)

    # --- axes of parallelism -----------------------------------------------------------------------------------------

    tensor_parallel_rank = AxisRank("tp", "The rank along the axis of tensor parallelism, 0 where it is not in use.")
    context_parallel_rank = AxisRank("cp", "The rank along the axis of context parallelism, 0 where it is not in use.")
    pipeline_parallel_rank = AxisRank("pp", "The stage of this process in a pipeline, 0 where it is not in use.")
    data_parallel_rank = AxisRank("dp_replicate", "The rank along the axis of replicas, 0 where it is not in use.")
    data_parallel_shard_rank = AxisRank("dp_shard", "The rank along the axis of sharding, 0 where it is not in use.")

    def maybe_context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Return a context in which each rank works on its part of the sequences, where cp_size is above 1.

        The buffers are cut in place, and attention sees the keys and values of all parts. Labels must be shifted
        before, and positions must be among the buffers, because a part does not know what comes before and after it.
        Keep the backward pass inside.

        Args:
            buffers: Tensors that have a dimension for the sequence.
            buffer_seq_dims: That dimension, for each buffer.
            no_restore_buffers: Buffers that may stay cut afterwards, which saves a copy.

        Raises:
            ConfigurationError: On entering, if the buffers and dimensions do not go together.
        """
        config = self.parallelism_config
        if config is None or not config.cp_enabled:
            log_once(__name__, "maybe_context_parallel does nothing: cp_size is 1, so every rank has whole sequences.")
            return nullcontext()
        if self._cp_context is None:
            self._prepare_cp()
        assert self._cp_context is not None
        kept = no_restore_buffers or set()
        return self._cp_context(buffers=buffers or (), buffer_seq_dims=buffer_seq_dims or (), no_restore_buffers=kept)

    # --- weights -----------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return all weights of a prepared model; those that are offloaded are read to the CPU.

        Args:
            model: A model as `prepare` returned it.
            unwrap: Leave out what `prepare` put around the model, and its part of the names.
        """
        inner = extract_model_from_parallel(model) if unwrap else model
        if any(map(has_offloaded_params, inner.modules())):
            return get_state_dict_offloaded_model(inner)
        return self.strategy.full_state_dict(model, unwrap=unwrap)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of a model into a folder that `load_checkpoint_in_model` and Transformers load from.

        All processes may call it; the main one writes, or the first of each machine if the project is configured so.
        Where weights are sharded over processes, all have to. It waits for nobody.

        Args:
            model: A model as `prepare` returned it, or one with offloaded weights: these are read one shard at a time.
            save_directory: A folder, or an address of fsspec such as `"s3://bucket/folder"`. Weights of an earlier save,
                in either format, are replaced; other files stay.
            max_shard_size: The size of the largest file, such as `"5GB"`; a larger single weight has its own.
            safe_serialization: Write safetensors; otherwise files of torch.

        Raises:
            CheckpointError: If the folder cannot be written; what was there before can still be read.
            ConfigurationError: If `save_directory` is a file.
            MissingPackageError: If the package for an address is not installed.
            UsageError: If weights have no data.
        """
        folder = open_folder(save_directory)
        weights = weights_of(extract_model_from_parallel(model), self.strategy.full_state_dict(model))
        runtime = self._run.runtime
        if (runtime.local_rank if self.project_configuration.save_on_each_node else runtime.rank) == 0:
            save_weights(weights, folder, max_shard_size, safe_serialization)

    def save(self, obj: Any, f: str | PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object to a file once per run, or once per machine if the project is configured so.

        Args:
            obj: What to save.
            f: Path of the file.
            safe_serialization: Write safetensors; `obj` must be a mapping of names to tensors.
        """
        each_node = self.project_configuration.save_on_each_node
        torch_files.save(obj, f, save_on_each_node=each_node, safe_serialization=safe_serialization)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def save_state(
        self,
        output_dir: str | PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Save the state of the run: models, optimizers, schedulers, loaders, random states, registered objects.

        Every rank calls it. A checkpoint appears as a whole or not at all, and older ones are removed after that. With
        `ProjectConfiguration(automatic_checkpoint_naming=True)` it is numbered and `output_dir` is not used.

        Args:
            output_dir: The folder of the checkpoint.
            safe_serialization: Write weights as safetensors.
            blocking: Wait until the checkpoint is on the disk. False returns when the weights are copied to host memory;
                the state of optimizers follows until their next step, which waits for it. The copy takes as much memory
                as the state; one such save runs at a time.
            **save_model_func_kwargs: Options of an engine that saves by itself.

        Returns:
            The folder of the checkpoint; it is there after `wait_for_save()` if `blocking` is False.

        Raises:
            CheckpointError: If it could not be saved, or an earlier one in the background could not.

        Example:
            ```python
            accelerator.save_state("checkpoints/last", blocking=False)
            ```
        """
        save, options = self._checkpoints.save, save_model_func_kwargs
        return save(output_dir, safe_serialization=safe_serialization, blocking=blocking, engine_options=options)

    def load_state(
        self,
        input_dir: str | PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Restore the state of a run, on any number of processes.

        Every rank calls it, with the same objects prepared and registered as when the checkpoint was saved. Loaders go on
        with the batch after the last one that was handed out. If the checkpoint is broken or of another run, nothing is
        changed.

        Args:
            input_dir: The folder of a checkpoint; None or "latest" take the newest valid one of the project.
            load_kwargs: Arguments of `torch.load`; `{"weights_only": False}` lets files run code, if you trust their writer.
            **load_model_func_kwargs: Arguments of `load_state_dict` of models; `map_location` ("cpu" or "on_device")
                says where tensors are put while they are read.

        Raises:
            ConfigurationError: (a ValueError) if there is no such folder.
            CheckpointError: (a RuntimeError) if the checkpoint is broken, would run code, or does not fit what is prepared.
        """
        map_location = load_model_func_kwargs.pop("map_location", None)
        self._checkpoints.load(input_dir, load_kwargs or {}, map_location, load_model_func_kwargs)

    def wait_for_save(self) -> None:
        """Wait until a save in the background is on the disk.

        Raises:
            CheckpointError: If it could not be saved.
        """
        self._checkpoints.checkpointer.wait()

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return the checkpoints of the project, the newest last."""
        return catalog.catalog(self._checkpoints.folder("checkpoints()"))

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and restore these objects with the state of the run, in the order of registration.

        Raises:
            ConfigurationError: (a ValueError) if an object has no `state_dict` or `load_state_dict`.
        """
        self._checkpoints.register(objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` before `save_state` writes.

        What it takes out of the list of weights is not written; what it writes to `output_dir` becomes part of the
        checkpoint. The result has a method `remove`.
        """
        return self._checkpoints.add_save_hook(hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call `hook(models, input_dir)` before `load_state` reads.

        What it takes out of the list of models is not loaded. The result has a method `remove`.
        """
        return self._checkpoints.add_load_hook(hook)

    # --- progress ----------------------------------------------------------------------------------------------------

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the epochs that are left of `total`, from the one in which the run stands.

        That is the first in a new run. After `load_state` it is the epoch of the checkpoint, or the one after it if the
        checkpoint was taken with the last batch of an epoch or later. If the launcher was told `--auto_resume`, or
        Slurm has requeued the job, the newest valid checkpoint is loaded first, unless one was loaded already.
        """
        return self._run_progress.epochs(total)

    @property
    def should_stop(self) -> bool:
        """Return whether the run is to stop here because a process got SIGTERM or SIGUSR1.

        All processes get the same answer at the same step (`progress.step`), whichever of them got the signal: True at
        one step and from there on. Without a prepared optimizer there are no steps, and every process must read it
        equally often. Reading it costs no communication. From the first time on, the signals no longer end the process.

        Example:
            ```python
            if accelerator.should_stop:
                accelerator.save_state()
                accelerator.exit_for_restart()
            ```
        """
        return self._run_progress.should_stop()

    def check_stop(self) -> bool:
        """Return at once, on all processes, whether any of them got a signal; every process must call it.

        It communicates, and is for places where no optimizer steps: the batches of a long evaluation. Once it has
        returned True, `should_stop` is True everywhere.
        """
        return self._run_progress.check_stop()

    def exit_for_restart(self) -> NoReturn:
        """End this process with exit code 75, which says that the run goes on when it is started again.

        Every process must call it. It waits for a save that is under way, closes trackers and leaves the process group.
        `accelerate launch` ends with the same code.
        """
        ignore_signals()  # who asked this process to end need not do so again while it does
        self.wait_for_save()
        self.end_training()
        raise SystemExit(PREEMPTED_EXIT_CODE)

    def resume(self) -> bool:
        """Go on from the newest valid checkpoint of the project folder; call it once everything is prepared.

        Returns:
            Whether there was one.

        Raises:
            ConfigurationError: If the Accelerator has no `project_dir`.
            CheckpointError: If there are some and none is valid, or the newest one does not fit this run.
        """
        return self._checkpoints.resume()

    # --- trackers ----------------------------------------------------------------------------------------------------

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Open a run on every tracker of `log_with`.

        Args:
            config: Settings to record with it.
            init_kwargs: For the name of a tracker, further arguments of its constructor.
        """
        self._trackers.start(project_name, config, init_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by its name.

        Where nothing is recorded (on other processes than the main one) the object that comes back has every method,
        and none does anything.

        Args:
            unwrap: Return the object of the underlying package instead.

        Raises:
            ConfigurationError: There are trackers, but none of that name.
        """
        return self._trackers.get(name, unwrap=unwrap)

    def log(
        self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, dict[str, Any]] | None = None
    ) -> None:
        """Record values with every tracker.

        Args:
            log_kwargs: For the name of a tracker, further arguments of its `log`.
        """
        self._trackers.log(values, step, log_kwargs)

    def end_training(self) -> None:
        """Close every tracker, wait for the other processes, and leave the process group.

        The run is over after this; a second call does nothing.
        """
        if self._trackers.has_ended:
            return
        self._trackers.has_ended = True
        # Each of these runs, the last one first, also when one before it fails: the others must not wait for ever.
        with ExitStack() as steps:
            steps.callback(self.state.destroy_process_group)
            steps.callback(self._run_progress.stop_listening)
            if dist.is_available() and dist.is_initialized():
                steps.callback(self.state.wait_for_everyone)
            steps.callback(self._trackers.finish)
            steps.callback(self._checkpoints.checkpointer.close)
