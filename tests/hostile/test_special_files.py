"""Pipes, sockets and devices where files are expected: nobody waits for a pipe, or reads a device for ever."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hostile.fuzz import limits
from tests.support.checkpoints import write_checkpoint

from accelerate._base.errors import CheckpointError, ConfigurationError
from accelerate.checkpointing.catalog import inspect
from accelerate.checkpointing.files import FileProblem, FileRecord, checksum
from accelerate.config import deepspeed
from accelerate.config.file_text import load_text
from accelerate.launch.hostfile import read_hostfile
from accelerate.offload.estimate import read_tensors
from accelerate.offload.safetensors_format import read_header
from accelerate.offload.store import OffloadedWeightsLoader, load_state_dict, open_weights_file
from accelerate.offload.stored import RawFile, SafetensorsFile
from accelerate.offload.weight_files import checkpoint_files, read_json
from accelerate.runtime import claims

READERS: list[Callable[[Path], Any]] = [
    lambda path: read_header(path.with_suffix(".safetensors")),
    lambda path: SafetensorsFile(path.with_suffix(".safetensors")),
    lambda path: open_weights_file(path.with_suffix(".bin")),
    lambda path: load_state_dict(path.with_suffix(".safetensors")),
    lambda path: read_tensors([path.with_suffix(".safetensors")]),
    lambda path: read_tensors([path.with_suffix(".bin")]),
    lambda path: RawFile(path.with_suffix(".dat"), (2,), torch.float32),
    lambda path: RawFile(path.with_suffix(".dat"), (0,), torch.float32),
    lambda path: read_json(path.with_suffix(".json")),
]
KINDS = ["pipe", "socket", "device"]


def make_special(path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("read", READERS)
def test_no_reader_waits(read: Callable[[Path], Any], kind: str, tmp_path: Path) -> None:
    for suffix in (".safetensors", ".bin", ".dat", ".json"):
        make_special(tmp_path / f"w{suffix}", kind)
    with limits(), pytest.raises(ConfigurationError, match="is a pipe, a socket or a device, and a file is expected"):
        read(tmp_path / "w")


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_of_machines_and_a_claim_are_files(kind: str, tmp_path: Path) -> None:
    make_special(tmp_path / "hosts", kind)
    make_special(tmp_path / ".state.accelerate-claim", kind)
    with limits():
        with pytest.raises(ConfigurationError, match="is a pipe, a socket or a device, and a file is expected"):
            read_hostfile(tmp_path / "hosts", "a test")
        with pytest.raises(CheckpointError, match="a folder, a pipe, a socket or a device"):
            claims.claim(tmp_path / "state")


@pytest.mark.parametrize("kind", KINDS)
def test_shards_and_offloaded_weights_are_files(kind: str, tmp_path: Path) -> None:
    for name in ("shard.safetensors", "a.dat"):
        make_special(tmp_path / name, kind)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "shard.safetensors"}}))
    (tmp_path / "index.json").write_text(
        json.dumps({"a": {"dtype": "int8", "shape": [0]}, "b": {"safetensors_file": "shard.safetensors"}})
    )
    weights = OffloadedWeightsLoader(save_folder=tmp_path)
    with limits():
        for read in (lambda: open_weights_file(checkpoint_files(index)[0]), lambda: weights["a"], lambda: weights["b"]):
            with pytest.raises(ConfigurationError, match="and a file is expected"):
                read()


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_made_of_files(kind: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "state", {"a": ""})
    (folder / "a").unlink()
    make_special(folder / "a", kind)
    with limits():
        assert FileRecord("a", 0, "x").problem(folder, checksums=True) == FileProblem("a", "it is no file")
        assert not inspect(folder, checksums=True).is_valid
        (folder / "manifest.json").unlink()
        make_special(folder / "manifest.json", kind)
        assert "and a file is expected" in str(inspect(folder).problem)


def test_options_may_come_through_a_pipe_but_not_without_end(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"num_processes: 2\n")
    os.close(writing)
    try:
        assert load_text(f"/dev/fd/{reading}") == {"num_processes": 2}
    finally:
        os.close(reading)
    with limits(), pytest.raises(ConfigurationError, match="/dev/zero"):
        load_text("/dev/zero")


@pytest.mark.parametrize("read", [load_text, deepspeed.read])
def test_options_are_not_read_from_a_pipe_without_a_writer(tmp_path: Path, read: Callable[[str], Any]) -> None:
    os.mkfifo(tmp_path / "pipe")
    with limits(), pytest.raises(ConfigurationError, match="pipe"):
        read(str(tmp_path / "pipe"))


def test_a_long_text_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    with path.open("wb") as file:
        file.truncate(2**40)  # it takes no room on the disk
    with limits(), pytest.raises(ConfigurationError, match="has 1099511627776 bytes, and a text of up to"):
        read_json(path)


def test_a_sparse_file_is_summed_or_refused_by_its_size(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        file.truncate(2**20)
    assert FileRecord("a", 2**20, checksum(tmp_path / "a")).problem(tmp_path, checksums=True) is None
    with (tmp_path / "a").open("wb") as file:
        file.truncate(2**40)  # to sum it would take hours
    with limits():
        problem = FileRecord("a", 2**20, "x").problem(tmp_path, checksums=True)
    assert problem == FileProblem("a", f"it has {2**40} bytes instead of {2**20}")
