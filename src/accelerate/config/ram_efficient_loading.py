"""The switch that lets only one process read the weights of a model that FSDP will share out."""

from __future__ import annotations

from accelerate.config import env

_VARIABLE = "FSDP_CPU_RAM_EFFICIENT_LOADING"


def enable_fsdp_ram_efficient_loading() -> None:
    """Let only the main process read the weights; the others get them when FSDP shares them out."""
    # Model libraries look for both variables, and the launcher sets the first only for its own runs.
    if env.get("ACCELERATE_USE_FSDP") is None:
        env.put("ACCELERATE_USE_FSDP", "True")
    env.put(_VARIABLE, "True")


def disable_fsdp_ram_efficient_loading() -> None:
    """Let every process read the weights itself."""
    env.put(_VARIABLE, "False")
