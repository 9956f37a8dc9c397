"""Functions on several real processes of this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import ProcessRaisedException

from accelerate import Accelerator, debug_launcher, notebook_launcher
from accelerate._base.errors import ConfigurationError, WrongTypeError
from accelerate.config.env import patch_environment
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
