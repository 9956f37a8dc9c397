"""Turn models, optimizers, schedulers and loaders into their prepared form, and keep them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import warn_once
from accelerate.config import env
from accelerate.data_loader import prepare_data_loader
from accelerate.data_loader.samplers import batch_size_of, check_splittable
from accelerate.optimizer import AcceleratedOptimizer, remap_optimizers
from accelerate.parallel.unwrap import extract_model_from_parallel, is_prepared_inside
from accelerate.runtime import current
from accelerate.runtime.gradient_clock import Progress
from accelerate.runtime.torch_private import follow_optimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.session.setup import Run
from accelerate.strategies.base import JointStrategy

_MARK = "_is_accelerate_prepared"
_EVALUATED = "_is_accelerate_prepared_for_evaluation"
_REPLACED = "_is_accelerate_replaced"


class ObjectKind(Enum):
    """What an argument of `prepare` is."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    LOADER = "loader"
    OTHER = "other"


_KINDS: tuple[tuple[type, ObjectKind], ...] = (
    (torch.nn.Module, ObjectKind.MODEL),
    (torch.optim.Optimizer, ObjectKind.OPTIMIZER),
    (LRScheduler, ObjectKind.SCHEDULER),
    (DataLoader, ObjectKind.LOADER),
)


@dataclass
class Argument:
    """One argument of `prepare`: what was given, and what goes back in its place."""

    given: Any
    kind: ObjectKind
    device_placement: bool | None
    result: Any


class Bundle:
    """The arguments of one call of `prepare`, in order and by kind.

    Args:
        args: The objects to prepare.
        device_placement: A flag per object, or None to use the default for all.
        loader_classes: Further classes that count as loaders.
        placeholders: Further classes that stand for an "optimizer", a "scheduler" or a "loader".

    Raises:
        ConfigurationError: If the flags do not match the objects, or an object was given twice.
    """

    def __init__(
        self,
        args: Sequence[Any],
        device_placement: Sequence[bool | None] | None = None,
        loader_classes: tuple[type, ...] = (),
        placeholders: Mapping[type, str] = MappingProxyType({}),
    ) -> None:
        if not args:
            raise ConfigurationError("prepare() was given nothing to prepare. Pass models, optimizers, loaders, ...")
        if device_placement is not None and len(device_placement) != len(args):
            raise ConfigurationError(
                f"device_placement={list(device_placement)!r} has {len(device_placement)} entries for {len(args)} "
                "objects. Give one entry per object: True, False, or None for the default."
            )
        stand_ins = ((known, ObjectKind(kind)) for known, kind in placeholders.items())
        kinds = (*((known, ObjectKind.LOADER) for known in loader_classes), *stand_ins, *_KINDS)
        self.arguments: list[Argument] = []
        seen: set[int] = set()
        for given, placement in zip(args, device_placement or [None] * len(args), strict=True):
            kind = next((kind for known, kind in kinds if isinstance(given, known)), ObjectKind.OTHER)
            is_loader_to_be = kind is ObjectKind.LOADER and isinstance(given, tuple(placeholders))
            # One that describes several loaders is given once for each of them.
            if kind is not ObjectKind.OTHER and id(given) in seen and not is_loader_to_be:
                raise ConfigurationError(
                    f"The same {kind.value} ({type(given).__name__}) was given twice to prepare(): it would be "
                    "wrapped twice. Give each object once."
                )
            seen.add(id(given))
            self.arguments.append(Argument(given, kind, placement, given))

    def of(self, *kinds: ObjectKind) -> Iterator[Argument]:
        """Return the arguments of the given kinds, in their order."""
        return (argument for argument in self.arguments if argument.kind in kinds)

    def results(self) -> Any:
        """Return what goes back to the caller: one object, or a tuple in the order of the arguments."""
        values = tuple(argument.result for argument in self.arguments)
        return values[0] if len(values) == 1 else values


