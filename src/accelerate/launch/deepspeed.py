"""DeepSpeed's own launcher, which reaches the other machines of a hostfile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate._base.helpers import Choice
from accelerate.config import conflicts
from accelerate.launch.elastic import processes_per_machine
from accelerate.launch.host import DEFAULT_PORT, Host
from accelerate.launch.plan import FILES, Launcher, LaunchPlan, script_words, worker_environment

if TYPE_CHECKING:
    from accelerate.config.run_config import RunConfig

_STANDARD = "standard"
_WITHOUT_SSH = "nossh"
_ENVIRONMENT_FILE = "deepspeed_env"


def _accepts(config: RunConfig, host: Host) -> Choice[bool]:
    """Accept several machines, unless each of them is started by hand."""
    if not config["use_deepspeed"]:
        return Choice(False, "DeepSpeed was not asked for")
    if int(config["num_machines"] or 1) < 2:
        return Choice(False, "DeepSpeed on one machine runs under torch's agent")
    starter = config["deepspeed_multinode_launcher"] or "pdsh"
    if starter == _STANDARD:
        return Choice(False, "the standard launcher starts each machine by hand under torch's agent")
    return Choice(True, f"DeepSpeed on several machines by {starter}")


def _plan(config: RunConfig, host: Host) -> LaunchPlan:
    """Write the command of DeepSpeed's launcher and the file by which variables reach the other machines."""
    conflicts.check_deepspeed_filters(config)
    local = processes_per_machine(config)
    values = worker_environment(config, host, local)
    starter = str(config["deepspeed_multinode_launcher"] or "pdsh")
    excluded, included = config["deepspeed_exclusion_filter"], config["deepspeed_inclusion_filter"]
    argv = ["deepspeed", "--no_local_rank"]
    if config["deepspeed_hostfile"]:
        argv += ["--hostfile", str(config["deepspeed_hostfile"])]
    if starter == _WITHOUT_SSH:
        argv += ["--no_ssh", "--node_rank", str(config["machine_rank"] or 0)]
    else:
        argv += ["--launcher", starter]
    if excluded or included:
        argv += ["--exclude", str(excluded)] if excluded else ["--include", str(included)]
    else:
        argv += ["--num_nodes", str(config["num_machines"]), "--num_gpus", str(local)]
    if config["main_process_ip"]:
        argv += ["--master_addr", str(config["main_process_ip"])]
    argv += ["--master_port", str(config["main_process_port"] or DEFAULT_PORT)]
    if config["module"] or config["no_python"]:
        argv.append("--module" if config["module"] else "--no_python")
    # DeepSpeed copies the variables of this file to every machine.
    files = {_ENVIRONMENT_FILE: "".join(f"{variable}={value}\n" for variable, value in values.items())}
    environment = {**values, "DS_ENV_FILE": f"{FILES}/{_ENVIRONMENT_FILE}"}
    return LaunchPlan("spawn_command", (*argv, *script_words(config)), environment, files=files)


DEEPSPEED = Launcher("DeepSpeed launcher", _accepts, _plan)
