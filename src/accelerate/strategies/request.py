"""What the program asks of the run, before anything is started."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from accelerate._base.errors import WrongTypeError
from accelerate.config import env
from accelerate.config.plugins.fsdp import FullyShardedDataParallelPlugin

_ENGINE_SWITCHES = {
    "deepspeed": "ACCELERATE_USE_DEEPSPEED",
    "fsdp": "ACCELERATE_USE_FSDP",
    "megatron": "ACCELERATE_USE_MEGATRON_LM",
}


@dataclass(frozen=True)
class EngineRequest:
    """Which engines were asked for, by a plugin or by the launcher's switch in the environment.

    Args:
        engines: Name of the engine -> its plugin, or None where only the switch is set.
        parallelism: The sizes of the axes of model parallelism, if given.
    """

    engines: dict[str, Any] = field(default_factory=dict)
    parallelism: Any = None

    @classmethod
    def from_plugins(cls, *, parallelism: Any = None, **plugins: Any) -> EngineRequest:
        """Collect the plugins that are there and the engines that the environment switches on."""
        switched_on = (name for name, switch in _ENGINE_SWITCHES.items() if env.flag(switch))
        engines = dict.fromkeys(switched_on)
        engines.update({name: plugin for name, plugin in plugins.items() if plugin is not None})
        if "fsdp" in engines:
            engines["fsdp"] = _fsdp_plugin(engines["fsdp"])
        return cls(engines, parallelism)


def _fsdp_plugin(given: Any) -> FullyShardedDataParallelPlugin:
    """Return the plugin that was given, or one made from the launcher's variables."""
    if given is None:
        return FullyShardedDataParallelPlugin()
    if not isinstance(given, FullyShardedDataParallelPlugin):
        raise WrongTypeError(
            f"fsdp_plugin={given!r} is a {type(given).__name__}, which says nothing of sharding. "
            "Pass a FullyShardedDataParallelPlugin(...)."
        )
    return given
