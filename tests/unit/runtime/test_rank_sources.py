"""Which process of how many this is, from the variables of each launcher."""

from __future__ import annotations

import os

import pytest

from accelerate._base.errors import ConfigurationError
from accelerate.config.env import clear_environment, patch_environment
from accelerate.devices import machine
from accelerate.runtime import rank_sources
from accelerate.runtime.current import Topology
from accelerate.utils.environment import CPUInformation, get_cpu_distributed_information

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "4711",
}

LAUNCHERS = [
    pytest.param({}, Topology(), id="none"),
    pytest.param(
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        Topology(3, 4, 1, 2, "torchrun"),
        id="torchrun",
    ),
    pytest.param({"RANK": "3", "WORLD_SIZE": "4"}, Topology(3, 4, 3, 4, "torchrun"), id="torchrun, one machine"),
    pytest.param(
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0.invalid"},
        Topology(1, 2, 0, 1, "torchrun"),
        id="a pod of a PyTorchJob",
    ),
    pytest.param(
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        Topology(1, 2, 0, 1, "torchrun"),
        id="a pod of a PyTorchJob by its own name",
    ),
    pytest.param(
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
        Topology(1, 2, 1, 2, "torchrun"),
        id="two processes that were started by hand",
    ),
    pytest.param(
        {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "a"},
        Topology(1, 2, 0, 1, "Kubeflow"),
        id="Kubeflow without a launcher",
    ),
    pytest.param({"PET_NNODES": "1", "PET_NODE_RANK": "0"}, Topology(), id="Kubeflow, one machine"),
    pytest.param({"JOB_COMPLETION_INDEX": "1"}, Topology(), id="an index among pods of unknown number"),
    pytest.param({"RANK": "3"}, Topology(), id="a rank without a size says nothing"),
    pytest.param(
        {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
        Topology(2, 4, 0, 2, "PMI"),
        id="PMI",
    ),
    pytest.param(
        {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        },
        Topology(1, 2, 1, 2, "Open MPI"),
        id="Open MPI",
    ),
    pytest.param(
        {
            "MV2_COMM_WORLD_RANK": "1",
            "MV2_COMM_WORLD_SIZE": "2",
            "MV2_COMM_WORLD_LOCAL_RANK": "1",
            "MV2_COMM_WORLD_LOCAL_SIZE": "2",
        },
        Topology(1, 2, 1, 2, "MVAPICH"),
        id="MVAPICH",
    ),
    pytest.param(SLURM, Topology(5, 8, 1, 4, "Slurm"), id="Slurm under srun"),
    pytest.param(
        {**SLURM, "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "3(x2),1", "SLURM_NODEID": "2"},
        Topology(5, 7, 1, 1, "Slurm"),
        id="Slurm, fewer tasks on the last node",
    ),
    pytest.param(
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"},
        Topology(0, 2, 0, 2, "Slurm"),
        id="Slurm without tasks per node",
    ),
    pytest.param(
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "4711"},
        Topology(),
        id="a Slurm batch script without srun is alone",
    ),
    pytest.param(
        {**SLURM, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        Topology(1, 2, 1, 2, "torchrun"),
        id="torchrun inside srun wins",
    ),
    pytest.param(
        {
            "CLOUD_TPU_TASK_ID": "5",
            "TPU_PROCESS_ADDRESSES": ",".join(f"10.0.0.{host}:{8476 + chip}" for host in (1, 2) for chip in range(4)),
            "PJRT_LOCAL_PROCESS_RANK": "1",
            "PJRT_LOCAL_PROCESS_COUNT": "4",
        },
        Topology(5, 8, 1, 4, "the TPU runtime"),
        id="a process of torch_xla for each chip of two hosts",
    ),
]


@pytest.mark.parametrize(("variables", "expected"), LAUNCHERS)
def test_ranks(variables: dict[str, str], expected: Topology) -> None:
    with clear_environment(), patch_environment(**variables):
        assert rank_sources.detect() == expected


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "first", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2.0"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "x"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "two"},
        {"SLURM_PROCID": "zero", "SLURM_STEP_NUM_TASKS": "2"},
    ],
)
def test_a_variable_that_is_no_number_is_named(variables: dict[str, str]) -> None:
    with clear_environment(), patch_environment(**variables), pytest.raises(ConfigurationError) as caught:
        rank_sources.detect()
    assert any(name in str(caught.value) and repr(text) in str(caught.value) for name, text in variables.items())


@pytest.mark.parametrize(("rank", "world_size", "local_rank"), [(2, 2, 0), (-1, 2, 0), (0, 0, 0), (0, 2, -1)])
def test_ranks_that_cannot_be(rank: int, world_size: int, local_rank: int) -> None:
    with pytest.raises(ConfigurationError, match=f"rank {rank}, world size {world_size}"):
        Topology(rank, world_size, local_rank, 1, "torchrun")


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("login", "login"),
        ("a1,a2", "a1"),
        ("gpu[003-005,9],login", "gpu003"),
        ("gpu[7]", "gpu7"),
        ("gpu-[01-02]-ib,x", "gpu-01-ib"),
        ("rack[1-2]node[03-04]", "rack1node03"),
    ],
)
def test_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert machine.first_host(nodes) == host


