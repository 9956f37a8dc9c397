"""Turn models, optimizers, schedulers and loaders into their prepared form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import warn_once
from accelerate.accelerator.window import AccumulationWindow
from accelerate.config import env
from accelerate.config.plugins.training import DataLoaderConfiguration
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.parallel.unwrap import extract_model_from_parallel, is_prepared_inside
from accelerate.runtime import current
from accelerate.runtime.gradient_clock import GradientState, Progress
from accelerate.runtime.memory import clear_device_cache
from accelerate.scheduler import AcceleratedScheduler
from accelerate.session.bundle import Bundle, Kind
from accelerate.session.following import follow
from accelerate.state import AcceleratorState
from accelerate.strategies.base import Strategy

_MARK = "_is_accelerate_prepared"


class PreparingMixin:
    """`prepare` and its relatives."""

    state: AcceleratorState
    strategy: Strategy
    dataloader_config: DataLoaderConfiguration
    device_placement: bool
    step_scheduler_with_optimizer: bool
    rng_types: list[Any]
    global_batch_size: int | None
    step: int
    _models: list[torch.nn.Module]
    _prepared_models: list[torch.nn.Module]
    _optimizers: list[AcceleratedOptimizer]
    _schedulers: list[AcceleratedScheduler]
    _dataloaders: list[Any]
    _window: AccumulationWindow
    _progress: Progress
    _has_lomo: bool

    @property
    def split_batches(self) -> bool:
        """Return whether one batch is split over all processes."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Return whether the main process reads for all, None for automatic."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Return whether all processes get the same number of batches of the same size."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config.even_batches = even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Return whether shuffles are seeded by `data_seed` or torch's initial seed."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Return whether batches are moved to the device without waiting."""
        return self.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Return whether loaders are built on torchdata's stateful one."""
        return self.dataloader_config.use_stateful_dataloader

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
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
        if not args:
            raise ConfigurationError("prepare() was given nothing to prepare. Pass models, optimizers, loaders, ...")
        bundle = Bundle(args, device_placement, self.dataloader_config.custom_classes)
        self._check(bundle)
        preparers: tuple[tuple[Kind, Callable[..., Any]], ...] = (
            (Kind.MODEL, self.prepare_model),
            (Kind.OPTIMIZER, self.prepare_optimizer),
            (Kind.LOADER, self.prepare_data_loader),
        )
        before = {id(slot): list(slot.given.parameters()) for slot in bundle.of(Kind.MODEL)}
        for kind, prepare in preparers:
            for slot in bundle.of(kind):
                slot.result = prepare(slot.given, device_placement=slot.device_placement)
            if kind is Kind.MODEL:
                self._follow_moved(bundle, before)
        for slot in bundle.of(Kind.SCHEDULER):
            slot.result = self.prepare_scheduler(slot.given)
        return bundle.results()

    def _follow_moved(self, bundle: Bundle, before: dict[int, list[torch.nn.Parameter]]) -> None:
        """Point optimizers to the parameters that preparing their models had to replace by new ones."""
        moved: dict[torch.nn.Parameter, torch.nn.Parameter | None] = {}
        for slot in bundle.of(Kind.MODEL):
            moved |= self.strategy.replaced(before[id(slot)], list(slot.result.parameters()))
        if moved:
            # Those that were prepared before their model follow it as well.
            given = [slot.given for slot in bundle.of(Kind.OPTIMIZER)]
            inner = map(_inner_optimizer, (*given, *self._optimizers))
            follow({id(optimizer): optimizer for optimizer in inner}.values(), moved)

    def _check(self, bundle: Bundle) -> None:
        """Refuse what cannot work before anything is changed."""
        for slot in bundle.of(Kind.MODEL):
            if not _is_prepared(slot.given):
                self._check_model(slot.given)
        models = [*self._prepared_models, *(slot.given for slot in bundle.of(Kind.MODEL))]
        for slot in bundle.of(Kind.OPTIMIZER):
            if not _is_prepared(slot.given):
                self._check_optimizer(slot.given, models)
        for slot in bundle.of(Kind.LOADER):
            if not _is_prepared(slot.given):
                self._check_loader(slot.given)

    def _check_model(self, model: torch.nn.Module) -> None:
        if any(is_prepared_inside(model, prepared) for prepared in self._prepared_models):
            raise ConfigurationError(
                f"This {type(model).__name__} was already prepared: wrapping it again would average its gradients twice. "
                "Use the object that prepare() returned."
            )
        bypass = env.get("ACCELERATE_BYPASS_DEVICE_MAP", "false") == "true"
        if current.runtime().is_distributed and self.verify_device_map(model) and not bypass:
            raise ConfigurationError(
                f"This {type(model).__name__} is spread over several devices by its `hf_device_map`, which cannot be "
                "replicated over processes. Load it on one device, or run a single process."
            )
        self.strategy.check_model(model)

    def _check_optimizer(self, optimizer: torch.optim.Optimizer, models: list[torch.nn.Module]) -> None:
        known = {id(parameter) for model in models for parameter in model.parameters()}
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(id(parameter) in known for parameter in own):
            return
        name = type(optimizer).__name__
        if models:
            raise ConfigurationError(
                f"The parameters of this {name} belong to none of the {len(models)} prepared model(s), so it would train "
                "nothing that was prepared. Give prepare() the model it optimizes, or build the optimizer from the "
                "prepared model's parameters."
            )
        if self.strategy.caps.replicates:
            warn_once(
                f"This {name} was prepared without its model: until the model is prepared too, every process trains "
                "a model of its own. Pass both to one prepare()."
            )

    def _check_loader(self, loader: Any) -> None:
        if self.dataloader_config.split_batches and self.global_batch_size is None:
            from accelerate.data_loader.samplers import check_splittable

            check_splittable(getattr(loader, "batch_size", None), self.strategy.data_shard()[1])

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Prepare one model; `evaluation_mode` leaves out what only training needs."""
        if _is_prepared(model):
            if not any(model is known for known in self._prepared_models):
                self._remember_model(model)
            return model
        self._check_model(model)
        place = self.device_placement if device_placement is None else device_placement
        place = place and not self.verify_device_map(model)
        prepared = self.strategy.prepare_model(model, place=place, evaluation=evaluation_mode)
        setattr(prepared, _MARK, True)
        self._remember_model(prepared)
        return prepared

    def _remember_model(self, prepared: torch.nn.Module) -> None:
        self._prepared_models.append(prepared)
        # Hooks of other libraries look at the models of a run and expect the user's own, not the replica around it.
        self._models.append(extract_model_from_parallel(prepared) if self.strategy.caps.replicates else prepared)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare one optimizer."""
        if isinstance(optimizer, AcceleratedOptimizer):
            if not any(optimizer is known for known in self._optimizers):
                optimizer._progress = None if self._optimizers else self._progress
                self._optimizers.append(optimizer)
            return optimizer
        place = self.device_placement if device_placement is None else device_placement
        prepared = AcceleratedOptimizer(optimizer, device_placement=place, scaler=self.strategy.precision.scaler)
        prepared.accelerator_state = self.state  # type: ignore[attr-defined]
        setattr(prepared, _MARK, True)
        if not self._optimizers:
            prepared._progress = self._progress  # one of them counts the updates of the run
        self._optimizers.append(prepared)
        self._has_lomo = any(entry._fused_backward for entry in self._optimizers)
        return prepared

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Prepare one scheduler; it follows the prepared optimizer that it was made for."""
        if isinstance(scheduler, AcceleratedScheduler):
            if not any(scheduler is known for known in self._schedulers):
                self._schedulers.append(scheduler)
            return scheduler
        inner = getattr(scheduler, "optimizer", None)
        own = [entry for entry in self._optimizers if inner is entry or inner is entry.optimizer]
        prepared = AcceleratedScheduler(
            scheduler,
            own or self._optimizers,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
            steps_per_update=self._steps_per_update(),
        )
        prepared.written_for(self._single_process_lengths())
        setattr(prepared, _MARK, True)
        self._schedulers.append(prepared)
        return prepared

    def _steps_per_update(self) -> int | None:
        """Return how many batches of one process an optimizer step takes, None where that is their number."""
        if self.global_batch_size is not None or self.split_batches:
            return 1
        shares = self.strategy.data_shard()[1]
        return None if shares == current.runtime().world_size else shares

    def _single_process_lengths(self) -> list[int]:
        """Return how many steps a schedule written for one process may count in an epoch of each loader.

        That is the length of the loader before it was shared, or the length after it times the number of processes.
        """
        lengths = []
        steps, processes = GradientState().num_steps, self.strategy.data_shard()[1]
        for loader in self._dataloaders:
            with suppress(TypeError, AttributeError):
                batches = getattr(loader.batch_sampler, "total_length", None) or len(loader)
                lengths += [-(-batches // steps), -(-len(loader) // steps) * processes]
        return lengths

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
        if _is_prepared(data_loader):
            if not any(data_loader is known for known in self._dataloaders):
                self._dataloaders.append(data_loader)
            return data_loader
        place = self.device_placement if device_placement is None else device_placement
        config = self.dataloader_config
        mesh = self.state.device_mesh
        # A mesh says by itself which ranks read the same data, and that they must agree on its order.
        index, count = self.strategy.data_shard() if mesh is None else (None, None)
        prepared = prepare_data_loader(
            data_loader,
            device=current.runtime().device,
            num_processes=count,
            process_index=index,
            split_batches=config.split_batches,
            put_on_device=place,
            rng_types=list(self.rng_types),
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
            torch_device_mesh=mesh,
            global_batch_size=self.global_batch_size,
            custom_classes=config.custom_classes,
        )
        setattr(prepared, _MARK, True)
        self._dataloaders.append(prepared)
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return a loader that starts `num_batches` batches in."""
        return skip_first_batches(dataloader, num_batches=num_batches)

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: torch.nn.Module) -> Any:
        """Return a loader for DeepSpeed's sequence parallelism; the loader itself where that is not in use."""
        return dl

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Return whether the model is spread over several devices."""
        return any(len(getattr(module, "hf_device_map", {}) or {}) > 1 for module in model.modules())

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
        for kept in (self._models, self._prepared_models, self._optimizers, self._schedulers, self._dataloaders):
            kept.clear()
        self.step = 0
        self._progress.restart()
        self._has_lomo = False
        self._window = AccumulationWindow()
        clear_device_cache(garbage_collection=True)
        return [None] * count

    def clear(self, *objects: Any) -> list[Any]:
        """Do the same as `free_memory`."""
        return self.free_memory(*objects)


def _inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _is_prepared(value: object) -> bool:
    return bool(getattr(value, _MARK, False))