@dataclass
class PreparedObjects:
    """The objects of a run. The lists stay the same ones, because other libraries read and edit them."""

    models: list[torch.nn.Module] = field(default_factory=list)
    """As hooks of other libraries expect them: the user's own, not the replica around it."""
    wrapped_models: list[torch.nn.Module] = field(default_factory=list)
    """As `prepare` returned them."""
    optimizers: list[AcceleratedOptimizer] = field(default_factory=list)
    schedulers: list[AcceleratedScheduler] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    custom: list[Any] = field(default_factory=list)
    """What was registered for checkpoints."""
    has_lomo: bool = False
    """Whether an optimizer updates weights inside the backward pass."""

    def forget(self) -> None:
        """Let go of all prepared objects."""
        for kept in (self.models, self.wrapped_models, self.optimizers, self.schedulers, self.loaders):
            kept.clear()
        self.has_lomo = False

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters of all models, each once."""
        seen: set[int] = set()
        for model in self.models:
            for parameter in model.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter


@dataclass
class Preparer:
    """Prepare the objects of a run, each kind in its way.

    Args:
        progress: What the first optimizer counts its updates in.
        state: What optimizers show as their `accelerator_state`.
    """

    run: Run
    objects: PreparedObjects
    progress: Progress
    state: Any

    def prepare(self, args: Sequence[Any], device_placement: Sequence[bool | None] | None) -> Any:
        """Prepare objects in any order and number; nothing is touched if one of them cannot work."""
        strategy = self.run.strategy
        bundle = Bundle(
            args, device_placement, self.run.options.dataloader_config.custom_classes, strategy.placeholders
        )
        self._check(bundle)
        if isinstance(strategy, JointStrategy):
            self._prepare_together(bundle, strategy)
            return bundle.results()
        if self.run.precision.joins_optimizer:
            self._join(bundle)
        given = [argument.given for argument in bundle.of(ObjectKind.OPTIMIZER)]
        for argument in bundle.of(ObjectKind.MODEL):
            argument.result = self._prepare_checked_model(
                argument.given, argument.device_placement, evaluation=False, optimizers=given
            )
        for argument in bundle.of(ObjectKind.OPTIMIZER):
            argument.result = self.prepare_optimizer(argument.given, argument.device_placement)
        for argument in bundle.of(ObjectKind.LOADER):
            argument.result = self.prepare_loader(argument.given, argument.device_placement)
        for argument in bundle.of(ObjectKind.SCHEDULER):
            argument.result = self.prepare_scheduler(argument.given)
        return bundle.results()

    def _prepare_together(self, bundle: Bundle, strategy: JointStrategy) -> None:
        """Let the engine make what takes the place of a model, its optimizer and its scheduler."""
        to_be = [
            entry for entry in bundle.of(ObjectKind.LOADER) if isinstance(entry.given, tuple(strategy.placeholders))
        ]
        for argument in bundle.of(ObjectKind.LOADER):
            if argument not in to_be:
                argument.result = self.prepare_loader(argument.given, argument.device_placement)
        kinds = (ObjectKind.MODEL, ObjectKind.OPTIMIZER, ObjectKind.SCHEDULER)
        models, optimizers, schedulers = (_unprepared(bundle, kind) for kind in kinds)
        loaders = [argument.given for argument in bundle.of(ObjectKind.LOADER)] or self.objects.loaders
        place = self._places(models[0].device_placement if models else None)
        made = strategy.prepare_together(
            [argument.given for argument in models],
            [argument.given for argument in optimizers],
            [argument.given for argument in schedulers],
            loaders,
            place=place,
        )
        for argument, model in zip(models, made.models, strict=True):
            setattr(model, _MARK, True)
            argument.given = argument.result = model
        for argument, optimizer in zip(optimizers, made.optimizers, strict=True):
            optimizer.accelerator_state = self.state
            setattr(optimizer, _MARK, True)
            argument.given = argument.result = optimizer
        for argument, scheduler in zip(schedulers, made.schedulers, strict=True):
            argument.given = scheduler
        for argument in bundle.of(ObjectKind.MODEL):
            self._prepare_checked_model(argument.given, None, evaluation=False)
        for argument in bundle.of(ObjectKind.OPTIMIZER):
            argument.result = self.prepare_optimizer(argument.given, None)
        for argument in bundle.of(ObjectKind.SCHEDULER):
            argument.result = self.prepare_scheduler(argument.given)
        for argument in bundle.of(ObjectKind.LOADER) if models else ():
            argument.result = self.share_sequences(argument.result)
        for argument, loader in zip(to_be, strategy.make_loaders([entry.given for entry in to_be]), strict=True):
            prepared = None if loader is None else self.prepare_loader(loader, argument.device_placement)
            argument.result = None if prepared is None else strategy.finish_loader(prepared)

    def share_sequences(self, loader: Any) -> Any:
        """Let ranks that split sequences work on the batches of a prepared loader together."""
        shared = self.run.strategy.share_sequences(loader)
        if shared is not loader:
            setattr(shared, _MARK, True)
            known = self.objects.loaders
            known[:] = [shared if entry is loader else entry for entry in known]
        return shared

    def _join(self, bundle: Bundle) -> None:
        """Let the number format replace models and optimizers together; schedulers follow their optimizer."""
        models, optimizers = (
            [argument for argument in bundle.of(kind) if not _is_prepared(argument.given)]
            for kind in (ObjectKind.MODEL, ObjectKind.OPTIMIZER)
        )
        moved = {id(argument.given) for argument in models if self._places(argument.device_placement)}
        joined = self.run.precision.join(
            [argument.given for argument in models],
            [argument.given for argument in optimizers],
            lambda model: self.run.strategy.place(model) if id(model) in moved else model,
        )
        for argument, new in zip((*models, *optimizers), (*joined[0], *joined[1]), strict=True):
            for scheduler in bundle.of(ObjectKind.SCHEDULER):
                if getattr(scheduler.given, "optimizer", None) is argument.given:
                    follow_optimizer(scheduler.given, new)
            argument.given = argument.result = new

    def _check(self, bundle: Bundle) -> None:
        """Refuse what cannot work before anything is changed."""
        options, strategy = self.run.options, self.run.strategy
        for argument in bundle.of(ObjectKind.MODEL):
            self._check_model(argument.given, evaluation=False)
        models = [*self.objects.wrapped_models, *(argument.given for argument in bundle.of(ObjectKind.MODEL))]
        if isinstance(strategy, JointStrategy):
            kinds = (ObjectKind.MODEL, ObjectKind.OPTIMIZER, ObjectKind.SCHEDULER)
            strategy.check_together(*([argument.given for argument in _unprepared(bundle, kind)] for kind in kinds))
        for argument in bundle.of(ObjectKind.OPTIMIZER):
            if not _is_prepared(argument.given) and isinstance(argument.given, torch.optim.Optimizer):
                self._check_optimizer(argument.given, models)
        if options.dataloader_config.split_batches and options.global_batch_size is None:
            for argument in bundle.of(ObjectKind.LOADER):
                if not _is_prepared(argument.given):
                    check_splittable(batch_size_of(argument.given), strategy.data_shard()[1])

    def _check_model(self, model: torch.nn.Module, *, evaluation: bool) -> None:
        if _is_prepared(model):
            return
        if any(is_prepared_inside(model, prepared) for prepared in self.objects.wrapped_models):
            raise ConfigurationError(
                f"This {type(model).__name__} was already prepared: wrapping it again would average its gradients twice. "
                "Use the object that prepare() returned."
            )
        if getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False):
            from accelerate.offload.quantised import check_places

            check_places(model, self.run.runtime.device)
        is_split = self.run.runtime.is_distributed and has_device_map(model)
        if is_split and env.get("ACCELERATE_BYPASS_DEVICE_MAP", "false") != "true":
            raise ConfigurationError(
                f"This {type(model).__name__} is spread over several devices by its `hf_device_map`, which cannot be "
                "replicated over processes. Load it on one device, or run a single process."
            )
        self.run.strategy.free_gathered(model)
        self.run.strategy.check_model(model, evaluation=evaluation)

    def _check_optimizer(self, optimizer: torch.optim.Optimizer, models: list[torch.nn.Module]) -> None:
        trained = self.run.strategy.trained
        known = {id(parameter) for model in models for parameter in trained(model.parameters())}
        _refuse_replaced(optimizer)
        if any(id(parameter) in known for group in optimizer.param_groups for parameter in trained(group["params"])):
            return
        if self.run.runtime.is_distributed and (models or self.run.strategy.caps.replicates):
            warn_once(
                f"The parameters of this {type(optimizer).__name__} are in no prepared model: until they are, every "
                "process trains them on its own data, and their gradients are not averaged. Give their model to the same "
                'prepare(), or average them before each step: `parameter.grad = accelerator.reduce(parameter.grad, "mean")`.',
                stacklevel=5,
            )

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None, *, evaluation: bool
    ) -> torch.nn.Module:
        """Prepare one model; `evaluation` leaves out what only training needs."""
        if isinstance(self.run.strategy, JointStrategy):
            prepared: torch.nn.Module = self.prepare([model], [device_placement])
            return prepared
        self._check_model(model, evaluation=evaluation)
        return self._prepare_checked_model(model, device_placement, evaluation=evaluation)

    def _prepare_checked_model(
        self,
        model: torch.nn.Module,
        device_placement: bool | None,
        *,
        evaluation: bool,
        optimizers: Sequence[Any] = (),
    ) -> torch.nn.Module:
        """Prepare a model; `optimizers`, and those that were prepared before it, follow to its new parameters."""
        prepared, strategy = model, self.run.strategy
        if not _is_prepared(model):
            before = list(model.parameters())
            self._follow_handlers()
            place = self._places(device_placement) and not has_device_map(model)
            prepared = strategy.prepare_model(model, place=place, evaluation=evaluation)
            setattr(prepared, _MARK, True)
            if evaluation:
                setattr(prepared, _EVALUATED, True)
            replaced = strategy.replaced(before, list(prepared.parameters()))
            for parameter in replaced:
                setattr(parameter, _REPLACED, True)
            if replaced:
                known = [*optimizers, *self.objects.optimizers]
                inner = (entry.optimizer if isinstance(entry, AcceleratedOptimizer) else entry for entry in known)
                remap_optimizers({id(optimizer): optimizer for optimizer in inner}.values(), replaced)
        elif not evaluation and getattr(model, _EVALUATED, False):
            prepared = self._train_evaluated_model(model)
        if not _holds(self.objects.wrapped_models, prepared):
            self.objects.wrapped_models.append(prepared)
            self.objects.models.append(extract_model_from_parallel(prepared) if strategy.caps.replicates else prepared)
        return prepared

    def _train_evaluated_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Put the engine's wrapper around a model that was prepared for evaluation, and is to be trained after all."""
        delattr(model, _EVALUATED)
        prepared = self.run.strategy.wrap(model)
        if prepared is not model:
            delattr(model, _MARK)
            setattr(prepared, _MARK, True)
            known = self.objects.wrapped_models
            known[:] = [prepared if entry is model else entry for entry in known]
        return prepared

    def _follow_handlers(self) -> None:
        """Take the options that programs set on the `Accelerator` after it was made, as Transformers' Trainer does."""
        handlers, strategy = self.run.options.handlers, self.run.strategy
        if handlers.ddp_handler is not None:
            strategy.context = replace(strategy.context, ddp=handlers.ddp_handler)
        self.run.precision.handler = handlers.autocast_handler

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None
    ) -> AcceleratedOptimizer:
        """Prepare one optimizer; the first of a run counts its updates."""
        if not isinstance(optimizer, AcceleratedOptimizer):
            _refuse_replaced(optimizer)
            prepared = AcceleratedOptimizer(
                optimizer,
                device_placement=self._places(device_placement),
                scaler=self.run.strategy.precision.scaler,
            )
            prepared.accelerator_state = self.state
            self.run.strategy.prepare_optimizer(optimizer)
            setattr(prepared, _MARK, True)
        else:
            prepared = optimizer
        if not _holds(self.objects.optimizers, prepared):
            prepared.progress = None if self.objects.optimizers else self.progress
            self.objects.optimizers.append(prepared)
            self.objects.has_lomo |= prepared.fused_backward
        return prepared

    def prepare_scheduler(self, scheduler: LRScheduler | AcceleratedScheduler) -> AcceleratedScheduler:
        """Prepare one scheduler; it follows the prepared optimizer that it was made for."""
        if isinstance(scheduler, AcceleratedScheduler):
            prepared = scheduler
        else:
            options = self.run.options
            optimizers, inner = self.objects.optimizers, getattr(scheduler, "optimizer", None)
            own = [entry for entry in optimizers if inner is entry or inner is entry.optimizer]
            shares = self.run.strategy.data_shard()[1]
            one_batch = options.global_batch_size is not None or options.dataloader_config.split_batches
            derived = None if shares == self.run.runtime.world_size else shares
            prepared = AcceleratedScheduler(
                scheduler,
                own or optimizers,
                step_with_optimizer=options.step_scheduler_with_optimizer,
                split_batches=options.dataloader_config.split_batches,
                steps_per_update=1 if one_batch else derived,
            )
            prepared.epoch_lengths = self._single_process_lengths(shares)
            setattr(prepared, _MARK, True)
        if not _holds(self.objects.schedulers, prepared):
            self.objects.schedulers.append(prepared)
        return prepared

    def _single_process_lengths(self, shares: int) -> list[int]:
        """Return how many steps a schedule written for one process may count in an epoch of each loader.

        That is the length of the loader before it was shared, or the length after it times the number of processes.
        """
        lengths = []
        steps = self.run.clock.num_steps
        for loader in self.objects.loaders:
            with suppress(TypeError, AttributeError):
                batches = getattr(loader.batch_sampler, "total_length", None) or len(loader)
                lengths += [-(-batches // steps), -(-len(loader) // steps) * shares]
        return lengths

    def prepare_loader(
        self,
        loader: Any,
        device_placement: bool | None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> Any:
        """Prepare one loader."""
        if _is_prepared(loader):
            if not _holds(self.objects.loaders, loader):
                self.objects.loaders.append(loader)
            return loader
        options = self.run.options
        config = options.dataloader_config
        loader = self.run.strategy.fit_batches(loader)
        # A mesh says by itself which ranks read the same data, and that they must agree on its order.
        mesh = current.ACCELERATOR.get("device_mesh")
        index, count = self.run.strategy.data_shard() if mesh is None else (None, None)
        prepared = prepare_data_loader(
            loader,
            device=self.run.runtime.device,
            num_processes=count,
            process_index=index,
            split_batches=config.split_batches,
            put_on_device=self._places(device_placement),
            rng_types=list(options.rng_types),
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
            torch_device_mesh=mesh,
            global_batch_size=options.global_batch_size,
            custom_classes=config.custom_classes,
        )
        self.run.strategy.share_batches(prepared)
        setattr(prepared, _MARK, True)
        self.objects.loaders.append(prepared)
        return prepared

    def _places(self, device_placement: bool | None) -> bool:
        return self.run.options.device_placement if device_placement is None else device_placement


def has_device_map(model: torch.nn.Module) -> bool:
    """Return whether the model is spread over several devices."""
    return any(len(getattr(module, "hf_device_map", {}) or {}) > 1 for module in model.modules())


def _refuse_replaced(optimizer: torch.optim.Optimizer) -> None:
    if any(hasattr(parameter, _REPLACED) for group in optimizer.param_groups for parameter in group["params"]):
        raise ConfigurationError(
            f"This {type(optimizer).__name__} has parameters that its model does not have any more: preparing the model "
            "replaced them, so they would not be trained. Pass both to one prepare(), or create the optimizer from the "
            "prepared model's parameters."
        )


def _unprepared(bundle: Bundle, kind: ObjectKind) -> list[Argument]:
    return [argument for argument in bundle.of(kind) if not _is_prepared(argument.given)]


def _is_prepared(value: object) -> bool:
    return bool(getattr(value, _MARK, False))


def _holds(known: Iterable[Any], value: Any) -> bool:
    return any(value is entry for entry in known)
