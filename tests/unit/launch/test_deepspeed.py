"""Plans of DeepSpeed on several machines, and what its own launcher makes of them."""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.launching import PYTHON, FakeHost, make_config

from accelerate._base.errors import ConfigurationError
from accelerate.launch import choose_launcher, make_plan, worker
from accelerate.launch.plan import FILES, LaunchPlan

WORKER = str(Path(worker.__file__))
RUNNER = (PYTHON, "-m", "deepspeed.launcher.runner", "--no_local_rank", "--hostfile", f"{FILES}/hostfile")
GIVEN: dict[str, Any] = {"use_deepspeed": True, "deepspeed_hostfile": "hosts", "arguments": ["a"]}
JOB = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2"}
STEP = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "a,b"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").touch()
    (tmp_path / "hosts").write_text("# two machines\na slots=4\n\nb  slots=4 # the second\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def plan_of(
    *, environment: dict[str, str] | None = None, facts: dict[str, Any] | None = None, **given: Any
) -> LaunchPlan:
    return make_plan(make_config(**(GIVEN | given)), FakeHost(environment or {}, **(facts or {})))


def hydra(program: str) -> str:
    return "HYDRA build details"


# --- the machines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "hostfile", "picked"),
    [
        ({}, "a slots=4\nb slots=4\n", None),
        ({"num_processes": 4}, "a slots=2\nb slots=2\n", None),
        ({"num_machines": 1, "deepspeed_multinode_launcher": "pdsh"}, None, None),  # one machine: torch's agent
        ({"detected": {"num_processes": 1}}, "a slots=4\nb slots=4\n", None),
        ({"deepspeed_inclusion_filter": "b"}, "b slots=4\n", None),
        ({"deepspeed_inclusion_filter": "b:3,1@a"}, "a slots=4\nb slots=4\n", "a:0,1,2,3@b:1,3"),
        ({"deepspeed_inclusion_filter": "b:1,3@a", "num_processes": 4}, "a slots=2\nb slots=4\n", "a:0,1@b:1,3"),
        ({"deepspeed_exclusion_filter": "a:3@b:2,3"}, "a slots=3\nb slots=2\n", None),
        ({"deepspeed_exclusion_filter": "a:0"}, "a slots=4\nb slots=4\n", "a:1,2,3@b:0,1,2,3"),
        ({"deepspeed_exclusion_filter": "a"}, "b slots=4\n", None),
    ],
)
def test_which_machines_take_part(given: dict[str, Any], hostfile: str | None, picked: str | None) -> None:
    plan = plan_of(**given)
    assert plan.files.get("hostfile") == hostfile
    assert (plan.argv[plan.argv.index("--include") + 1] if "--include" in plan.argv else None) == picked


def test_decisions_about_machines_are_said() -> None:
    Path("hosts").write_text("a slots=4\nb slots=4\nc slots=4\n")
    assert plan_of(num_machines=2).notes[0] == (
        "Of the 3 machines in hosts the first 2 take part: num_machines=2 (flag --num_machines)."
    )
    plan = plan_of(deepspeed_inclusion_filter="a@b:0", file={"num_processes": 8})
    assert plan.notes[0] == "The filter leaves 5 slots, and as many processes take the place of num_processes=8 (file)."


