"""The launchers as functions of parsed options, and the programs of their own, none of which starts anything here."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.launching import launch_environment

from accelerate._base.errors import ConfigurationError
from accelerate.commands import launch
from accelerate.launch.host import Host

pytestmark = pytest.mark.usefixtures("empty_script")


def parsed(*words: str) -> argparse.Namespace:
    return launch.launch_command_parser().parse_args([*words, "train.py", "--lr", "1"])


@pytest.mark.parametrize(
    ("function", "words", "shown"),
    [
        (launch.simple_launcher, ["--cpu"], ["launcher: one process", "train.py --lr 1"]),
        (launch.multi_gpu_launcher, ["--cpu", "--num_processes", "2"], ["launcher: torch elastic agent"]),
        (
            launch.deepspeed_launcher,
            ["--cpu", "--use_deepspeed", "--num_processes", "2"],
            ["launcher: torch elastic agent"],
        ),
        (
            launch.deepspeed_launcher,
            [
                *("--cpu", "--use_deepspeed", "--num_processes", "4", "--num_machines", "2"),
                *("--main_process_ip", "10.0.0.1", "--machine_rank", "1", "--deepspeed_multinode_launcher", "nossh"),
            ],
            ["launcher: deepspeed", "-m deepspeed.launcher.runner", "file hostfile", "  ACCELERATE_USE_DEEPSPEED=true"],
        ),
        (
            launch.tpu_launcher,
            ["--tpu", "--tpu_cluster", "--mixed_precision", "bf16"],
            [
                "launcher: TPU, because: tpu=True (flag --tpu)",
                "worker.py xla 1 __main__ script train",
                "  ACCELERATE_MIXED_PRECISION=bf16",
            ],
        ),
        (
            launch.tpu_launcher,
            ["--tpu", "--use_parallelism_config"],
            ["python train.py --lr 1", "  XLA_USE_SPMD=1", "note: One process drives all XLA devices"],
        ),
        (
            launch.tpu_pod_launcher,
            ["--tpu", "--vm", "a"],
            [
                "launcher: TPU",
                "command: gcloud compute tpus tpu-vm ssh a --worker all --command 'cd ",
                "note: gcloud starts",
            ],
        ),
        (
            launch.tpu_pod_launcher,
            ["--tpu", "--vm", "a", "--vm", "b"],
            ["command for a: gcloud", "command for b: gcloud"],
        ),
    ],
)
def test_each_launcher_by_its_own_function(
    function: Callable[[argparse.Namespace], None],
    words: list[str],
    shown: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "--tpu" in words:
        monkeypatch.setenv("PJRT_DEVICE", "CPU")
        monkeypatch.setenv("CLOUDSDK_COMPUTE_ZONE", "zone-a")
        monkeypatch.setattr(Host, "has_package", lambda host, name: True)
        monkeypatch.setattr(Host, "find_program", lambda host, name: name)
    function(parsed("--explain", *words))
    told = capsys.readouterr().out
    assert [text for text in shown if text.lower() not in told.lower()] == [], told
    assert told.endswith("Nothing was started.\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--num_processes", "2"], "this machine has 1 XLA device"),
        (["--mixed_precision", "fp8"], "XLA devices train in bfloat16"),
        (["--main_training_function", "fit"], "'train.py' has no such function"),
        (["--tpu_cluster"], "neither the pod nor its machines are named"),
    ],
)
def test_an_explanation_refuses_as_the_launch_does(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setattr(Host, "has_package", lambda host, name: True)
    for more in ([], ["--explain"]):
        with pytest.raises(ConfigurationError, match=told):
            launch.launch_command(parsed("--tpu", *words, *more))
    monkeypatch.setattr(Host, "has_package", lambda host, name: False)
    with pytest.raises(
        ConfigurationError, match=r"torch_xla, which is not installed. Install it with `pip install torch_xla`"
    ):
        launch.launch_command(parsed("--tpu", "--explain"))


def test_notes_are_explained(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(Path.cwd()))
    program = Path("srun")
    program.touch()
    program.chmod(0o755)
    launch.launch_command(parsed("--explain", "--cpu", "--num_processes", "4"))
    told = capsys.readouterr().out
    assert "note: " in told
    assert "--num_machines 1" in told
    program.unlink()
    with pytest.raises(ConfigurationError, match=r"holds 2 nodes and srun is not on the PATH.*add --num_machines 1"):
        launch.launch_command(parsed("--explain", "--cpu", "--num_processes", "4"))


def test_a_job_of_sagemaker_is_refused(tmp_path: Path) -> None:
    told = r"describes a job of Amazon SageMaker.*Start it with the sagemaker package, or name another file"
    with pytest.raises(ConfigurationError, match=f"^Namespace {told}"):
        launch.sagemaker_launcher(argparse.Namespace(), parsed())
    path = tmp_path / "job.yaml"
    path.write_text(
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'\nec2_instance_type: ml.p3.2xlarge\n"
        "iam_role_name: role\nprofile: default\nregion: us-east-1\n"
    )
    with pytest.raises(ConfigurationError, match=rf"job\.yaml {told}"):
        launch.launch_command(parsed("--config_file", str(path)))


@pytest.mark.parametrize("module", ["launch", "env", "test", "tpu", "merge", "completion"])
def test_a_module_is_a_program_of_its_own(module: str) -> None:
    command = [sys.executable, "-m", f"accelerate.commands.{module}", "--help"]
    done = subprocess.run(command, env=launch_environment(), capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.lower().startswith("usage: accelerate")
