"""Launches on torch_xla's own runtime: one process, a process that torch_xla spawns, one process for two devices, a pod."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.launching import launch, launch_environment
from tests.support.tpu_machines import write_gcloud

pytest.importorskip("torch_xla")

ONE = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", "PYTHONUNBUFFERED": ""}
TWO = {**ONE, "CPU_NUM_DEVICES": "2"}
# A machine of a pod has torch_xla start a process for each device, here one.
SPAWNED = {**ONE, "ACCELERATE_IN_TPU_POD": "1"}
SCRIPT = """
import json
import os
import sys

import torch
import torch_xla
from torch_xla import runtime


def main(index=None):
    total = torch.ones(4, device=torch_xla.device()).sum()
    facts = {
        "name": __name__,
        "arguments": sys.argv,
        "path": sys.path[0],
        "index": index,
        "sum": total.item(),
        "devices": runtime.global_runtime_device_count(),
        "spmd": runtime.is_spmd(),
        "world_size": runtime.world_size(),
        "machine": os.environ.get("MACHINE"),
        "precision": os.environ.get("ACCELERATE_MIXED_PRECISION"),
    }
    print(json.dumps(facts))
    if "fail" in sys.argv:
        raise ValueError("broken on purpose")
    sys.exit(7 if "exit" in sys.argv else 0)


def _mp_fn(index):
    main(index)


if __name__ == "__main__":
    main()
"""
ACCELERATED = """
import json

import torch

from accelerate import Accelerator

