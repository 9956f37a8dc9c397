"""TPU: spawn the cores of this machine, or reach the workers of a pod through torch_xla."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate._base.helpers import Choice
from accelerate.config import conflicts
from accelerate.launch.host import Host
from accelerate.launch.plan import WORKER, Launcher, LaunchPlan, script_kind, script_words, worker_environment

if TYPE_CHECKING:
    from accelerate.config.run_config import RunConfig


def _accepts(config: RunConfig, host: Host) -> Choice[bool]:
    return Choice(bool(config["tpu"]), "tpu was asked for" if config["tpu"] else "no TPU was asked for")


def _plan(config: RunConfig, host: Host) -> LaunchPlan:
    conflicts.check_tpu(config)
    values = worker_environment(config, host, 1)
    if config["mixed_precision"] == "bf16":
        values["XLA_DOWNCAST_BF16" if config["downcast_bf16"] else "XLA_USE_BF16"] = "1"
    if config["tpu_cluster"]:
        return _plan_pod(config, host, values)
    function = str(config["main_training_function"] or "main")
    cores = ("xla", str(config["num_processes"] or 0), function)
    return LaunchPlan("exec", (host.python, str(WORKER), *cores, script_kind(config), *script_words(config)), values)


def _plan_pod(config: RunConfig, host: Host, values: dict[str, str]) -> LaunchPlan:
    machines = [word for machine in config["vm"] or () for word in ("--vm", str(machine))]
    variables = [f"{variable}={value}" for variable, value in {**values, "ACCELERATE_IN_TPU_POD": "1"}.items()]
    given = [str(entry) for entry in config["env"] or ()]
    argv = [host.python, "-m", "torch_xla.distributed.xla_dist", *(machines or ["--tpu", str(config["tpu_name"])])]
    argv += [word for entry in (*variables, *given) for word in ("--env", entry)]
    argv += ["--", *(["sudo"] if config["tpu_use_sudo"] else []), "python3", *(["-m"] if config["module"] else [])]
    return LaunchPlan("spawn_command", (*argv, *script_words(config)), values)


TPU = Launcher("TPU", _accepts, _plan)
