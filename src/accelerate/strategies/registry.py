"""The table of strategies, and the choice of the one that runs what was asked for."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from .._base.choice import Choice
from .._base.errors import ConfigurationError
from ..runtime.runtime import Runtime
from ..session.request import EngineRequest
from .base import Strategy
from .ddp import DDPStrategy

_STRATEGIES: list[type[Strategy]] = [DDPStrategy, Strategy]
_PLUGINS = "accelerate.strategies"


def register(strategy: type[Strategy]) -> None:
    """Add a strategy; it is asked before those that are there."""
    _STRATEGIES.insert(0, strategy)


def unregister(strategy: type[Strategy]) -> None:
    """Forget a strategy that was registered."""
    _STRATEGIES.remove(strategy)


@cache
def _load_plugins() -> None:
    for entry in entry_points(group=_PLUGINS):
        register(entry.load())


def all_strategies() -> tuple[type[Strategy], ...]:
    """Return every known strategy, in the order in which they are asked."""
    _load_plugins()
    return tuple(_STRATEGIES)


def require_known(request: EngineRequest) -> None:
    """Refuse, before anything is started, an engine that no strategy drives, or two engines at once.

    Raises:
        ConfigurationError: If there is no such strategy, or several engines were asked for.
    """
    known = {strategy.engine for strategy in all_strategies() if strategy.engine is not None}
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
    sizes = request.parallelism
    if sizes is not None and sizes.non_data_parallel_size > 1 and "fsdp" not in known:
        raise ConfigurationError(
            f"{sizes!r} splits the model over {sizes.non_data_parallel_size} ranks, but this installation has no "
            "strategy that shards a model. Use dp_replicate_size alone."
        )


def select(request: EngineRequest, runtime: Runtime) -> Choice[type[Strategy]]:
    """Choose the strategy: that of the engine asked for, else the first that takes the run."""
    require_known(request)
    for strategy in all_strategies():
        if strategy.engine is not None and strategy.engine not in request.engines:
            continue
        if request.engines and strategy.engine is None:
            continue
        answer = strategy.selected(request, runtime)
        if answer.value:
            return Choice(strategy, answer.reason)
    raise ConfigurationError(f"No strategy takes a run with {runtime.world_size} process(es) and {request!r}.")
