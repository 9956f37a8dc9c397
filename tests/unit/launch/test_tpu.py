"""Plans for XLA devices: one process, a process for each, a pod; and a pod whose machines are processes of this one."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.launching import PYTHON, FakeHost, launch, launch_command, launch_environment, make_config
from tests.support.tpu_machines import write_gcloud, write_torch_xla

from accelerate._base.errors import ConfigurationError
from accelerate.commands.launch import launch_command_parser
from accelerate.launch import make_plan, worker
from accelerate.launch.plan import LaunchPlan

WORKER = str(Path(worker.__file__))
CPU = {"PJRT_DEVICE": "CPU"}
POD = {"tpu_name": "pod", "tpu_zone": "zone-a"}


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("def main(): ...\nif __name__ == '__main__':\n    main()\n")
    monkeypatch.chdir(tmp_path)


def plan_of(
    environment: dict[str, str], *, cores: Sequence[int] = (), facts: dict[str, Any] | None = None, **given: Any
) -> LaunchPlan:
    host = FakeHost(environment, tpu_cores=lambda environment: list(cores), **(facts or {}))
    return make_plan(make_config(**{"tpu": True, **given}), host)


def refusal(environment: dict[str, str], **given: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        plan_of(environment, **given)
    return str(caught.value)


# --- a process for each device ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "given", "count"),
    [
        (CPU, {}, "1"),
        (CPU, {"num_processes": 1}, "1"),
        ({"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}, {"num_processes": 1}, "1"),
        ({}, {"cores": [1]}, "1"),
        ({}, {"cores": [1] * 4}, "all"),
        ({}, {"cores": [1] * 4, "num_processes": 4}, "all"),
        ({}, {"cores": [1] * 4, "num_processes": 1}, "1"),
        ({}, {"cores": [2] * 4, "num_processes": 1}, "1"),
        ({"TPU_VISIBLE_CHIPS": "1"}, {"cores": [1]}, "1"),
        # A machine of a pod is never alone, and a file there may speak about the whole pod.
        ({"ACCELERATE_IN_TPU_POD": "1"}, {"cores": [1]}, "all"),
        ({"ACCELERATE_IN_TPU_POD": "1"}, {"cores": [1] * 4, "file": {"num_processes": 16}}, "all"),
    ],
)
def test_one_process_or_one_for_each_device(environment: dict[str, str], given: dict[str, Any], count: str) -> None:
    plan = plan_of(environment, arguments=["a"], **given)
    assert plan.argv == (PYTHON, WORKER, "xla", count, "__main__", "script", "train.py", "a")
    assert plan.mode == ("exec" if count == "1" else "spawn_command")
    assert ("ACCELERATE_FAILURE_FOLDER" in plan.environment) is (count == "all")
    assert {**environment, **plan.environment}["PJRT_DEVICE"] == environment.get("PJRT_DEVICE", "TPU")
    assert plan.notes == ()
    assert plan.reason == "tpu=True (flag --tpu)"


def test_a_plugin_says_itself_how_many_devices_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.devices.xla._plugin_kinds", lambda: ("WARP",))
    assert plan_of({"PJRT_DEVICE": "warp"}).argv[3] == "all"
    assert plan_of({"PJRT_DEVICE": "warp"}, num_processes=1).argv[3] == "1"
    told = refusal({"PJRT_DEVICE": "warp"}, num_processes=2)
    assert "how many devices PJRT_DEVICE=WARP has is known to its plugin alone. Leave --num_processes out" in told


def test_a_function_of_the_script_is_called_and_said_so() -> None:
    Path("train.py").write_text("def main(index): ...\ndef fit(): ...\n")
    plan = plan_of(CPU)
    assert plan.argv[4] == "main"
    assert plan.notes[0].startswith(
        "Each process imports the script and calls its main(), because the script defines it"
    )
    plan = plan_of(CPU, main_training_function="fit", module=True, script="train")
    assert plan.argv[3:] == ("1", "fit", "module", "train")
    assert "main_training_function='fit' (flag --main_training_function)" in plan.notes[0]
    assert "'train.py' has no such function (it has main, fit)" in refusal(CPU, main_training_function="run")


@pytest.mark.parametrize(
    ("given", "variables"),
    [
        # XLA_USE_BF16 would store the weights in 16 bits.
        ({"mixed_precision": "bf16"}, {"ACCELERATE_MIXED_PRECISION": "bf16"}),
        (
            {"mixed_precision": "bf16", "downcast_bf16": True},
            {"XLA_DOWNCAST_BF16": "1", "ACCELERATE_DOWNCAST_BF16": "true", "ACCELERATE_MIXED_PRECISION": "bf16"},
        ),
        ({"mixed_precision": "no"}, {"ACCELERATE_MIXED_PRECISION": "no"}),
    ],
)
def test_number_formats(given: dict[str, Any], variables: dict[str, str]) -> None:
    named = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "ACCELERATE_DOWNCAST_BF16", "ACCELERATE_MIXED_PRECISION")
    for environment in (CPU, {**CPU, "XLA_USE_SPMD": "1"}):
        plan = plan_of(environment, **given)
        assert {name: plan.environment[name] for name in named if name in plan.environment} == variables


# --- one process for all devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "given", "reason"),
    [
        ({**CPU, "XLA_USE_SPMD": "1", "CPU_NUM_DEVICES": "2"}, {}, "XLA_USE_SPMD=1"),
        ({"XLA_USE_SPMD": "true"}, {"cores": [2] * 4, "num_processes": 1}, "XLA_USE_SPMD=true"),
        (
            {"XLA_USE_SPMD": "0"},
            {"cores": [1] * 4, "use_parallelism_config": True},
            "use_parallelism_config=True (flag",
        ),
        ({"PJRT_DEVICE": "TPU", "XLA_USE_SPMD": "1"}, {}, "XLA_USE_SPMD=1"),  # torch_xla may see what is hidden here
        ({"XLA_USE_SPMD": "1", "TPU_VISIBLE_CHIPS": "0,1"}, {"cores": [1, 1]}, "XLA_USE_SPMD=1"),
    ],
)
def test_one_process_drives_all_devices(environment: dict[str, str], given: dict[str, Any], reason: str) -> None:
    plan = plan_of(environment, arguments=["a"], **given)
    assert (plan.mode, plan.argv) == ("exec", (PYTHON, "train.py", "a"))
    assert plan.environment["XLA_USE_SPMD"] == "1"
    assert {**environment, **plan.environment}["PJRT_DEVICE"] == environment.get("PJRT_DEVICE", "TPU")
    (note,) = plan.notes
    assert note.startswith("One process drives all XLA devices of this machine together (SPMD), because of " + reason)


def test_one_process_for_all_devices_calls_a_function_as_others_do() -> None:
    Path("train.py").write_text("def main(index): ...\ndef fit(): ...\n")
    environment = {**CPU, "XLA_USE_SPMD": "1"}
    plan = plan_of(environment, arguments=["a"])
    assert (plan.mode, plan.argv[1:]) == ("exec", (WORKER, "xla", "spmd", "main", "script", "train.py", "a"))
    assert plan.notes[1].startswith("Each process imports the script and calls its main()")
    assert plan_of(environment, main_training_function="fit").argv[4] == "fit"
    assert "'train.py' has no such function" in refusal(environment, main_training_function="run")


def test_one_process_may_be_any_program() -> None:
    assert plan_of({**CPU, "XLA_USE_SPMD": "1"}, no_python=True, script="run.sh").argv == ("run.sh",)
    told = refusal(CPU, no_python=True, script="run.sh")
    assert "'run.sh' is run as Python in a process for each. Leave --no_python out, or set XLA_USE_SPMD=1" in told


def test_several_processes_under_spmd() -> None:
    environment = {**CPU, "XLA_USE_SPMD": "1"}
    told = refusal(environment, num_processes=2)
    assert (
        "num_processes=2 (flag --num_processes) together with XLA_USE_SPMD=1, by which one process drives all" in told
    )
    # A file may be for the other way.
    plan = plan_of(environment, file={"num_processes": 8})
    assert plan.notes[1] == "num_processes=8 (file) is not used: one process drives all devices."


# --- what cannot run --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "given", "told"),
    [
        ({}, {}, "this machine has no TPU (no accelerator and 8 CPU cores), and PJRT_DEVICE names no other XLA device"),
        ({}, {}, "set PJRT_DEVICE=CPU for a trial run on the CPU"),
        ({"PJRT_DEVICE": "TPU"}, {}, "PJRT_DEVICE=TPU, but this machine lists no TPU chip"),
        ({"PJRT_DEVICE": "WARP"}, {}, "PJRT_DEVICE='WARP' names no device of torch_xla"),
        ({"PJRT_DEVICE": "WARP", "XLA_USE_SPMD": "1"}, {}, "PJRT_DEVICE='WARP' names no device of torch_xla"),
        (
            CPU,
            {"num_processes": 2},
            "has 1 XLA device (PJRT_DEVICE=CPU): torch_xla starts one process, or one for each",
        ),
        (
            {},
            {"cores": [1] * 4, "num_processes": 2},
            "has 4 XLA devices (PJRT_DEVICE=TPU): torch_xla starts one process",
        ),
        ({}, {"cores": [1] * 4, "num_processes": 8}, "Processes need a device each. Leave --num_processes out for 4"),
        (
            {},
            {"cores": [1] * 4, "file": {"num_processes": 8}},
            "num_processes=8 (file), and this machine has 4 XLA devices",
        ),
        (
            {},
            {"cores": [2] * 4},
            "each TPU chip of this machine has 2 cores, and torch_xla would drive them by threads",
        ),
        (
            {},
            {"cores": [2] * 4, "num_processes": 8},
            "Set XLA_USE_SPMD=1: one process then drives all 8 devices together",
        ),
        ({**CPU, "CPU_NUM_DEVICES": "2"}, {}, "CPU_NUM_DEVICES=2, and torch_xla would drive them by threads"),
        ({**CPU, "CPU_NUM_DEVICES": "many"}, {}, "CPU_NUM_DEVICES='many' is no number of devices. Write 1 or more"),
        ({**CPU, "CPU_NUM_DEVICES": "0"}, {}, "CPU_NUM_DEVICES='0' is no number of devices"),
        ({"TPU_VISIBLE_CHIPS": "0,1"}, {"cores": [1, 1]}, "TPU_VISIBLE_CHIPS='0,1' gives every process the same chips"),
        (
            CPU,
            {"mixed_precision": "fp16"},
            "mixed_precision='fp16' (flag --mixed_precision) with a TPU: XLA devices train",
        ),
        (CPU, {"mixed_precision": "fp8"}, "Write --mixed_precision bf16, or leave it out"),
        (
            CPU,
            {"num_machines": 2},
            "num_machines=2 (flag --num_machines) with a TPU, whose machines know of each other",
        ),
        (CPU, {"max_restarts": 3}, "max_restarts=3 (flag --max_restarts) is about torch's agent, which does not start"),
        (CPU, {"log_dir": "logs"}, "Leave --log_dir out"),
        (CPU, {"tee": "3"}, "Leave --tee out"),
    ],
)
def test_what_cannot_run(environment: dict[str, str], given: dict[str, Any], told: str) -> None:
    assert told in refusal(environment, **given)


def test_no_torch_xla() -> None:
    missing = {"has_package": lambda name: name != "torch_xla"}
    told = refusal(CPU, facts={"python": sys.executable, **missing})
    assert (
        "tpu=True (flag --tpu) needs the package torch_xla, which is not installed. Install it with `pip install "
        in told
    )
    # Of another interpreter nothing is known, and a pod has it on its machines.
    assert plan_of(CPU, facts=missing).argv[2] == "xla"
    assert plan_of({}, tpu_cluster=True, file=POD, facts={"python": sys.executable, **missing}).argv[0] == "gcloud"


def test_options_that_say_what_holds_anyway_are_taken() -> None:
    assert plan_of(CPU, num_machines=1, max_restarts=0, tee="0").argv[3] == "1"


# --- a pod ------------------------------------------------------------------------------------------------------------

GCLOUD = ("gcloud", "compute", "tpus", "tpu-vm", "ssh")


def test_a_pod(tmp_path: Path) -> None:
    plan = plan_of({}, tpu_cluster=True, file=POD, arguments=["--name", "two words", "$HOME"])
    command = (
        f"cd {tmp_path} && env ACCELERATE_IN_TPU_POD=1 accelerate launch --tpu --no_tpu_cluster train.py --name "
        "'two words' '$HOME'"
    )
    assert plan.argv == (*GCLOUD, "pod", "--zone", "zone-a", "--worker", "all", "--command", command)
    assert (plan.mode, plan.machines, plan.environment) == ("spawn_command", {}, {})
    note = "gcloud starts this launcher on every machine of pod; each of them starts a process for each of its devices."
    assert plan.notes == (note,)


def command_of(environment: dict[str, str] | None = None, **given: Any) -> str:
    return plan_of(environment or {}, tpu_cluster=True, **{"file": POD, **given}).argv[-1].partition(" && ")[2]


def test_machines_of_a_pod_are_told_what_matters_to_them() -> None:
    given: dict[str, Any] = {
        "mixed_precision": "bf16",
        "downcast_bf16": True,
        "main_training_function": "fit",
        "module": True,
        "debug": True,
        "num_cpu_threads_per_process": 4,
        "dynamo_backend": "inductor",
        "use_parallelism_config": True,
        "parallelism_config_tp_size": 2,
        "auto_resume": True,
        "main_process_port": 1234,  # not that
        "config_file": "here.yaml",
    }
    words = shlex.split(command_of(script="pkg.train", arguments=["--lr", "1"], **given))
    assert words[:6] == ["env", "ACCELERATE_IN_TPU_POD=1", "accelerate", "launch", "--tpu", "--no_tpu_cluster"]
    read = launch_command_parser().parse_args(words[4:])
    told = {name: getattr(read, name) for name in read.nondefault}
    del given["main_process_port"], given["config_file"]
    script = {"training_script": "pkg.train", "training_script_args": ["--lr", "1"]}
    assert told == {**given, **script, "tpu": True, "tpu_cluster": False}


def test_values_of_a_file_reach_the_machines_and_a_number_of_processes_does_not() -> None:
    file = {**POD, "mixed_precision": "bf16", "num_processes": 8, "env": ["A=b c"], "tpu_use_sudo": True}
    plan = plan_of({}, tpu_cluster=True, file=file)
    assert plan.argv[-1].partition(" && ")[2] == (
        "sudo env \"PATH=$PATH\" ACCELERATE_IN_TPU_POD=1 'A=b c' accelerate launch --tpu --no_tpu_cluster "
        "--mixed_precision=bf16 train.py"
    )
    assert plan.notes[1] == "num_processes=8 (file) is not used."
    assert len(plan_of({}, tpu_cluster=True, file={**POD, "num_processes": 1}).notes) == 1


def test_a_pod_under_spmd() -> None:
    environment = {"XLA_USE_SPMD": "1"}
    assert command_of(environment).startswith("env ACCELERATE_IN_TPU_POD=1 XLA_USE_SPMD=1 accelerate launch --tpu ")
    plan = plan_of(environment, tpu_cluster=True, file={**POD, "num_processes": 8}, num_processes=1)
    assert "each of them starts one process that drives all its devices" in plan.notes[0]
    assert "num_processes=4 (flag --num_processes) together with XLA_USE_SPMD=1" in refusal(
        environment, tpu_cluster=True, file=POD, num_processes=4
    )


def test_named_machines_are_reached_at_the_same_time() -> None:
    plan = plan_of({"CLOUDSDK_COMPUTE_ZONE": "zone-b"}, tpu_cluster=True, vm=["a", "b"])
    assert list(plan.machines) == ["a", "b"]
    assert plan.machines["a"] == plan.argv
    assert plan.machines["b"][:9] == (*GCLOUD, "b", "--worker", "all", "--command")
    assert plan_of({}, tpu_cluster=True, vm=["a"], file={"tpu_zone": "z"}).machines == {}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {},
            "tpu_cluster=True (flag --tpu_cluster) and neither the pod nor its machines are named. Add --vm once for each",
        ),
        ({"vm": ["a"]}, "the zone of a was not given, without which gcloud does not find it. Add tpu_zone to the"),
        ({"file": {"tpu_name": "pod"}}, "or set CLOUDSDK_COMPUTE_ZONE"),
        (
            {"file": {"tpu_name": "--ssh-flag=x", "tpu_zone": "z"}},
            "tpu_name (file): '--ssh-flag=x' is neither a name nor an address of a machine",
        ),
        (
            {"file": POD, "env": ["A"]},
            "env='A' (flag --env) is no variable for the machines of the pod. Write --env NAME=",
        ),
        ({"file": POD, "env": ["1 2=3"]}, "env='1 2=3'"),
        ({"file": POD, "num_processes": 8}, "num_processes=8 (flag --num_processes) and tpu_cluster=True"),
        ({"file": POD, "mixed_precision": "fp16"}, "mixed_precision='fp16'"),
        ({"file": POD, "facts": {"find_program": lambda name: None}}, "'gcloud' is not on the PATH"),
    ],
)
def test_a_pod_that_cannot_be_reached(given: dict[str, Any], told: str) -> None:
    assert told in refusal({}, tpu_cluster=True, **given)


def test_the_script_of_a_pod_is_looked_for_on_its_machines() -> None:
    assert command_of(script="there.py").endswith(" there.py")


# --- a pod, for real --------------------------------------------------------------------------------------------------

ON_MACHINE = """
import os
import sys
import time

