"""TPU: spawn the cores of this machine, or reach the workers of a pod through torch_xla."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import Choice
from accelerate.launch.command import worker_environment
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.site import Site

if TYPE_CHECKING:
    from accelerate.config.run_config import RunConfig

name = "TPU"

_SPAWN = Path(__file__).with_name("xla_spawn.py")


def accepts(config: RunConfig, site: Site) -> Choice[bool]:
    """Accept when a TPU was asked for."""
    return Choice(bool(config["tpu"]), "tpu was asked for" if config["tpu"] else "no TPU was asked for")


def plan(config: RunConfig, site: Site) -> LaunchPlan:
    """Write the command for one TPU machine or a pod."""
    if config["no_python"]:
        raise ConfigurationError(
            f"--no_python was given with a TPU, where {config['training_script']!r} is loaded as a Python module. "
            "Leave --no_python out."
        )
    values = worker_environment(config, site, 1)
    if config["downcast_bf16"] and config["mixed_precision"] == "bf16":
        values["XLA_DOWNCAST_BF16"] = "1"
    elif config["mixed_precision"] == "bf16":
        values["XLA_USE_BF16"] = "1"
    return _pod(config, site, values) if config["tpu_cluster"] else _machine(config, site, values)


def _machine(config: RunConfig, site: Site, values: dict[str, str]) -> LaunchPlan:
    function = str(config["main_training_function"] or "main")
    argv = (site.python, str(_SPAWN), str(config["num_processes"] or 0), function)
    kind = "module" if config["module"] else "script"
    return LaunchPlan("exec", (*argv, kind, *_script(config)), values, launcher=name)


def _pod(config: RunConfig, site: Site, values: dict[str, str]) -> LaunchPlan:
    machines = [str(machine) for machine in config["vm"] or ()]
    if not machines and not config["tpu_name"]:
        raise ConfigurationError(
            "tpu_cluster was asked for and neither the pod nor its machines are named. "
            "Add --vm once for each machine, or tpu_name to the configuration file."
        )
    where = [word for machine in machines for word in ("--vm", machine)] or ["--tpu", str(config["tpu_name"])]
    given = [str(entry) for entry in config["env"] or ()]
    variables = [f"{variable}={value}" for variable, value in {**values, "ACCELERATE_IN_TPU_POD": "1"}.items()]
    words = [word for entry in (*variables, *given) for word in ("--env", entry)]
    prefix = ("sudo",) if config["tpu_use_sudo"] else ()
    kind = ("-m",) if config["module"] else ()
    argv = (site.python, "-m", "torch_xla.distributed.xla_dist", *where, *words, "--", *prefix, "python3")
    return LaunchPlan("spawn_command", (*argv, *kind, *_script(config)), values, launcher=name)


def _script(config: RunConfig) -> tuple[str, ...]:
    return (str(config["training_script"]), *map(str, config["training_script_args"] or ()))