accelerator = Accelerator()
model, optimizer = accelerator.prepare(model := torch.nn.Linear(4, 2), torch.optim.SGD(model.parameters(), 0.1))
accelerator.backward(model(torch.ones(2, 4, device=accelerator.device)).sum())
optimizer.step()
optimizer.zero_grad()
facts = {"device": accelerator.device.type, "processes": accelerator.num_processes}
print(json.dumps({**facts, "kind": accelerator.distributed_type.value, "precision": accelerator.mixed_precision}))
"""


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "accelerated.py").write_text(ACCELERATED)


def facts_of(done: subprocess.CompletedProcess[str], code: int = 0) -> list[dict[str, Any]]:
    assert done.returncode == code, done.stderr
    lines = [line.partition("{") for line in done.stdout.splitlines() if "{" in line]
    return [json.loads(brace + rest) for _, brace, rest in lines]


# --- one process ------------------------------------------------------------------------------------------------------


def test_a_script_in_one_process(tmp_path: Path) -> None:
    done = launch("--tpu", "--mixed_precision", "no", "train.py", "--lr", "1", env=ONE, cwd=tmp_path)
    (found,) = facts_of(done)
    assert (found["name"], found["arguments"], found["path"]) == ("__main__", ["train.py", "--lr", "1"], str(tmp_path))
    assert (found["sum"], found["devices"], found["spmd"], found["world_size"]) == (4.0, 1, False, 1)
    assert (found["index"], found["precision"], done.stderr) == (None, "no", "")


def test_a_script_that_fails_in_one_process(tmp_path: Path) -> None:
    done = launch("--tpu", "--num_processes", "1", "train.py", "fail", env=TWO, cwd=tmp_path)
    (found,) = facts_of(done, code=1)
    assert found["world_size"] == 1
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert done.stderr.endswith("ValueError: broken on purpose\n")
    assert "worker.py" not in done.stderr
    assert "torch_xla" not in done.stderr


def test_an_accelerator_in_one_process(tmp_path: Path) -> None:
    (found,) = facts_of(launch("--tpu", "accelerated.py", env=ONE, cwd=tmp_path))
    assert (found["device"], found["processes"], found["precision"]) == ("xla", 1, "no")


# --- processes that torch_xla spawns ----------------------------------------------------------------------------------


def test_a_function_in_a_process_that_torch_xla_spawns(tmp_path: Path) -> None:
    words = ("--tpu", "--main_training_function", "_mp_fn", "train.py", "x")
    (found,) = facts_of(launch(*words, env=SPAWNED, cwd=tmp_path))
    assert (found["name"], found["arguments"], found["path"]) == ("train", ["train.py", "x"], str(tmp_path))
    assert (found["index"], found["sum"], found["devices"]) == (0, 4.0, 1)


@pytest.mark.parametrize(
    ("word", "code", "last"), [("fail", 1, "ValueError: broken on purpose"), ("exit", 7, "sys.exit(7)")]
)
def test_a_failure_in_a_process_that_torch_xla_spawns(tmp_path: Path, word: str, code: int, last: str) -> None:
    done = launch("--tpu", "train.py", word, env=SPAWNED, cwd=tmp_path)
    (found,) = facts_of(done, code=code)
    assert (found["name"], found["index"]) == ("__main__", None)
    told = done.stderr.rpartition("-" * 100)[2]
    assert f"exit code {code}\n" in told
    assert told.splitlines()[-1].startswith(last)
    assert "worker.py" not in told


# --- one process for all devices --------------------------------------------------------------------------------------


def test_one_process_drives_two_devices(tmp_path: Path) -> None:
    done = launch("--tpu", "train.py", "--lr", "1", env={**TWO, "XLA_USE_SPMD": "1"}, cwd=tmp_path)
    (found,) = facts_of(done)
    assert (found["name"], found["arguments"]) == ("__main__", ["train.py", "--lr", "1"])
    assert (found["sum"], found["devices"], found["spmd"]) == (4.0, 2, True)
    assert (
        "One process drives all XLA devices of this machine together (SPMD), because of XLA_USE_SPMD=1." in done.stderr
    )


def test_a_function_over_two_devices(tmp_path: Path) -> None:
    words = ("--tpu", "--main_training_function", "_mp_fn", "train.py", "fail")
    done = launch(*words, env={**TWO, "XLA_USE_SPMD": "1"}, cwd=tmp_path)
    (found,) = facts_of(done, code=1)
    assert (found["name"], found["index"], found["sum"], found["devices"]) == ("train", 0, 4.0, 2)
    assert done.stderr.endswith("ValueError: broken on purpose\n")
    assert "worker.py" not in done.stderr


def test_an_accelerator_over_two_devices(tmp_path: Path) -> None:
    words = ("--tpu", "--use_parallelism_config", "--parallelism_config_dp_shard_size", "2", "accelerated.py")
    (found,) = facts_of(launch(*words, env=TWO, cwd=tmp_path))
    assert (found["device"], found["processes"], found["precision"]) == ("xla", 1, "no")


# --- a pod ------------------------------------------------------------------------------------------------------------


def test_a_script_on_two_machines(tmp_path: Path) -> None:
    write_gcloud(tmp_path / "bin")
    around = {**ONE, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CLOUDSDK_COMPUTE_ZONE": "z"}
    words = ("--tpu", "--tpu_cluster", "--vm", "a", "--vm", "b", "--env", "PJRT_DEVICE=CPU", "train.py", "two words")
    done = launch(*words, env=around, cwd=tmp_path)
    found = {entry["machine"]: entry for entry in facts_of(done)}
    assert set(found) == {"a", "b"}
    assert found["a"]["arguments"] == found["b"]["arguments"] == ["train.py", "two words"]
    assert all(line.startswith(("[a] ", "[b] ")) for line in done.stdout.splitlines())


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "words", "told"),
    [
        (TWO, (), "CPU_NUM_DEVICES=2, and torch_xla would drive them by threads of one process"),
        (ONE, ("--num_processes", "3"), "torch_xla starts one process, or one for each device"),
        ({**TWO, "XLA_USE_SPMD": "1"}, ("--num_processes", "2"), "by which one process drives all XLA devices"),
        ({**ONE, "PJRT_DEVICE": "WARP"}, (), "PJRT_DEVICE='WARP' names no device of torch_xla"),
        ({**ONE, "PJRT_DEVICE": ""}, (), "set PJRT_DEVICE=CPU for a trial run on the CPU"),
        (ONE, ("--mixed_precision", "fp16"), "XLA devices train in bfloat16"),
        (ONE, ("--main_training_function", "fit"), "'train.py' has no such function (it has main, _mp_fn)"),
    ],
)
def test_what_is_refused(tmp_path: Path, env: dict[str, str], words: tuple[str, ...], told: str) -> None:
    done = launch("--tpu", *words, "train.py", env=env, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


# --- notebooks --------------------------------------------------------------------------------------------------------

NOTEBOOK = """
import json
import os
import sys

