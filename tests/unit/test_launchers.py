"""Functions on several real processes of this machine."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.multiprocessing import ProcessRaisedException

from accelerate import Accelerator, debug_launcher, launchers, notebook_launcher
from accelerate._base.errors import ConfigurationError, UsageError, WrongTypeError
from accelerate.config.env import patch_environment
from accelerate.devices.machine import Machine
from accelerate.state import PartialState


def note(folder: str, word: str) -> None:
    accelerator = Accelerator()
    total = accelerator.reduce(torch.ones(1), "sum").item()
    facts = {
        "word": word,
        "local_rank": os.environ["LOCAL_RANK"],
        "ranks": [accelerator.process_index, accelerator.local_process_index, accelerator.num_processes],
        "total": total,
        "backend": accelerator.state.backend,
        "device": str(accelerator.device),
        "fork_launched": accelerator.state.fork_launched,
    }
    Path(folder, f"{accelerator.process_index}.json").write_text(json.dumps(facts))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_the_processes(tmp_path: Path, size: int) -> None:
    torch.ones(200, 200) @ torch.ones(200, 200)  # threads of the parent must not hold the children
    PartialState()  # nor its state
    debug_launcher(note, (str(tmp_path), "given"), num_processes=size)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    assert found == [
        {
            "word": "given",
            "local_rank": str(rank),
            "ranks": [rank, rank, size],
            "total": size,
            "backend": "gloo",
            "device": "cpu",
            "fork_launched": True,
        }
        for rank in range(size)
    ]
    assert len(list(tmp_path.iterdir())) == size


def fail_on_one() -> None:
    if Accelerator().process_index == 1:
        raise ValueError("broken on purpose")
    # The other rank waits here; the launcher ends it.
    Accelerator().wait_for_everyone()


def test_the_error_of_a_child_arrives_with_its_traceback() -> None:
    with pytest.raises(ProcessRaisedException, match=r"(?s)fail_on_one.*ValueError: broken on purpose") as caught:
        debug_launcher(fail_on_one)
    assert caught.value.error_index == 1


def test_a_group_that_is_there_already(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        with pytest.raises(ConfigurationError, match="already in a process group"):
            debug_launcher(note, (str(tmp_path), "never"))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("size", [0, -1])
def test_no_processes(size: int) -> None:
    with pytest.raises(ConfigurationError, match=f"num_processes={size}"):
        debug_launcher(print, num_processes=size)


@pytest.mark.parametrize("args", [5, None, "abc", b"abc", {"rate": 0.1}, {1, 2}])
@pytest.mark.parametrize("size", [1, 2])
def test_arguments_that_are_no_sequence_are_refused_before_the_start(args: object, size: int, tmp_path: Path) -> None:
    def never(*args: object) -> None:
        (tmp_path / str(os.getpid())).touch()

    for launch in (debug_launcher, notebook_launcher):
        with pytest.raises(WrongTypeError, match=r"args=.* is of the type \w+, .*Write args=\(value,\) for one value"):
            launch(never, args, num_processes=size)  # type: ignore[arg-type, operator]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("args", [(1, 2), [1, 2], iter([1, 2]), {"a": 1, "b": 2}.values()])
def test_arguments_in_any_order_keeping_form_are_taken(args: object) -> None:
    found: list[object] = []
    notebook_launcher(lambda *given: found.extend(given), args, num_processes=1)  # type: ignore[arg-type]
    assert found == [1, 2]


def test_the_environment_of_the_parent_stays(tmp_path: Path) -> None:
    with patch_environment(world_size="7", accelerate_mixed_precision="bf16"):
        debug_launcher(note, (str(tmp_path), "given"))
        assert os.environ["WORLD_SIZE"] == "7"
    assert json.loads((tmp_path / "0.json").read_text())["ranks"] == [0, 0, 2]


# --- notebooks: what is refused before a process is started -----------------------------------------------------------


@pytest.fixture
def no_notebook_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "google.colab", raising=False)
    for name in [name for name in os.environ if name.startswith("KAGGLE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a real program first in the path that lists two GPUs."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: A100'\necho 'GPU 1: A100'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"num_processes was not given.*this machine has .*CPU cores.*Write num_processes=\d"),
        ({"num_processes": 0}, r"num_processes=0 starts nothing. Write 1 or more"),
        (
            {"num_processes": 2, "num_nodes": 2, "node_rank": 2},
            r"node_rank=2 is not a place among num_nodes=2 .*Write a node_rank from 0 to 1",
        ),
        ({"num_processes": 1, "mixed_precision": "fp7"}, r"mixed_precision='fp7' .*one of 'no', .*'bf16'"),
        ({"num_processes": 1, "mixed_precision": None}, r"mixed_precision=None .*one of 'no'"),
        ({"num_processes": 2, "use_port": "door"}, r"use_port='door' is not a port. Write a number, or '0'"),
    ],
)
def test_arguments_of_a_notebook_that_cannot_work(
    no_notebook_service: None, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        notebook_launcher(pytest.fail, ("it was called",), **given)


@pytest.mark.parametrize("service", ["KAGGLE_KERNEL_RUN_TYPE", "google.colab"])
def test_a_notebook_service_with_one_device_runs_in_place(
    no_notebook_service: None, monkeypatch: pytest.MonkeyPatch, service: str
) -> None:
    if service.isupper():
        monkeypatch.setenv(service, "Interactive")
    else:
        monkeypatch.setitem(sys.modules, service, ModuleType(service))
    monkeypatch.setattr(launchers, "detect", lambda environ: Machine("cuda", 1))
    assert notebook_launcher(os.environ.get, ("ACCELERATE_MIXED_PRECISION",), mixed_precision="BF16") == "bf16"
    assert notebook_launcher(os.getpid) == os.getpid()


def test_a_package_that_sets_up_the_device_at_its_import_is_refused(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    with pytest.raises(UsageError, match=r"set up 'cuda' already \(the import of bitsandbytes\).*Restart the kernel"):
        notebook_launcher(pytest.fail, ("it was called",), num_processes=2)
    # Processes on the CPU do not mind: the next mistake is found.
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    with pytest.raises(ConfigurationError, match="use_port='door'"):
        notebook_launcher(pytest.fail, ("it was called",), num_processes=2, use_port="door")


def test_a_device_that_the_notebook_has_used_is_refused(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(UsageError, match=r"'cuda' already \(a tensor, a model or a query that was sent there\)"):
        notebook_launcher(pytest.fail, ("it was called",), num_processes=2)


def local_function() -> None:
    pytest.fail("it was called")


@pytest.mark.parametrize("cause", ["a forked process cannot use cuda", f"{sys.platform} cannot fork"])
def test_a_function_of_the_notebook_cannot_be_spawned(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    if "cuda" in cause:
        monkeypatch.setattr(torch.version, "hip", "6.4")  # AMD's runtime does not survive a fork
    else:
        monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    with pytest.raises(ConfigurationError, match="use_port='door'"):  # an imported function is fine
        notebook_launcher(local_function, num_processes=2, use_port="door")
    monkeypatch.setattr(local_function, "__module__", "__main__")
    with pytest.raises(
        ConfigurationError, match=rf"'local_function' .*because {cause}. Write the function into a file"
    ):
        notebook_launcher(local_function, num_processes=2)


def test_processes_that_cannot_start_are_found_before_the_training(
    no_notebook_service: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "warp")
    with pytest.raises(launchers.ProcessFailedError, match=r"(?s)test_launch.*'warp'") as caught:
        notebook_launcher(Path.touch, (tmp_path / "trained",), num_processes=2, use_port=0)
    assert not (tmp_path / "trained").exists()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.rank, copy.exit_code) == (str(caught.value), caught.value.rank, 1)


def test_a_result_that_cannot_leave_its_process_is_dropped_with_a_warning() -> None:
    def keep() -> Any:
        return lambda: None

    worker = launchers.FunctionWorker(keep, (), {}, forked=False, sends_result=True)
    with pytest.warns(UserWarning, match=r"keep returned, a function, cannot leave its process.*Return numbers"):
        assert worker() is None
    assert launchers.FunctionWorker(lambda: {"a": 1}, (), {}, forked=False, sends_result=True)() == {"a": 1}