@pytest.mark.parametrize(
    ("content", "given", "message"),
    [
        (
            None,
            {"deepspeed_hostfile": "nowhere"},
            r"'nowhere' \(flag --deepspeed_hostfile\) does not exist.*Write a file",
        ),
        (None, {"deepspeed_hostfile": "."}, r"deepspeed_hostfile='\.' .*cannot be read \('\.' is a folder"),
        (None, {"deepspeed_hostfile": "/dev/zero"}, r"cannot be read \('/dev/zero' is a pipe, a socket or a device"),
        (None, {"deepspeed_hostfile": "~nobody-of-this-name/x"}, r"cannot be read \(.*home"),
        ("#" * 1_000_001, {}, r"cannot be read \('hosts' has 1000001 bytes, and a text of up to 1000000 is expected"),
        ("".join(f"m{i} slots=10000\n" for i in range(200)), {}, r"hosts:101: up to this line .*gives 1010000 slots"),
        ("a slots=4\n-oProxyCommand=x slots=1\n", {}, r"hosts:2: '-oProxyCommand=x' is neither a name nor an address"),
        ("a;touch slots=1\n", {}, r"hosts:1: 'a;touch' is neither .*no `-` in front\. Write one such as worker-1"),
        ("# nobody\n\n", {}, r"deepspeed_hostfile='hosts' .* names no machine\. Write a line such as"),
        ("a slots=4\nb\n", {}, r"hosts:2: 'b' is not a machine with a number of slots.*Write a line such as"),
        ("a slots=0\n", {}, r"hosts:1: 'a slots=0' is not a machine"),
        ("a slots=4\n#\na slots=2\n", {}, r"hosts:3: 'a slots=2' names 'a' a second time, after hosts:1.*Leave one"),
        (None, {"deepspeed_inclusion_filter": "c"}, r"deepspeed_inclusion_filter \(flag.*'c'.*such as 'a'"),
        (
            None,
            {"deepspeed_exclusion_filter": "a:4"},
            r"names slot 4 of 'a', which has 4 \(hosts:2\)\. Write slots from 0 to 3",
        ),
        (
            None,
            {"deepspeed_inclusion_filter": "a:x"},
            r"'a:x' is not a machine with or without slots\. Write `worker-1@",
        ),
        (None, {"deepspeed_exclusion_filter": "a@b"}, r"leaves out every slot.*Leave out fewer"),
        (
            None,
            {"deepspeed_inclusion_filter": "a", "deepspeed_exclusion_filter": "b"},
            r"inclusion_filter='a' \(flag .*exclusion_filter='b' \(flag .*Leave one out",
        ),
        (
            None,
            {"num_machines": 3},
            r"num_machines=3 \(flag --num_machines\) is more than .*'hosts'.*: a, b\..*--num_machines 2",
        ),
        (
            None,
            {"num_processes": 10},
            r"num_processes=10 .*cannot be shared evenly.*: a 4, b 4\. Write --num_processes 8",
        ),
        (None, {"num_processes": 3}, r"num_processes=3 .*cannot be shared evenly"),
    ],
)
def test_machines_that_cannot_be(content: str | None, given: dict[str, Any], message: str) -> None:
    if content is not None:
        Path("hosts").write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        plan_of(**given)


@pytest.mark.parametrize("starter", ["pdsh", "openmpi", "mpich", "mvapich"])
def test_a_launcher_that_reaches_machines_needs_a_hostfile(starter: str) -> None:
    told = rf"num_machines=2 .*{starter} starts processes on the machines of a hostfile.*Add --deepspeed_hostfile"
    with pytest.raises(ConfigurationError, match=told):
        plan_of(deepspeed_hostfile=None, num_machines=2, deepspeed_multinode_launcher=starter)
    with pytest.raises(ConfigurationError, match=r"filter='a' .* chooses among the machines of a hostfile, and none"):
        plan_of(
            deepspeed_hostfile=None,
            num_machines=2,
            deepspeed_multinode_launcher=starter,
            deepspeed_inclusion_filter="a",
        )


@pytest.mark.parametrize("name", ["worker_1", "10.0.0.1", "fe80::1", "a.b-c.example.com.", "me@worker-1"])
def test_names_and_addresses_of_machines(name: str) -> None:
    Path("hosts").write_text(f"{name} slots=4\n")
    assert plan_of().files["hostfile"] == f"{name} slots=4\n"


@pytest.mark.parametrize("name", ["-x", "me@-x", "-l@a", "a@b@c", "$(x)", "`x`", "a,b", "a'b", "^file", "x" * 256])
def test_no_machine_is_an_option_of_ssh_or_more_than_a_word(name: str) -> None:
    Path("hosts").write_text(f"{name} slots=4\n")
    with pytest.raises(ConfigurationError, match=r"hosts:1: .*is neither a name nor an address of a machine"):
        plan_of()


@pytest.mark.parametrize("starter", ["pdsh", "nossh", "openmpi"])
def test_no_shell_reads_a_command_in_the_main_address(starter: str) -> None:
    given: dict[str, Any] = {"deepspeed_multinode_launcher": starter, "num_machines": 2, "machine_rank": 0}
    told = r"main_process_ip='x;touch y;' \(file\) is neither a name nor an address.*Write --main_process_ip"
    with pytest.raises(ConfigurationError, match=told):
        plan_of(file={"main_process_ip": "x;touch y;"}, **given)
    for address in ("10.0.0.1", "fe80::1", "fe80::1%eth0", "node_1"):
        plan = plan_of(main_process_ip=address, **given)
        assert address in (*plan.argv, *plan.environment.values())