import torch
import torch_xla

from accelerate import notebook_launcher
from accelerate.launchers import FunctionWorker, tpu


def train(word):
    total = torch.ones(4, device=torch_xla.device()).sum().item()
    if word == "fail":
        raise ValueError("broken on purpose")
    names = ("ACCELERATE_MIXED_PRECISION", "XLA_USE_SPMD", "FORK_LAUNCHED")
    here = {"word": word, "sum": total, "pid": os.getpid(), **{name: os.environ.get(name) for name in names}}
    return {**here, "devices": torch_xla.runtime.global_runtime_device_count()}


if __name__ == "__main__":
    print(json.dumps({"notebook": os.getpid()}))
    if sys.argv[1] == "used":
        torch.ones(1, device=torch_xla.device())
    if sys.argv[1] == "forked":
        for word in ("ok", "fail"):
            worker = FunctionWorker(train, (word,), {"fork_launched": "1"}, forked=True, sends_result=True)
            results, failure, text = tpu.run_processes(worker)
            print(json.dumps({"results": results, "text": text, "code": failure.exit_code if failure else 0}))
        sys.exit()
    for word in ("first", "second"):
        print(json.dumps(notebook_launcher(train, (word,), mixed_precision="bf16")))
"""


def notebook(folder: Path, word: str, env: dict[str, str], code: int = 0) -> tuple[list[dict[str, Any]], str]:
    (folder / "notebook.py").write_text(NOTEBOOK)
    command = [sys.executable, "notebook.py", word]
    done = subprocess.run(
        command, cwd=folder, env=launch_environment(env), capture_output=True, text=True, check=False, timeout=600
    )
    return facts_of(done, code), done.stderr


def test_a_notebook_with_one_device(tmp_path: Path) -> None:
    (here, *found), _ = notebook(tmp_path, "plain", ONE)
    assert [entry["word"] for entry in found] == ["first", "second"]
    for entry in found:
        assert (entry["pid"], entry["sum"], entry["devices"]) == (here["notebook"], 4.0, 1)
        assert (entry["ACCELERATE_MIXED_PRECISION"], entry["XLA_USE_SPMD"]) == ("bf16", None)


def test_a_notebook_with_devices_that_share_a_process(tmp_path: Path) -> None:
    (here, *found), told = notebook(tmp_path, "plain", TWO)
    for entry in found:
        assert (entry["pid"], entry["devices"], entry["XLA_USE_SPMD"]) == (here["notebook"], 2, "1")
    assert told.count("notebook_launcher: this process drives all XLA devices together (SPMD)") == 1
    _, told = notebook(tmp_path, "used", TWO, code=1)
    assert "UsageError: This process has used an XLA device already" in told


def test_a_notebook_forks_a_process_for_each_device(tmp_path: Path) -> None:
    (here, good, bad), _ = notebook(tmp_path, "forked", ONE)
    (result,) = good["results"]
    assert (result["sum"], result["FORK_LAUNCHED"]) == (4.0, "1")
    assert result["pid"] != here["notebook"]
    assert bad["code"] == 1
    assert "ValueError: broken on purpose" in bad["text"]