def test_an_empty_node_list() -> None:
    with pytest.raises(ConfigurationError, match="names no host"):
        machine.first_host("")


def published(topology: Topology, **variables: str) -> dict[str, str]:
    with clear_environment(), patch_environment(**variables):
        rank_sources.publish(topology)
        found = dict(os.environ)
        os.environ.clear()
    return found


def test_publish_on_one_machine() -> None:
    found = published(Topology(1, 2, 1, 2, "Open MPI"))
    assert found == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": machine.interface_of("127.0.0.1"),
    }


@pytest.mark.parametrize("more", [{"PET_NPROC_PER_NODE": "2"}, {"PET_NNODES": "1:2"}])
def test_ranks_that_only_a_launcher_can_give(more: dict[str, str]) -> None:
    variables = {"PET_NNODES": "2", "PET_NODE_RANK": "1", **more}
    with clear_environment(), patch_environment(**variables), pytest.raises(ConfigurationError, match="PET_NNODES"):
        rank_sources.detect()


def test_machines_that_only_a_launcher_can_number() -> None:
    variables = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_RDZV_ENDPOINT": "trainer-0:29400"}
    with clear_environment(), patch_environment(**variables), pytest.raises(ConfigurationError, match="PET_NNODES='2'"):
        rank_sources.detect()


def test_kubeflow_names_the_first_machine() -> None:
    found = published(Topology(1, 2, 0, 1, "Kubeflow"), PET_MASTER_ADDR="trainer-0", PET_MASTER_PORT="23456")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("trainer-0", "23456")


def test_publish_keeps_what_is_there() -> None:
    found = published(Topology(1, 2, 1, 2), MASTER_ADDR="10.0.0.1", MASTER_PORT="1234", LOCAL_RANK="7")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"], found["LOCAL_RANK"]) == ("10.0.0.1", "1234", "7")


def test_machines_that_cannot_find_each_other() -> None:
    with pytest.raises(ConfigurationError, match="MASTER_ADDR is not set"):
        published(Topology(0, 4, 0, 2, "Open MPI"))


def test_slurm_processes_derive_one_meeting_point_from_the_job() -> None:
    first = published(Topology(0, 8, 0, 4, "Slurm"), **SLURM)
    second = published(Topology(5, 8, 1, 4, "Slurm"), **SLURM)
    other_job = published(Topology(5, 8, 1, 4, "Slurm"), **{**SLURM, "SLURM_JOB_ID": "4712"})
    assert first["MASTER_ADDR"] == second["MASTER_ADDR"] == "gpu003"
    assert first["MASTER_PORT"] == second["MASTER_PORT"] != other_job["MASTER_PORT"]
    assert all(15000 <= int(found["MASTER_PORT"]) < 55000 for found in (first, other_job))


def test_slurm_processes_of_one_node_meet_at_the_loopback_address() -> None:
    variables = {**SLURM, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_NODEID": "0"}
    found = published(Topology(5, 8, 5, 8, "Slurm"), **variables)
    assert found["MASTER_ADDR"] == "127.0.0.1"
    assert found["GLOO_SOCKET_IFNAME"] == machine.interface_of("127.0.0.1")
    assert found["MASTER_PORT"] == published(Topology(5, 8, 1, 4, "Slurm"), **SLURM)["MASTER_PORT"]


def test_a_meeting_file_needs_no_address() -> None:
    with clear_environment(), patch_environment(RANK="0", WORLD_SIZE="2", ACCELERATE_DEBUG_RDV_FILE="/tmp/meeting"):
        topology = rank_sources.detect()
    assert topology.init_method == "file:///tmp/meeting"
    assert "MASTER_ADDR" not in published(topology)


def test_the_record_of_a_process_that_is_alone() -> None:
    with clear_environment():
        assert get_cpu_distributed_information() == CPUInformation(0, 1, 0, 1)


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2},
        {"PMI_RANK": 3, "PMI_SIZE": 4, "MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 2},
        {
            "OMPI_COMM_WORLD_RANK": 3,
            "OMPI_COMM_WORLD_SIZE": 4,
            "OMPI_COMM_WORLD_LOCAL_RANK": 1,
            "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
        },
        {
            "MV2_COMM_WORLD_RANK": 3,
            "MV2_COMM_WORLD_SIZE": 4,
            "MV2_COMM_WORLD_LOCAL_RANK": 1,
            "MV2_COMM_WORLD_LOCAL_SIZE": 2,
        },
    ],
)
def test_ranks_of_a_launcher(variables: dict[str, int]) -> None:
    with clear_environment(), patch_environment(**variables):
        assert get_cpu_distributed_information() == CPUInformation(3, 4, 1, 2)
