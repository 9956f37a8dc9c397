"""Runs with Megatron's own optimizers go on exactly from checkpoints, and groups of processes train as one does."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate._base.errors import CheckpointError
from accelerate._base.imports import is_package_available
from accelerate.checkpointing.files import FolderWriter
from accelerate.checkpointing.parts import LoadOptions, Part
from accelerate.checkpointing.snapshot import host_copy
from accelerate.strategies.megatron.options import core

if not is_package_available("megatron.core"):
    pytest.skip("needs megatron-core", allow_module_level=True)
pytest.importorskip("transformers")

from tests.support.megatron import make_model
from tests.support.megatron_accelerator import GROUPS, Run, accelerator_host, group_results, plain_losses, prepare

from accelerate.strategies.megatron.accelerator_checkpoint import (
    MegatronOptimizerPart,
    MegatronRandomPart,
    accelerator_parts,
)
from accelerate.strategies.megatron.checkpoint import PiecesPart


@pytest.fixture
def host() -> Iterator[list[int]]:
    with accelerator_host() as seeds:
        yield seeds


def write(run: Run, folder: Path, *, in_background: bool = False) -> list[str]:
    """Write weights, optimizer and generators, and return the names of the files."""
    folder.mkdir(exist_ok=True)
    writer = FolderWriter(folder)
    try:
        for part in (PiecesPart(run.engine), MegatronOptimizerPart(run.engine), MegatronRandomPart()):
            payload = part.snapshot()
            part.write(host_copy(payload) if in_background else payload, writer)
        return [record.name for record in writer.finish()]
    finally:
        writer.close()


def read(run: Run, folder: Path) -> None:
    parts: list[Part] = [PiecesPart(run.engine), MegatronOptimizerPart(run.engine), MegatronRandomPart()]
    payloads = [part.read(folder, LoadOptions()) for part in parts]
    for part, payload in zip(parts, payloads, strict=True):
        part.restore(payload)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize(
    ("precision", "optimizer", "options"),
    [
        ("no", "groups", {}),
        ("no", "sgd", {}),
        ("no", "groups", {"use_distributed_optimizer": True}),
        ("bf16", "adamw", {}),
        ("bf16", "adamw", {"use_distributed_optimizer": True}),
        ("fp16", "groups", {}),
    ],
)
def test_a_run_goes_on_exactly(
    host: list[int], tmp_path: Path, precision: str, optimizer: str, options: dict[str, Any], in_background: bool
) -> None:
    options = {**options, "other_megatron_args": {"initial_loss_scale": 2.0**10}}
    run = prepare("llama", precision, optimizer, **options)
    run.train(3)
    run.held.param_groups[0]["lr"] = 0.02
    files = write(run, tmp_path / "saved", in_background=in_background)
    own = [name for name in files if name.startswith("megatron_core_optimizer_0/")]
    assert {"common.pt", "metadata.json", ".metadata", "__0_0.distcp"} == {Path(name).name for name in own}
    expected = run.train(3, clip=0.5)
    resumed = prepare("llama", precision, optimizer, **options)
    read(resumed, tmp_path / "saved")
    assert resumed.held.num_updates == 3
    assert resumed.held.param_groups[0]["lr"] == 0.02
    assert resumed.train(3, clip=0.5) == expected


def test_an_optimizer_that_has_not_stepped_is_saved_as_such(host: list[int], tmp_path: Path) -> None:
    run = prepare("llama", "bf16", use_distributed_optimizer=True)
    assert "megatron_core_optimizer_0/new.bin" in write(run, tmp_path)
    expected = run.train(2)
    read(run, tmp_path)
    assert run.held.num_updates == 0
    assert run.train(2) == expected


@pytest.mark.parametrize("option", ["no_save_optim", "no_load_optim"])
def test_the_plugin_says_whether_the_optimizer_is_saved(host: list[int], tmp_path: Path, option: str) -> None:
    options: dict[str, Any] = {option: True}
    run = prepare("llama", "bf16", **options)
    run.train(2)
    files = write(run, tmp_path)
    assert any("optimizer" in name for name in files) == (option == "no_load_optim")
    before = run.weights()
    run.train(1)
    run.engine.plugin.no_load_optim = True
    read(run, tmp_path)
    # Steps go on from the weights that were read, and not from copies of the former ones.
    run.accelerator.backward(run.engine(**run.batch()).loss)
    for group in run.held.param_groups:
        group["lr"] = 0.0
    run.optimizer.step()
    for weight, expected in zip(run.weights(), before, strict=True):
        torch.testing.assert_close(weight, expected, rtol=0, atol=0)


class Foreign:
    """What a file should not be able to make."""

    def __reduce__(self) -> Any:
        return os.getenv, ("HOME",)


def test_what_cannot_be_read_is_refused_before_anything_changes(host: list[int], tmp_path: Path) -> None:
    run = prepare("llama")
    run.train(1)
    part = MegatronOptimizerPart(run.engine)
    with pytest.raises(CheckpointError, match="no_load_optim"):
        part.read(tmp_path, LoadOptions())
    write(run, tmp_path)
    folder = tmp_path / part.folder_name
    assert part.read(tmp_path, LoadOptions()) == folder
    for config, message in (
        ({"sharded_backend": "zarr"}, "zarr"),
        ({"sharded_backend": "torch_dist", "common_backend": "pickle"}, "pickle"),
        ([], "broken"),
    ):
        (folder / "metadata.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=message):
            part.read(tmp_path, LoadOptions())
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    common = torch.load(folder / "common.pt", weights_only=True)
    for name, value in (("num_groups", 5), ("use_distributed_optimizer", True)):
        torch.save({**common, "accelerate": {**common["accelerate"], name: value}}, folder / "common.pt")
        with pytest.raises(CheckpointError, match=name):
            part.read(tmp_path, LoadOptions())
    torch.save({**common, "foreign": Foreign()}, folder / "common.pt")
    with pytest.raises(CheckpointError, match=r"is not read.*getenv"):
        part.read(tmp_path, LoadOptions())


def test_shards_of_another_model_are_refused(host: list[int], tmp_path: Path) -> None:
    run = prepare("llama")
    run.train(1)
    write(run, tmp_path)
    other = prepare("gpt2")
    part = MegatronOptimizerPart(other.engine)
    payload = part.read(tmp_path, LoadOptions())
    with pytest.raises(CheckpointError, match="do not fit"):
        part.restore(payload)


def test_generators_go_on_where_they_were(host: list[int], tmp_path: Path) -> None:
    prepare("gpt2")
    tracker = core("tensor_parallel").get_cuda_rng_tracker()
    state = tracker.get_states()
    part, writer = MegatronRandomPart(), FolderWriter(tmp_path)
    part.write(part.snapshot(), writer)
    assert [record.name for record in writer.finish()] == ["megatron_rng_0.bin"]
    writer.close()
    tracker.set_states({"model-parallel-rng": torch.tensor([7], dtype=torch.uint8)})
    part.restore(part.read(tmp_path, LoadOptions()))
    assert torch.equal(tracker.get_states()["model-parallel-rng"], state["model-parallel-rng"])
    assert part.read(tmp_path, LoadOptions(rank=3, world_size=4)) is None


def test_every_part_of_a_model_is_listed_once(host: list[int]) -> None:
    run = prepare("gpt2")
    names = [part.name for part in accelerator_parts(run.engine, 0)]
    assert names == ["optimizer 0", "random states of Megatron"]
    assert [part.name for part in accelerator_parts(run.engine, 1)] == ["optimizer 1"]


# --- several processes ------------------------------------------------------------------------------------------------


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", GROUPS)
def test_two_processes_train_as_one_does(name: str) -> None:
    kind = GROUPS[name].get("kind", "llama")
    expected = plain_losses(kind, "adamw", 4, clip=0.5)
    for rank, results in enumerate(group_results()):
        found = results[name]
        assert found["names"] == (list(make_model(kind).state_dict()) if rank == 0 else [])
        for (loss, norm), (plain, plain_norm) in zip(found["steps"], expected, strict=True):
            assert loss == pytest.approx(plain, rel=1e-4)
            assert norm == pytest.approx(plain_norm, rel=1e-3)
        assert found["again"] == found["steps"][2:]
        assert found["has loss"] == (True, False)
        assert found["same logits"]
        assert found["shape"] == (13, 101)
