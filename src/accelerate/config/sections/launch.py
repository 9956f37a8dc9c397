"""Launch options that say what is run, on what, in how many processes, and how these meet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from accelerate.config.knob import (
    NAMES,
    ON_ONE,
    ON_TRUE,
    REPEATED,
    THREADS,
    TRUE_FALSE,
    Ask,
    LaunchSection,
    Reader,
    knob,
)
from accelerate.config.sections.torchrun import STREAMS

PRECISIONS = ("no", "fp16", "bf16", "fp8")


# --- when a question of `accelerate config` applies, from the answers before it ---------------------------------------


def several_processes(answers: Mapping[str, Any]) -> bool:
    """Say whether the run has more than one process."""
    return bool(answers["distributed_type"] != "NO")


def several_machines(answers: Mapping[str, Any]) -> bool:
    """Say whether the run has more than one machine."""
    return bool(answers["num_machines"] > 1)


def _needs_address(answers: Mapping[str, Any]) -> bool:
    """Say whether machines must be told where to find each other."""
    return several_machines(answers) and not answers["mpirun_hostfile"]


def _on_accelerators(answers: Mapping[str, Any]) -> bool:
    """Say whether the run has several accelerators of a machine."""
    return several_processes(answers) and not answers["cpu"] and not answers["tpu"]


def _on_tpu(answers: Mapping[str, Any]) -> bool:
    return bool(answers["tpu"])


def _on_tpu_pod(answers: Mapping[str, Any]) -> bool:
    return _on_tpu(answers) and bool(answers["tpu_cluster"])


# --- the options ------------------------------------------------------------------------------------------------------


class RunOptions(LaunchSection):
    """The script, and how it is started."""

    in_files: ClassVar[bool] = False
    reader: ClassVar[Reader | None] = "launcher"

    config_file: str | None = knob(
        help="YAML or JSON file to take defaults from, instead of the one in the cache folder.", reader="resolver"
    )
    quiet: bool = knob(
        False,
        help="Leave out the report when a worker fails; only its own output is shown.",
        shape="switch",
        short="-q",
    )
    module: bool = knob(False, help="Run the script as a module, as `python -m` does.", shape="switch", short="-m")
    no_python: bool = knob(
        False, help="Run the script as a program of its own, without a Python interpreter before it.", shape="switch"
    )
    debug: bool = knob(
        False,
        help="Check in every collective that all processes agree about its shapes; slower.",
        codec=ON_TRUE,
        env="ACCELERATE_DEBUG_MODE",
        shape="switch",
        yaml="debug",
        ask=Ask(only_if=several_processes),
    )
    training_script: str | None = knob(
        help="Path of the script, or name of the module, to run in every process.", shape="place"
    )
    training_script_args: list[str] | None = knob(
        help="Arguments of the script, handed on as they are.", codec=REPEATED, shape="rest"
    )


class HardwareOptions(LaunchSection):
    """What the processes compute on."""

    title: ClassVar[str] = "Hardware Selection Arguments"
    reader: ClassVar[Reader | None] = "launcher"

    cpu: bool = knob(
        False,
        help="Compute on the CPU even if there is an accelerator. The default file is not read then.",
        codec=TRUE_FALSE,
        env="ACCELERATE_USE_CPU",
        shape="switch",
        yaml="use_cpu",
        ask=Ask("Compute on the CPU alone", only_if=lambda answers: not several_processes(answers)),
    )
    multi_gpu: bool = knob(False, help="Start one process for each of several accelerators.", shape="switch", yaml="")
    tpu: bool = knob(
        False, help="Start the script on a TPU, or on what PJRT_DEVICE names for torch_xla.", shape="switch", yaml=""
    )


class ResourceOptions(LaunchSection):
    """Number of processes, threads and bits."""

    title: ClassVar[str] = "Resource Selection Arguments"
    reader: ClassVar[Reader | None] = "elastic"

    mixed_precision: str | None = knob(
        help="Number format of training.",
        choices=PRECISIONS,
        env="ACCELERATE_MIXED_PRECISION",
        fallback="no",
        ask=Ask(),
    )
    num_processes: int | None = knob(
        help="Number of processes over all machines; one for each accelerator where it is not given.",
        ask=Ask(
            "Number of processes over all machines",
            only_if=lambda answers: several_processes(answers) and not _on_tpu_pod(answers),
        ),
    )
    num_machines: int | None = knob(
        help="Number of machines.",
        fallback=1,
        ask=Ask(only_if=lambda answers: several_processes(answers) and not answers["tpu"]),
    )
    num_cpu_threads_per_process: int | None = knob(
        help="Threads of each process; on the CPU the physical cores are shared out where it is not given.",
        codec=THREADS,
        env="OMP_NUM_THREADS",
        yaml="",
    )
    enable_cpu_affinity: bool = knob(
        False,
        help="Bind each process to the cores next to its accelerator.",
        codec=ON_ONE,
        env="ACCELERATE_CPU_AFFINITY",
        shape="switch",
        ask=Ask(only_if=_on_accelerators),
    )


class ParadigmOptions(LaunchSection):
    """Which engine wraps the model; one at most."""

    title: ClassVar[str] = "Training Paradigm Arguments"
    in_files: ClassVar[bool] = False
    variables: ClassVar[str | None] = "ACCELERATE_"

    use_deepspeed: bool = knob(False, help="Train with DeepSpeed.", codec=ON_TRUE, shape="switch")
    use_fsdp: bool = knob(False, help="Shard the model with FSDP.", codec=ON_TRUE, shape="switch")
    use_parallelism_config: bool = knob(
        False,
        help="Lay the processes out on the axes given by --parallelism_config_*; those that shard need FSDP 2 or DeepSpeed.",
        codec=ON_TRUE,
        shape="switch",
        ask=Ask(
            "Lay the processes out on several axes of parallelism",
            only_if=lambda answers: answers["use_deepspeed"] or (answers["use_fsdp"] and answers["fsdp_version"] == 2),
        ),
    )
    use_megatron_lm: bool = knob(False, help="Train with Megatron-LM.", codec=ON_TRUE, shape="switch")


class DistributedOptions(LaunchSection):
    """Addresses, rendezvous, logs and restarts."""

    title: ClassVar[str] = "Distributed GPUs"
    reader: ClassVar[Reader | None] = "elastic"

    gpu_ids: str | None = knob(
        help="Accelerators of this machine to use, such as `0,2`, or `all`.",
        codec=NAMES,
        fallback="all",
        reader="launcher",
        ask=Ask(only_if=lambda answers: _on_accelerators(answers) and not several_machines(answers)),
    )
    same_network: bool = knob(
        False,
        help="Accepted and not needed: machines always meet at the address of the first one.",
        shape="switch",
        reader="resolver",
        idle=": machines always meet at --main_process_ip and --main_process_port.",
    )
    machine_rank: int | None = knob(
        help="Number of this machine, from 0.", also=("node_rank",), fallback=0, ask=Ask(only_if=_needs_address)
    )
    min_machines: int | None = knob(
        help="Begin and go on with as few machines as this; the others may come later or leave. Needs --rdzv_backend c10d.",
        yaml="",
    )
    main_process_ip: str | None = knob(
        help="Address of the first machine.",
        also=("master_addr",),
        env="MASTER_ADDR",
        ask=Ask(only_if=_needs_address),
    )
    main_process_port: int | None = knob(
        help="Port of the first machine; 0 takes a free one.",
        also=("master_port",),
        env="MASTER_PORT",
        ask=Ask(default=29500, only_if=_needs_address),
    )
    tee: str = knob(
        "0",
        help="Streams that go to the terminal and to the log files: 1 is output, 2 is errors, 3 is both.",
        codec=STREAMS,
        short="-t",
        yaml="",
    )
    log_dir: str | None = knob(help="Folder for the logs of each process.", yaml="")
    role: str = knob("default", help="Name of the workers in logs.", yaml="")
    rdzv_backend: str = knob(
        "static",
        help="How the machines meet: static, c10d or etcd.",
        ask=Ask("How the machines meet", choices=("static", "c10d", "etcd"), only_if=_needs_address),
    )
    rdzv_conf: str = knob("", help="Options of the rendezvous, as `key=value,key=value`.", yaml="")
    max_restarts: int = knob(0, help="How often the workers are started anew after a failure.", yaml="")
    auto_resume: bool = knob(
        False,
        help="Let `accelerator.epochs()` go on from the newest valid checkpoint of the project folder.",
        codec=ON_TRUE,
        env="ACCELERATE_AUTO_RESUME",
        shape="switch",
        yaml="",
    )
    preemption_grace: float = knob(
        30.0,
        help="Seconds that workers which read `accelerator.should_stop` have to save and end after SIGTERM.",
        also=("shutdown_timeout",),
        yaml="",
    )
    monitor_interval: float = knob(0.1, help="Seconds between two looks at the workers.", yaml="")


class TpuOptions(LaunchSection):
    """A TPU, or a pod of them."""

    title: ClassVar[str] = "TPU"
    reader: ClassVar[Reader | None] = "launcher"

    tpu_cluster: bool = knob(
        False,
        help="Start the script on every machine of a TPU pod.",
        shape="switch",
        negative="no_tpu_cluster",
        yaml="tpu_use_cluster",
        old_keys=("tpu_cluster",),
        ask=Ask(only_if=_on_tpu),
    )
    tpu_use_sudo: bool = knob(
        False, help="Run with sudo on the machines of the pod.", shape="switch", ask=Ask(only_if=_on_tpu_pod)
    )
    vm: list[str] | None = knob(
        help="A TPU machine to start the script on, in the place of the pod; repeat it for each.",
        codec=REPEATED,
        shape="repeat",
        yaml="tpu_vm",
        ask=Ask(
            "TPU machine in the place of the whole pod, or a JSON list of them", optional=True, only_if=_on_tpu_pod
        ),
    )
    env: list[str] | None = knob(
        help="A variable for the machines of the pod, as `NAME=value`; repeat it for each.",
        codec=REPEATED,
        shape="repeat",
        yaml="tpu_env",
        ask=Ask(
            "Variable for the machines of the pod as `NAME=value`, or a JSON list of them",
            optional=True,
            only_if=_on_tpu_pod,
        ),
    )
    main_training_function: str | None = knob(
        help="Function that each process of a TPU calls, where the script does not call it by itself.",
        fallback="main",
        ask=Ask(only_if=_on_tpu),
    )
    downcast_bf16: bool = knob(
        False,
        help="With bf16 on a TPU, store all floats in 16 bits, weights as well, and doubles in 32.",
        codec=ON_TRUE,
        env="ACCELERATE_DOWNCAST_BF16",
        shape="switch",
        ask=Ask(only_if=lambda answers: _on_tpu(answers) and answers["mixed_precision"] == "bf16"),
    )
    tpu_name: str | None = knob(help="Name of the TPU.", shape="none", ask=Ask(only_if=_on_tpu_pod))
    tpu_zone: str | None = knob(help="Zone of the TPU.", shape="none", ask=Ask(only_if=_on_tpu_pod))
    command_file: str | None = knob(
        help="File of commands for `tpu-config`.", shape="none", ask=Ask(optional=True, only_if=_on_tpu_pod)
    )
    commands: list[str] | None = knob(
        help="Commands for `tpu-config`.",
        codec=REPEATED,
        shape="none",
        ask=Ask(
            "Command for `tpu-config`, or a JSON list of them",
            optional=True,
            only_if=lambda answers: _on_tpu_pod(answers) and not answers["command_file"],
        ),
    )


class AwsOptions(LaunchSection):
    """The account that a job on Amazon SageMaker is charged to."""

    title: ClassVar[str] = "AWS Arguments"
    in_files: ClassVar[bool] = False
    variables: ClassVar[str | None] = ""

    aws_access_key_id: str | None = knob(help="Key of the account, for jobs on SageMaker.", secret=True)
    aws_secret_access_key: str | None = knob(help="Secret of that key.", secret=True)


class MpiOptions(LaunchSection):
    """Start through `mpirun`."""

    title: ClassVar[str] = "MPI Arguments"
    file_key: ClassVar[str | None] = "mpirun_config"
    prefix: ClassVar[str] = "mpirun_"

    mpirun_hostfile: str | None = knob(
        help="Start with mpirun on the machines that this file lists.",
        reader="launcher",
        ask=Ask(
            "File of machines to start on with mpirun",
            optional=True,
            only_if=lambda answers: several_machines(answers) and bool(answers["cpu"]),
        ),
    )
