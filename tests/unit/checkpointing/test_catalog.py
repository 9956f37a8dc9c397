"""Which checkpoints there are, whether their bytes are what was written, and what is surplus among them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.checkpoints import write_checkpoint as write

from accelerate import Accelerator
from accelerate._base.errors import ConfigurationError
from accelerate.checkpointing.catalog import (
    CheckpointInfo,
    catalog,
    inspect,
    newest_valid,
    numbered,
    prune,
    surplus,
    verify,
)
from accelerate.checkpointing.manifest import Manifest
from accelerate.runtime import atomic


class TestCatalog:
    def test_numbers_order_checkpoints_and_times_those_with_names(self, tmp_path: Path) -> None:
        for number in (10, 9, 2):
            write(numbered(tmp_path / "checkpoints", number), {"a": "1"}, step=number)
        assert [info.step for info in catalog(tmp_path)] == [2, 9, 10]
        for created, name in ((30.0, "first"), (20.0, "second")):
            write(tmp_path / "other" / name, {"a": "1"}, created=created)
        assert [info.name for info in catalog(tmp_path / "other")] == ["second", "first"]
        assert catalog(tmp_path / "nowhere") == []

    def test_what_is_no_checkpoint_is_not_listed(self, tmp_path: Path) -> None:
        write(tmp_path / "state", {"a": "1"})
        (tmp_path / "logs").mkdir()
        (tmp_path / "file").write_text("")
        (tmp_path / atomic.partial_name("state")).mkdir()
        (info,) = catalog(tmp_path)
        assert (info.name, info.world_size, info.epoch, info.samples, info.size) == ("state", 2, 1, 0, 1)

    def test_the_newest_valid_one_is_found_and_the_reason_names_the_others(self, tmp_path: Path) -> None:
        folders = [write(numbered(tmp_path, number), {"a": "1"}) for number in range(4)]
        (folders[3] / "a").unlink()
        choice = newest_valid(tmp_path, without={folders[2]: "a: its bytes have changed"})
        assert choice.value is not None
        assert choice.value.path == folders[1]
        assert "checkpoint_3 was passed over (a: it is missing)" in choice.reason
        assert "checkpoint_2 was passed over (a: its bytes have changed)" in choice.reason
        assert choice.passed_over == 2
        nothing = newest_valid(tmp_path / "nowhere")
        assert nothing.value is None
        assert "there is no valid checkpoint" in nothing.reason

    def test_a_checkpoint_without_a_manifest_must_open(self, tmp_path: Path) -> None:
        folder = tmp_path / "checkpoint_0"
        folder.mkdir()
        assert inspect(folder).problem == "it holds no file of a checkpoint"
        torch.save({"a": torch.ones(3)}, folder / "optimizer.bin")
        info = inspect(folder)
        assert (info.is_valid, info.problem, info.world_size) == (True, "no manifest", 0)
        content = (folder / "optimizer.bin").read_bytes()
        (folder / "optimizer.bin").write_bytes(content[: len(content) // 2])
        assert inspect(folder).problem == "optimizer.bin: it is not a whole torch file"
        (folder / "optimizer.bin").unlink()
        (folder / "model.safetensors").write_bytes(b"nothing")
        assert "model.safetensors: it cannot be opened" in str(inspect(folder).problem)


class TestPruning:
    def test_the_newest_valid_ones_stay(self, tmp_path: Path) -> None:
        folders = [write(numbered(tmp_path, number), {"a": "1"}) for number in range(4)]
        (folders[2] / "a").unlink()
        assert set(prune(tmp_path, 2)) == {folders[0], folders[2]}
        assert [info.name for info in catalog(tmp_path)] == ["checkpoint_1", "checkpoint_3"]
        with pytest.raises(ValueError, match="keep=0"):
            prune(tmp_path, 0)

    def test_a_spared_one_counts_and_named_ones_are_left_alone(self, tmp_path: Path) -> None:
        folders = [write(numbered(tmp_path, number), {"a": "1"}) for number in (1, 5)]
        write(tmp_path / "best", {"a": "1"})
        assert prune(tmp_path, 1, spare=folders[0]) == [folders[1]]
        assert {info.name for info in catalog(tmp_path)} == {"checkpoint_1", "best"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> CheckpointInfo:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(20, 20))
    accelerator.save_state(tmp_path / "checkpoint")
    return inspect(tmp_path / "checkpoint")


def test_every_file_is_read_once(checkpoint: CheckpointInfo) -> None:
    sizes: list[int] = []
    assert verify(checkpoint, sizes.append) == checkpoint
    manifest = Manifest.read(checkpoint.path)
    assert manifest is not None
    assert sizes == [record.size for record in manifest.files]
    assert sum(sizes) == checkpoint.size


def test_what_is_wrong_is_named(checkpoint: CheckpointInfo) -> None:
    weights = checkpoint.path / "model.safetensors"
    weights.write_bytes(bytes([weights.read_bytes()[0] ^ 1]) + weights.read_bytes()[1:])
    (checkpoint.path / "random_states_0.pkl").unlink()
    found = verify(checkpoint)
    assert not found.is_valid
    assert found.problem is not None
    assert "model.safetensors: its bytes have changed" in found.problem
    assert "random_states_0.pkl: it is missing" in found.problem


def test_without_a_manifest_nothing_is_known(checkpoint: CheckpointInfo) -> None:
    (checkpoint.path / "manifest.json").unlink()
    known = inspect(checkpoint.path)
    assert known.problem == "no manifest"
    assert verify(known) == known
    (checkpoint.path / "manifest.json").write_text("[]")
    assert not verify(known).is_valid


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
    accelerator.end_training()
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint_2"]