# --- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("starter", "program", "told"),
    [
        ("pdsh", "pdsh", "Install pdsh, or"),
        ("pdsh", "ssh", "Install an ssh client, or"),
        ("openmpi", "mpirun mpiexec", "Install Open MPI, MPICH or MVAPICH, or"),
        ("mpich", "mpirun mpiexec", "mpirun or mpiexec starts the processes, and is not on the PATH"),
        ("slurm", "srun", "Load Slurm's programs, or"),
    ],
)
def test_a_program_that_is_not_installed(starter: str, program: str, told: str) -> None:
    facts = {"find_program": lambda name: None if name in program.split() else name}
    message = f"deepspeed_multinode_launcher='{starter}' .*{told}"
    with pytest.raises(ConfigurationError, match=message):
        plan_of(deepspeed_multinode_launcher=starter, facts=facts)


def test_deepspeed_that_is_not_installed() -> None:
    for starter in ("pdsh", "nossh"):
        with pytest.raises(ConfigurationError, match=r"deepspeed is not installed. Install it with `pip install"):
            plan_of(deepspeed_multinode_launcher=starter, machine_rank=0, facts={"has_package": lambda name: False})


def test_the_mpirun_of_another_mpi() -> None:
    with pytest.raises(ConfigurationError, match=r"'openmpi'.*another MPI.*Write --deepspeed_multinode_launcher mpich"):
        plan_of(deepspeed_multinode_launcher="openmpi", facts={"mpi_version": hydra})
    with pytest.raises(ConfigurationError, match=r"'mpich'.*Write --deepspeed_multinode_launcher openmpi"):
        plan_of(deepspeed_multinode_launcher="mpich")


# --- plans ------------------------------------------------------------------------------------------------------------


def test_pdsh() -> None:
    plan = plan_of(num_machines=2, main_process_ip="10.0.0.1", cpu=True)
    end = (
        "--launcher",
        "pdsh",
        "--master_addr",
        "10.0.0.1",
        "--master_port",
        "29500",
        WORKER,
        "script",
        "train.py",
        "a",
    )
    assert (plan.mode, plan.argv) == ("spawn_command", (*RUNNER, *end))
    assert plan.environment["DS_ENV_FILE"] == f"{FILES}/deepspeed_env"
    lines = plan.files["deepspeed_env"].splitlines()
    assert {"ACCELERATE_USE_DEEPSPEED=true", "DS_ACCELERATOR=cpu", "LOCAL_WORLD_SIZE=4"} <= set(lines)


def test_what_this_machine_has_says_nothing_about_others() -> None:
    assert "DS_ACCELERATOR" not in plan_of().environment
    assert "DS_ACCELERATOR=xpu\n" in plan_of(environment={"DS_ACCELERATOR": "xpu"}).files["deepspeed_env"]


def test_one_machine_that_is_left_is_reached_by_its_name() -> None:
    assert "--force_multi" in plan_of(deepspeed_inclusion_filter="b").argv
    assert "--force_multi" not in plan_of().argv


def test_variables_of_the_users_own_file_go_along(folder: Path) -> None:
    (folder / "home").mkdir()
    (folder / "home" / ".deepspeed_env").write_text("ONE=1\nTWO=2\n")
    (folder / ".deepspeed_env").write_text("TWO=3\n\nnothing\n")
    assert {"ONE=1", "TWO=3"} <= set(plan_of().files["deepspeed_env"].splitlines())
    (folder / "mine").write_text("THREE=3\n")
    lines = plan_of(environment={"DS_ENV_FILE": str(folder / "mine")}).files["deepspeed_env"].splitlines()
    assert "THREE=3" in lines
    assert "ONE=1" not in lines


