"""What a strategy is: the interface, which is training on a single device, and what it is selected and made with.

The way of a strategy through a run:

- select: `selected`, `label`; `caps` say what it can do, so that nobody compares names
- prepare: `check_model`, `prepare_model` (= `steps`, with `convert`, `place` and `wrap` among them), `replaced`,
  `prepare_optimizer`, `data_shard`, `share_batches`; `check_together` and `prepare_together` where an engine makes one object of a model and its optimizer
- train: `no_sync`, `backward`, `scale_gradients`, `clip_grad_norm`, `clip_grad_value`
- state: `full_state_dict`, `checkpoint_parts`, `open_gradients`, `set_open_gradients`, `gradient_share`, `release`
"""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from accelerate._base.enums import DistributedType, DynamoBackend
from accelerate._base.errors import ConfigurationError, WrongTypeError
from accelerate._base.helpers import Choice
from accelerate.checkpointing.parts import (
    ModelPart,
    OptimizerPart,
    Part,
    Prepared,
    ScalerPart,
    SchedulerPart,
)
from accelerate.checkpointing.run_parts import LoaderPart
from accelerate.config import env
from accelerate.config.plugins.fsdp import FullyShardedDataParallelPlugin
from accelerate.config.plugins.training import DistributedDataParallelKwargs, TorchDynamoPlugin
from accelerate.data_loader.samplers import data_shard
from accelerate.offload.tensors import move_module
from accelerate.parallel.compile import compile_module, compile_regions
from accelerate.parallel.mesh import GradientShare, axis_rank, gradient_share
from accelerate.parallel.unwrap import (
    extract_model_from_parallel,
    has_compiled_regions,
    is_compiled_module,
    plain_name,
)
from accelerate.parallelism_config import ParallelismConfig
from accelerate.precision.formats import Precision
from accelerate.runtime import current
from accelerate.runtime.current import Runtime
from accelerate.strategies.sharded_units import ShardedUnits

if TYPE_CHECKING:  # most runs have no mesh and no engine
    from torch.distributed.device_mesh import DeviceMesh

    from accelerate.config.plugins.deepspeed import DeepSpeedPlugin
    from accelerate.config.plugins.megatron import MegatronLMPlugin

Step = Callable[[torch.nn.Module], torch.nn.Module]


_ENGINE_SWITCHES = {
    "deepspeed": "ACCELERATE_USE_DEEPSPEED",
    "fsdp": "ACCELERATE_USE_FSDP",
    "megatron": "ACCELERATE_USE_MEGATRON_LM",
}


@dataclass(frozen=True)
class EngineRequest:
    """Which engines a program asks for, by a plugin or by the launcher's switch in the environment.

    Args:
        engines: Name of the engine -> its plugin, or None where only the switch is set.
        parallelism: The sizes of the axes of model parallelism, if given.
    """

    engines: dict[str, Any] = field(default_factory=dict)
    parallelism: ParallelismConfig | None = None

    @classmethod
    def from_plugins(cls, *, parallelism: ParallelismConfig | None = None, **plugins: Any) -> EngineRequest:
        """Collect the plugins that are there and the engines that the environment switches on.

        Raises:
            WrongTypeError: If what was given for an engine is no plugin of it.
        """
        engines = dict.fromkeys(name for name, switch in _ENGINE_SWITCHES.items() if env.flag(switch))
        engines.update({name: plugin for name, plugin in plugins.items() if plugin is not None})
        if "fsdp" in engines:
            given = engines["fsdp"]
            if given is not None and not isinstance(given, FullyShardedDataParallelPlugin):
                raise WrongTypeError(
                    f"fsdp_plugin={given!r} is a {type(given).__name__}, which says nothing of sharding. "
                    "Pass a FullyShardedDataParallelPlugin(...)."
                )
            # Without a plugin the options are in the launcher's variables.
            engines["fsdp"] = FullyShardedDataParallelPlugin() if given is None else given
        if "deepspeed" in engines:
            engines["deepspeed"] = _deepspeed_plugins(engines["deepspeed"])
        if "megatron" in engines:
            engines["megatron"] = _megatron_plugin(engines["megatron"])
        return cls(engines, parallelism)


def _deepspeed_plugins(given: Any) -> dict[str, DeepSpeedPlugin]:
    """Return the settings of DeepSpeed by name; a single plugin has the name "default"."""
    from accelerate.config.plugins.deepspeed import DeepSpeedPlugin

    if given is None:
        # Another Accelerator of the same process has those of the first; else they are in the launcher's variables.
        earlier: dict[str, DeepSpeedPlugin] | None = current.ACCELERATOR.get("deepspeed_plugins")
        return earlier if earlier is not None else {"default": DeepSpeedPlugin()}
    plugins = given if isinstance(given, dict) else {"default": given}
    wrong = {name: plugin for name, plugin in plugins.items() if not isinstance(plugin, DeepSpeedPlugin)}
    if wrong or not plugins:
        raise WrongTypeError(
            f"deepspeed_plugin={given!r} is neither a plugin of DeepSpeed nor a dictionary of such. Pass a "
            "DeepSpeedPlugin(...), or {'name': DeepSpeedPlugin(...), ...}."
        )
    return dict(plugins)