name = os.environ["MACHINE"]
print(f"machine {name} {__name__} {sys.argv[1:]} {os.environ['WORD']} {os.environ['ACCELERATE_MIXED_PRECISION']}")
sys.stderr.write("and to stderr\\n")
if "fail" in sys.argv:
    if name == "b":
        sys.exit(5)
    time.sleep(600)
"""


@pytest.fixture
def around(tmp_path: Path) -> dict[str, str]:
    """Return variables under which gcloud reaches machines that have a torch_xla."""
    (tmp_path / "train.py").write_text(ON_MACHINE)
    write_gcloud(tmp_path / "bin")
    write_torch_xla(tmp_path / "packages")
    paths = f"{tmp_path / 'packages'}:{launch_environment()['PYTHONPATH']}"
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": paths,
        "PYTHONUNBUFFERED": "",
        "CLOUDSDK_COMPUTE_ZONE": "zone-a",
        "ACCELERATE_MIXED_PRECISION": "no",
    }


POD_WORDS = (*("--tpu", "--tpu_cluster", "--num_cpu_threads_per_process", "1"), *("--env", "PJRT_DEVICE=CPU"))
MACHINES = (*POD_WORDS, "--env", "WORD=two words", "--env", "XLA_USE_SPMD=1", "--vm", "a", "--vm", "b", "train.py")


def test_a_script_runs_on_two_machines(around: dict[str, str], tmp_path: Path) -> None:
    done = launch(*MACHINES, "it's", "$X", env=around, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = [f"[{name}] machine {name} __main__ [\"it's\", '$X'] two words no" for name in ("a", "b")]
    assert sorted(done.stdout.splitlines()) == said
    assert "[a] and to stderr\n" in done.stderr
    assert "[b] accelerate launch: One process drives all XLA devices of this machine together (SPMD)" in done.stderr


def test_the_first_machine_that_fails_ends_the_others(around: dict[str, str], tmp_path: Path) -> None:
    begin = time.monotonic()
    done = launch(*MACHINES, "fail", env=around, cwd=tmp_path)
    assert time.monotonic() - begin < 120
    assert done.returncode == 5
    assert done.stderr.endswith("\nTPU: 'b' ended with exit code 5; the others were ended. The lines of [b] say why.\n")


def test_a_signal_to_the_launcher_ends_all_machines(around: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\nprint('started', flush=True)\ntime.sleep(600)\n")
    command = launch_command(*MACHINES)
    environment = launch_environment(around)
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = sorted(process.stdout.readline() for _ in range(2))
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
    assert (lines, code) == (["[a] started\n", "[b] started\n"], 128 + signal.SIGTERM)


def test_one_pod_passes_its_lines_through(around: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "pod.yaml").write_text("distributed_type: XLA\ntpu_name: pod\ntpu_zone: z\ntpu_use_cluster: true\n")
    words = ("--config_file", "pod.yaml", "--env", "PJRT_DEVICE=CPU", "--env", "WORD=one", "train.py")
    done = launch(*words, env=around, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # torch_xla has two devices there, and each has a process.
    assert done.stdout.splitlines() == ["machine pod __main__ [] one no"] * 2
    done = launch(*words, env={**around, "PATH": str(tmp_path)}, cwd=tmp_path)
    assert done.returncode == 2
    assert (
        "Install the Google Cloud CLI, or run `accelerate launch --tpu --no_tpu_cluster` on each machine."
        in done.stderr
    )
    assert done.stderr.count("\n") == 1
