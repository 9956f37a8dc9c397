"""The table of strategies, and the choice of the one that runs what was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import Choice
from accelerate.devices.base import DeviceBackend
from accelerate.devices.xla import XLA
from accelerate.parallelism_config import ParallelismConfig
from accelerate.runtime.current import Runtime
from accelerate.strategies.base import EngineRequest, Strategy
from accelerate.strategies.ddp import DDPStrategy


@dataclass(frozen=True)
class _LazyStrategy:
    """A strategy that is imported when a run may need it: what it needs of torch takes a second to load.

    Args:
        module: The module that holds it.
        engine: The engine whose plugin selects it; None where a layout of the ranks or the hardware does.
        device: The type of the hardware that selects it.
    """

    module: str
    name: str
    engine: str | None = None
    device: str | None = None


_STRATEGIES: list[type[Strategy] | _LazyStrategy] = [
    _LazyStrategy("accelerate.strategies.fsdp.fsdp2", "FSDP2Strategy", "fsdp"),
    _LazyStrategy("accelerate.strategies.fsdp.fsdp1", "FSDP1Strategy", "fsdp"),
    _LazyStrategy("accelerate.strategies.deepspeed.strategy", "DeepSpeedStrategy", "deepspeed"),
    _LazyStrategy("accelerate.strategies.megatron.strategy", "MegatronStrategy", "megatron"),
    _LazyStrategy("accelerate.strategies.xla.spmd", "SpmdStrategy", device=XLA.type),
    _LazyStrategy("accelerate.strategies.xla.strategy", "XlaStrategy", device=XLA.type),
    _LazyStrategy("accelerate.strategies.fsdp.presharded", "PreshardedStrategy"),
    _LazyStrategy("accelerate.strategies.parallel", "ParallelStrategy"),
    Strategy,
    DDPStrategy,
]
_ENTRY_POINTS = "accelerate.strategies"


def register(strategy: type[Strategy]) -> None:
    """Add a strategy; it is asked before those that are there."""
    _STRATEGIES.insert(0, strategy)


def unregister(strategy: type[Strategy]) -> None:
    """Forget a strategy that was registered."""
    _STRATEGIES.remove(strategy)


@cache
def _register_entry_points() -> None:
    for entry in entry_points(group=_ENTRY_POINTS):
        register(entry.load())


def _load(entry: type[Strategy] | _LazyStrategy) -> type[Strategy]:
    if not isinstance(entry, _LazyStrategy):
        return entry
    strategy: type[Strategy] = getattr(import_module(entry.module), entry.name)
    return strategy


def all_strategies() -> tuple[type[Strategy], ...]:
    """Return every known strategy, in the order in which they are asked."""
    _register_entry_points()
    return tuple(_load(entry) for entry in _STRATEGIES)


def select(request: EngineRequest, runtime: Runtime) -> Choice[type[Strategy]]:
    """Choose the strategy: that of the engine asked for, else the first that takes the run."""
    require_known(request, runtime.backend)
    for entry in _STRATEGIES:
        if _is_asked(entry, request, runtime):
            strategy = _load(entry)
            answer = strategy.selected(request, runtime)
            if answer.value:
                return Choice(strategy, answer.reason)
    raise ConfigurationError(f"No strategy takes a run with {runtime.world_size} process(es) and {request!r}.")


def _is_asked(entry: type[Strategy] | _LazyStrategy, request: EngineRequest, runtime: Runtime) -> bool:
    """Return whether it is that of the engine; without an engine, whether it is of the hardware or needs none."""
    if request.engines or entry.engine is not None:
        return entry.engine in request.engines
    if not isinstance(entry, _LazyStrategy):
        return True
    if entry.device is not None:
        return entry.device == runtime.backend.type
    return request.parallelism is not None


def require_known(request: EngineRequest, backend: DeviceBackend | None = None) -> None:
    """Refuse, before anything is started, an engine that no strategy drives, or two engines at once.

    Raises:
        ConfigurationError: If there is no such strategy, or several engines were asked for.
    """
    _register_entry_points()
    known = {entry.engine for entry in _STRATEGIES if entry.engine is not None}
    for engine in request.engines:
        if engine not in known:
            raise ConfigurationError(
                f"The engine {engine!r} was asked for, but this installation has no strategy for it. "
                f"Engines here: {', '.join(sorted(known)) or 'none besides single process and DDP'}. "
                "Leave the plugin and its ACCELERATE_USE_... variable out."
            )
    if len(request.engines) > 1:
        raise ConfigurationError(
            f"The engines {sorted(request.engines)!r} were asked for together, but one run has one engine. Give one."
        )
    if backend is XLA:
        _check_on_xla(request)
    elif request.parallelism is not None:
        _check_axes(request.parallelism, request)


def _check_on_xla(request: EngineRequest) -> None:
    """Refuse engines that do not know XLA devices, and axes that are not laid out over them."""
    engine = next(iter(request.engines), None)
    if engine is not None:
        raise ConfigurationError(
            f"The engine {engine!r} was asked for, but this process computes on XLA devices ({XLA.found()}), which it does "
            "not know. Leave it out; to shard weights over the devices, write "
            "parallelism_config=ParallelismConfig(dp_shard_size=...)."
        )
    sizes = request.parallelism
    if sizes is not None and (sizes.cp_enabled or sizes.sp_enabled or sizes.pp_enabled):
        raise ConfigurationError(
            f"cp_size={sizes.cp_size}, sp_size={sizes.sp_size}, pp_size={sizes.pp_size} were given, but over XLA devices "
            "batches, weights and layers are split. Use dp_replicate_size, dp_shard_size and tp_size."
        )


def _check_axes(sizes: ParallelismConfig, request: EngineRequest) -> None:
    """Refuse axes that need an engine that was not asked for, or that the one asked for does not know."""
    if sizes.sp_enabled and not request.engines:
        raise ConfigurationError(
            f"sp_size={sizes.sp_size} was given without the engine that splits sequences. Pass a deepspeed_plugin, or use "
            "cp_size."
        )
    if sizes.pp_enabled and request.engines:
        raise ConfigurationError(
            f"pp_size={sizes.pp_size} was given with the engine {next(iter(request.engines))!r}, which does not know "
            "stages. Leave the engine out and combine pp_size with dp_replicate_size, or set pp_size=1."
        )
    if "deepspeed" in request.engines and (sizes.tp_enabled or sizes.cp_enabled):
        raise ConfigurationError(
            f"tp_size={sizes.tp_size}, cp_size={sizes.cp_size} were given with DeepSpeed, which splits layers and sequences by "
            "itself. Write 'tensor_parallel': {'autotp_size': ...} in its configuration, or sp_size."
        )
    version = getattr(request.engines.get("fsdp"), "fsdp_version", None)
    if version == 1 and (sizes.tp_enabled or sizes.cp_enabled):
        raise ConfigurationError(
            f"tp_size={sizes.tp_size}, cp_size={sizes.cp_size} were given with version 1 of FSDP, which shards whole "
            "layers over all ranks. Write FullyShardedDataParallelPlugin(fsdp_version=2)."
        )
