"""Parsed launch options as a command and an environment, for programs that start the processes themselves."""

from __future__ import annotations

import argparse
import atexit
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from accelerate._base.enums import DistributedType
from accelerate._base.errors import ConfigurationError, UsageError
from accelerate.config import env
from accelerate.config.resolve import resolve
from accelerate.config.run_config import RunConfig, encode
from accelerate.devices.machine import detect
from accelerate.launch import DEEPSPEED, ELASTIC, MPI, ONE_PROCESS, choose_launcher
from accelerate.launch.host import Host

_RENDEZVOUS_FILE = "ACCELERATE_DEBUG_RDV_FILE"
# Those whose processes each drive one accelerator, and learn from these variables which.
_ONE_DEVICE_EACH = frozenset(kind.value for kind in DistributedType if kind.value.startswith("MULTI_"))


class PrepareForLaunch:
    """A function that a process of `torch.multiprocessing` runs, once the process knows its rank.

    Args:
        launcher: The function.
        distributed_type: The regime of the run.
        debug: Meet the other processes at the file of `debug_launcher`.
    """

    def __init__(
        self, launcher: Callable[..., Any], distributed_type: DistributedType | str = "NO", debug: bool = False
    ) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(str(distributed_type).upper())
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Call the function as the process with this number.

        Raises:
            UsageError: If the processes are to meet at a file and none was named.
        """
        if self.debug:
            file, count = env.get(_RENDEZVOUS_FILE), env.integer("WORLD_SIZE", 0)
            if file is None or count < 1:
                raise UsageError(
                    f"PrepareForLaunch(debug=True) was called with {_RENDEZVOUS_FILE}={file!r} and WORLD_SIZE={count}, so the "
                    "processes cannot meet. Set both, or use debug_launcher, which does."
                )
            dist.init_process_group("gloo", store=FileStore(file, count), rank=int(index), world_size=count)
        elif self.distributed_type.value in _ONE_DEVICE_EACH:
            env.put("LOCAL_RANK", str(index))
            env.put("RANK", str(env.integer("NODE_RANK", 0) * env.integer("NPROC", 1) + index))
        env.put("FORK_LAUNCHED", "1")
        self.launcher(*args)


def _resolved(args: argparse.Namespace) -> RunConfig:
    return resolve(args, detect(env.items()))


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of one process, or of `mpirun` where the options ask for it.

    Raises:
        ConfigurationError: The command needs files beside it.
    """
    config, host = _resolved(args), Host()
    launcher = choose_launcher(config, host, (MPI, ONE_PROCESS)).value
    plan = launcher.plan(config, host)
    if plan.files:
        raise ConfigurationError(
            f"The {launcher.name} launcher needs files beside its command, which cannot be returned as a command and an "
            "environment. Call launch_command with the same options."
        )
    return list(plan.argv), {**env.items(), **plan.environment}


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment of the processes of this machine, and write torchrun's own options into `args`."""
    plan = ELASTIC.plan(_resolved(args), Host())
    options = plan.elastic
    assert options is not None
    args.nproc_per_node, args.nnodes = str(options.nproc_per_node), str(options.num_nodes)
    args.rdzv_backend, args.rdzv_endpoint = options.rdzv_backend, options.rdzv_endpoint
    args.node_rank = int(options.rdzv_configs.get("rank", 0))
    args.rdzv_conf = ",".join(f"{key}={value}" for key, value in options.rdzv_configs.items())
    args.max_restarts, args.monitor_interval = options.max_restarts, options.monitor_interval
    return {**env.items(), **plan.environment}


def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str] | None, dict[str, str]]:
    """Return the command that starts the machines of a DeepSpeed run, None where torch's agent does it, and the environment.

    Files that the command needs are in a folder that stays until this process ends.

    Raises:
        ConfigurationError: The machines cannot be started as the options ask.
    """
    config, host = _resolved(args), Host(arguments=tuple(getattr(args, "typed_arguments", ())))
    if not DEEPSPEED.accepts(config, host).value:
        return None, prepare_multi_gpu_env(args)
    plan = DEEPSPEED.plan(config, host)
    folder = tempfile.mkdtemp(prefix="accelerate-launch-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, content in plan.files.items():
        Path(folder, name).write_text(content)
    argv, variables = plan.in_folder(folder)
    return list(argv), {**env.items(), **variables}


def prepare_extend_env_parallelism_config(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the sizes of the axes of parallelism to an environment and return it."""
    return _extended(args, current_env, "PARALLELISM_CONFIG_")


def setup_fp8_env(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """Add the options of fp8 to an environment and return it."""
    return _extended(args, current_env, "ACCELERATE_FP8_")


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
    current_env |= {"XLA_USE_BF16": "0", "XLA_DOWNCAST_BF16": "0", **({name: "1"} if wants_bf16 else {})}
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