def _megatron_plugin(given: Any) -> MegatronLMPlugin:
    """Return the settings of Megatron-LM; those that were not given are an earlier run's, or the launcher's."""
    from accelerate.config.plugins.megatron import MegatronLMPlugin

    if given is None:
        earlier: MegatronLMPlugin | None = current.ACCELERATOR.get("megatron_lm_plugin")
        return earlier if earlier is not None else MegatronLMPlugin()
    if not isinstance(given, MegatronLMPlugin):
        raise WrongTypeError(
            f"megatron_lm_plugin={given!r} is a {type(given).__name__}, which says nothing of Megatron-LM. Pass a "
            "MegatronLMPlugin(...)."
        )
    return given


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do: the rest of the library asks here instead of comparing names.

    Args:
        replicates: Every rank holds the whole model and gradients are averaged between ranks.
        joinable: Ranks may have different numbers of batches under `join_uneven_inputs`.
        clips_by_value: Gradients can be clipped element by element.
        holds_back_gradients: The exchange of gradients can wait until an accumulation window closes.
        hides_open_gradients: Gradients are not in the parameters until they were exchanged.
        owns_precision: The engine itself computes in the number format, and scales losses.
    """

    replicates: bool = False
    joinable: bool = False
    clips_by_value: bool = True
    holds_back_gradients: bool = False
    hides_open_gradients: bool = False
    owns_precision: bool = False


@dataclass(frozen=True)
class PreparedTogether:
    """What takes the place of objects that were prepared in one go; schedulers of torch stay as they are."""

    models: tuple[torch.nn.Module, ...]
    optimizers: tuple[Any, ...]
    schedulers: tuple[Any, ...]


class AcceleratorReference:
    """Weak reference that can be pickled together with its object: an `Accelerator` is freed as soon as nothing uses it."""

    def __init__(self, owner: object) -> None:
        self._reference = weakref.ref(owner)

    def __call__(self) -> Any:
        return self._reference()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self(),)


@dataclass(frozen=True)
class StrategyContext:
    """What a strategy works with: the process, the number format and the user's options."""

    runtime: Runtime
    precision: Precision
    dynamo: TorchDynamoPlugin
    ddp: DistributedDataParallelKwargs = field(default_factory=DistributedDataParallelKwargs)
    parallelism: ParallelismConfig | None = None
    fsdp: FullyShardedDataParallelPlugin | None = None
    accelerator: AcceleratorReference | None = None
    """Refers to the `Accelerator` of the run, which functions expect that other libraries replace."""


