"""Faults of the disk that holds offloaded weights, weights that are saved, or the records of trackers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.disks import contents, fill_up, flip, mounted, read_only, truncate
from tests.support.processes import run_group
from tests.support.training import fresh_accelerator

from accelerate import disk_offload, load_checkpoint_in_model
from accelerate._base.errors import CheckpointError, UsageError
from accelerate.checkpointing.catalog import inspect
from accelerate.offload.store import offload_state_dict
from accelerate.tracking import GeneralTracker


def network(value: float = 1.0) -> torch.nn.Sequential:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return model


def refuse_to_offload(folder: Path, reason: str) -> None:
    """Offload a model where that fails: it is as it was, and computes."""
    model = network(0.5)
    rows = torch.ones(1, 64)
    expected = model(rows)
    with pytest.raises(OSError, match=reason):
        disk_offload(model, folder)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert not [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")]
    assert torch.equal(model(rows), expected)


def test_weights_on_a_disk_that_is_full_or_read_only(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=300k") as disk:
        accelerator = fresh_accelerator(cpu=True)
        accelerator.save_model(network(), disk / "model", max_shard_size="20KB")
        before = contents(disk)
        fill_up(disk)
        with pytest.raises(CheckpointError, match=r"No space left on device.*can still be read"):
            accelerator.save_model(network(2.0), disk / "model", max_shard_size="20KB")
        refuse_to_offload(disk / "offload", "No space left on device")
        (disk / "filler").unlink()
        assert contents(disk) == before
        assert list((disk / "offload").iterdir()) == []
        with read_only(disk):
            with pytest.raises(CheckpointError, match="Read-only file system"):
                accelerator.save_model(network(2.0), disk / "model")
            refuse_to_offload(disk / "offload", "Read-only file system")
            model = network(0.0)
            load_checkpoint_in_model(model, disk / "model")
            assert model[3].bias[0] == 1.0
        accelerator.save_model(network(3.0), disk / "model")
        load_checkpoint_in_model(model, disk / "model")
        assert model[0].weight[0, 0] == 3.0


def test_a_disk_that_fills_up_while_weights_are_offloaded(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=300k") as disk:
        fill_up(disk)
        os.truncate(disk / "filler", (disk / "filler").stat().st_size - 40_960)
        refuse_to_offload(disk / "offload", "No space left on device")
        # What was written is whole, and no index says that there is more.
        left = contents(disk / "offload")
        whole = {f"{name}.dat": weight.numpy().tobytes() for name, weight in network(0.5).state_dict().items()}
        assert 0 < len(left) < len(whole)
        assert left == {name: whole[name] for name in left}
        (disk / "filler").unlink()
        model = disk_offload(network(), disk / "offload")
        assert torch.equal(model(torch.ones(1, 64)), network()(torch.ones(1, 64)))


def test_a_folder_of_offloaded_weights_that_vanishes_is_named(tmp_path: Path) -> None:
    model = network()
    disk_offload(model, tmp_path / "offload")
    rows = torch.ones(1, 64)
    expected = model(rows)
    (tmp_path / "offload").rename(tmp_path / "elsewhere")
    with pytest.raises((UsageError, ValueError), match=r"offload/\d\.(weight|bias)\.dat"):
        model(rows)
    (tmp_path / "elsewhere").rename(tmp_path / "offload")
    assert torch.equal(model(rows), expected)


def test_a_file_of_offloaded_weights_that_changes_is_named(tmp_path: Path) -> None:
    model = network()
    disk_offload(model, tmp_path / "offload")
    rows = torch.ones(1, 64)
    expected = model(rows)
    file = tmp_path / "offload" / "2.weight.dat"
    content, status = file.read_bytes(), file.stat()

    flip(file)  # the same file, the same size
    with pytest.raises(UsageError, match=r"offload/2\.weight\.dat' was changed in place while a model uses it"):
        model(rows)
    truncate(file)
    with pytest.raises(UsageError, match=r"offload/2\.weight\.dat' was changed from 16384 to 8192 bytes"):
        model(rows)
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert torch.equal(model(rows), expected)

    file.rename(tmp_path / "kept")
    file.write_bytes(content)  # the same bytes, but who knows that
    with pytest.raises(UsageError, match=r"offload/2\.weight\.dat' was replaced by another file"):
        model(rows)
    (tmp_path / "kept").replace(file)
    assert torch.equal(model(rows), expected)


def test_a_wrong_bit_that_was_there_before_is_not_seen(tmp_path: Path) -> None:
    """What the page warns of: files of offloaded weights have no checksums."""
    expected = disk_offload(network(), tmp_path)(torch.ones(1, 64))
    content = bytearray((tmp_path / "2.weight.dat").read_bytes())
    content[3] ^= 0x01  # of the exponent of one weight
    (tmp_path / "2.weight.dat").write_bytes(content)
    found = disk_offload(network().to("meta"), tmp_path)(torch.ones(1, 64))
    assert not torch.equal(found, expected)


def offload_elsewhere(value: float, folder: str) -> torch.Tensor:
    """Offload a model in another program, and return what it computes."""
    found: torch.Tensor = disk_offload(network(value), folder)(torch.ones(1, 64))
    return found.detach()


def test_two_programs_offload_into_one_folder(tmp_path: Path) -> None:
    rows = torch.ones(1, 64)
    first = disk_offload(network(1.0), tmp_path)
    expected = first(rows)
    (shared,) = run_group(offload_elsewhere, 1, 1.0, str(tmp_path))
    assert torch.equal(shared, expected)
    run_group(offload_state_dict, 1, str(tmp_path), network(1.0).state_dict())
    assert torch.equal(first(rows), expected)
    run_group(offload_state_dict, 1, str(tmp_path), network(2.0).state_dict())
    with pytest.raises(UsageError, match=r"\d\.(weight|bias)\.dat' was replaced by another file"):
        first(rows)


class Lines(GeneralTracker):
    """A tracker that writes lines to a file, as many do."""

    name = "lines"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str) -> None:
        super().__init__()
        Path(logging_dir).mkdir(parents=True, exist_ok=True)
        self.stream = Path(logging_dir, run_name).open("w", buffering=1)  # noqa: SIM115 - until `finish`

    @property
    def tracker(self) -> Any:
        return self.stream

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.stream.write(f"{step} {values}\n")

    def finish(self) -> None:
        self.stream.close()


def test_training_goes_on_when_its_record_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with mounted(tmp_path / "disk", "size=100k") as disk:
        accelerator = fresh_accelerator(cpu=True, log_with=Lines("run", str(disk / "logs")))
        accelerator.init_trackers("run")
        accelerator.log({"loss": 1.0}, step=0)
        fill_up(disk)
        model = torch.nn.Linear(2, 2)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(40):
            accelerator.backward(model(torch.ones(2, 2)).square().mean())
            optimizer.step()
            accelerator.log({"loss": float(step), "text": "x" * 500}, step=step)
        accelerator.save_state(tmp_path / "state")
        accelerator.end_training()
    assert accelerator.progress.step == 40
    assert "The tracker 'lines' failed to log; the run goes on" in caplog.text
    assert inspect(tmp_path / "state", checksums=True).is_valid
