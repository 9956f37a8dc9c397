"""`accelerate merge-weights`: one file out of shards, from the files alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from accelerate._base.errors import CheckpointError, ConfigurationError
from accelerate.checkpointing.sharded import ShardFolder, WholeTensors, by_position, without_warnings_of_torch
from accelerate.commands import accelerate_cli, merge
from accelerate.utils import merge_fsdp_weights

WEIGHTS = {
    "layer.weight": torch.arange(12.0).reshape(3, 4),
    "layer.bias": torch.ones(3, dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "none": torch.empty(0),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    with without_warnings_of_torch():
        save({"model": dict(WEIGHTS)}, storage_writer=FileSystemWriter(folder / "pytorch_model_fsdp_0"), no_dist=True)
        state = {"state": {"layer.weight": {"step": torch.tensor(3.0)}}, "param_groups": [{"params": ["layer.weight"]}]}
        save({"optimizer": state}, storage_writer=FileSystemWriter(folder / "optimizer_0"), no_dist=True)
    return folder


def same(found: dict[str, torch.Tensor]) -> bool:
    return found.keys() == WEIGHTS.keys() and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in WEIGHTS.items()
    )


def test_a_checkpoint_or_its_shards_become_one_file(checkpoint: Path, tmp_path: Path) -> None:
    for number, source in enumerate((checkpoint, checkpoint / "pytorch_model_fsdp_0")):
        target = tmp_path / str(number)
        assert accelerate_cli.run(["merge-weights", str(source), str(target)]) == 0
        assert [entry.name for entry in target.iterdir()] == ["model.safetensors"]
        assert same(load_file(target / "model.safetensors"))


def test_the_old_format_and_the_removal_of_shards(checkpoint: Path, tmp_path: Path) -> None:
    words = ["merge-weights", str(checkpoint), str(tmp_path), "--unsafe-serialization", "--remove_checkpoint_dir"]
    assert accelerate_cli.run(words) == 0
    assert same(torch.load(tmp_path / "pytorch_model.bin", weights_only=True))
    assert [entry.name for entry in checkpoint.iterdir()] == ["optimizer_0"]


def test_a_batch_at_a_time_is_held(checkpoint: Path) -> None:
    tensors = WholeTensors(checkpoint / "pytorch_model_fsdp_0", batch_bytes=1)
    assert same(dict(tensors.in_order(tensors.shapes)))
    assert all(shape.is_meta for shape in tensors.shapes.values())


def test_what_is_no_shards_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no folder"):
        merge_fsdp_weights(tmp_path / "missing", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="SHARDED_STATE_DICT"):
        merge_fsdp_weights(tmp_path / "empty", tmp_path)
    with without_warnings_of_torch():
        save(
            {"model": dict(WEIGHTS)}, storage_writer=FileSystemWriter(checkpoint / "pytorch_model_fsdp_1"), no_dist=True
        )
    with pytest.raises(ConfigurationError, match="pytorch_model_fsdp_1"):
        merge_fsdp_weights(checkpoint, tmp_path)
    (checkpoint / "pytorch_model_fsdp_0" / ".metadata").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="broken"):
        merge_fsdp_weights(checkpoint / "pytorch_model_fsdp_0", tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


def test_states_by_name_are_counted(checkpoint: Path) -> None:
    state = by_position(ShardFolder(checkpoint / "optimizer_0").read_whole()["optimizer"])
    assert state == {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"params": [0]}]}
    assert by_position(state) == state


def test_the_parser_says_what_the_module_says() -> None:
    assert merge.merge_command_parser().description == merge.description
