"""DeepSpeed's ZeRO: an engine holds the model, its optimizer and its gradients in shards, and steps them together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from accelerate._base.enums import DistributedType
from accelerate._base.errors import ConfigurationError, UsageError
from accelerate._base.helpers import Choice
from accelerate._base.imports import require
from accelerate.checkpointing.parts import Part, Prepared
from accelerate.collectives.nested import recursively_apply
from accelerate.config.deepspeed import Fact, complete, hidden_size_facts, precision_of
from accelerate.config.plugins.deepspeed import DeepSpeedPlugin
from accelerate.parallel.compile import compile_regions_deepspeed
from accelerate.runtime import current
from accelerate.runtime.current import Runtime
from accelerate.runtime.gradient_clock import GradientState
from accelerate.runtime.torch_private import follow_optimizer
from accelerate.strategies.base import Capabilities, EngineRequest, JointStrategy, PreparedTogether, StrategyContext
from accelerate.strategies.deepspeed.config_facts import (
    HALVES,
    batch_size_facts,
    hidden_size,
    optimizer_facts,
    scheduler_facts,
    tensor_parallel_size,
)
from accelerate.strategies.deepspeed.engine import (
    DeepSpeedEngineWrapper,
    is_training_engine,
    open_gradients,
    set_open_gradients,
)
from accelerate.strategies.deepspeed.setup import set_up_process
from accelerate.strategies.deepspeed.wrappers import (
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    DummyOptim,
    DummyScheduler,
    map_pytorch_optim_to_deepspeed,
)

if TYPE_CHECKING:  # most runs split no sequences
    from accelerate.strategies.deepspeed.sequence import SplitAttention

_WHY = "DeepSpeedPlugin"


def _is_single(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


class DeepSpeedStrategy(JointStrategy):
    """Train with the engines that `deepspeed.initialize` makes, one for each model."""

    name: ClassVar[str] = "deepspeed"
    engine: ClassVar[str | None] = "deepspeed"
    title: ClassVar[str] = "DeepSpeed"
    caps: ClassVar[Capabilities] = Capabilities(clips_by_value=False, hides_open_gradients=True, owns_precision=True)
    placeholders: ClassVar[Mapping[type, str]] = {DummyOptim: "optimizer", DummyScheduler: "scheduler"}

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self.engines: list[DeepSpeedEngineWrapper] = []
        """Those of models that are trained, in the order in which they were prepared."""
        self._holds_back = False
        self._split: SplitAttention | None = None
        """The attention that is split along the sequence, once there is a model that has it."""
        set_up_process(self.runtime)
        plugins = list(self.plugins.values())
        if not any(plugin.selected for plugin in plugins):
            plugins[0].select(_from_accelerator_state=True)

    @cached_property
    def _clock(self) -> GradientState:
        return GradientState()

    @classmethod
    def selected(cls, request: EngineRequest, runtime: Runtime) -> Choice[bool]:
        """Take the runs that have a plugin of DeepSpeed, or its switch."""
        return Choice("deepspeed" in request.engines, "DeepSpeed was asked for")

    @classmethod
    def label(cls, runtime: Runtime) -> DistributedType:
        """Return DEEPSPEED, also for one process."""
        return DistributedType.DEEPSPEED

    @property
    def plugins(self) -> Mapping[str, DeepSpeedPlugin]:
        """Return the settings that were given, by name."""
        plugins: Mapping[str, DeepSpeedPlugin] = current.ACCELERATOR["deepspeed_plugins"]
        return plugins

    @property
    def plugin(self) -> DeepSpeedPlugin:
        """Return the settings in force; a program with several selects among them."""
        return next(plugin for plugin in self.plugins.values() if plugin.selected)

    @property
    def _sequence_ranks(self) -> int:
        """Return over how many ranks a sequence is split."""
        layout = self.context.parallelism
        return 1 if layout is None else layout.sizes["sp"]

    @property
    def engine_wrapped(self) -> DeepSpeedEngineWrapper | None:
        """Return the engine that was prepared last for training."""
        return self.engines[-1] if self.engines else None

    # --- prepare -----------------------------------------------------------------------------------------------------

    def check_together(self, models: Sequence[Any], optimizers: Sequence[Any], schedulers: Sequence[Any]) -> None:
        """Refuse what no engine can be made of, before anything is touched."""
        self.check_one_of_each(
            models,
            optimizers,
            schedulers,
            several="; deepspeed_plugins={...} gives each its own settings",
            alone="DeepSpeed's engine is made of both together. Write model, optimizer = accelerator.prepare(model, optimizer), "
            "before the model is prepared for evaluation; with Transformers' Trainer, call train() before evaluate().",
        )
        config = self.plugin.deepspeed_config
        if self.engines and optimizers:
            self._check_torch_style()
        device = require("deepspeed.accelerator", why=_WHY, extra="deepspeed").get_accelerator()
        if precision_of(config) == "fp16" and not device.is_fp16_supported():
            raise ConfigurationError(
                f"mixed_precision='fp16' (fp16.enabled of DeepSpeed's configuration) was asked for, but DeepSpeed does not compute "
                f"in it on this {device.device_name()}. Write mixed_precision='bf16' or 'no'."
            )
        for given, section, kind in (
            (optimizers, "optimizer", DummyOptim),
            (schedulers, "scheduler", DummyScheduler),
        ):
            for entry in given:
                is_dummy = isinstance(entry, kind)
                if is_dummy and section not in config and getattr(entry, "lr_scheduler_callable", None) is None:
                    raise ConfigurationError(
                        f"A {kind.__name__} was given, which stands for the {section} of DeepSpeed's configuration, but "
                        f"that has the entries {', '.join(map(repr, config))} only. Add {section!r} to it, or pass a "
                        f"{section} of torch."
                    )
                if not is_dummy and section in config:
                    raise ConfigurationError(
                        f"{type(entry).__name__} was given as the {section}, but DeepSpeed's configuration has one too: "
                        f"{section}.type={config[section].get('type')!r}. Pass a {kind.__name__} in its place, or remove "
                        f"{section!r} from the configuration."
                    )

    def _check_torch_style(self) -> None:
        """Refuse another engine where backward passes of several cannot be told apart by their hooks."""
        configs = [*(wrapper.engine.config for wrapper in self.engines), self.plugin.deepspeed_config]
        offloads = [(config["zero_optimization"].get("offload_optimizer") or {}).get("device") for config in configs]
        unfit = [
            config
            for config, offload in zip(configs, offloads, strict=True)
            if not config["zero_optimization"].get("stage")
            or precision_of(config) == "fp16"
            or offload in ("cpu", "nvme")
        ]
        if unfit:
            raise ConfigurationError(
                "A second model is prepared for training by this Accelerator, and with ZeRO 0, fp16 or offload_optimizer "
                "DeepSpeed cannot tell which of its engines a loss belongs to. Make a second Accelerator() and prepare the model "
                "and its optimizer with that, or use ZeRO 1 to 3 without these."
            )

    def prepare_together(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[Any],
        schedulers: Sequence[Any],
        loaders: Sequence[Any],
        *,
        place: bool,
    ) -> PreparedTogether:
        """Make an engine of a model, its optimizer and its scheduler; without an optimizer it is for inference."""
        if not models:
            return PreparedTogether((), (), tuple(schedulers))
        model, plugin = models[0], self.plugin
        given_optimizer = optimizers[0] if optimizers else None
        given_scheduler = schedulers[0] if schedulers else None
        config = self._complete_config(model, given_optimizer, given_scheduler, loaders)
        has_optimizer = given_optimizer is not None or "optimizer" in config
        if not has_optimizer and plugin.zero_stage != 3:
            # Nothing is sharded that such a model has, and ZeRO 1 and 2 cannot be without an optimizer.
            half = HALVES.get(precision_of(config))
            prepared = model.to(device=self.runtime.device, dtype=half) if place else model.to(dtype=half)
            return PreparedTogether((self._cast_inputs(prepared, half),), (), tuple(schedulers))
        engine_arguments = self._engine_arguments(model, config, given_optimizer, given_scheduler)
        deepspeed = require("deepspeed", why=_WHY, extra="deepspeed")
        plugin.set_moe_leaf_modules(model)
        model = self.precision.convert(model)
        engine, optimizer, _, scheduler = deepspeed.initialize(model=model, **engine_arguments)
        current.ACCELERATOR["deepspeed_config"] = config
        self._cast_inputs(engine.module, HALVES.get(precision_of(config)))
        self._compile(engine)
        results: list[Any] = []
        if has_optimizer:
            wrapper = DeepSpeedEngineWrapper(engine, plugin)
            self.engines.append(wrapper)
            wrapped = DeepSpeedOptimizerWrapper(optimizer)
            wrapped.engine = wrapper
            results = [wrapped] if given_optimizer is not None else []
        if given_scheduler is not None and isinstance(given_scheduler, DummyScheduler):
            schedulers = [DeepSpeedSchedulerWrapper(scheduler, results)]
        elif given_scheduler is not None and given_scheduler.optimizer is not engine.basic_optimizer:
            follow_optimizer(given_scheduler, engine.basic_optimizer)
        return PreparedTogether((engine,), tuple(results), tuple(schedulers))

    def _engine_arguments(
        self, model: torch.nn.Module, config: dict[str, Any], optimizer: Any, scheduler: Any
    ) -> dict[str, Any]:
        """Return what `deepspeed.initialize` gets beside the model and the configuration."""
        arguments: dict[str, Any] = {"config": config}
        if tensor_parallel_size(config) > 1:
            # Which ranks are replicas is counted in one way here and in another where ZeRO 3 shards (deepspeed 0.19).
            arguments["config"] = {name: value for name, value in config.items() if name != "train_batch_size"}
        if isinstance(optimizer, DummyOptim):
            arguments["model_parameters"] = optimizer.params
        elif optimizer is not None:
            offload = config["zero_optimization"].get("offload_optimizer") or {}
            if offload.get("device") in ("cpu", "nvme") and config.get("zero_force_ds_cpu_optimizer", True):
                optimizer = map_pytorch_optim_to_deepspeed(optimizer)
            arguments["optimizer"] = optimizer
        layout = self.context.parallelism
        if layout is not None and layout.sp_enabled:
            from accelerate.strategies.deepspeed.sequence import split_attention

            self._split = split_attention(model, layout, config["train_micro_batch_size_per_gpu"])
            arguments["mpu"] = self._split.groups
        if isinstance(scheduler, DummyScheduler) and scheduler.lr_scheduler_callable is not None:
            arguments["lr_scheduler"] = scheduler.lr_scheduler_callable
        return arguments

    def _complete_config(
        self, model: torch.nn.Module, optimizer: Any, scheduler: Any, loaders: Sequence[Any]
    ) -> dict[str, Any]:
        """Return DeepSpeed's configuration with every entry that waited for the program."""
        plugin = self.plugin
        facts: dict[str, Fact] = {
            "gradient_accumulation_steps": Fact(
                self._clock.num_steps,
                f"Accelerator(gradient_accumulation_steps={self._clock.num_steps})",
                binding=self._clock.num_steps != 1,
            ),
            "gradient_clipping": Fact(0.0, "no clipping but that of clip_grad_norm_", binding=False),
            "zero_optimization.stage3_gather_16bit_weights_on_model_save": Fact(
                plugin.zero3_save_16bit_model, "DeepSpeedPlugin(zero3_save_16bit_model)", binding=False
            ),
            **batch_size_facts(
                loaders,
                current.ACCELERATOR.get("deepspeed_config"),
                smallest=plugin.is_train_batch_min,
                trains=optimizer is not None or "optimizer" in plugin.deepspeed_config,
            ),
            **optimizer_facts(optimizer),
            **scheduler_facts(scheduler, optimizer),
        }
        if (size := hidden_size(model)) is not None:
            facts |= hidden_size_facts(size, plugin.zero_stage)
        # DeepSpeed counts ranks that split layers as replicas here, though they read the same batches.
        num_replicas = self.runtime.world_size // self._sequence_ranks
        config = complete(plugin.open_config(), facts, num_replicas=num_replicas, place=plugin.place).config
        if optimizer is not None and not isinstance(optimizer, DummyOptim):
            config.setdefault("zero_allow_untested_optimizer", True)
        # Other libraries read the plugin's configuration after `prepare`.
        plugin.fill(config)
        self._clock.set_num_steps(config["gradient_accumulation_steps"])
        return config

    def _cast_inputs(self, model: torch.nn.Module, dtype: torch.dtype | None) -> torch.nn.Module:
        """Let a model whose weights are in half precision take inputs in single precision, as under autocast."""
        if dtype is None:
            return model

        def cast(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
            return recursively_apply(lambda tensor: tensor.to(dtype), (args, kwargs), test_type=_is_single)

        model.register_forward_pre_hook(cast, prepend=True, with_kwargs=True)
        return model

    def _compile(self, engine: Any) -> None:
        """Compile the engine's model, whole or by its repeated blocks, where that was asked for."""
        if not self.compiles:
            return
        dynamo = self.context.dynamo
        options = dynamo.to_kwargs()
        if dynamo.use_regional_compilation:
            compile_regions_deepspeed(engine.module, **options)
        else:
            engine.compile(backend=options.pop("backend"), compile_kwargs=options)

    # --- train -------------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Let the engine compute gradients; it exchanges those of the pass that closes a window."""
        if not self.engines:
            raise UsageError(
                "backward() was called, but no model was prepared with an optimizer, so DeepSpeed has no engine that could "
                "train. Give both to one prepare()."
            )
        closes = self._clock.sync_gradients and not self._holds_back
        if self._split is not None and int(self.engines[0].engine.zero_optimization_stage()) < 3:
            # Over the ranks that split a sequence ZeRO 3 averages, as other engines do, and the others add up.
            loss = loss / self._sequence_ranks
        if len(self.engines) == 1:
            self.engines[0].accumulate(loss, closes=closes, scale_wrt_gas=False, **kwargs)
        else:
            self._backward_of_several(loss, closes, kwargs)

    def _backward_of_several(self, loss: torch.Tensor, closes: bool, kwargs: dict[str, Any]) -> None:
        """Compute gradients of a loss that one engine or several took part in; their hooks tell which."""
        with ExitStack() as passes:
            for wrapper in self.engines:
                passes.enter_context(wrapper.passing(closes=closes))
            # Outside of `engine.backward`, engines divide what comes to their outputs by their own number of steps.
            (loss * self._clock.num_steps).backward(**kwargs)

    @contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Return a context in which a backward pass leaves its window open.

        ZeRO 2 and 3 exchange gradients in every pass, because no rank has room for all of them.
        """
        before, self._holds_back = self._holds_back, True
        try:
            yield
        finally:
            self._holds_back = before

    def scale_gradients(self, parameters: Iterable[torch.nn.Parameter], factor: torch.Tensor | float) -> None:
        """Let the next step multiply gradients by `factor`."""
        for wrapper in self.engines:
            wrapper.scale_gradients(factor)

    def clip_grad_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Let the next step scale gradients down, and return the norm of all ranks' gradients.

        Raises:
            ConfigurationError: If it is not the 2-norm, or DeepSpeed's configuration clips to another norm.
        """
        if norm_type != 2:
            raise ConfigurationError(
                f"clip_grad_norm_(norm_type={norm_type!r}) was called under DeepSpeed, which clips by the 2-norm. Leave "
                "norm_type out."
            )
        engines = self._engines_of(parameters)
        for wrapper in engines:
            fixed = float(wrapper.engine.config.get("gradient_clipping") or 0.0)
            if fixed and max_norm not in (fixed, float("inf")):
                raise ConfigurationError(
                    f"clip_grad_norm_(max_norm={max_norm!r}) was called, but DeepSpeed's configuration says "
                    f"gradient_clipping={fixed!r}, and only one of them can hold. Write the same number in both, or 'auto' "
                    "for gradient_clipping."
                )
        norms = [wrapper.clip_grad_norm(max_norm, norm_type) for wrapper in engines]
        return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))

    def _engines_of(self, parameters: Any) -> list[DeepSpeedEngineWrapper]:
        """Return the engines that train any of these parameters."""
        if len(self.engines) == 1:
            return self.engines
        given = {id(parameter) for parameter in ([parameters] if isinstance(parameters, torch.Tensor) else parameters)}
        return [
            wrapper
            for wrapper in self.engines
            if any(id(parameter) in given for parameter in wrapper.engine.module.parameters())
        ]

    # --- state -------------------------------------------------------------------------------------------------------

    def open_gradients(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        return open_gradients(model) if is_training_engine(model) else {}

    def set_open_gradients(self, model: torch.nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        if is_training_engine(model):
            set_open_gradients(model, gradients)

    def full_state_dict(self, model: torch.nn.Module, *, unwrap: bool = True) -> dict[str, Any]:
        """Return all weights; where ZeRO 3 shards them, on the first rank, and every rank must call it."""
        from accelerate.strategies.deepspeed.weights import gather_weights

        own = (wrapper.plugin for wrapper in self.engines if wrapper.engine is model)
        plugin = next(own, None) or self.plugin
        refused = plugin.gathers_16bit_weights is False
        return gather_weights(model, plugin.deepspeed_config, refused=refused, keep=self.runtime.rank == 0)

    def checkpoint_parts(self, prepared: Prepared) -> list[Part]:
        """Return what is saved; a schedule that the engine steps is in the engine's own files."""
        own = [entry for entry in prepared.schedulers if not isinstance(entry, DeepSpeedSchedulerWrapper)]
        return super().checkpoint_parts(replace(prepared, schedulers=own))

    def weight_parts(self, prepared: Prepared) -> list[Part]:
        """Return the parts that engines write with their own layout of files, and those of models without an engine."""
        from accelerate.strategies.deepspeed.checkpoint import engine_parts

        return engine_parts(prepared)

    def repeats_rows(self) -> bool:
        """Return whether another rank that splits the same layers comes before this one."""
        return self.runtime.rank % tensor_parallel_size(self.plugin.deepspeed_config) > 0

    def release(self) -> None:
        """Let go of the engines, and of the attention that was split for them."""
        for wrapper in self.engines:
            wrapper.engine.destroy()  # its hooks on gradients would keep it
        self.engines.clear()
        if self._split is not None:
            self._split.take_out()
            self._split = None

    def share_sequences(self, loader: Any) -> Any:
        """Return a loader for ranks that split sequences; the loader itself where they do not."""
        from accelerate.strategies.deepspeed.sequence import SequenceLoader

        if self._split is None or isinstance(loader, SequenceLoader):
            return loader
        return SequenceLoader(loader, self._split.groups.get_sequence_parallel_group(), self.runtime.device)

    def data_shard(self) -> tuple[int, int]:
        """Return which share of the data this process reads; ranks that split a layer read the same.

        Ranks that split sequences read shares of their own, and work on them together, one after another.
        """
        together = tensor_parallel_size(self.plugin.deepspeed_config)
        return self.runtime.rank // together, self.runtime.world_size // together
