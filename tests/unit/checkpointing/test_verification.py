"""Checkpoints that are read as a whole, and what is surplus among them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accelerate import Accelerator
from accelerate._base.errors import ConfigurationError
from accelerate.checkpointing.catalog import CheckpointInfo, catalog, inspect, prune, surplus
from accelerate.checkpointing.manifest import Manifest
from accelerate.checkpointing.verification import verified


@pytest.fixture
def checkpoint(tmp_path: Path) -> CheckpointInfo:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(20, 20))
    accelerator.save_state(tmp_path / "checkpoint")
    return inspect(tmp_path / "checkpoint")


def test_every_file_is_read_once(checkpoint: CheckpointInfo) -> None:
    sizes: list[int] = []
    assert verified(checkpoint, sizes.append) == checkpoint
    manifest = Manifest.read(checkpoint.path)
    assert manifest is not None
    assert sizes == [record.size for record in manifest.files]
    assert sum(sizes) == checkpoint.size


def test_what_is_wrong_is_named(checkpoint: CheckpointInfo) -> None:
    weights = checkpoint.path / "model.safetensors"
    weights.write_bytes(bytes([weights.read_bytes()[0] ^ 1]) + weights.read_bytes()[1:])
    (checkpoint.path / "random_states_0.pkl").unlink()
    found = verified(checkpoint)
    assert not found.is_valid
    assert found.problem is not None
    assert "model.safetensors: its bytes have changed" in found.problem
    assert "random_states_0.pkl: it is missing" in found.problem


def test_without_a_manifest_nothing_is_known(checkpoint: CheckpointInfo) -> None:
    (checkpoint.path / "manifest.json").unlink()
    known = inspect(checkpoint.path)
    assert known.problem == "no manifest"
    assert verified(known) == known
    (checkpoint.path / "manifest.json").write_text("[]")
    assert not verified(known).is_valid


def info(number: int | str, is_valid: bool = True) -> CheckpointInfo:
    name = f"checkpoint_{number}" if isinstance(number, int) else number
    return CheckpointInfo(Path(name), name, 0, 0, 0, 0.0, 0, 1, is_valid)


@pytest.mark.parametrize(
    ("valid", "keep", "gone"),
    [
        ("vvvv", 2, [0, 1]),
        ("vvvv", 4, []),
        ("vvvv", 9, []),
        ("vvbb", 1, [0, 2, 3]),
        ("vvbb", 3, [2, 3]),
        ("vbvb", 1, [0, 1, 3]),
        ("vbbb", 1, [1, 2, 3]),
        ("bbbb", 1, []),
        ("", 1, []),
    ],
)
def test_surplus(valid: str, keep: int, gone: list[int]) -> None:
    found = [info(number, letter == "v") for number, letter in enumerate(valid)]
    assert surplus(found, keep) == [found[number] for number in gone]


def test_surplus_beside_a_new_checkpoint() -> None:
    found = [info(0), info("mine"), info(1, False), info(2), info(3)]
    assert surplus(found, 2, spare=Path("checkpoint_3")) == [found[0], found[2]]
    assert surplus(found, 1, spare=Path("checkpoint_3")) == [found[0], found[2], found[3]]
    assert surplus(found, 1, spare=Path("elsewhere")) == [found[0], found[2], found[3], found[4]]


def test_nothing_kept_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="keep=0"):
        surplus([info(1)], 0)


def test_prune_removes_it(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    for number in range(3):
        accelerator.save_state(tmp_path / f"checkpoint_{number}")
    removed = prune(tmp_path, 1)
    assert sorted(removed) == [tmp_path / "checkpoint_0", tmp_path / "checkpoint_1"]
    assert [found.name for found in catalog(tmp_path)] == ["checkpoint_2"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint_2"]
