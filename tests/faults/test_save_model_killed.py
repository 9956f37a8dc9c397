"""A `save_model` that is killed at any step leaves weights that are whole: the old ones or the new ones."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from accelerate import Accelerator, load_checkpoint_in_model
from accelerate._base.errors import ConfigurationError

SHARD = 100  # bytes: one of the three weights below
WAYS = {"one file": (True, "10GB"), "shards": (True, SHARD), "fewer shards": (True, 210), "torch files": (False, SHARD)}
INDEX_OF = {True: "model.safetensors.index.json", False: "pytorch_model.bin.index.json"}
STEPS = 60  # more than any of the saves below takes


def network(value: float) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(5, 5, bias=False) for _ in range(3)))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def save(value: float, folder: Path, way: str) -> None:
    safe, size = WAYS[way]
    Accelerator().save_model(network(value), folder, max_shard_size=size, safe_serialization=safe)


def save_and_be_killed(value: float, folder: Path, way: str, after: int) -> bool:
    """Save in a process that is killed after some steps at the disk; return whether it was."""
    child = os.fork()
    if child == 0:
        gc.freeze()  # what was inherited may need threads that only the parent has
        _die_after(after)
        try:
            save(value, folder, way)
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def _die_after(steps: int) -> None:
    """Make this process kill itself before its next step that changes names on the disk."""
    left = iter(range(steps))
    for module, name in ((os, "replace"), (os, "unlink"), (os, "link"), (os, "mkdir"), (os, "fsync"), (os, "rmdir")):
        setattr(module, name, _counted(getattr(module, name), left))


def _counted(function: object, left: Iterator[int]) -> object:
    def step(*args: object, **kwargs: object) -> object:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        assert callable(function)
        return function(*args, **kwargs)

    return step


def value_in(folder: Path) -> float:
    """Return the value that all weights of a folder, or of an index, have; a mix fails."""
    model = network(-1.0)
    load_checkpoint_in_model(model, folder, strict=True)
    (value,) = torch.unique(torch.cat([parameter.flatten() for parameter in model.parameters()])).tolist()
    return float(value)


@pytest.mark.parametrize("before", WAYS)
@pytest.mark.parametrize("after", WAYS)
def test_killed_at_every_step(tmp_path: Path, before: str, after: str) -> None:
    outcomes = []
    for steps in range(STEPS):
        folder = tmp_path / str(steps)
        save(1.0, folder, before)
        killed = save_and_be_killed(2.0, folder, after, steps)
        indices = _indices(folder)
        if len(indices) == 2:
            # Both formats are there, each whole; the loader asks which one is meant instead of guessing.
            with pytest.raises(ConfigurationError, match=r"holds 2 index files.*Give the path of the file or index"):
                value_in(folder)
            assert {index: value_in(folder / index) for index in indices} == {
                INDEX_OF[WAYS[before][0]]: 1.0,
                INDEX_OF[WAYS[after][0]]: 2.0,
            }
        else:
            outcomes.append(value_in(folder))
        if not killed:
            break
        if steps % 4 == 0:
            save(3.0, folder, after)  # what was left is not in the way
            assert value_in(folder) == 3.0
            assert not [path for path in folder.iterdir() if path.is_dir()]
    else:
        pytest.fail(f"the save takes more than {STEPS} steps")
    assert outcomes == sorted(outcomes)  # once the new weights are there, they stay
    assert set(outcomes) == {1.0, 2.0}


def _indices(folder: Path) -> list[str]:
    single = any((folder / name).exists() for name in ("model.safetensors", "pytorch_model.bin"))
    return [] if single else [path.name for path in folder.glob("*.index.json")]


def test_a_second_kill_after_the_first(tmp_path: Path) -> None:
    """What a killed save left is replaced as safely as what a whole one left."""
    for first in range(0, STEPS, 7):
        folder = tmp_path / str(first)
        save(1.0, folder, "shards")
        save_and_be_killed(2.0, folder, "shards", first)
        kept = value_in(folder)
        for second in range(0, STEPS, 5):
            killed = save_and_be_killed(3.0, folder, "shards", second)
            assert value_in(folder) in (kept, 3.0)
            if not killed:
                break
