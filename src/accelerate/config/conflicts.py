"""Refuse options of a launch that contradict each other, the script or the machine, before anything is started.

`check` holds for every configuration. The other functions belong to single launchers, which know what will be started:
those named `check_*` raise a ConfigurationError, the others return the one for a fact that a launcher has met.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from accelerate._base.enums import MeshAxis
from accelerate._base.errors import ConfigurationError
from accelerate._base.untrusted import number_in
from accelerate.config.run_config import Resolved, RunConfig

_OTHER_HARDWARE = ("tpu", "multi_gpu")
_ENGINES = (*_OTHER_HARDWARE, "use_deepspeed", "use_fsdp", "use_megatron_lm")
MPI_WORLD_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
# What only torch's agent does.
_OF_THE_AGENT = ("max_restarts", "min_machines", "log_dir", "tee", "redirects", "local_ranks_filter", "numa_binding")
# In seconds: a shorter one only keeps the processor busy.
_SHORTEST_INTERVAL = 0.001
_SHARDING_AXES = {MeshAxis.DP_SHARD, MeshAxis.SP}

Rule = Callable[[RunConfig, Mapping[str, str]], None]


def check(config: RunConfig, environ: Mapping[str, str]) -> None:
    """Run every rule that does not depend on the launcher.

    Raises:
        ConfigurationError: One of them fails.
    """
    for rule in _RULES:
        rule(config, environ)


# --- every configuration ----------------------------------------------------------------------------------------------


def _one_paradigm(config: RunConfig, environ: Mapping[str, str]) -> None:
    """Let one engine have the model; the CPU goes with each of them, but not with a choice of other hardware."""
    engines = [name for name in _ENGINES if config[name]]
    other_hardware = [name for name in engines if name in _OTHER_HARDWARE]
    rivals = ["cpu", *other_hardware] if config["cpu"] and other_hardware else engines
    if len(rivals) > 1:
        raise ConfigurationError(
            f"{config.shown(rivals[0])} and {config.shown(rivals[1])} exclude each other: a run has one "
            "kind of training. Leave one of them out."
        )


def _counts(config: RunConfig, environ: Mapping[str, str]) -> None:
    for name in ("num_processes", "num_machines"):
        if config[name] is not None and config[name] < 1:
            raise ConfigurationError(
                f"{config.shown(name)} cannot work: at least one is needed. Write --{name} with a number from 1 on."
            )
    # Slurm and MPI may share processes out in their own way.
    hosts_are_named = _cluster_names_hosts(config, environ)
    if not hosts_are_named:
        check_even_share(config)
    # A hostfile may say how many machines there are.
    if not (hosts_are_named and config.is_default("num_machines")):
        _check_machine_rank(config)


def _agent_numbers(config: RunConfig, environ: Mapping[str, str]) -> None:
    for name, least in (("max_restarts", 0), ("preemption_grace", 0), ("monitor_interval", _SHORTEST_INTERVAL)):
        # A comparison with NaN is False.
        if not least <= config[name] < float("inf"):
            raise ConfigurationError(
                f"{config.shown(name)} cannot work: a number of at least {least} is needed. Write such a --{name}, or leave "
                "it out."
            )


def _hostfile(config: RunConfig, environ: Mapping[str, str]) -> None:
    if (
        config["use_deepspeed"]
        and config["deepspeed_hostfile"]
        and config["deepspeed_multinode_launcher"] == "standard"
    ):
        raise ConfigurationError(
            f"{config.shown('deepspeed_hostfile')} names machines, and {config.shown('deepspeed_multinode_launcher')} starts "
            "processes on this machine only. Leave the hostfile out and start each machine with its --machine_rank, or write "
            "--deepspeed_multinode_launcher pdsh."
        )


def is_pod(environ: Mapping[str, str]) -> bool:
    """Return whether a cluster gave this process a rank among several, and no place on its machine, as a PyTorchJob does."""
    size = number_in(environ.get("WORLD_SIZE", ""))
    return size is not None and size > 1 and "RANK" in environ and "LOCAL_RANK" not in environ


def _pods(config: RunConfig, environ: Mapping[str, str]) -> None:
    alone = config["num_machines"] == 1 and not config.is_typed("num_machines")
    if alone and (config["num_processes"] or 1) > 1 and is_pod(environ):
        rank, size = environ["RANK"], environ["WORLD_SIZE"]
        raise ConfigurationError(
            f"RANK={rank} and WORLD_SIZE={size} in the environment number the processes of a cluster, and "
            f"{config.shown('num_processes')} would start a separate run in each of them. Add --num_machines {size} "
            f"--machine_rank {rank} and count the processes of all machines in --num_processes, or add --num_machines 1."
        )


def _range(config: RunConfig, environ: Mapping[str, str]) -> None:
    least, most = config["min_machines"], config["num_machines"]
    if least is None:
        return
    if not 0 < least <= most:
        raise ConfigurationError(
            f"{config.shown('min_machines')} is no number up to {config.shown('num_machines')}. "
            f"Write --min_machines with a number from 1 to {most}."
        )
    if least < most and config["rdzv_backend"] == "static":
        raise ConfigurationError(
            f"{config.shown('min_machines')} lets machines come and go, and "
            f"{config.shown('rdzv_backend')} waits for all {most}. Add --rdzv_backend c10d."
        )


def _binding(config: RunConfig, environ: Mapping[str, str]) -> None:
    if config["numa_binding"] and (config["cpu"] or not config.machine.has_accelerator):
        raise ConfigurationError(
            f"{config.shown('numa_binding')} binds processes to the cores near their GPUs, and this run has none. "
            "Leave it out."
        )


def _check_machine_rank(config: RunConfig) -> None:
    machines = config["num_machines"]
    if not 0 <= int(config["machine_rank"] or 0) < machines:
        raise ConfigurationError(
            f"{config.shown('machine_rank')} is not a place among {config.shown('num_machines')}. "
            f"Write --machine_rank with a number from 0 to {machines - 1}."
        )


def _cluster_names_hosts(config: RunConfig, environ: Mapping[str, str]) -> bool:
    """Say whether a hostfile, Slurm or MPI names the machines, so that no address is needed."""
    slurm = config.machine.slurm
    # All but these two find the machines in a hostfile or ask Slurm for them.
    by_hand = config["deepspeed_multinode_launcher"] in (None, "standard", "nossh")
    hostfile = config["mpirun_hostfile"] or (config["use_deepspeed"] and (config["deepspeed_hostfile"] or not by_hand))
    inside_mpi = any(environ.get(name) for name in MPI_WORLD_SIZES)
    return bool(hostfile) or (slurm is not None and slurm.num_nodes > 1) or inside_mpi


def _address(config: RunConfig, environ: Mapping[str, str]) -> None:
    if config["num_machines"] < 2 or _cluster_names_hosts(config, environ):
        return
    if not config["tpu"] and not _is_sagemaker(config):
        _check_address(config)


def _check_address(config: RunConfig) -> None:
    if not config["main_process_ip"]:
        raise ConfigurationError(
            f"{config.shown('num_machines')} and no address was given, so the machines cannot find each other. "
            "Add --main_process_ip with the address of the machine with rank 0."
        )


def _port(config: RunConfig, environ: Mapping[str, str]) -> None:
    port = config["main_process_port"]
    if port is not None and not 0 <= port <= 65535:
        raise ConfigurationError(
            f"{config.shown('main_process_port')} is no port. Write a number up to 65535, or 0 for a free one."
        )


def _several_devices(config: RunConfig, environ: Mapping[str, str]) -> None:
    # A file for several accelerators may well be used for one process; a flag that asks for several is meant.
    if config["multi_gpu"] and config.is_typed("multi_gpu") and config["num_processes"] < 2:
        raise ConfigurationError(
            f"{config.shown('multi_gpu')} starts several processes, and {config.shown('num_processes')}. "
            "Write --num_processes 2 or more, or leave --multi_gpu out."
        )
    chosen = config["gpu_ids"]
    if not chosen or chosen == "all" or config["cpu"] or config["tpu"]:
        return
    listed = [entry for entry in chosen.split(",") if entry.strip()]
    local = config["num_processes"] // config["num_machines"]
    if len(listed) < local:
        raise ConfigurationError(
            f"{config.shown('gpu_ids')} names {len(listed)} accelerator(s) for {local} processes on this machine "
            f"({config.shown('num_processes')}). Name one for each, or write --gpu_ids all."
        )


def _hardware(config: RunConfig, environ: Mapping[str, str]) -> None:
    """Refuse accelerators that are asked for and not there."""
    if not _runs_here(config, environ):
        return
    asked = _demand(config)
    local = config["num_processes"] // config["num_machines"]
    if asked is not None and not config.machine.has_accelerator:
        raise ConfigurationError(
            f"{config.shown(asked)} with {config.shown('num_processes')} needs accelerators, and this "
            f"machine has {config.machine}. Run it where they are, or add --cpu to run on the CPU."
        )
    if config.machine.has_accelerator and local > config.machine.device_count and config["gpu_ids"] == "all":
        most = config.machine.device_count * config["num_machines"]
        raise ConfigurationError(
            f"{config.shown('num_processes')} starts {local} processes here, and this machine has "
            f"{config.machine}: two processes cannot share one. Write --num_processes {most}, or add --cpu to run on the "
            "CPU."
        )


def _runs_here(config: RunConfig, environ: Mapping[str, str]) -> bool:
    """Say whether the processes compute on what a look at this machine finds."""
    # Whoever forces a device knows more than a look at the machine.
    forced = config["cpu"] or config["tpu"] or environ.get("ACCELERATE_TORCH_DEVICE")
    return not forced and not _cluster_names_hosts(config, environ) and not _is_sagemaker(config)


def _demand(config: RunConfig) -> str | None:
    """Return the flag that asks for accelerators by name; a file may be meant for another machine, an engine for any."""
    if config["multi_gpu"] and config.is_typed("multi_gpu"):
        return "multi_gpu"
    return "gpu_ids" if config.is_typed("gpu_ids") and config["gpu_ids"] != "all" else None


def falls_back_to_cpu(config: RunConfig, environ: Mapping[str, str]) -> str | None:
    """Return a sentence about a run that was meant for accelerators and computes on the CPU, for want of them."""
    kind = next((name for name in _ENGINES if config[name]), None)
    if kind is None or config.machine.has_accelerator or not _runs_here(config, environ):
        return None
    return f"{config.shown(kind)} runs on the CPU: this machine has {config.machine}."


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


def _xla_devices(config: RunConfig, environ: Mapping[str, str]) -> None:
    if config["tpu"]:
        check_tpu(config)


_RULES: tuple[Rule, ...] = (
    _one_paradigm,
    _counts,
    _agent_numbers,
    _pods,
    _hostfile,
    _range,
    _address,
    _port,
    _several_devices,
    _hardware,
    _axes,
    _loading,
    _megatron_degrees,
    _binding,
    _xla_devices,
)


# --- two names for one thing ------------------------------------------------------------------------------------------


def flags_differ(name: str, one: Resolved, other: Resolved) -> ConfigurationError:
    """Return the error for an option that two flags give different values."""
    return ConfigurationError(
        f"{name}={one.value!r} ({one.origin}) and {name}={other.value!r} ({other.origin}) say the same thing in two ways, with "
        "different values. Leave one of them out."
    )


# --- every launch -----------------------------------------------------------------------------------------------------


def check_script(config: RunConfig, find_program: Callable[[str], str | None]) -> None:
    """Refuse a launch without something to run."""
    script = config["training_script"]
    if not script:
        raise ConfigurationError(
            "No script was given, so there is nothing to run. Write `accelerate launch script.py`, options before it."
        )
    if config["module"] and config["no_python"]:
        raise ConfigurationError(
            f"--module and --no_python were both given for {script!r}: one runs a Python module, the other a program. "
            "Leave one of them out."
        )
    if config["tpu"] and config["tpu_cluster"]:
        return  # it is on the machines of the pod, which look for it
    if config["no_python"] and find_program(script) is None:
        raise ConfigurationError(
            f"The program {script!r} is not on the PATH or cannot be executed, and --no_python runs it as it is. "
            "Write its full path, or leave --no_python out for a Python script."
        )
    if not config["no_python"] and not config["module"]:
        _check_file(Path(script))


def _check_file(script: Path) -> None:
    if script.is_file() or (script / "__main__.py").is_file():
        return
    if script.is_dir():
        raise ConfigurationError(
            f"The script {str(script)!r} is a folder without a __main__.py. Write the path of a file in it."
        )
    import difflib

    beside = [path.name for path in script.parent.glob("*.py")]
    near = difflib.get_close_matches(script.name, beside, n=1)
    hint = f"Did you mean {str(script.parent / near[0])!r}?" if near else "Check the path, or use -m to run a module."
    folder = "" if script.is_absolute() else f" in {str(Path.cwd())!r}"
    raise ConfigurationError(f"The script {str(script)!r} does not exist{folder}. {hint}")


def check_sagemaker(config: RunConfig) -> None:
    """Refuse a file that describes a job of Amazon SageMaker."""
    if config.file is not None and config.file.sagemaker is not None:
        raise sagemaker_job(str(config.file.path))


def _is_sagemaker(config: RunConfig) -> bool:
    return config.file is not None and config.file.sagemaker is not None


def sagemaker_job(place: str) -> ConfigurationError:
    """Return the error for a job of Amazon SageMaker."""
    return ConfigurationError(
        f"{place} describes a job of Amazon SageMaker (compute_environment), which this command does not start. "
        "Start it with the sagemaker package, or name another file with --config_file."
    )


def cannot_start(program: str, error: OSError) -> ConfigurationError:
    """Return the error for a program that the system refuses to start."""
    return ConfigurationError(
        f"The program {program!r} cannot be started: {error.strerror}. Install it or put it on the PATH; "
        "--explain shows the whole command."
    )


# --- processes and machines under torch's agent -----------------------------------------------------------------------


def check_even_share(config: RunConfig) -> None:
    """Refuse a number of processes that the machines cannot share evenly."""
    processes, machines = int(config["num_processes"] or 0), int(config["num_machines"] or 1)
    if processes % machines:
        raise ConfigurationError(
            f"{config.shown('num_processes')} is the total over all machines and cannot be shared evenly among "
            f"{config.shown('num_machines')}. Write --num_processes {max(1, processes // machines) * machines}, "
            "or another multiple."
        )


def check_machines(config: RunConfig) -> None:
    """Refuse several machines that cannot find each other."""
    _check_address(config)
    if str(config["rdzv_backend"] or "static") == "static" and not config.is_given("machine_rank"):
        raise ConfigurationError(
            f"{config.shown('num_machines')} and this machine's place among them was not given. Add "
            f"--machine_rank, from 0 to {config['num_machines'] - 1}, or --rdzv_backend c10d, which needs none."
        )
    _check_machine_rank(config)


def check_rendezvous_options(config: RunConfig) -> None:
    """Refuse options of torch's rendezvous that are not pairs, such as `timeout=60,join_timeout=10`."""
    text = str(config["rdzv_conf"] or "")
    for pair in (entry.strip() for entry in text.split(",")):
        if pair and "=" not in pair:
            raise ConfigurationError(
                f"rdzv_conf={text!r}: {pair!r} has no value. Write pairs, such as --rdzv_conf timeout=60,is_host=true."
            )


