"""From the arguments of an `Accelerator` to its run: everything is checked before the process is started."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from accelerate._base.enums import FP8BackendType, PrecisionType, RNGType
from accelerate._base.errors import ConfigurationError, WrongHandlerError
from accelerate._base.helpers import Choice, log_once, user_stacklevel, warn_once
from accelerate._base.imports import is_deepspeed_available, require
from accelerate.collectives.base import Communicator, communicator
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
from accelerate.parallelism_config import ParallelismConfig
from accelerate.precision import formats as precisions
from accelerate.precision import fp8
from accelerate.precision.formats import Precision
from accelerate.runtime import current
from accelerate.runtime.current import Runtime
from accelerate.runtime.gradient_clock import GradientState
from accelerate.runtime.start import GroupChoice, choose_backend, choose_group, expected_topology, start
from accelerate.strategies import registry as strategies
from accelerate.strategies.base import EngineRequest, Strategy, StrategyContext

if TYPE_CHECKING:  # most runs have no mesh and no tracker: their modules are imported by the runs that do
    from torch.distributed.device_mesh import DeviceMesh

    from accelerate.config.plugins.deepspeed import DeepSpeedPlugin
    from accelerate.tracking.registry import Chosen

_LOG = logging.getLogger(__name__)
PROCESS_FACTS = (
    "_cpu",
    "backend",
    "device",
    "distributed_type",
    "local_process_index",
    "num_processes",
    "process_index",
)
"""What `AcceleratorState` shows of `PartialState`."""
_SWITCHES = {
    "fsdp": "ACCELERATE_USE_FSDP",
    "deepspeed": "ACCELERATE_USE_DEEPSPEED",
    "megatron": "ACCELERATE_USE_MEGATRON_LM",
}
SWITCHED_ON = "_switched_on"
"""The variables by which model libraries learn of an engine, and that this run has set."""


class SecondPluginError(ConfigurationError, NotImplementedError):
    """Report a plugin of an engine whose settings all `Accelerator` objects of a process share."""


@dataclass
class Handlers:
    """The options that `kwargs_handlers` brought, by the attribute of the `Accelerator` that shows them."""

    ddp_handler: DistributedDataParallelKwargs | None = None
    scaler_handler: GradScalerKwargs | None = None
    init_handler: InitProcessGroupKwargs | None = None
    autocast_handler: AutocastKwargs | None = None
    profile_handler: ProfileKwargs | None = None
    fp8_recipe_handler: FP8RecipeKwargs | None = None
    ao_recipe_handler: AORecipeKwargs | None = None
    te_recipe_handler: TERecipeKwargs | None = None
    msamp_recipe_handler: MSAMPRecipeKwargs | None = None

    @property
    def fp8_recipe(self) -> KwargsHandler | None:
        """Return the recipe for training in 8-bit floats, if there is one."""
        return next((recipe for name in _FP8_RECIPES if (recipe := getattr(self, name)) is not None), None)

    @property
    def fp8_backend(self) -> FP8BackendType:
        """Return which library computes in fp8."""
        return fp8.backend_of(self.fp8_recipe)

    def choose_fp8_recipe(self) -> None:
        """Take the recipe of the library that is named by the launcher or installed, unless one was given."""
        if self.fp8_recipe is None:
            recipe = fp8.choose_recipe()
            setattr(self, _handler_names()[type(recipe)], recipe)

    @property
    def has_fp8_handler(self) -> bool:
        """Return whether there is a recipe for fp8."""
        return self.fp8_backend is not FP8BackendType.NO


def _handler_names() -> dict[type[KwargsHandler], str]:
    """Return the field for each class of options; each is declared as `SomeKwargs | None`."""
    return {get_args(hint)[0]: name for name, hint in get_type_hints(Handlers).items()}


_FP8_RECIPES = ("fp8_recipe_handler", "ao_recipe_handler", "te_recipe_handler", "msamp_recipe_handler")


@dataclass
class RunSettings:
    """What the program asked for. Programs edit it through the `Accelerator`, so it is read when it is needed."""

    device_placement: bool = True
    mixed_precision: str | None = None
    cpu: bool = False
    dataloader_config: DataLoaderConfiguration = field(default_factory=DataLoaderConfiguration)
    accumulation: GradientAccumulationPlugin = field(default_factory=GradientAccumulationPlugin)
    request: EngineRequest = field(default_factory=EngineRequest)
    torch_tp_plugin: Any = None
    rng_types: list[str | RNGType] = field(default_factory=lambda: [RNGType.GENERATOR.value])
    log_with: list[Chosen] = field(default_factory=list)
    project_configuration: ProjectConfiguration = field(default_factory=ProjectConfiguration)
    step_scheduler_with_optimizer: bool = True
    handlers: Handlers = field(default_factory=Handlers)
    group_options: dict[str, Any] = field(default_factory=dict)
    dynamo: TorchDynamoPlugin = field(default_factory=TorchDynamoPlugin)
    global_batch_size: int | None = None


@dataclass(frozen=True)
class Run:
    """What runs the training loop of one `Accelerator`, and why it was chosen.

    Args:
        clock: When an accumulation window is complete.
        mesh: The ranks along the axes of parallelism, None without such axes.
        reasons: Why this device, strategy and precision.
    """

    options: RunSettings
    runtime: Runtime
    strategy: Strategy
    precision: Precision
    clock: GradientState
    mesh: DeviceMesh | None
    reasons: dict[str, str]

    @property
    def communicator(self) -> Communicator:
        """Return what the processes talk through; it is made anew with the process group."""
        return communicator()


def resolve_options(
    *,
    device_placement: bool,
    split_batches: bool | None,
    mixed_precision: str | None,
    gradient_accumulation_steps: int,
    cpu: bool,
    dataloader_config: DataLoaderConfiguration | None,
    deepspeed_plugin: Any,
    fsdp_plugin: Any,
    torch_tp_plugin: Any,
    megatron_lm_plugin: Any,
    rng_types: Sequence[str | RNGType] | None,
    project_dir: str | PathLike[str] | None,
    project_config: ProjectConfiguration | None,
    gradient_accumulation_plugin: GradientAccumulationPlugin | None,
    step_scheduler_with_optimizer: bool,
    kwargs_handlers: Sequence[KwargsHandler] | None,
    dynamo_backend: Any,
    dynamo_plugin: TorchDynamoPlugin | None,
    deepspeed_plugins: Any,
    parallelism_config: ParallelismConfig | None,
    global_batch_size: int | None,
) -> RunSettings:
    """Return the options of a run; settings that were not given come from the environment. Nothing is started.

    Raises:
        ConfigurationError: If arguments contradict each other or cannot work.
        WrongTypeError: If an argument is of the wrong type.
    """
    loaders = _resolve_loaders(dataloader_config, split_batches, global_batch_size)
    accumulation = _resolve_accumulation(gradient_accumulation_steps, gradient_accumulation_plugin, global_batch_size)
    if dynamo_backend is not None and dynamo_plugin is not None:
        raise ConfigurationError(
            f"dynamo_backend={dynamo_backend!r} and a dynamo_plugin were both given. "
            "Write TorchDynamoPlugin(backend=...) alone."
        )
    if deepspeed_plugin is not None and deepspeed_plugins is not None:
        raise ConfigurationError("deepspeed_plugin and deepspeed_plugins are one argument. Give one of them.")
    if torch_tp_plugin is not None and parallelism_config is None:
        warn_once(
            "Accelerator(torch_tp_plugin=...) is deprecated. Write "
            f"parallelism_config=ParallelismConfig(tp_size={torch_tp_plugin.tp_size!r}).",
            FutureWarning,
            stacklevel=user_stacklevel(),
        )
        parallelism_config = ParallelismConfig(tp_size=torch_tp_plugin.tp_size)
    elif parallelism_config is None:
        parallelism_config = parallelism_from_environment()
    project = project_config if project_config is not None else ProjectConfiguration()
    if project_dir is not None and project.project_dir is None:
        project.set_directories(str(project_dir))
    request = EngineRequest.from_plugins(
        deepspeed=deepspeed_plugin if deepspeed_plugin is not None else deepspeed_plugins,
        fsdp=fsdp_plugin,
        megatron=megatron_lm_plugin,
        parallelism=parallelism_config,
    )
    handlers = _sort_handlers(kwargs_handlers or (), resolve_precision(mixed_precision).value, request)
    return RunSettings(
        device_placement=device_placement,
        mixed_precision=mixed_precision,
        cpu=cpu,
        dataloader_config=loaders,
        accumulation=accumulation,
        request=request,
        torch_tp_plugin=torch_tp_plugin,
        rng_types=list(rng_types) if rng_types is not None else [RNGType.GENERATOR.value],
        project_configuration=project,
        step_scheduler_with_optimizer=step_scheduler_with_optimizer,
        handlers=handlers,
        group_options=handlers.init_handler.to_kwargs() if handlers.init_handler is not None else {},
        dynamo=dynamo_plugin if dynamo_plugin is not None else TorchDynamoPlugin(backend=dynamo_backend),
        global_batch_size=global_batch_size,
    )


def _fit_deepspeed(plugins: dict[str, DeepSpeedPlugin], options: RunSettings) -> None:
    """Bring DeepSpeed's configurations and the other options together, before a process is started.

    Raises:
        ConfigurationError: If they contradict each other, or (also a NotImplementedError) this process has settings of
            DeepSpeed already.
        MissingPackageError: If DeepSpeed is not installed.
    """
    if not is_deepspeed_available():  # not imported yet: it chooses its device then
        require("deepspeed", why="DeepSpeedPlugin", extra="deepspeed")
    earlier = current.ACCELERATOR.get("deepspeed_plugins")
    if earlier is not None:
        if plugins != earlier:
            raise SecondPluginError(
                f"This process has the settings {', '.join(map(repr, earlier))} of DeepSpeed already, which every further "
                "Accelerator shares. Give all of them to the first one, as deepspeed_plugins={'name': DeepSpeedPlugin(...)}, "
                "and choose with accelerator.state.select_deepspeed_plugin(name)."
            )
        return
    for plugin in plugins.values():
        plugin.set_mixed_precision(resolve_precision(options.mixed_precision).value)
    accumulation = options.accumulation
    steps = next(iter(plugins.values())).open_config().get("gradient_accumulation_steps", "auto")
    if steps == "auto" or int(steps) == accumulation.num_steps:
        return
    if accumulation.num_steps not in (None, 1):
        raise ConfigurationError(
            f"gradient_accumulation_steps={accumulation.num_steps} was given to the Accelerator, but DeepSpeed's "
            f"configuration says gradient_accumulation_steps={steps}. Write the same number in both, or 'auto' in the "
            "configuration."
        )
    accumulation.num_steps = int(steps)


def parallelism_from_environment() -> ParallelismConfig | None:
    """Return the sizes that the launcher asks for, None if it does not."""
    return ParallelismConfig() if env.flag("ACCELERATE_USE_PARALLELISM_CONFIG") else None


def start_run(options: RunSettings, choose_group: GroupChoice = choose_group) -> Run:
    """Start this process unless it is, choose the strategy and the precision, and fill `AcceleratorState`.

    Args:
        choose_group: Returns the backend of the process group and the label of the run.

    Raises:
        ConfigurationError: If the options cannot work here, or contradict those of an earlier run of this process.
    """
    request = options.request
    cpu = options.cpu or env.flag("ACCELERATE_USE_CPU")
    backend = choose_backend(cpu).value
    strategies.require_known(request, backend)
    if "deepspeed" in request.engines:
        _fit_deepspeed(request.engines["deepspeed"], options)
    if "megatron" in request.engines:
        from accelerate.strategies.megatron.groups import check_run

        check_run(request.engines["megatron"], expected_topology(backend).world_size)
    shared = current.ACCELERATOR
    if shared:
        check_agreement(options.mixed_precision, options.cpu)
        # Another Accelerator of the same process shards as the first one does.
        engines = {name: plugin for name, plugin in request.engines.items() if name not in _SWITCHES}
        if shared["fsdp_plugin"] is not None:
            engines["fsdp"] = shared["fsdp_plugin"]
        if shared["deepspeed_plugins"] is not None:
            engines["deepspeed"] = shared["deepspeed_plugins"]
        if shared["megatron_lm_plugin"] is not None:
            engines["megatron"] = shared["megatron_lm_plugin"]
        request = EngineRequest(engines, request.parallelism)
    asked = resolve_precision(options.mixed_precision)
    if (shared["_mixed_precision"] if shared else asked.value) == "fp8":
        options.handlers.choose_fp8_recipe()
    together = request.parallelism is not None
    runtime = start(cpu=cpu, group_options=options.group_options, together=together, choose_group=choose_group)
    chosen = strategies.select(request, runtime)
    precision_name = Choice(shared["_mixed_precision"], asked.reason) if shared else _on_device(asked, runtime)
    if not shared:
        _publish(options, request, precision_name.value, chosen.value.label(runtime))
        current.set_main_rank(chosen.value.main_rank(runtime))
    mesh: DeviceMesh | None = None
    if request.parallelism is not None:
        mesh = shared["device_mesh"] = chosen.value.lay_out(request.parallelism, runtime)
    recipe = options.handlers.fp8_recipe
    precision = _engine_precision(chosen.value, precision_name.value) or precisions.make(
        # Engines that shard take a recipe beside "bf16" as well.
        "fp8" if recipe is not None and precision_name.value == "bf16" == asked.value else precision_name.value,
        runtime.backend,
        options.handlers.autocast_handler,
        options.handlers.scaler_handler,
        recipe,
    )
    context = StrategyContext(
        runtime,
        precision,
        options.dynamo,
        ddp=options.handlers.ddp_handler or DistributedDataParallelKwargs(),
        parallelism=request.parallelism,
        fsdp=shared["fsdp_plugin"],
    )
    reasons = {"device": runtime.reason, "strategy": chosen.reason, "precision": precision_name.reason}
    _LOG.debug("device %s, strategy %s, precision %s: %s", runtime.device, chosen.value.name, precision.name, reasons)
    return Run(options, runtime, chosen.value(context), precision, GradientState(options.accumulation), mesh, reasons)


def _engine_precision(strategy: type[Strategy], name: str) -> Precision | None:
    """Return the number format of an engine that computes in it by itself; None where this library sees to it."""
    return precisions.EnginePrecision(name) if strategy.caps.owns_precision and name != "fp8" else None


def _publish(options: RunSettings, request: EngineRequest, precision: str, label: Any) -> None:
    """Fill what every `AcceleratorState` shows."""
    current.PARTIAL["distributed_type"] = label
    fsdp = request.engines.get("fsdp")
    current.ACCELERATOR.update(
        {name: current.PARTIAL[name] for name in PROCESS_FACTS},
        _mixed_precision=precision,
        dynamo_plugin=options.dynamo,
        deepspeed_plugins=request.engines.get("deepspeed"),
        fsdp_plugin=fsdp,
        megatron_lm_plugin=request.engines.get("megatron"),
        torch_tp_plugin=options.torch_tp_plugin,
        parallelism_config=request.parallelism,
        device_mesh=None,
        use_ipex=False,
    )
    switches = [switch for engine, switch in _SWITCHES.items() if engine in request.engines and not env.flag(switch)]
    for switch in switches:
        env.put(switch, "true")  # model libraries look there before they load weights
    current.ACCELERATOR[SWITCHED_ON] = switches


def check_agreement(mixed_precision: str | None, cpu: bool) -> None:
    """Refuse settings that contradict those in force in this process.

    Raises:
        ConfigurationError: If another device or precision was asked for.
    """
    device, precision = current.ACCELERATOR["device"], current.ACCELERATOR["_mixed_precision"]
    if (cpu or env.flag("ACCELERATE_USE_CPU")) and device.type != "cpu":
        raise ConfigurationError(
            f"cpu=True was given, but this process already runs on {device}. Pass cpu=True to the first "
            "Accelerator of the program, or reset the state in between with `accelerator.reset()`."
        )
    if mixed_precision is not None and resolve_precision(mixed_precision).value != precision:
        raise ConfigurationError(
            f"mixed_precision={mixed_precision!r} was given, but this process already uses "
            f"{precision!r}. Pass it to the first Accelerator of the program, or reset the state in "
            "between with `accelerator.reset()`."
        )


def resolve_precision(mixed_precision: str | PrecisionType | None) -> Choice[str]:
    """Return the number format that an argument, else ACCELERATE_MIXED_PRECISION, asks for.

    Raises:
        ConfigurationError: If there is no such format.
    """
    given, reason = mixed_precision, "mixed_precision was given"
    if given is None:
        given = env.get("ACCELERATE_MIXED_PRECISION")
        reason = "ACCELERATE_MIXED_PRECISION is set" if given is not None else "no other precision was asked for"
    name = str(given if given is not None else "no").lower()
    try:
        return Choice(PrecisionType(name).value, reason)
    except ValueError as error:
        raise ConfigurationError(
            f"mixed_precision={given!r} is not a number format. Write one of {', '.join(PrecisionType.list())}."
        ) from error


def _on_device(asked: Choice[str], runtime: Runtime) -> Choice[str]:
    """Return the number format that was asked for, or the nearest one that the device computes in."""
    instead = runtime.backend.instead_of_fp8() if asked.value == "fp8" else None
    if instead is None:
        return asked
    _LOG.warning("%s does not compute in 8-bit floats: mixed_precision is %r.", runtime.device, instead)
    return Choice(instead, f"{runtime.device} does not compute in 8-bit floats")


def _sort_handlers(given: Sequence[KwargsHandler], mixed_precision: str, request: EngineRequest) -> Handlers:
    if not given:
        return Handlers()
    types = {name: known for known, name in _handler_names().items()}
    found: dict[str, Any] = {}
    for handler in given:
        # The most derived class first: a union of two recipes is not also one of them.
        name = next((name for name, known in types.items() if type(handler) is known), None)
        name = name or next((name for name, known in types.items() if isinstance(handler, known)), None)
        if name is None:
            raise WrongHandlerError(
                f"kwargs_handlers holds {handler!r}, which is not one of "
                f"{', '.join(known.__name__ for known in types.values())}. Pass instances of these."
            )
        if name in found:
            raise ConfigurationError(
                f"kwargs_handlers holds two {types[name].__name__}, and only one can be in force. Merge them."
            )
        found[name] = handler
    recipe = next((name for name in _FP8_RECIPES if name in found), None)
    beside = ("fp8", "bf16") if request.engines else ("fp8",)
    if recipe is not None and mixed_precision not in beside:
        raise ConfigurationError(
            f"A {types[recipe].__name__} was given with mixed_precision={mixed_precision!r}, which does not use "
            "it. Write mixed_precision='fp8' or leave the recipe out."
        )
    return Handlers(**found)


def _resolve_accumulation(
    steps: int, plugin: GradientAccumulationPlugin | None, global_batch_size: int | None
) -> GradientAccumulationPlugin:
    if steps < 1:
        raise ConfigurationError(
            f"gradient_accumulation_steps={steps!r} cannot work: a window has at least one batch. Write 1 or more."
        )
    if plugin is None:
        launched = env.integer("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", steps)
        if launched != steps != 1:
            log_once(
                __name__,
                f"gradient_accumulation_steps={steps} was given, but ACCELERATE_GRADIENT_ACCUMULATION_STEPS={launched} "
                "is set by the launcher and wins.",
            )
        plugin = GradientAccumulationPlugin(num_steps=launched)
    elif steps != 1:
        raise ConfigurationError(
            f"gradient_accumulation_steps={steps!r} and a gradient_accumulation_plugin were both given. "
            "Write GradientAccumulationPlugin(num_steps=...) alone."
        )
    if global_batch_size is not None and (plugin.num_steps or 1) > 1:
        raise ConfigurationError(
            f"global_batch_size={global_batch_size!r} and {plugin.num_steps} accumulation steps were both given, but the "
            "first says how many batches make a step: as many as fill it. Leave the accumulation steps out."
        )
    return plugin


def _resolve_loaders(
    config: DataLoaderConfiguration | None, split_batches: bool | None, global_batch_size: int | None
) -> DataLoaderConfiguration:
    if config is None:
        config = DataLoaderConfiguration(split_batches=bool(split_batches))
    elif split_batches is not None and split_batches != config.split_batches:
        raise ConfigurationError(
            f"split_batches={split_batches!r} was given with a dataloader_config that says {config.split_batches!r}. "
            "Write DataLoaderConfiguration(split_batches=...) alone."
        )
    if global_batch_size is not None:
        _check_global_batch_size(global_batch_size, config)
    if split_batches is not None:
        warn_once(
            f"Accelerator(split_batches={split_batches!r}) is deprecated. Write "
            f"dataloader_config=DataLoaderConfiguration(split_batches={split_batches!r}).",
            FutureWarning,
            stacklevel=user_stacklevel(),
        )
    return config


def _check_global_batch_size(global_batch_size: int, config: DataLoaderConfiguration) -> None:
    if isinstance(global_batch_size, bool) or not isinstance(global_batch_size, int) or global_batch_size < 1:
        raise ConfigurationError(
            f"global_batch_size={global_batch_size!r} is not a number of samples. Write a whole number from 1 on."
        )
    for option in ("split_batches", "dispatch_batches"):
        if getattr(config, option):
            raise ConfigurationError(
                f"global_batch_size={global_batch_size!r} was given with {option}=True, and both say how a batch is "
                f"shared between processes. Leave {option} out."
            )