class Strategy:
    """Train on one device. Engines override what they do differently.

    Args:
        context: The process, the number format and the options of the run.
    """

    name: ClassVar[str] = "single"
    engine: ClassVar[str | None] = None
    """The engine whose plugin selects this strategy, None where no plugin is needed."""
    caps: ClassVar[Capabilities] = Capabilities()
    placeholders: ClassVar[Mapping[type, str]] = {}
    """Further classes that `prepare` takes for an "optimizer", a "scheduler" or a "loader"."""
    prepare_method: ClassVar[str | None] = None
    """The method of `Accelerator` that prepares for this strategy, where other libraries replace it."""

    def __init__(self, context: StrategyContext) -> None:
        self.context = context
        self.runtime = context.runtime
        self.precision = context.precision

    @cached_property
    def sharded_units(self) -> ShardedUnits:
        """Return the modules of all models that FSDP 2 shards, also of models that arrive sharded."""
        return ShardedUnits()

    @property
    def _has_sharded_units(self) -> bool:
        return "sharded_units" in vars(self)  # the cached property was read

    @classmethod
    def selected(cls, request: EngineRequest, runtime: Runtime) -> Choice[bool]:
        """Decide whether this strategy runs what was asked for."""
        return Choice(not runtime.is_distributed, f"there are {runtime.world_size} process(es)")

    @classmethod
    def label(cls, runtime: Runtime) -> DistributedType:
        """Return the name of this regime in the public enumeration."""
        return DistributedType.NO

    @classmethod
    def main_rank(cls, runtime: Runtime) -> int:
        """Return the rank that prints, logs and saves for all."""
        return 0

    @classmethod
    def lay_out(cls, sizes: ParallelismConfig, runtime: Runtime) -> DeviceMesh | None:
        """Lay the axes of model parallelism out over the processes, and return their mesh.

        Raises:
            ConfigurationError: If the sizes do not fit.
        """
        sizes.fit(runtime.world_size)
        return sizes.get_device_mesh(runtime.device.type)

    def free_gathered(self, model: torch.nn.Module) -> None:
        """Free the full parameters that a model holds, if it arrives sharded and after a forward pass."""
        fsdp = sys.modules.get("torch.distributed.fsdp")  # without it nothing is sharded
        if fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules()):
            self.sharded_units.add(model)

    def trained(self, parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters that optimizers update in place of those given."""
        if self._has_sharded_units:
            return self.sharded_units.trained(parameters)
        return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)

    def check_model(self, model: torch.nn.Module, *, evaluation: bool) -> None:
        """Raise a ConfigurationError, before anything is touched, if this strategy cannot prepare `model`."""

    def steps(self, *, place: bool, evaluation: bool) -> tuple[Step, ...]:
        """Return what is done to a model, in order.

        Autocast goes innermost, so that wrappers see float32 outputs; blocks are compiled before the model is wrapped
        and a whole model after, because each compiler wants to see, respectively not to see, the wrapper.
        """
        chain: list[Step] = [self.precision.wrap_forward] if evaluation else [self.convert, self.precision.wrap_forward]
        if place:
            chain.append(self.place)
        chain.append(self.compile_blocks)
        if not evaluation:
            chain.append(self.wrap)
        chain.append(self.compile_whole)
        return tuple(chain)

    def prepare_model(self, model: torch.nn.Module, *, place: bool, evaluation: bool) -> torch.nn.Module:
        """Return `model` ready for training, or for evaluation only."""
        for step in self.steps(place=place, evaluation=evaluation):
            model = step(model)
        return model

    def convert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Replace layers by those of the number format."""
        return self.precision.convert(model)

    def place(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move a model to the device of this process; a quantised one stays where it was loaded."""
        if getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False):
            return model
        device = self.runtime.device
        if all(tensor.device == device for tensor in chain(model.parameters(), model.buffers())):
            return model
        return move_module(model, device)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Put the engine's wrapper around a model."""
        return model

    @property
    def compiles(self) -> bool:
        """Return whether models are compiled."""
        dynamo = self.context.dynamo
        return dynamo.backend != DynamoBackend.NO and not dynamo.disable

    def compile_blocks(self, model: torch.nn.Module) -> torch.nn.Module:
        """Compile repeated blocks one by one, where that was asked for."""
        dynamo = self.context.dynamo
        if not self.compiles or not dynamo.use_regional_compilation or has_compiled_regions(model):
            return model
        return compile_regions(model, **dynamo.to_kwargs())

    def compile_whole(self, model: torch.nn.Module) -> torch.nn.Module:
        """Compile the model as a whole, where that was asked for."""
        dynamo = self.context.dynamo
        if not self.compiles or dynamo.use_regional_compilation or is_compiled_module(model):
            return model
        return compile_module(model, **dynamo.to_kwargs())

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer know of what the strategy does at its steps, and of parameters that are sharded."""
        if self._has_sharded_units:
            self.sharded_units.follow(optimizer)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which backward passes do not exchange gradients."""
        return nullcontext()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients of `loss`, scaled up in float16 so that small ones do not vanish."""
        scaler = self.precision.scaler
        (loss if scaler is None else scaler.scale(loss)).backward(**kwargs)

    def scale_gradients(self, parameters: Iterable[torch.nn.Parameter], factor: torch.Tensor | float) -> None:
        """Multiply the gradients that are there by `factor`."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def clip_grad_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale gradients down so that their total norm is at most `max_norm`, and return the norm they had."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Limit each element of the gradients to the range from `-clip_value` to `clip_value`."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def open_gradients(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return the whole gradients that this rank has summed up in a window that is open, by names in the user's model."""
        named = model.named_parameters()
        return {plain_name(name): parameter.grad for name, parameter in named if parameter.grad is not None}

    def set_open_gradients(self, model: torch.nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Go on in a window with what was summed up in it; a parameter that is not named has no gradient."""
        for name, parameter in model.named_parameters():
            gradient = gradients.get(plain_name(name))
            parameter.grad = None if gradient is None else gradient.to(parameter.device)

    def full_state_dict(self, model: torch.nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """Return all weights of a model, gathered where they are sharded."""
        return (extract_model_from_parallel(model) if unwrap else model).state_dict()

    def checkpoint_parts(self, prepared: Prepared) -> list[Part]:
        """Return what is saved of the prepared objects and the gradient scaler, in the order in which it is restored."""
        parts = self.weight_parts(prepared)
        parts += [SchedulerPart(scheduler, i) for i, scheduler in enumerate(prepared.schedulers)]
        parts += [
            LoaderPart(loader, i, rank=self.runtime.rank, restores=prepared.restore_positions, others=prepared.loaders)
            for i, loader in enumerate(prepared.loaders)
        ]
        if self.precision.scaler is not None:
            parts.append(ScalerPart(self.precision.scaler))
        return parts

    def weight_parts(self, prepared: Prepared) -> list[Part]:
        """Return the parts of the models and of their optimizers."""
        safe = prepared.safe_serialization
        return [
            *(ModelPart(model, i, safe_serialization=safe) for i, model in enumerate(prepared.models)),
            *(OptimizerPart(optimizer, i) for i, optimizer in enumerate(prepared.optimizers)),
        ]

    def fit_batches(self, loader: Any) -> Any:
        """Return a loader that is to be prepared with batches of the size that a step takes."""
        return loader

    def share_batches(self, loader: Any) -> None:
        """Let the devices of this process share the batches of a prepared loader, where it has several."""

    def share_sequences(self, loader: Any) -> Any:
        """Return a loader for ranks that work on parts of the same sequences; the loader itself where none do."""
        return loader

    def release(self) -> None:
        """Let go of what was made for the prepared objects."""

    def _axis_sizes(self) -> dict[str, int]:
        """Return the ranks along each axis of the mesh; none without one."""
        layout = self.context.parallelism
        return {} if layout is None or layout.device_mesh is None else layout.sizes

    def data_shard(self) -> tuple[int, int]:
        """Return which share of the data this process reads, and of how many; ranks of one model read the same."""
        return data_shard(self.runtime.rank, self.runtime.world_size, self._axis_sizes())

    def repeats_rows(self) -> bool:
        """Return whether this process has the same rows as another: ranks that split layers, or hold other ones."""
        mesh = current.ACCELERATOR.get("device_mesh")
        return axis_rank(mesh, "tp") + axis_rank(mesh, "pp") > 0

    def gradient_share(self) -> GradientShare:
        """Return which gradients this process sums up: of its data, and of its layers."""
        rank, world_size, sizes = self.runtime.rank, self.runtime.world_size, self._axis_sizes()
        return gradient_share(rank, world_size, sizes) if sizes else GradientShare(rank, world_size)

    def replaced(
        self, before: Sequence[torch.nn.Parameter], after: Sequence[torch.nn.Parameter]
    ) -> dict[torch.nn.Parameter, torch.nn.Parameter | None]:
        """Return the parameters in place of those that preparation replaced; None for one trained on another rank.

        torch keeps a parameter's identity in a move between most devices, but not to those whose tensors are of
        another kind (XLA, meta), nor when it is split over ranks.
        """
        pairs = zip(before, after, strict=False)
        return {old: new for old, new in pairs if old is not new and old.shape == new.shape}


class JointStrategy(Strategy, ABC):
    """Train with an engine that makes one object of a model, its optimizer and its scheduler."""

    title: ClassVar[str]
    """The name of the engine, for messages."""

    def check_one_of_each(
        self, models: Sequence[Any], optimizers: Sequence[Any], schedulers: Sequence[Any], *, several: str, alone: str
    ) -> None:
        """Refuse several of a kind, and an optimizer or a scheduler without its model.

        Args:
            several: What to write instead of several.
            alone: Why the model is needed, and what to write.
        """
        for what, given in (("model", models), ("optimizer", optimizers), ("scheduler", schedulers)):
            if len(given) > 1:
                names = ", ".join(type(entry).__name__ for entry in given)
                raise ConfigurationError(
                    f"prepare() was given {len(given)} {what}s ({names}) under {self.title}, whose engine holds one. Call prepare() "
                    f"for each model, with its optimizer and scheduler{several}."
                )
        if (optimizers or schedulers) and not models:
            name = type([*optimizers, *schedulers][0]).__name__
            raise ConfigurationError(
                f"prepare() was given {name} without its model, or with one that was prepared without it, but {alone}"
            )

    @abstractmethod
    def check_together(self, models: Sequence[Any], optimizers: Sequence[Any], schedulers: Sequence[Any]) -> None:
        """Raise a ConfigurationError, before anything is touched, if these cannot be prepared in one go."""

    @abstractmethod
    def prepare_together(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[Any],
        schedulers: Sequence[Any],
        loaders: Sequence[Any],
        *,
        place: bool,
    ) -> PreparedTogether:
        """Prepare a model, its optimizer and its scheduler in one go.

        Args:
            loaders: What the model is trained with, prepared or not.
            place: Move the model to the device of this process.
        """

    def make_loaders(self, placeholders: Sequence[Any]) -> list[Any]:
        """Return the loaders that placeholders stand for, None for one without data; they are prepared afterwards."""
        return []

    def finish_loader(self, loader: Any) -> Any:
        """Return what a program gets in the place of a prepared loader that a placeholder stood for."""
        return loader