@pytest.mark.parametrize(
    "given", [{"arguments": ["a b"]}, {"arguments": [""]}, {"arguments": ["%n"]}, {"arguments": ["$x"]}]
)
def test_what_a_shell_would_change_is_encoded(given: dict[str, Any]) -> None:
    plan = plan_of(**given, offload_param_nvme_path="/my disk")
    assert plan.argv[-3:-1] == (WORKER, "encoded")
    content = json.loads(base64.urlsafe_b64decode(plan.argv[-1]))
    assert content["arguments"] == ["script", "train.py", *given["arguments"]]
    assert content["variables"] == {"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "/my disk"}
    assert "NVME_PATH" not in plan.files["deepspeed_env"]


def test_each_machine_by_hand() -> None:
    by_hand = {"deepspeed_multinode_launcher": "nossh", "num_machines": 2, "num_processes": 4, "machine_rank": 1}
    plan = plan_of(**by_hand, deepspeed_hostfile=None, main_process_ip="10.0.0.1")
    end = ("--no_ssh", "--node_rank", "1", "--master_addr", "10.0.0.1", "--master_port", "29500")
    assert plan.argv == (*RUNNER, *end, WORKER, "script", "train.py", "a")
    assert plan.files == {"hostfile": "machine-0 slots=2\nmachine-1 slots=2\n"}
    assert (plan.environment["LOCAL_WORLD_SIZE"], plan.environment["DS_ACCELERATOR"]) == ("2", "cpu")
    named = plan_of(deepspeed_multinode_launcher="nossh", machine_rank=1)
    assert named.argv[named.argv.index("--master_addr") + 1] == "a"
    card = {"address_towards": lambda host: "10.0.0.2", "interface_of": lambda address: f"card of {address}"}
    assert plan_of(**by_hand, facts=card).environment["GLOO_SOCKET_IFNAME"] == "card of 10.0.0.2"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"'nossh' .*by hand, and this machine's place among them was not given\. Add --machine_rank, from 0 to 1"),
        ({"machine_rank": 2}, r"machine_rank=2 .*not a place among the 2 machines.*from 0 to 1"),
        ({"machine_rank": 0, "facts": {"port_in_use": lambda port: True}}, "something listens on that port"),
    ],
)
def test_a_machine_that_cannot_be_started_by_hand(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan_of(deepspeed_multinode_launcher="nossh", **given)


@pytest.mark.parametrize(("starter", "version"), [("openmpi", "Open MPI"), ("mpich", "HYDRA"), ("mvapich", "MVAPICH")])
def test_mpirun(starter: str, version: str) -> None:
    Path("hosts").write_text("a slots=4\nb slots=2\n")
    environment = {"NCCL_DEBUG": "INFO", "OTHER": "1"}
    facts = {"mpi_version": lambda program: version}
    plan = plan_of(deepspeed_multinode_launcher=starter, environment=environment, facts=facts, cpu=True)
    count, front = ("-np", "-x") if starter == "openmpi" else ("-n", "-genv")
    assert plan.argv[:3] == ("mpirun", count, "6")
    assert plan.argv[-5:] == ("-u", WORKER, "script", "train.py", "a")
    assert plan.files["hostfile"] == ("a slots=4\nb slots=2\n" if starter == "openmpi" else "a:4\nb:2\n")
    handed_on = {after for word, after in zip(plan.argv, plan.argv[1:], strict=False) if word == front}
    assert {"NCCL_DEBUG", "MASTER_ADDR", "MASTER_PORT", "ACCELERATE_USE_DEEPSPEED", "DS_ACCELERATOR"} <= handed_on
    assert "OTHER" not in handed_on
    assert (plan.environment["MASTER_ADDR"], plan.environment["MASTER_PORT"]) == ("a", "29500")


@pytest.mark.parametrize("starter", ["openmpi", "slurm"])
def test_certain_slots_where_only_a_number_can_be_said(starter: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"'{starter}'.*cannot choose slots 1, 2, 3 of 'b'.*launcher pdsh"):
        plan_of(deepspeed_multinode_launcher=starter, deepspeed_exclusion_filter="b:0")
    if starter == "slurm":
        with pytest.raises(ConfigurationError, match=r"their slots are a 4, b 3\. Give each the same number"):
            plan_of(deepspeed_multinode_launcher=starter, deepspeed_exclusion_filter="b:3")


def test_srun() -> None:
    front = ("srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1")
    command = (PYTHON, "-m", "accelerate.commands.launch")
    slurm = {"deepspeed_multinode_launcher": "slurm"}
    typed = {"arguments": ("--x", "train.py")}
    plan = plan_of(**slurm, facts=typed)
    assert plan.argv == (
        *front,
        "--nodelist=a,b",
        "--gpus-per-node=4",
        *command,
        "--num_processes",
        "8",
        "--x",
        "train.py",
    )
    assert "--gpus-per-node=4" not in plan_of(**slurm, cpu=True).argv
    assert "--gpus-per-node=4" not in plan_of(**slurm, environment=JOB).argv
    plan = plan_of(**slurm, deepspeed_hostfile=None, num_machines=2, cpu=True)
    assert plan.argv == (*front, *command)


def test_slurm_has_the_run_once_srun_has_started_it() -> None:
    def chosen(environment: dict[str, str], **given: Any) -> str:
        return choose_launcher(make_config(**(GIVEN | given)), FakeHost(environment)).value.name

    slurm = {"deepspeed_multinode_launcher": "slurm", "main_process_ip": "a"}
    assert chosen({}, **slurm) == "DeepSpeed launcher"
    assert chosen(JOB, **slurm) == "DeepSpeed launcher"
    assert chosen(JOB | STEP, **slurm) == "Slurm"
    # One task of srun does not start srun again.
    assert chosen(JOB | STEP | {"SLURM_STEP_NUM_TASKS": "1"}, **slurm) == "one process"
    assert chosen(JOB) == "DeepSpeed launcher"
    assert chosen(JOB, deepspeed_hostfile=None, num_machines=2) == "Slurm"


@pytest.mark.parametrize(("given", "kind"), [({"module": True}, "module"), ({"no_python": True}, "program")])
@pytest.mark.parametrize("starter", ["pdsh", "nossh", "openmpi"])
def test_modules_and_programs(given: dict[str, Any], kind: str, starter: str) -> None:
    argv = plan_of(deepspeed_multinode_launcher=starter, machine_rank=0, script="train", **given).argv
    plain = starter == "openmpi" and kind == "program"
    assert argv[-2:] == ("train", "a")
    assert (argv[-4:-2] == (WORKER, kind)) is not plain


# --- what DeepSpeed makes of them -------------------------------------------------------------------------------------

# The runner of DeepSpeed, up to the command that it would start.
COMMAND_OF_RUNNER = """
import json, subprocess, sys
from deepspeed.launcher import runner

class Started:
    returncode = 0
    def __init__(self, command, env):
        sys.stdout.write("command " + json.dumps(command) + "\\n")
    def wait(self):
        pass

subprocess.Popen = Started
subprocess.check_call = lambda command, **_: None
runner.main(sys.argv[1:])
"""


def command_of_runner(plan: LaunchPlan, folder: Path) -> list[str]:
    """Return the command that DeepSpeed's runner would start for a plan."""
    pytest.importorskip("deepspeed")
    for name, content in plan.files.items():
        (folder / name).write_text(content)
    argv, values = plan.in_folder(str(folder))
    for name in ("pdsh", "ssh"):
        (folder / name).touch(mode=0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", COMMAND_OF_RUNNER, *argv[3:]],
        env={**os.environ, **values, "PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("command "))
    found: list[str] = json.loads(line.removeprefix("command "))
    return found


def world_of(command: list[str]) -> dict[str, list[int]]:
    (word,) = (word for word in command if word.startswith("--world_info="))
    world: dict[str, list[int]] = json.loads(base64.urlsafe_b64decode(word.removeprefix("--world_info=")))
    return world


def test_deepspeeds_runner_starts_what_the_plan_means(tmp_path: Path) -> None:
    given = {"deepspeed_exclusion_filter": "a:0,1", "main_process_ip": "10.0.0.1", "cpu": True}
    command = command_of_runner(plan_of(**given, arguments=["it's", "--", "-x"]), tmp_path)
    assert command[:6] == ["pdsh", "-S", "-f", "1024", "-w", "a,b"]
    assert world_of(command) == {"a": [2, 3], "b": [0, 1, 2, 3]}
    assert {"--master_addr=10.0.0.1", "--master_port=29500", "--no_local_rank"} <= set(command)
    exported = shlex.split(command[6])
    assert {"DS_ACCELERATOR=cpu;", "ACCELERATE_USE_DEEPSPEED=true;"} <= set(exported)
    assert command[-3:-1] == [WORKER, "encoded"]


def test_deepspeeds_runner_starts_one_machine_by_hand(tmp_path: Path) -> None:
    by_hand = {"deepspeed_multinode_launcher": "nossh", "machine_rank": 1, "main_process_ip": "10.0.0.1"}
    command = command_of_runner(plan_of(**by_hand, arguments=["--", "-x y"], num_processes=2), tmp_path)
    assert world_of(command) == {"a": [0], "b": [0]}
    assert {"--node_rank=1", "--master_addr=10.0.0.1"} <= set(command)
    assert command[-5:] == [WORKER, "script", "train.py", "--", "-x y"]


def test_a_worker_reads_what_was_encoded(tmp_path: Path) -> None:
    script = tmp_path / "say.py"
    script.write_text("import os, sys\nsys.stdout.write(repr((os.environ['A_NAME'], sys.argv[1:])))\n")
    from accelerate.launch.plan import encoded_words

    words = encoded_words(("script", str(script), "a $b"), {"A_NAME": "some thing"})
    done = subprocess.run([sys.executable, WORKER, *words], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "('some thing', ['a $b'])"
    program = (sys.executable, WORKER, "program", sys.executable, "-c", "print('as it is')")
    assert subprocess.run(program, capture_output=True, text=True, timeout=300, check=True).stdout == "as it is\n"
