"""DeepSpeed's own launcher, which reaches the other machines of a hostfile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import Choice
from accelerate.launch.command import worker_environment
from accelerate.launch.elastic import processes_per_machine
from accelerate.launch.meeting import DEFAULT_PORT
from accelerate.launch.plan import FILES, LaunchPlan
from accelerate.launch.site import Site

if TYPE_CHECKING:
    from accelerate.config.run_config import RunConfig

name = "DeepSpeed launcher"

_STANDARD = "standard"
_WITHOUT_SSH = "nossh"
_ENVIRONMENT_FILE = "deepspeed_env"


def accepts(config: RunConfig, site: Site) -> Choice[bool]:
    """Accept several machines, unless each of them is started by hand."""
    if not config["use_deepspeed"]:
        return Choice(False, "DeepSpeed was not asked for")
    if int(config["num_machines"] or 1) < 2:
        return Choice(False, "DeepSpeed on one machine runs under torch's agent")
    starter = config["deepspeed_multinode_launcher"] or "pdsh"
    if starter == _STANDARD:
        return Choice(False, "the standard launcher starts each machine by hand under torch's agent")
    return Choice(True, f"DeepSpeed on several machines by {starter}")


def plan(config: RunConfig, site: Site) -> LaunchPlan:
    """Write the command of DeepSpeed's launcher and the file by which variables reach the other machines."""
    if config["deepspeed_inclusion_filter"] and config["deepspeed_exclusion_filter"]:
        raise ConfigurationError(
            "deepspeed_inclusion_filter and deepspeed_exclusion_filter were both given, and DeepSpeed takes one of "
            "them. Leave one out."
        )
    local = processes_per_machine(config)
    values = worker_environment(config, site, local)
    # DeepSpeed copies the variables of this file to every machine.
    content = "".join(f"{variable}={value}\n" for variable, value in values.items())
    environment = {**values, "DS_ENV_FILE": f"{FILES}/{_ENVIRONMENT_FILE}"}
    argv = ("deepspeed", "--no_local_rank", *_machines(config, local), *_meeting(config), *_script(config))
    return LaunchPlan("spawn_command", argv, environment, files={_ENVIRONMENT_FILE: content}, launcher=name)


def _machines(config: RunConfig, local: int) -> tuple[str, ...]:
    starter = str(config["deepspeed_multinode_launcher"] or "pdsh")
    words: tuple[str, ...] = ("--hostfile", str(config["deepspeed_hostfile"])) if config["deepspeed_hostfile"] else ()
    if starter == _WITHOUT_SSH:
        words += ("--no_ssh", "--node_rank", str(config["machine_rank"] or 0))
    else:
        words += ("--launcher", starter)
    if config["deepspeed_exclusion_filter"]:
        return (*words, "--exclude", str(config["deepspeed_exclusion_filter"]))
    if config["deepspeed_inclusion_filter"]:
        return (*words, "--include", str(config["deepspeed_inclusion_filter"]))
    return (*words, "--num_nodes", str(config["num_machines"]), "--num_gpus", str(local))


def _meeting(config: RunConfig) -> tuple[str, ...]:
    address = ("--master_addr", str(config["main_process_ip"])) if config["main_process_ip"] else ()
    return (*address, "--master_port", str(config["main_process_port"] or DEFAULT_PORT))


def _script(config: RunConfig) -> tuple[str, ...]:
    kind = ("--module",) if config["module"] else ("--no_python",) if config["no_python"] else ()
    return (*kind, str(config["training_script"]), *map(str, config["training_script_args"] or ()))
