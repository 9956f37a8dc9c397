"""Refuse options of engines that contradict each other or the number of processes, before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from accelerate._base.enums import MeshAxis
from accelerate._base.errors import ConfigurationError
from accelerate.config.run_config import RunConfig

Rule = Callable[[RunConfig, Mapping[str, str]], None]

_SHARDING_AXES = {MeshAxis.DP_SHARD, MeshAxis.SP}


def _axes(config: RunConfig, environ: Mapping[str, str]) -> None:
    """Ask for an engine under the axes that shard; the others need none, and XLA devices share out by themselves."""
    if not config["use_parallelism_config"] or config["use_deepspeed"] or config["tpu"]:
        return
    if config["use_fsdp"] and config["fsdp_version"] == 2:
        return
    if config["use_fsdp"]:
        raise ConfigurationError(
            f"{config.shown('use_parallelism_config')} needs FSDP 2, and {config.shown('fsdp_version')}. "
            "Write --fsdp_version 2."
        )
    used = {axis for axis in MeshAxis if config[f"parallelism_config_{axis}_size"] > 1}
    if used & _SHARDING_AXES or (config.is_typed("use_parallelism_config") and not used):
        raise ConfigurationError(
            f"{config.shown('use_parallelism_config')} needs an engine that shards. Add --use_fsdp "
            "--fsdp_version 2, or --use_deepspeed."
        )


def _loading(config: RunConfig, environ: Mapping[str, str]) -> None:
    if config["use_fsdp"] and config["fsdp_cpu_ram_efficient_loading"] and not config["fsdp_sync_module_states"]:
        raise ConfigurationError(
            f"{config.shown('fsdp_cpu_ram_efficient_loading')} lets one process read the weights, and "
            f"{config.shown('fsdp_sync_module_states')} keeps them from the others. Set fsdp_sync_module_states "
            "to true."
        )


def _megatron_degrees(config: RunConfig, environ: Mapping[str, str]) -> None:
    """Let the processes of Megatron-LM be shared out evenly: replicas of a model are whole."""
    names = ("megatron_lm_tp_degree", "megatron_lm_pp_degree", "megatron_lm_context_parallel_size")
    total = config["num_processes"]
    if not config["use_megatron_lm"] or total is None:
        return
    together = 1
    for name in names:
        together *= config[name] or 1
    if together < 1 or total % together:
        degrees = ", ".join(config.shown(name) for name in names if config[name])
        raise ConfigurationError(
            f"{degrees} needs a multiple of {together} processes, and {config.shown('num_processes')}. Write "
            f"--num_processes {-(-total // max(together, 1)) * max(together, 1)}, or lower a degree."
        )


RULES: tuple[Rule, ...] = (_axes, _loading, _megatron_degrees)