def port_in_use(config: RunConfig, port: int) -> ConfigurationError:
    """Return the error for a port that another program listens on."""
    return ConfigurationError(
        f"main_process_port={port} ({config.origin('main_process_port')}): something listens on that port of this "
        "machine already. Give another --main_process_port (the same on every machine), or end what listens there."
    )


# --- other launchers --------------------------------------------------------------------------------------------------


def check_tpu(config: RunConfig) -> None:
    """Refuse what no run on XLA devices can have."""
    if config["mixed_precision"] in ("fp16", "fp8"):
        raise ConfigurationError(
            f"{config.shown('mixed_precision')} with a TPU: XLA devices train in bfloat16 and have neither a scaler "
            "for float16 nor fp8. Write --mixed_precision bf16, or leave it out."
        )
    if int(config["num_machines"] or 1) > 1:
        raise ConfigurationError(
            f"{config.shown('num_machines')} with a TPU, whose machines know of each other by themselves. Leave "
            "--num_machines out, and add --tpu_cluster to start the script on all of them from here."
        )
    for name in _OF_THE_AGENT:
        if config.is_typed(name) and config[name] not in (0, "0"):
            raise ConfigurationError(
                f"{config.shown(name)} is about torch's agent, which does not start the processes of a TPU. "
                f"Leave --{name} out."
            )


