"""Megatron-LM on megatron-core: layers split over ranks, replicas of them, and a model of the program's own format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any, ClassVar

import torch

from accelerate._base.enums import DistributedType, MeshAxis
from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import Choice
from accelerate.checkpointing.parts import Part, Prepared
from accelerate.config.plugins.megatron import MegatronLMPlugin
from accelerate.runtime import current
from accelerate.runtime.current import Runtime
from accelerate.runtime.gradient_clock import GradientState
from accelerate.runtime.torch_private import follow_optimizer
from accelerate.strategies import tools
from accelerate.strategies.base import Capabilities, EngineRequest, JointStrategy, PreparedTogether, StrategyContext
from accelerate.strategies.megatron.configs import Degrees, MegatronConfigs, degrees_of, translate
from accelerate.strategies.megatron.datasets import (
    EndlessLoader,
    MegatronLMDummyDataLoader,
    build_loaders,
    sample_shape,
)
from accelerate.strategies.megatron.groups import make_groups
from accelerate.strategies.megatron.micro_batches import enlarged, is_enlarged
from accelerate.strategies.megatron.options import core, quiet_imports
from accelerate.strategies.megatron.wrappers import (
    MegatronLMDummyScheduler,
    MegatronLMOptimizerWrapper,
    MegatronLMSchedulerWrapper,
    carry_optimizer,
    check_optimizer,
    make_schedule,
)


class MegatronStrategy(JointStrategy):
    """Train Transformers models with the layers of megatron-core."""

    name: ClassVar[str] = "megatron"
    engine: ClassVar[str | None] = "megatron"
    title: ClassVar[str] = "Megatron-LM"
    caps: ClassVar[Capabilities] = Capabilities(holds_back_gradients=True, owns_precision=True)
    placeholders: ClassVar[Mapping[type, str]] = {
        MegatronLMDummyScheduler: "scheduler",
        MegatronLMDummyDataLoader: "loader",
    }

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self.engines: list[Any] = []
        """Those of models, in the order in which they were prepared."""
        self._clipped: set[int] = set()
        """The engines, by identity, whose gradients the loop has clipped since their last step."""

    @classmethod
    def selected(cls, request: EngineRequest, runtime: Runtime) -> Choice[bool]:
        """Take the runs that have a plugin of Megatron-LM, or its switch."""
        return Choice("megatron" in request.engines, "Megatron-LM was asked for")

    @classmethod
    def label(cls, runtime: Runtime) -> DistributedType:
        """Return MEGATRON_LM, also for one process."""
        return DistributedType.MEGATRON_LM

    @classmethod
    def main_rank(cls, runtime: Runtime) -> int:
        """Return the last rank, on which the last stage of a pipeline has the loss."""
        return runtime.world_size - 1

    @property
    def plugin(self) -> MegatronLMPlugin:
        """Return the settings of the run."""
        plugin: MegatronLMPlugin = current.ACCELERATOR["megatron_lm_plugin"]
        return plugin

    @cached_property
    def degrees(self) -> Degrees:
        """Return over how many ranks each thing is split."""
        return degrees_of(self.plugin)

    def _axis_sizes(self) -> dict[str, int]:
        degrees = self.degrees
        return {
            MeshAxis.PP: degrees.pipeline,
            MeshAxis.DP_REPLICATE: degrees.data_parallel(self.runtime.world_size),
            MeshAxis.CP: degrees.context,
            MeshAxis.TP: degrees.tensor,
        }

    def repeats_rows(self) -> bool:
        """Return whether another rank of the same replica comes before this one."""
        together = self.degrees.tensor * self.degrees.context
        replicas = self.degrees.data_parallel(self.runtime.world_size)
        return self.runtime.rank % together > 0 or self.runtime.rank >= together * replicas

    # --- prepare -----------------------------------------------------------------------------------------------------

    def check_together(self, models: Sequence[Any], optimizers: Sequence[Any], schedulers: Sequence[Any]) -> None:
        """Refuse what Megatron cannot train, before anything is touched."""
        self.check_one_of_each(
            models,
            optimizers,
            schedulers,
            several="",
            alone="Megatron-LM replaces the parameters of the model. Write model, optimizer = accelerator.prepare(model, optimizer).",
        )
        for optimizer in optimizers:
            check_optimizer(optimizer)
        if any(isinstance(entry, MegatronLMDummyScheduler) for entry in schedulers) and not optimizers:
            raise ConfigurationError(
                "prepare() was given a MegatronLMDummyScheduler without an optimizer, whose learning rate it would set. Give both "
                "to one prepare()."
            )
        for model in models:
            if not hasattr(model, "config"):
                raise ConfigurationError(
                    f"{type(model).__name__} was given to prepare() under Megatron-LM, which builds a model of its own from the "
                    "configuration of a Transformers model, and this has none. Pass a Transformers model, or one with a `config` "
                    "whose model_type is registered with add_model_config_to_megatron_parser."
                )
            configs = self._translate(model, (), (), None)
            self.check_experts(configs)
            check_built(configs)

    def check_experts(self, configs: MegatronConfigs) -> None:
        """Refuse experts where words cannot be sent to them."""
        experts = configs.transformer.num_moe_experts
        if experts and self.runtime.device.type == "cpu":
            raise ConfigurationError(
                f"A model with {experts} experts was given to prepare() on the CPU, but megatron-core 0.16.1 sends words to "
                "experts with CUDA alone. Train it on an accelerator, or without Megatron-LM."
            )

    def _translate(
        self, model: Any, optimizers: Sequence[Any], schedulers: Sequence[Any], micro_batch_size: int | None
    ) -> MegatronConfigs:
        dummies = [entry for entry in schedulers if isinstance(entry, MegatronLMDummyScheduler)]
        return translate(
            self.plugin,
            model,
            device_type=self.runtime.device.type,
            mixed_precision=self.precision.name,
            micro_batch_size=micro_batch_size,
            world_size=self.runtime.world_size,
            optimizer=optimizers[0] if optimizers else None,
            scheduler=dummies[0] if dummies else None,
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
        """Build Megatron's model in the place of a Transformers model; its optimizer and its scheduler follow."""
        if not models:
            return PreparedTogether((), (), tuple(schedulers))
        configs = self._translate(models[0], optimizers, schedulers, self._micro_batch_size(loaders))
        make_groups(configs.degrees, self.runtime)
        with quiet_imports():
            from accelerate.strategies.megatron.carried import carry
            from accelerate.strategies.megatron.engine import MegatronEngine, RunView

        if not self._is_on_cpu:
            with quiet_imports():
                from accelerate.strategies.megatron.accelerator_passes import seed_generators

            seed_generators()  # layers draw from them when they are built
        carried = carry(models[0], configs, self.runtime.device, self.plugin)
        engine = MegatronEngine(RunView(), carried, None, None)
        for optimizer in optimizers:
            carry_optimizer(optimizer, carried.replaced, dict(carried.module.named_parameters()), self.plugin)
        set_up = self._train_by_torch if self._is_on_cpu else self._train_by_megatron
        results = set_up(engine, optimizers)
        made = [self._follow(scheduler, results, configs) for scheduler in schedulers]
        engine.optimizer, engine.scheduler = next(iter(results), None), next(iter(made), None)
        carried.hand_over(engine)
        self.engines.append(engine)
        return PreparedTogether((engine,), tuple(results), tuple(made))

    def _micro_batch_size(self, loaders: Sequence[Any]) -> int | None:
        """Return the rows that go through the model at a time: those of a batch, as the program wrote its loaders."""
        sizes = []
        for loader in loaders:
            if isinstance(loader, MegatronLMDummyDataLoader):
                sizes.append(loader.dataset_args.get("micro_batch_size"))
            else:
                share = self.plugin.num_micro_batches if is_enlarged(loader) else 1
                sizes.append((getattr(loader, "batch_size", None) or 0) // share)
        known = [size for size in sizes if size]
        if not known:
            return None
        return int(min(known) if self.plugin.is_train_batch_min else max(known))

    def fit_batches(self, loader: Any) -> Any:
        """Return a loader whose batches have the rows of all parts that go through the model one by one."""
        count = self.plugin.num_micro_batches
        return loader if count == 1 or is_enlarged(loader) else enlarged(loader, count)

    def make_loaders(self, placeholders: Sequence[Any]) -> list[Any]:
        """Return the loaders of Megatron's data: the first placeholder is for training, then validation and test."""
        if not placeholders:
            return []
        if len(placeholders) > 3:
            raise ConfigurationError(
                f"prepare() was given {len(placeholders)} MegatronLMDummyDataLoaders, but there are three kinds of data: for "
                "training, validation and test. Give up to three."
            )
        micro_batch_size = self._micro_batch_size(placeholders)
        if micro_batch_size is None:
            raise ConfigurationError(
                "MegatronLMDummyDataLoader was given without micro_batch_size, so nobody knows the rows of a batch. Write "
                "MegatronLMDummyDataLoader(micro_batch_size=..., ...)."
            )
        made: dict[int, Any] = {}
        found = []
        for place, dummy in enumerate(placeholders):
            if id(dummy) not in made:
                made[id(dummy)] = build_loaders(
                    dummy,
                    self.plugin,
                    micro_batch_size=micro_batch_size,
                    num_replicas=self.data_shard()[1],
                    **sample_shape(self.plugin),
                )
            found.append(made[id(dummy)][place])
        return [None if loader is None else enlarged(loader, 1) for loader in found]

    def finish_loader(self, loader: Any) -> Any:
        """Return a loader that also gives one batch after another to `next`."""
        return EndlessLoader(loader)

    def _follow(self, scheduler: Any, optimizers: Sequence[Any], configs: MegatronConfigs) -> Any:
        """Return the schedule of Megatron that a placeholder stands for; one of torch follows its optimizer."""
        if not isinstance(scheduler, MegatronLMDummyScheduler):
            if optimizers:
                inner = getattr(optimizers[0].optimizer, "given", optimizers[0].optimizer)
                if scheduler.optimizer is not inner:
                    follow_optimizer(scheduler, inner)
            return scheduler
        assert configs.schedule is not None
        return MegatronLMSchedulerWrapper(make_schedule(optimizers[0].optimizer, configs.schedule), list(optimizers))

    @property
    def _is_on_cpu(self) -> bool:
        """Return whether torch computes what Megatron's own parts ask an accelerator for."""
        return self.runtime.device.type == "cpu"

    def _train_by_torch(self, engine: Any, optimizers: Sequence[Any]) -> list[MegatronLMOptimizerWrapper]:
        """Let torch compute gradients, and step with the optimizer of the program."""
        from accelerate.strategies.megatron.passes import TorchPasses
        from accelerate.strategies.megatron.train_steps import replica_group

        engine.passes = TorchPasses(
            engine.module,
            replica_group(),
            core("parallel_state").get_tensor_model_parallel_group(),
            per_token=bool(engine.configs.transformer.calculate_per_token_loss),
            autocast=torch.bfloat16 if self.precision.name == "bf16" else None,
        )
        results = [MegatronLMOptimizerWrapper(optimizer) for optimizer in optimizers]
        for result in results:
            result.before_step = partial(self._clip_at_step, engine)
        return results

    def _train_by_megatron(self, engine: Any, optimizers: Sequence[Any]) -> list[MegatronLMOptimizerWrapper]:
        """Let Megatron's schedules compute gradients, and step with its optimizers, which clip by themselves."""
        with quiet_imports():
            from accelerate.strategies.megatron.accelerator_optimizer import freeze_others, make_optimizer
            from accelerate.strategies.megatron.accelerator_passes import MegatronPasses

        for optimizer in optimizers:
            freeze_others(engine.module, optimizer)
        returns_logits = bool(self.plugin.return_logits)
        passes = MegatronPasses(engine.module, engine.configs, trains=bool(optimizers), returns_logits=returns_logits)
        engine.passes, engine.module = passes, passes.module
        return [
            MegatronLMOptimizerWrapper(make_optimizer(engine.configs, passes, optimizer)) for optimizer in optimizers
        ]

    # --- train -------------------------------------------------------------------------------------------------------

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which gradients stay on this rank."""
        suspend = getattr(model, "no_sync", None)
        return suspend() if suspend is not None else nullcontext()

    def clip_grad_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale gradients down by the norm of the whole model; the step that follows then does not clip again."""
        if not self._is_on_cpu:
            if not GradientState().sync_gradients:
                return torch.zeros((), device=self.runtime.device)  # a window that is open is clipped when it closes
            norms: list[torch.Tensor] = [
                engine.optimizer.optimizer.clip_grad_norm(max_norm, norm_type) for engine in self._trained()
            ]
            return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        self._clipped = {id(engine) for engine in self._trained()}
        return self._clip(parameters, max_norm, norm_type)

    def _clip(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        split = (core("parallel_state").get_tensor_model_parallel_group(),) if self.degrees.tensor > 1 else ()

        def groups_of(parameter: torch.Tensor) -> tools.Groups:
            return split if getattr(parameter, "tensor_model_parallel", False) else ()

        return tools.clip_grad_norm(parameters, max_norm, norm_type, self.runtime.device, groups_of=groups_of)

    def _trained(self) -> list[Any]:
        return [engine for engine in self.engines if engine.optimizer is not None]

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Limit each element of the gradients.

        Raises:
            ConfigurationError: If they are in Megatron's buffers.
        """
        if not self._is_on_cpu:
            raise ConfigurationError(
                f"clip_grad_value_({clip_value!r}) was called under Megatron-LM on {self.runtime.device}, whose optimizers clip by "
                "the norm alone. Use clip_grad_norm_."
            )
        super().clip_grad_value(parameters, clip_value)

    def scale_gradients(self, parameters: Iterable[torch.nn.Parameter], factor: torch.Tensor | float) -> None:
        """Multiply the gradients that are there by `factor`."""
        if self._is_on_cpu:
            super().scale_gradients(parameters, factor)
        else:
            for engine in self._trained():
                engine.passes.gradients.scale(factor)

    def _clip_at_step(self, engine: Any) -> None:
        """Clip as the plugin says, unless the loop has clipped these gradients."""
        limit = float(self.plugin.megatron_lm_default_args["clip_grad"] or 0.0)
        if limit > 0 and id(engine) not in self._clipped:
            self._clip(engine.parameters(), limit, 2.0)
        self._clipped.discard(id(engine))

    # --- state -------------------------------------------------------------------------------------------------------

    def open_gradients(self, model: Any) -> dict[str, torch.Tensor]:
        """Return the gradients of this rank's data in pieces; ranks that share a layer bring them together.

        Megatron's buffers are returned as they are, for a run of the same layout.
        """
        if not self._is_on_cpu:
            buffers: dict[str, torch.Tensor] = model.passes.gradients.state()
            return buffers
        weights = model.carried.weights
        found: dict[str, torch.Tensor] = {}
        for layout, parameter in weights:
            if parameter.grad is not None:
                found |= weights.whole(layout, parameter.grad)
        return found

    def set_open_gradients(self, model: Any, gradients: Mapping[str, torch.Tensor]) -> None:
        if not self._is_on_cpu:
            model.passes.gradients.load_state(gradients)
            return
        weights = model.carried.weights
        for layout, parameter in weights:
            pieces = [gradients.get(name) for name in layout.piece_names]
            is_there = all(piece is not None for piece in pieces)
            parameter.grad = (
                layout.cut(pieces, parameter, weights.group_of(layout)).to(parameter.device) if is_there else None
            )

    def full_state_dict(self, model: Any, *, unwrap: bool = True) -> dict[str, Any]:
        """Return all weights under the names of the Transformers model, on the first and on the last rank; all call it."""
        from accelerate.strategies.megatron.carried import keeps_weights

        if not self._is_on_cpu:
            model.passes.finish_parameters()
        found: dict[str, Any] = model.carried.full_state_dict(keep=keeps_weights())
        return found

    def weight_parts(self, prepared: Prepared) -> list[Part]:
        """Return parts that all ranks write together, so that any tensor-parallel degree can read them."""
        from accelerate.strategies.megatron.checkpoint import engine_parts

        return engine_parts(prepared)

    def release(self) -> None:
        """Let go of the engines."""
        self.engines.clear()


def check_built(configs: MegatronConfigs) -> None:
    """Refuse what megatron-core has, and a model that comes back in its own format has not.

    Raises:
        ConfigurationError: If it was asked for.
    """
    if configs.ddp.use_megatron_fsdp:
        raise ConfigurationError(
            "MegatronLMPlugin(use_custom_fsdp=True) cannot work: the weights that Megatron's FSDP shards could not be brought back "
            "into the Transformers model. Shard the optimizer with use_distributed_optimizer=True, or use a "
            "FullyShardedDataParallelPlugin."
        )
    if configs.degrees.virtual_pipeline is not None:
        raise ConfigurationError(
            f"MegatronLMPlugin(num_layers_per_virtual_pipeline_stage=...) asks for {configs.degrees.virtual_pipeline} stages a "
            "process, and there is one. Leave it out, and give a batch more parts with num_micro_batches."
        )
