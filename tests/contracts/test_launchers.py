"""Every launcher passes the same checks: it takes the run that it is for, and its plan starts nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.support.launching import FakeHost, make_config

from accelerate._base.helpers import Choice
from accelerate.launch import LAUNCHERS, choose_launcher, make_plan
from accelerate.launch.plan import Launcher, LaunchPlan, Mode

MACHINES = {"num_machines": 2, "num_processes": 8, "main_process_ip": "10.0.0.1", "main_process_port": 29500}
STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "gpu003",
}
# Launcher -> a run that is for it: its options, and the variables around it.
RUNS: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"tpu": True, "num_processes": 1}, {"PJRT_DEVICE": "CPU"}),
    ({"num_processes": 2}, STEP),
    ({"cpu": True, "num_processes": 2, "mpirun_hostfile": "localhost"}, {}),
    ({**MACHINES, "use_deepspeed": True, "machine_rank": 1, "deepspeed_hostfile": "hosts"}, {}),
    ({"num_processes": 2, "cpu": True}, {}),
    ({"num_processes": 1}, {}),
]
MEMBERS = [pytest.param(launcher, *run, id=launcher.name) for launcher, run in zip(LAUNCHERS, RUNS, strict=True)]


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "hosts").write_text("a slots=4\nb slots=4\n")
    monkeypatch.chdir(tmp_path)


def plan_of(options: dict[str, Any], around: dict[str, str]) -> LaunchPlan:
    return make_plan(make_config(arguments=["--lr", "1"], **options), FakeHost(around))


@pytest.mark.parametrize(("launcher", "options", "around"), MEMBERS)
class TestLauncher:
    def test_it_is_the_first_that_takes_its_run(
        self, launcher: Launcher, options: dict[str, Any], around: dict[str, str]
    ) -> None:
        choice = choose_launcher(make_config(**options), FakeHost(around))
        assert choice.value is launcher
        assert choice.reason

    def test_it_answers_every_run_with_a_reason(
        self, launcher: Launcher, options: dict[str, Any], around: dict[str, str]
    ) -> None:
        for given, variables in RUNS:
            answer = launcher.accepts(make_config(**given), FakeHost(variables))
            assert isinstance(answer, Choice)
            assert isinstance(answer.value, bool)
            assert answer.reason

    def test_its_plan_is_a_value_that_starts_and_changes_nothing(
        self, launcher: Launcher, options: dict[str, Any], around: dict[str, str]
    ) -> None:
        before, files = dict(os.environ), sorted(Path.cwd().iterdir())
        plan = plan_of(options, around)
        assert plan == plan_of(options, around)
        assert (dict(os.environ), sorted(Path.cwd().iterdir())) == (before, files)
        assert (plan.launcher, bool(plan.reason)) == (launcher.name, True)

    def test_its_plan_is_whole(self, launcher: Launcher, options: dict[str, Any], around: dict[str, str]) -> None:
        plan = plan_of(options, around)
        assert plan.mode in get_args(Mode)
        assert (plan.elastic is not None) is (plan.mode == "elastic")
        assert all(isinstance(word, str) for word in plan.argv)
        assert all(isinstance(text, str) for pair in plan.environment.items() for text in pair)
        # The script and its arguments come last, word for word.
        assert " ".join(plan.argv).endswith("train.py --lr 1")

    def test_the_files_of_its_plan_have_a_folder(
        self, launcher: Launcher, options: dict[str, Any], around: dict[str, str]
    ) -> None:
        plan = plan_of(options, around)
        argv, environment = plan.in_folder("folder")
        texts = [*argv, *environment.values()]
        assert not any("@accelerate-files@" in text for text in texts)
        assert any(text.startswith("folder/") for text in texts) or not plan.files

    def test_workers_learn_the_options(
        self, launcher: Launcher, options: dict[str, Any], around: dict[str, str]
    ) -> None:
        plan = plan_of({**options, "mixed_precision": "bf16"}, around)
        told = [*plan.environment.items(), *(tuple(word.split("=", 1)) for word in plan.argv if "=" in word)]
        told += [tuple(line.split("=", 1)) for text in plan.files.values() for line in text.splitlines() if "=" in line]
        assert ("ACCELERATE_MIXED_PRECISION", "bf16") in told


def test_names_are_their_own() -> None:
    names = [launcher.name for launcher in LAUNCHERS]
    assert len(names) == len(set(names))
    assert all(names)