def check_tpu_pod(config: RunConfig) -> None:
    """Refuse a pod without a name, and variables for it that are none."""
    if not config["vm"] and not config["tpu_name"]:
        raise ConfigurationError(
            f"{config.shown('tpu_cluster')} and neither the pod nor its machines are named. "
            "Add --vm once for each machine, or tpu_name to the configuration file."
        )
    for entry in map(str, config["env"] or ()):
        if not entry.partition("=")[0].isidentifier() or "=" not in entry:
            raise ConfigurationError(
                f"env={entry!r} ({config.origin('env')}) is no variable for the machines of the pod. "
                "Write --env NAME=value."
            )


def no_gcloud() -> ConfigurationError:
    """Return the error for a pod that cannot be reached."""
    return ConfigurationError(
        "The program 'gcloud' is not on the PATH, and it is what reaches the machines of a TPU pod. Install the Google "
        "Cloud CLI, or run `accelerate launch --tpu --no_tpu_cluster` on each machine."
    )


def check_deepspeed_filters(config: RunConfig) -> None:
    """Refuse two filters of machines for DeepSpeed."""
    if config["deepspeed_inclusion_filter"] and config["deepspeed_exclusion_filter"]:
        raise ConfigurationError(
            f"{config.shown('deepspeed_inclusion_filter')} and {config.shown('deepspeed_exclusion_filter')} were "
            "both given, and DeepSpeed takes one of them. Leave one out."
        )


def check_deepspeed_rank(config: RunConfig, num_machines: int) -> None:
    """Refuse a machine that does not know its place among those that DeepSpeed starts by hand."""
    if not config.is_given("machine_rank"):
        raise ConfigurationError(
            f"{config.shown('deepspeed_multinode_launcher')} starts each of {num_machines} machines by hand, and this "
            f"machine's place among them was not given. Add --machine_rank, from 0 to {num_machines - 1}."
        )
    if not 0 <= int(config["machine_rank"]) < num_machines:
        raise ConfigurationError(
            f"{config.shown('machine_rank')} is not a place among the {num_machines} machines of the run. "
            f"Write --machine_rank with a number from 0 to {num_machines - 1}."
        )
