"""Full disks, folders that cannot be written, files that are not what was written, checkpoints of something else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.disks import contents, fill_up, flip, mounted, read_only, remove, truncate
from tests.support.processes import run_group
from tests.support.stopping import until
from tests.support.training import fresh_accelerator
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate._base.errors import CheckpointError
from accelerate.utils import ProjectConfiguration

WIDTH = 120  # 57 kB of weights, 173 kB with the optimizer


def make_run(project: Path, width: int = WIDTH, **options: Any) -> tuple[Accelerator, Any, Any, Any]:
    configuration = ProjectConfiguration(project_dir=str(project), automatic_checkpoint_naming=True, **options)
    accelerator = fresh_accelerator(project_config=configuration)
    torch.manual_seed(0)
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(torch.randn(40, width), batch_size=2)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def train(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, steps: int = 1) -> int:
    """Train some steps and return the number of updates so far."""
    for number, batch in enumerate(loader, start=1):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if number == steps:
            break
    return accelerator.progress.step


def survive_a_full_disk(project: str, disk: str) -> list[str]:
    """Save, fill the disk, fail to save, go on, make room, save: return what failing said, blocking and not."""
    run = make_run(Path(project))
    accelerator = run[0]
    train(*run)
    accelerator.save_state()
    before = contents(Path(project))
    said = []
    for blocking in (True, False):
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            fill_up(Path(disk))
        accelerator.wait_for_everyone()
        with pytest.raises(CheckpointError) as failure:
            accelerator.save_state(blocking=blocking)
            accelerator.wait_for_save()
        said.append(str(failure.value))
        accelerator.wait_for_everyone()
        assert contents(Path(project)) == before
        assert [info.is_valid for info in accelerator.checkpoints()] == [True]
        train(*run)
        accelerator.wait_for_everyone()
        Path(disk, "filler").unlink(missing_ok=True)
    accelerator.wait_for_everyone()
    accelerator.save_state()
    infos = accelerator.checkpoints()
    assert [info.is_valid for info in infos] == [True, True]
    assert infos[-1].step == 3
    return said


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_full_disk_is_named_and_leaves_the_last_checkpoint(tmp_path: Path, world_size: int) -> None:
    with mounted(tmp_path / "disk", "size=1m") as disk:
        said = run_group(survive_a_full_disk, world_size, str(disk / "project"), str(disk))
        texts = {text for rank in said for text in rank}
        assert len(said[0]) == 2
        assert all("No space left on device" in text and "checkpoint_" in text for text in texts)
        assert all("untouched" in text or "begun" in text for text in texts)
        assert len({tuple(rank) for rank in said}) == 1, "the same error on all ranks"


def test_a_disk_that_fills_up_in_the_middle_names_the_file(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=300k") as disk:
        run = make_run(disk / "project")
        train(*run)
        run[0].save_state()
        before = contents(disk)
        train(*run)
        with pytest.raises(CheckpointError, match=r"No space left on device.*(model\.safetensors|optimizer\.bin)"):
            run[0].save_state()
        assert contents(disk) == before
        assert train(*run) == 3


def test_a_save_behind_training_that_fails_is_logged_at_once_and_raised_by_what_comes_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mounted(tmp_path / "disk", "size=300k") as disk:
        run = make_run(disk / "project")
        accelerator = run[0]
        train(*run)
        accelerator.save_state()
        before = contents(disk)
        following = (accelerator.save_state, accelerator.wait_for_save, accelerator.end_training)
        for number, follows in enumerate(following, start=1):
            train(*run)
            accelerator.save_state(blocking=False)
            until(lambda number=number: caplog.text.count("No space left on device") == number)
            with pytest.raises(CheckpointError, match=r"No space left on device.*(model\.safetensors|optimizer\.bin)"):
                follows()
            assert contents(disk) == before
        assert accelerator.progress.step == 4


def test_a_folder_that_cannot_be_written_can_be_read(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=4m") as disk:
        run = make_run(disk / "project")
        train(*run)
        run[0].save_state()
        before = contents(disk)
        with read_only(disk):
            with pytest.raises(CheckpointError, match=r"Read-only file system.*checkpoint_1"):
                run[0].save_state()
            assert train(*run) == 2
            other = make_run(disk / "project")
            other[0].load_state()
            assert other[0].progress.step == 1
        assert contents(disk) == before


def two_checkpoints(project: Path) -> tuple[Path, Path]:
    run = make_run(project)
    paths = []
    for _ in range(2):
        train(*run)
        paths.append(Path(run[0].save_state()))
    return paths[0], paths[1]


FILES = ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "loader.bin", "progress.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [truncate, flip, remove])
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_is_taken(
    tmp_path: Path, damage: Callable[[Path], None], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = two_checkpoints(tmp_path)
    damage(bad / name)
    untouched = contents(good)
    accelerator, model, optimizer, loader = make_run(tmp_path)
    weights = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as failure:
        accelerator.load_state(bad)
    assert str(bad) in str(failure.value)
    # Nothing was taken over from the broken one.
    assert torch.equal(model.weight, weights)
    assert not optimizer.state_dict()["state"]
    assert (accelerator.progress.step, loader.position.samples) == (0, 0)

    accelerator.load_state()
    assert (accelerator.progress.step, loader.position.samples) == (1, 2)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"{bad.name} was passed over ({name}: " in warned[-1]
    assert contents(good) == untouched
    assert train(accelerator, model, optimizer, loader) == 2
    assert accelerator.save_state().name == "checkpoint_2"


@pytest.mark.parametrize("damage", [truncate, flip, remove])
def test_without_a_valid_checkpoint_the_error_says_what_was_passed_over(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    for path in two_checkpoints(tmp_path):
        damage(path / "model.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint_1 was passed over \(model\.safetensors: it.*checkpoint_0 was .*\(model\.safetensors: it",
    ):
        make_run(tmp_path)[0].load_state()


def test_a_broken_manifest_is_a_broken_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, bad = two_checkpoints(tmp_path)
    truncate(bad / "manifest.json")
    accelerator = make_run(tmp_path)[0]
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        accelerator.load_state(bad)
    accelerator.load_state("latest")
    assert accelerator.progress.step == 1
    (warned,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert f"{bad.name} was passed over (" in warned
    assert "manifest.json" in warned


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    two_checkpoints(tmp_path)
    accelerator, model, optimizer, loader = make_run(tmp_path, width=7)
    weights = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*'weight' has the shape \(120, 120\)"):
        accelerator.load_state()
    assert torch.equal(model.weight, weights)
    assert accelerator.progress.step == 0
    assert train(accelerator, model, optimizer, loader) == 1


def save_on_two(project: str) -> None:
    run = make_run(Path(project))
    for _ in range(2):
        train(*run)
        run[0].save_state()


def load_on_two(project: str) -> tuple[str, int]:
    accelerator = make_run(Path(project))[0]
    with pytest.raises(CheckpointError) as failure:
        accelerator.load_state(Path(project, "checkpoints", "checkpoint_1"))
    accelerator.load_state()
    return str(failure.value), accelerator.progress.step


def test_a_missing_file_of_one_rank_is_the_same_error_on_all(tmp_path: Path) -> None:
    run_group(save_on_two, 2, str(tmp_path))
    (tmp_path / "checkpoints" / "checkpoint_1" / "random_states_1.pkl").unlink()
    (first, step), (second, other) = run_group(load_on_two, 2, str(tmp_path))
    assert first == second
    assert "random_states_1.pkl" in first
    assert step == other == 1
