"""Find out from the launcher's variables which process of how many this is."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from accelerate._base.errors import ConfigurationError
from accelerate.devices import machine
from accelerate.runtime.current import Topology

_DEFAULT_PORT = 29500
_PET_COUNTS = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK")


@dataclass(frozen=True)
class RankVariables:
    """The names under which one launcher publishes ranks and sizes."""

    source: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str

    def detect(self, environ: Mapping[str, str]) -> Topology | None:
        """Return the topology if this launcher started the process."""
        if self.rank not in environ or self.world_size not in environ:
            return None
        rank, world_size = _integer(environ, self.rank, 0), _integer(environ, self.world_size, 1)
        alone = self.rank == "RANK" and self.local_rank not in environ and _is_pod(environ)
        local_world_size = _integer(environ, self.local_world_size, 1 if alone else world_size)
        local_rank = _integer(environ, self.local_rank, rank % max(local_world_size, 1))
        rendezvous = environ.get("ACCELERATE_DEBUG_RDV_FILE")
        return Topology(
            rank, world_size, local_rank, local_world_size, self.source, f"file://{rendezvous}" if rendezvous else None
        )


def _is_pod(environ: Mapping[str, str]) -> bool:
    """Return whether each process runs on a separate machine, and only its global rank is known.

    A PyTorchJob of Kubeflow gives each pod RANK, WORLD_SIZE and MASTER_ADDR.
    """
    address = environ.get("MASTER_ADDR", "")
    return bool(address) and ("KUBERNETES_SERVICE_HOST" in environ or not machine.owns_address(address))


def _kubeflow(environ: Mapping[str, str]) -> Topology | None:
    """Take the ranks that Kubeflow means for torchrun, where a machine has one process.

    Raises:
        ConfigurationError: If torchrun would start several processes, or find out ranks or the number of machines.
    """
    machines = environ.get("PET_NNODES", "")
    if machines in ("", "1", "1:1"):
        return None
    if not machines.isdecimal() or environ.get("PET_NPROC_PER_NODE", "1") != "1" or "PET_NODE_RANK" not in environ:
        given = ", ".join(f"{name}={environ[name]!r}" for name in _PET_COUNTS if name in environ)
        raise ConfigurationError(
            f"{given} in the environment is for a launcher, and none has started this process. Run the script by `accelerate "
            "launch` or torchrun, or unset the variables PET_*."
        )
    return Topology(_integer(environ, "PET_NODE_RANK", 0), _integer(environ, "PET_NNODES", 1), 0, 1, "Kubeflow")


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name)
    if text is None or text == "":
        return default
    try:
        return int(text)
    except ValueError as error:
        raise ConfigurationError(
            f"The environment variable {name} is {text!r}, which is not a whole number. Unset it or correct it."
        ) from error


def _slurm(environ: Mapping[str, str]) -> Topology | None:
    # SLURM_STEP_NUM_TASKS exists only inside a step that srun started. The batch script itself has SLURM_NTASKS too,
    # but is one process: waiting there for the others would wait for ever.
    if "SLURM_PROCID" not in environ or "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    world_size = _integer(environ, "SLURM_STEP_NUM_TASKS", 1)
    tasks = machine.tasks_of_nodes(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _integer(environ, "SLURM_NODEID", 0)
    return Topology(
        _integer(environ, "SLURM_PROCID", 0),
        world_size,
        _integer(environ, "SLURM_LOCALID", 0),
        tasks[node] if 0 <= node < len(tasks) else world_size,
        "Slurm",
    )


def _tpu(environ: Mapping[str, str]) -> Topology | None:
    # torch_xla sets these in the processes that it starts, one for each chip.
    if "CLOUD_TPU_TASK_ID" not in environ or "TPU_PROCESS_ADDRESSES" not in environ:
        return None
    world_size = len(environ["TPU_PROCESS_ADDRESSES"].split(","))
    return Topology(
        _integer(environ, "CLOUD_TPU_TASK_ID", 0),
        world_size,
        _integer(environ, "PJRT_LOCAL_PROCESS_RANK", 0),
        _integer(environ, "PJRT_LOCAL_PROCESS_COUNT", world_size),
        "the TPU runtime",
    )


_DETECTORS: tuple[Callable[[Mapping[str, str]], Topology | None], ...] = (
    RankVariables("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE").detect,
    RankVariables("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS").detect,
    RankVariables(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ).detect,
    RankVariables(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ).detect,
    _slurm,
    _tpu,
    _kubeflow,
)


def detect() -> Topology:
    """Return the place of this process, by the first launcher whose variables are there; alone if there is none."""
    for detector in _DETECTORS:
        topology = detector(os.environ)
        if topology is not None:
            return topology
    return Topology()


def publish(topology: Topology) -> None:
    """Write ranks and rendezvous where `torch.distributed` looks for them, keeping what is already there.

    Raises:
        ConfigurationError: If the run spans machines and nothing says where they meet.
    """
    values = {
        "RANK": topology.rank,
        "WORLD_SIZE": topology.world_size,
        "LOCAL_RANK": topology.local_rank,
        "LOCAL_WORLD_SIZE": topology.local_world_size,
    }
    for name, value in values.items():
        os.environ.setdefault(name, str(value))
    if topology.init_method is not None:
        return
    if topology.source == "Kubeflow":
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if os.environ.get(f"PET_{name}"):
                os.environ.setdefault(name, os.environ[f"PET_{name}"])
    nodes = os.environ.get("SLURM_STEP_NODELIST")
    job = os.environ.get("SLURM_JOB_ID")
    if topology.source == "Slurm" and nodes and job:
        # Tasks of one node need no address that other machines can reach.
        is_one_node = os.environ.get("SLURM_STEP_NUM_NODES") == "1"
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1" if is_one_node else machine.first_host(nodes))
        os.environ.setdefault("MASTER_PORT", str(machine.port_of_job(job)))
    if "MASTER_ADDR" not in os.environ:
        if topology.local_world_size < topology.world_size:
            raise ConfigurationError(
                f"{topology.source} started {topology.world_size} processes, {topology.local_world_size} of them here, "
                "and MASTER_ADDR is not set, so the machines cannot find each other. "
                "Set MASTER_ADDR to the address of the machine with rank 0."
            )
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ.setdefault("MASTER_PORT", str(_DEFAULT_PORT))
    if machine.is_loopback(os.environ["MASTER_ADDR"]):
        keep_gloo_on_loopback()


def keep_gloo_on_loopback() -> None:
    """Let gloo listen on the loopback address only, where this machine has one and no interface was chosen.

    Otherwise gloo listens on the address that the machine's own name leads to, which others may reach.
    """
    interface = machine.interface_of("127.0.0.1") if "GLOO_SOCKET_IFNAME" not in os.environ else None
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface


@dataclass
class CPUInformation:
    """Rank and size of the run and of this machine's part of it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Return the ranks that torchrun, an MPI or Slurm gave this process; alone if none did."""
    found = detect()
    return CPUInformation(found.rank, found.world_size, found.local_rank, found.local_world_size)
