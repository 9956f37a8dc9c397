"""Plans of every launcher, decided without starting anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.launching import PYTHON, FakeHost, make_config

from accelerate._base.errors import ConfigurationError
from accelerate.launch import choose_launcher, make_plan, worker
from accelerate.launch.plan import FILES, ElasticOptions, LaunchPlan

WORKER = str(Path(worker.__file__))


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)


def plan_of(
    *, environment: dict[str, str] | None = None, facts: dict[str, Any] | None = None, **given: Any
) -> LaunchPlan:
    return make_plan(make_config(**given), FakeHost(environment or {}, **(facts or {})))


def only(plan: LaunchPlan, *names: str) -> dict[str, str | None]:
    return {name: plan.environment.get(name) for name in names}


# --- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "command"),
    [
        ({}, (PYTHON, "train.py", "--lr", "1", "--", "-x")),
        ({"module": True, "script": "pkg.train"}, (PYTHON, "-m", "pkg.train", "--lr", "1", "--", "-x")),
        ({"no_python": True, "script": "run.sh"}, ("run.sh", "--lr", "1", "--", "-x")),
    ],
)
def test_one_process_is_what_a_user_would_type(given: dict[str, Any], command: tuple[str, ...]) -> None:
    plan = plan_of(arguments=["--lr", "1", "--", "-x"], num_processes=1, **given)
    assert (plan.mode, plan.argv, plan.elastic) == ("exec", command, None)
    assert only(plan, "RANK", "MASTER_PORT", "OMP_NUM_THREADS") == dict.fromkeys(
        ("RANK", "MASTER_PORT", "OMP_NUM_THREADS")
    )


def test_one_process_of_an_engine_that_needs_a_group() -> None:
    plan = plan_of(num_processes=1, use_fsdp=True, cpu=True)
    assert plan.mode == "exec"
    assert only(plan, "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") == {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29501",
    }


def test_one_process_that_is_to_be_restarted_gets_an_agent() -> None:
    plan = plan_of(num_processes=1, max_restarts=3)
    assert plan.elastic == ElasticOptions(1, max_restarts=3, local_addr="127.0.0.1")


@pytest.mark.parametrize(
    ("given", "environment", "seconds"),
    [
        ({}, {}, 30.0),
        ({}, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}, 7.0),
        ({"preemption_grace": 90.0}, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}, 90.0),
    ],
)
def test_time_to_save(given: dict[str, Any], environment: dict[str, str], seconds: float) -> None:
    plan = plan_of(num_processes=2, environment=environment, **given)
    assert plan.elastic is not None
    assert plan.elastic.seconds_to_end == seconds


def test_workers_are_told_to_resume() -> None:
    assert only(plan_of(num_processes=2, auto_resume=True), "ACCELERATE_AUTO_RESUME") == {
        "ACCELERATE_AUTO_RESUME": "true"
    }
    assert only(plan_of(num_processes=2), "ACCELERATE_AUTO_RESUME") == {"ACCELERATE_AUTO_RESUME": None}


# --- several processes here -------------------------------------------------------------------------------------------


def test_boards_that_cannot_talk_peer_to_peer_are_told_not_to() -> None:
    facts = {"link_variables": lambda machine: {"FIRST_LINK": "1", "OTHER_LINK": "1"}}
    plan = plan_of(num_processes=2, facts=facts, environment={"OTHER_LINK": "0"})
    assert only(plan, "FIRST_LINK", "OTHER_LINK") == {"FIRST_LINK": "1", "OTHER_LINK": None}
    for given in ({"num_processes": 2, "cpu": True}, {"num_processes": 1}):
        assert only(plan_of(facts=facts, **given), "FIRST_LINK") == {"FIRST_LINK": None}


def test_processes_of_this_machine() -> None:
    plan = plan_of(cpu=True, num_processes=3, arguments=["a"])
    assert plan.mode == "elastic"
    assert plan.argv == (PYTHON, "-u", WORKER, "script", "train.py", "a")
    assert plan.elastic == ElasticOptions(3, local_addr="127.0.0.1")
    assert only(plan, "OMP_NUM_THREADS", "ACCELERATE_USE_CPU", "KMP_AFFINITY") == {
        "OMP_NUM_THREADS": "2",
        "ACCELERATE_USE_CPU": "True",
        "KMP_AFFINITY": None,
    }


def test_options_of_the_agent() -> None:
    plan = plan_of(
        num_processes=2,
        module=True,
        max_restarts=2,
        monitor_interval=1.5,
        log_dir="logs",
        tee="3",
        role="trainer",
        main_process_port=12345,
        rdzv_conf="timeout=60, join_timeout=5",
    )
    assert plan.argv == (PYTHON, "-u", WORKER, "module", "train.py")
    assert plan.elastic == ElasticOptions(
        2,
        rdzv_backend="static",
        rdzv_endpoint="127.0.0.1:12345",
        rdzv_configs={"timeout": "60", "join_timeout": "5", "rank": "0"},
        role="trainer",
        max_restarts=2,
        monitor_interval=1.5,
        log_dir="logs",
        tee="3",
        local_addr="127.0.0.1",
    )


@pytest.mark.parametrize(
    ("given", "environment", "threads"),
    [
        ({"cpu": True, "num_processes": 2}, {}, "4"),
        ({"cpu": True, "num_processes": 16}, {}, "1"),
        ({"num_processes": 2}, {}, "1"),
        ({"cpu": True, "num_processes": 2}, {"OMP_NUM_THREADS": "3"}, None),
        ({"cpu": True, "num_processes": 2, "num_cpu_threads_per_process": 7}, {"OMP_NUM_THREADS": "3"}, "7"),
        ({"cpu": True, "num_processes": 1}, {}, None),
    ],
)
def test_threads(given: dict[str, Any], environment: dict[str, str], threads: str | None) -> None:
    assert plan_of(environment=environment, **given).environment.get("OMP_NUM_THREADS") == threads


def test_a_busy_port_is_replaced_or_named() -> None:
    busy = {"port_in_use": lambda port: port == 29500}
    plan = plan_of(facts=busy, num_processes=2, file={"main_process_port": 29500})
    assert plan.elastic is not None
    assert plan.elastic.rdzv_endpoint == "localhost:0"
    assert "29500" in plan.notes[0]
    assert "file" in plan.notes[0]
    with pytest.raises(ConfigurationError, match=r"main_process_port=29500 \(flag --main_process_port\)"):
        plan_of(facts=busy, num_processes=2, main_process_port=29500)


def test_a_pair_without_a_value() -> None:
    with pytest.raises(ConfigurationError, match="'timeout' has no value"):
        plan_of(num_processes=2, rdzv_conf="timeout")


# --- several machines -------------------------------------------------------------------------------------------------

MACHINES: dict[str, Any] = {"num_processes": 8, "num_machines": 2, "main_process_ip": "10.0.0.1"}


@pytest.mark.parametrize(
    ("given", "backend", "endpoint", "configs"),
    [
        ({"machine_rank": 1}, "static", "10.0.0.1:29500", {"rank": "1"}),
        ({"machine_rank": 1, "rdzv_backend": "c10d"}, "c10d", "10.0.0.1:29500", {"is_host": "False"}),
        ({"machine_rank": 0, "rdzv_backend": "c10d"}, "c10d", "10.0.0.1:29500", {"is_host": "True"}),
        ({"rdzv_backend": "c10d", "main_process_port": 7}, "c10d", "10.0.0.1:7", {}),
        ({"machine_rank": 0, "main_process_ip": "fe80::1"}, "static", "[fe80::1]:29500", {"rank": "0"}),
    ],
)
def test_machines(given: dict[str, Any], backend: str, endpoint: str, configs: dict[str, str]) -> None:
    plan = plan_of(facts={"address_towards": lambda host: "10.0.0.9"}, **(MACHINES | given))
    assert plan.elastic == ElasticOptions(
        4, 2, rdzv_backend=backend, rdzv_endpoint=endpoint, rdzv_configs=configs, local_addr="10.0.0.9"
    )


def test_the_first_machine_whose_own_name_leads_to_its_loopback_address() -> None:
    ways = {"node-a": "127.0.0.1", "203.0.113.1": "10.0.0.9"}
    facts = {"address_towards": ways.get, "interface_of": lambda address: f"card of {address}"}
    plan = plan_of(facts=facts, **{**MACHINES, "main_process_ip": "node-a", "rdzv_backend": "c10d"})
    assert plan.elastic is not None
    # The other machines reach it by its name.
    assert plan.elastic.local_addr == "node-a"
    assert plan.environment["GLOO_SOCKET_IFNAME"] == "card of 10.0.0.9"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "Add --machine_rank, from 0 to 1"),
        ({"machine_rank": 2}, "machine_rank=2 .* is not a place among num_machines=2"),
        ({"machine_rank": 0, "main_process_ip": None}, "Add --main_process_ip"),
        ({"machine_rank": 0, "num_processes": 7}, "Write --num_processes 6"),
        ({"machine_rank": 0, "main_process_ip": "a b"}, "main_process_ip='a b' .*is neither a name nor an address"),
        ({"machine_rank": 0, "main_process_ip": "[::1]"}, "such as 10.0.0.1, fe80::1 or worker-1"),
    ],
)
def test_machines_that_cannot_meet(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan_of(**(MACHINES | given))


def test_the_port_of_the_first_machine_is_busy() -> None:
    facts = {"port_in_use": lambda port: True}
    with pytest.raises(ConfigurationError, match="something listens on that port"):
        plan_of(facts=facts, machine_rank=0, **MACHINES)
    assert plan_of(facts=facts, machine_rank=1, **MACHINES).elastic is not None


# --- MPI --------------------------------------------------------------------------------------------------------------


def test_mpirun_with_a_given_hostfile(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# ours\nnode-a slots=2\nnode-b slots=2\n")
    plan = plan_of(
        cpu=True, num_processes=4, num_machines=2, mpirun_hostfile=str(hostfile), num_cpu_threads_per_process=5
    )
    front = ("mpirun", "-np", "4", "--hostfile", str(hostfile), "--map-by", "ppr:2:node", "--bind-to", "none")
    assert plan.mode == "spawn_command"
    assert plan.argv[: len(front)] == front
    assert plan.argv[-5:] == (PYTHON, "-u", WORKER, "script", "train.py")
    handed_on = {plan.argv[place + 1] for place, word in enumerate(plan.argv) if word == "-x"}
    assert handed_on == set(plan.environment)
    assert only(plan, "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS") == {
        "MASTER_ADDR": "node-a",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "5",
    }


def test_mpirun_with_hosts_and_another_family() -> None:
    facts = {"mpi_version": lambda program: "HYDRA build details: Version 4.1"}
    plan = plan_of(facts=facts, cpu=True, num_processes=2, mpirun_hostfile="localhost")
    assert plan.argv[:7] == ("mpirun", "-n", "2", "-f", f"{FILES}/hostfile", "-ppn", "2")
    assert plan.files == {"hostfile": "localhost slots=2\n"}
    place = plan.argv.index("MASTER_PORT")
    assert plan.argv[place - 1 : place + 2] == ("-genv", "MASTER_PORT", "29501")
    argv, environment = plan.in_folder("/somewhere")
    assert argv[4] == "/somewhere/hostfile"
    assert environment["ACCELERATE_FAILURE_FOLDER"] == "/somewhere/failures"


def test_mpirun_that_is_not_there() -> None:
    with pytest.raises(ConfigurationError, match="neither is on the PATH"):
        plan_of(facts={"find_program": lambda name: None}, cpu=True, mpirun_hostfile="a,b")
    with pytest.raises(ConfigurationError, match="'missing/hosts' does not exist"):
        plan_of(cpu=True, mpirun_hostfile="missing/hosts")
    with pytest.raises(ConfigurationError, match="neither Open MPI nor MPICH"):
        plan_of(facts={"mpi_version": lambda program: "my own"}, cpu=True, mpirun_hostfile="a")


def test_a_store_in_a_file_is_no_machine() -> None:
    given = {"rdzv_backend": "c10d", "rdzv_conf": "store_type=file", "main_process_ip": "/shared/store"}
    agent = plan_of(machine_rank=0, **(MACHINES | given)).elastic
    assert agent is not None
    assert agent.rdzv_endpoint == "/shared/store:29500"


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "me@-x", "a;touch", "a#;touch"])
def test_no_host_of_mpirun_is_an_option_of_ssh(name: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"node-a:2\n# {name}\n{name} slots=2\n")
    for given, place in (("hosts", "hosts:3"), (f"node-a,{name}", f"mpirun_hostfile='node-a,{name}'")):
        with pytest.raises(ConfigurationError, match=f"{place}: '{name}' is neither a name nor an address"):
            plan_of(cpu=True, num_processes=4, num_machines=2, mpirun_hostfile=given)


def test_a_hostfile_of_mpirun_is_not_read_without_end(tmp_path: Path) -> None:
    with (tmp_path / "hosts").open("wb") as file:
        file.truncate(2**40)  # it takes no room on the disk
    with pytest.raises(ConfigurationError, match="'hosts' has 1099511627776 bytes"):
        plan_of(cpu=True, num_processes=4, num_machines=2, mpirun_hostfile="hosts")


def test_a_hostfile_without_a_host(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# none\n\n")
    with pytest.raises(ConfigurationError, match=r"The hostfile 'hosts' names no host.*Write one host a line"):
        plan_of(cpu=True, num_processes=4, num_machines=2, mpirun_hostfile="hosts")


def test_mpirun_starts_a_program_as_it_is() -> None:
    plan = plan_of(cpu=True, num_processes=2, mpirun_hostfile="a", no_python=True, script="run.sh", arguments=["x"])
    assert plan.argv[-2:] == ("run.sh", "x")
    assert WORKER not in plan.argv


def test_inside_mpirun() -> None:
    around = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    plan = plan_of(environment=around, cpu=True, detected={"num_processes": 1})
    assert (plan.mode, plan.argv) == ("exec", (PYTHON, "train.py"))
    assert only(plan, "RANK", "OMP_NUM_THREADS") == {"RANK": None, "OMP_NUM_THREADS": "4"}


# --- Slurm ------------------------------------------------------------------------------------------------------------


def step(rank: int = 3, tasks: int = 4, nodes: int = 2, per_node: str = "2(x2)") -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_NODEID": str(rank * nodes // tasks),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_STEP_NODELIST": "gpu[003-004]",
    }


@pytest.mark.parametrize("given", [{"detected": {"num_processes": 1}}, {"num_processes": 4}])
def test_a_task_of_srun_takes_its_place(given: dict[str, Any]) -> None:
    plan = plan_of(environment=step(), **given)
    assert (plan.mode, plan.argv) == ("exec", (PYTHON, "train.py"))
    assert only(plan, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR") == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu003",
    }
    assert 15000 <= int(plan.environment["MASTER_PORT"]) < 55000
    # The first task speaks for all.
    assert plan.notes == ()
    assert "becomes rank 0" in plan_of(environment=step(rank=0), **given).notes[0]


def test_tasks_of_one_node_meet_at_the_loopback_address() -> None:
    one_node = step(nodes=1, per_node="4")
    assert plan_of(environment=one_node, num_processes=4).environment["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize("given", [{"num_processes": 16}, {"detected": {"num_processes": 8}}])
def test_one_task_a_node_starts_its_share(given: dict[str, Any]) -> None:
    plan = plan_of(environment=step(rank=1, tasks=2, per_node="1(x2)"), **given)
    assert plan.elastic is not None
    assert (plan.elastic.nproc_per_node, plan.elastic.num_nodes) == (8, 2)
    assert plan.elastic.rdzv_endpoint.startswith("gpu003:")
    assert plan.elastic.rdzv_configs == {"rank": "1"}


def test_tasks_and_processes_that_do_not_fit() -> None:
    with pytest.raises(ConfigurationError, match=r"num_processes=6 .* srun started 4 tasks on 2 nodes"):
        plan_of(environment=step(), num_processes=6)
    with pytest.raises(ConfigurationError, match="Write --num_processes 14"):
        plan_of(environment=step(rank=1, tasks=2, per_node="1(x2)"), num_processes=15)


def test_a_batch_script_asks_srun() -> None:
    around = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "3", "SLURM_CPUS_PER_TASK": "6"}
    facts = {"arguments": ("--num_processes", "24", "train.py")}
    plan = plan_of(environment=around, facts=facts, num_processes=24)
    assert plan.mode == "spawn_command"
    assert plan.argv == (
        *("srun", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--cpus-per-task=6"),
        *(PYTHON, "-m", "accelerate.commands.launch", "--num_processes", "24", "train.py"),
    )
    assert "--num_machines 1" in plan.notes[0]
    assert plan.seconds_to_end == 35
    assert plan_of(environment=around, num_processes=24, num_machines=1).mode == "elastic"


def test_slurm_steps_aside() -> None:
    interactive = step(rank=0, tasks=1, nodes=1, per_node="1")
    assert plan_of(environment=interactive, num_processes=4).elastic == ElasticOptions(4, local_addr="127.0.0.1")
    by_hand = {**MACHINES, "machine_rank": 1}
    assert choose_launcher(make_config(**by_hand), FakeHost(step())).value.name == "torch elastic agent"


# --- DeepSpeed on one machine; for several, see test_deepspeed.py -------------------------------------------------------


def test_deepspeed_under_the_agent() -> None:
    assert plan_of(use_deepspeed=True, num_processes=4).mode == "elastic"
    by_hand = {**MACHINES, "use_deepspeed": True, "machine_rank": 1}
    assert plan_of(**by_hand).mode == "elastic"  # nothing names the other machines
    assert plan_of(**by_hand, deepspeed_multinode_launcher="standard").mode == "elastic"


@pytest.mark.parametrize(
    ("given", "environment", "reason"),
    [
        ({"cpu": True}, {}, "cpu=True (flag --cpu)"),
        ({}, {}, "this machine has no accelerator"),
        ({}, {"ACCELERATE_TORCH_DEVICE": "cpu"}, "ACCELERATE_TORCH_DEVICE=cpu"),
        ({}, {"ACCELERATE_TORCH_DEVICE": "meta"}, None),
        ({"cpu": True}, {"DS_ACCELERATOR": "xpu"}, None),
    ],
)
def test_deepspeed_is_told_to_compute_on_the_cpu(
    given: dict[str, Any], environment: dict[str, str], reason: str | None
) -> None:
    for processes in (1, 2):
        plan = plan_of(use_deepspeed=True, num_processes=processes, environment=environment, **given)
        said = [note for note in plan.notes if note.startswith("DS_ACCELERATOR=cpu ")]
        assert (plan.environment.get("DS_ACCELERATOR"), len(said)) == (("cpu", 1) if reason else (None, 0))
        assert reason is None or reason in said[0]
    assert "DS_ACCELERATOR" not in plan_of(num_processes=2, cpu=True).environment


# --- what cannot run --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"script": "tain.py"}, r"'tain.py' does not exist in '.*'. Did you mean 'train.py'\?"),
        ({"script": "."}, "is a folder without a __main__.py"),
        ({"script": "run", "no_python": True}, "'run' is not on the PATH"),
        ({"module": True, "no_python": True}, "Leave one of them out"),
        ({"script": ""}, "nothing to run"),
    ],
)
def test_nothing_to_run(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan_of(facts={"find_program": lambda name: None}, **given)
