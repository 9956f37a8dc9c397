"""Commands and environments of parsed launch options, for programs that start the processes themselves."""

from __future__ import annotations

import argparse
from typing import Any

from accelerate._base.errors import ConfigurationError
from accelerate.config import env
from accelerate.config.resolve import resolve
from accelerate.config.run_config import RunConfig, encode
from accelerate.devices.machine import detect
from accelerate.launch import deepspeed, elastic, mpi, simple
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.site import here

_PARALLELISM = "PARALLELISM_CONFIG_"
_FP8 = "ACCELERATE_FP8_"
_BF16_ON_TPU = {"XLA_USE_BF16": "0", "XLA_DOWNCAST_BF16": "0"}


def _resolved(args: argparse.Namespace) -> RunConfig:
    return resolve(args, detect(env.items()))


def _command_and_environment(plan: LaunchPlan) -> tuple[list[str], dict[str, str]]:
    if plan.files:
        raise ConfigurationError(
            f"The {plan.launcher} needs files beside its command, which cannot be returned as a command and an "
            "environment. Call launch_command with the same options."
        )
    return list(plan.argv), {**env.items(), **plan.environment}


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of one process, or of `mpirun` where the options ask for it."""
    config, site = _resolved(args), here()
    launcher = mpi if mpi.accepts(config, site).value else simple
    return _command_and_environment(launcher.plan(config, site))


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment of the processes of this machine, and write torchrun's own options into `args`."""
    config, site = _resolved(args), here()
    plan = elastic.plan(config, site)
    options = plan.elastic
    assert options is not None
    args.nproc_per_node, args.nnodes = str(options.nproc_per_node), str(options.num_nodes)
    args.rdzv_backend, args.rdzv_endpoint = options.rdzv_backend, options.rdzv_endpoint
    args.rdzv_conf = ",".join(f"{key}={value}" for key, value in options.rdzv_configs.items())
    args.max_restarts, args.monitor_interval = options.max_restarts, options.monitor_interval
    return {**env.items(), **plan.environment}


def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str] | None, dict[str, str]]:
    """Return the command of DeepSpeed's launcher, None where torch's agent does it, and the environment."""
    config, site = _resolved(args), here()
    if not deepspeed.accepts(config, site).value:
        return None, prepare_multi_gpu_env(args)
    plan = deepspeed.plan(config, site)
    # The environment is given here, so the file that carries it to other machines stays with the launcher.
    variables = {name: value for name, value in plan.environment.items() if name != "DS_ENV_FILE"}
    return list(plan.argv), {**env.items(), **variables}


def prepare_extend_env_parallelism_config(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the sizes of the axes of parallelism to an environment and return it."""
    return _extended(args, current_env, _PARALLELISM)


def setup_fp8_env(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the options of fp8 to an environment and return it."""
    return _extended(args, current_env, _FP8)


def _extended(args: argparse.Namespace, current_env: dict[str, str], prefix: str) -> dict[str, str]:
    encoded = encode(_resolved(args))
    current_env.update({name: value for name, value in encoded.items() if name.startswith(prefix)})
    return current_env


def prepare_tpu(
    args: argparse.Namespace, current_env: dict[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    """Add the number format of a TPU run to an environment; with `pod`, also name the machines as XLA does."""
    wants_bf16 = getattr(args, "mixed_precision", None) == "bf16"
    name = "XLA_DOWNCAST_BF16" if getattr(args, "downcast_bf16", False) else "XLA_USE_BF16"
    current_env.update({**_BF16_ON_TPU, **({name: "1"} if wants_bf16 else {})})
    if getattr(args, "debug", False):
        current_env["ACCELERATE_DEBUG_MODE"] = "true"
    if pod:
        args.vm, args.tpu = getattr(args, "tpu_vm", None), getattr(args, "tpu_name", None)
    return args, current_env


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """Return a list of paths from the environment with one more at its end."""
    paths = [path for path in (env.get(env_var_name) or "").split(":") if path]
    return ":".join([*paths, str(path_to_add)])


def _filter_args(
    args: argparse.Namespace, parser: argparse.ArgumentParser, default_args: list[str] | None = None
) -> argparse.Namespace:
    """Return the defaults of another parser with the values that `args` has for its options."""
    known, _ = parser.parse_known_args(default_args or [])
    for name, value in vars(args).items():
        if name in vars(known):
            setattr(known, name, value)
    return known


def prepare_sagemager_args_inputs(sagemaker_config: Any, args: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Refuse: jobs of Amazon SageMaker are started with its own package.

    Raises:
        ConfigurationError: Always.
    """
    raise ConfigurationError(
        f"prepare_sagemager_args_inputs was given a {type(sagemaker_config).__name__}, but jobs of Amazon SageMaker are "
        "not started from here. Build the estimator with the sagemaker package."
    )
