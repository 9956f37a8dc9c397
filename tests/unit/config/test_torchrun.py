"""What torchrun's options say becomes the options of a launch, and every value knows which flag gave it."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate._base.errors import ConfigurationError
from accelerate.commands.launch import launch_command_parser
from accelerate.config.resolve import resolve
from accelerate.config.run_config import RunConfig
from accelerate.devices.machine import Machine, SlurmJob

GPUS = Machine(device_type="cuda", device_count=4, cpu_count=8, visible_devices_variable="CUDA_VISIBLE_DEVICES")
NO_GPU = Machine(cpu_count=8)
SLURM = Machine(device_type="cuda", device_count=4, cpu_count=8, slurm=SlurmJob("1", 3, 3, 0))
ADDRESS = ("--master_addr", "10.0.0.1")


@pytest.fixture(autouse=True)
def no_default_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))


def launched(*words: str, machine: Machine = GPUS, environ: dict[str, str] | None = None) -> RunConfig:
    return resolve(launch_command_parser().parse_args([*words, "train.py"]), machine, environ=environ or {})


def refused(*words: str, machine: Machine = GPUS) -> str:
    with pytest.raises(ConfigurationError) as caught:
        launched(*words, machine=machine)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "machine", "total", "origin"),
    [
        (("--nproc_per_node=2",), GPUS, 2, "flag --nproc_per_node 2"),
        (("--nproc-per-node=auto",), GPUS, 4, "flag --nproc_per_node 4"),
        (("--nproc-per-node=gpu",), GPUS, 4, "flag --nproc_per_node 4"),
        (("--nproc-per-node=cuda",), GPUS, 4, "flag --nproc_per_node 4"),
        (("--nproc-per-node=gpu", "--gpu_ids=0,2"), GPUS, 2, "flag --nproc_per_node 2"),
        (("--nproc-per-node=cpu",), GPUS, 8, "flag --nproc_per_node 8"),
        (("--nproc-per-node=auto", "--cpu"), GPUS, 8, "flag --nproc_per_node 8"),
        (("--nproc-per-node=auto",), NO_GPU, 8, "flag --nproc_per_node 8"),
        (("--nproc-per-node=3",), NO_GPU, 3, "flag --nproc_per_node 3"),
        (
            ("--nproc_per_node=2", "--nnodes=3", *ADDRESS),
            GPUS,
            6,
            "flag --nproc_per_node 2 on each of 3 machines",
        ),
        (
            ("--nproc_per_node=2", "--num_machines=3", *ADDRESS),
            GPUS,
            6,
            "flag --nproc_per_node 2 on each of 3 machines",
        ),
        (("--nproc_per_node=2",), SLURM, 6, "flag --nproc_per_node 2 on each of 3 machines"),
        (("--nproc_per_node=2", "--nnodes=1"), SLURM, 2, "flag --nproc_per_node 2"),
        (("--nproc_per_node=2", "--num_processes=2"), GPUS, 2, "flag --nproc_per_node 2"),
    ],
)
def test_processes_of_a_machine_are_counted_over_all(
    words: tuple[str, ...], machine: Machine, total: int, origin: str
) -> None:
    config = launched(*words, machine=machine)
    assert (config["num_processes"], config.origin("num_processes")) == (total, origin)


def test_a_process_for_each_core_computes_on_the_cpu() -> None:
    config = launched("--nproc_per_node=cpu")
    assert (config["cpu"], config.origin("cpu")) == (True, "flag --nproc_per_node cpu")
    assert "multi_gpu=True" in refused("--nproc_per_node=cpu", "--multi_gpu")
    # Where there is nothing else, nothing is forced.
    assert launched("--nproc_per_node=cpu", machine=NO_GPU)["cpu"] is False


def test_a_command_line_wins_over_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "distributed_type: MULTI_GPU\nnum_processes: 8\nnum_machines: 2\nmachine_rank: 1\nmain_process_ip: 10.0.0.9\n"
    )
    config = launched("--config_file", str(path), "--standalone", "--nproc_per_node=2")
    assert {name: config[name] for name in ("num_processes", "num_machines", "machine_rank")} == {
        "num_processes": 2,
        "num_machines": 1,
        "machine_rank": 0,
    }
    assert (config.origin("machine_rank"), config.notes) == ("flag --standalone", ())
    other = launched("--config_file", str(path), "--nproc_per_node=1")
    assert (other["num_processes"], other["machine_rank"]) == (2, 1)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--num_processes=4", "--nproc_per_node=3"),
            ["num_processes=4 (flag --num_processes)", "num_processes=3 (flag --nproc_per_node 3)"],
        ),
        (
            ("--num_machines=2", "--nnodes=3", *ADDRESS),
            ["num_machines=2 (flag --num_machines)", "num_machines=3 (flag --nnodes)"],
        ),
        (
            ("--machine_rank=0", "--node-rank=1", "--nnodes=2", *ADDRESS),
            ["machine_rank=0 (flag --machine_rank)", "machine_rank=1 (flag --node_rank)"],
        ),
        (
            (*ADDRESS, "--main_process_ip=10.0.0.2"),
            ["main_process_ip='10.0.0.1' (flag --master_addr)", "'10.0.0.2' (flag --main_process_ip)"],
        ),
        (
            ("--master_port=1", "--rdzv_endpoint=h:2"),
            ["main_process_port=1 (flag --master_port)", "main_process_port=2 (flag --rdzv_endpoint)"],
        ),
        (
            ("--preemption_grace=5", "--shutdown-timeout=6"),
            ["preemption_grace=5.0 (flag --preemption_grace)", "6.0 (flag --shutdown_timeout)"],
        ),
        (
            ("--min_machines=2", "--nnodes=1:4", *ADDRESS),
            ["min_machines=2 (flag --min_machines)", "min_machines=1 (flag --nnodes)"],
        ),
    ],
)
def test_two_names_with_two_values_contradict_each_other(words: tuple[str, ...], told: list[str]) -> None:
    message = refused(*words)
    assert all(word in message for word in told), message
    assert "Leave one of them out." in message


def test_two_names_with_one_value_agree_and_a_flag_that_is_repeated_counts_last() -> None:
    config = launched("--main_process_port=29511", "--master-port=29511", *ADDRESS)
    assert config.origin("main_process_port") == "flag --master_port"
    assert launched("--master_port=1", "--master-port=2")["main_process_port"] == 2


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [
        ("node7:29400", "node7", 29400),
        ("node7", "node7", None),
        ("10.0.0.1:0", "10.0.0.1", 0),
        ("[fe80::1]:29400", "fe80::1", 29400),
        ("[fe80::1]", "fe80::1", None),
        ("fe80::1", "fe80::1", None),
    ],
)
def test_an_endpoint_is_an_address_and_a_port(endpoint: str, host: str, port: int | None) -> None:
    config = launched("--rdzv-endpoint", endpoint)
    assert (config["main_process_ip"], config["main_process_port"]) == (host, port)
    assert config.origin("main_process_ip") == "flag --rdzv_endpoint"


def test_variables_of_another_launcher_yield_to_the_endpoint() -> None:
    config = launched("--rdzv-endpoint=h:1", environ={"MASTER_ADDR": "other", "MASTER_PORT": "7"})
    assert (config["main_process_ip"], config["main_process_port"]) == ("h", 1)


def test_a_range_has_a_least_and_a_most(tmp_path: Path) -> None:
    config = launched("--nnodes=1:4", "--nproc_per_node=2", "--rdzv_backend=c10d", *ADDRESS)
    assert (config["min_machines"], config["num_machines"], config["num_processes"]) == (1, 4, 8)
    assert launched("--nnodes=2:2", *ADDRESS)["min_machines"] is None
    assert "no number up to" in refused("--min_machines=3", "--num_machines=2", *ADDRESS)


def test_a_machine_alone_needs_no_address_and_says_what_it_does_not_use() -> None:
    config = launched("--standalone", "--rdzv-endpoint=h:1", "--rdzv-backend=static")
    assert config.notes == ("--rdzv_endpoint is not used, because --standalone was given.",)
    assert (config["main_process_ip"], config["main_process_port"], config["rdzv_backend"]) == (None, None, "c10d")
    # A range that begins with one machine is content with this one.
    alone = launched("--standalone", "--nnodes=1:4", "--nproc_per_node=2")
    assert (alone["num_machines"], alone["min_machines"], alone["num_processes"]) == (1, None, 2)


# --- variables of clusters --------------------------------------------------------------------------------------------

KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "trainer-0",
    "PET_MASTER_PORT": "23456",
}


def test_variables_of_torchrun_are_read_below_flags() -> None:
    config = launched("--cpu", machine=NO_GPU, environ=KUBEFLOW)
    names = ("num_machines", "num_processes", "machine_rank", "main_process_ip", "main_process_port")
    assert tuple(config[name] for name in names) == (2, 4, 1, "trainer-0", 23456)
    assert config.origin("num_machines") == "environment PET_NNODES"
    assert config.is_given("machine_rank")
    typed = launched("--cpu", "--num_machines", "3", "--num_processes", "3", machine=NO_GPU, environ=KUBEFLOW)
    assert (typed["num_machines"], typed["num_processes"]) == (3, 3)
    with pytest.raises(ConfigurationError, match="PET_NNODES is 'two'"):
        launched(environ={"PET_NNODES": "two"})


def test_the_index_of_a_pod_is_the_rank_of_its_machine() -> None:
    several = ("--cpu", "--num_machines", "2", "--num_processes", "2", *ADDRESS)
    environ = {"JOB_COMPLETION_INDEX": "1"}
    assert launched(*several, machine=NO_GPU, environ=environ)["machine_rank"] == 1
    assert launched(*several, "--machine_rank", "0", machine=NO_GPU, environ=environ)["machine_rank"] == 0
    # Pods that have nothing to do with each other may have an index too.
    assert launched("--cpu", machine=NO_GPU, environ=environ)["machine_rank"] == 0


def test_ranks_of_pods_that_a_launch_would_drop_are_refused() -> None:
    pod = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0"}
    with pytest.raises(ConfigurationError, match=r"RANK=1 and WORLD_SIZE=2"):
        launched("--cpu", "--num_processes", "2", machine=NO_GPU, environ=pod)
    assert launched("--cpu", machine=NO_GPU, environ=pod)["num_processes"] == 1
    alone = launched("--cpu", "--num_processes", "2", "--num_machines", "1", machine=NO_GPU, environ=pod)
    assert alone["num_processes"] == 2
    worker = {**pod, "LOCAL_RANK": "0"}
    assert launched("--cpu", "--num_processes", "2", machine=NO_GPU, environ=worker)["num_processes"] == 2
