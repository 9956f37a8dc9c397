"""The errors for facts that launchers of clusters meet: MPI and Slurm."""

from __future__ import annotations

from accelerate._base.errors import ConfigurationError
from accelerate.config.run_config import RunConfig


def no_mpirun(config: RunConfig) -> ConfigurationError:
    """Return the error for a hostfile where MPI is not installed."""
    return ConfigurationError(
        f"{config.shown('mpirun_hostfile')} needs mpirun or mpiexec, and neither is on the PATH. "
        "Install Open MPI or MPICH, or leave the hostfile out."
    )


def unknown_mpi(version: str) -> ConfigurationError:
    """Return the error for an mpirun whose options are not known."""
    return ConfigurationError(
        f"`mpirun --version` says {version.strip()[:80]!r}, which is neither Open MPI nor MPICH, Intel MPI or MVAPICH, "
        "so its options are unknown. Put one of these first on the PATH, or start `mpirun ... accelerate launch` by hand."
    )


def missing_hostfile(given: str) -> ConfigurationError:
    """Return the error for a path at which there is no hostfile."""
    return ConfigurationError(
        f"The hostfile {given!r} does not exist. Write a file with one host a line, or name the hosts themselves: "
        "--mpirun_hostfile first-host,second-host."
    )


def unreadable_hostfile(given: str, error: Exception) -> ConfigurationError:
    """Return the error for a hostfile that holds no text, or cannot be opened."""
    return ConfigurationError(
        f"The hostfile {given!r} cannot be read: {error}. Write a file with one host a line, or name the hosts themselves: "
        "--mpirun_hostfile first-host,second-host."
    )


def empty_hostfile(config: RunConfig) -> ConfigurationError:
    """Return the error for a hostfile without a host."""
    return ConfigurationError(
        f"The hostfile {config['mpirun_hostfile']!r} names no host, so the processes cannot meet. "
        "Write one host a line, the first of them this machine."
    )


def tasks_differ(config: RunConfig, tasks: int, nodes: int) -> ConfigurationError:
    """Return the error for a number of processes that does not fit the tasks of srun."""
    asked = config["num_processes"]
    return ConfigurationError(
        f"{config.shown('num_processes')} and srun started {tasks} tasks on {nodes} nodes, so it is unclear who "
        f"runs what. Start {asked} tasks (`srun --ntasks={asked}`), or one task a node (`srun --ntasks-per-node=1`) and "
        "let this launcher start the rest."
    )


def uneven_nodes(config: RunConfig, total: int, nodes: int) -> ConfigurationError:
    """Return the error for processes that the nodes of a Slurm step cannot share evenly."""
    return ConfigurationError(
        f"num_processes={total} ({config.origin('num_processes')}) cannot be shared evenly among the {nodes} nodes of "
        f"this step. Write --num_processes {max(1, total // nodes) * nodes}."
    )


def no_srun(nodes: int) -> ConfigurationError:
    """Return the error for a Slurm job of several nodes without Slurm's programs."""
    return ConfigurationError(
        f"This job holds {nodes} nodes and srun is not on the PATH, so the others cannot be reached from here. "
        "Load Slurm's programs, or add --num_machines 1 to use this node alone."
    )
