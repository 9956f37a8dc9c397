"""Processes that read files of their own see every sample once, in step, also after a resume on another number of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tests.support.processes import run_group
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.multiprocess

reads: list[int] = []


def samples_of(files: list[tuple[int, int]]) -> Iterator[dict[str, int]]:
    """Read files, each a number and a length, and note what was read."""
    for number, length in files:
        for index in range(length):
            reads.append(number)
            yield {"x": 100 * number + index}


def read_files(lengths: list[int], folder: Path | None = None, stop: int = 0, workers: int = 0) -> dict[str, Any]:
    """Read an epoch, to its end or until a checkpoint, after one if there is any."""
    config = DataLoaderConfiguration(dispatch_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    files = datasets.IterableDataset.from_generator(
        samples_of, gen_kwargs={"files": list(enumerate(lengths))}
    ).with_format("torch")
    loader = accelerator.prepare(DataLoader(files, batch_size=2, num_workers=workers))
    if folder is not None and folder.exists():
        accelerator.load_state(folder)
    reads.clear()
    found: dict[str, Any] = {"batches": [], "real": [], "metric": []}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in islice(loader, stop or None):
            found["batches"].append(batch["x"].tolist())
            found["real"].append(loader.share.real)
            found["metric"] += accelerator.gather_for_metrics(batch["x"]).tolist()
            found["end"] = loader.end_of_dataloader
        if stop and folder is not None:
            found["position"] = loader.position.samples
    if stop and folder is not None:
        accelerator.save_state(folder)
    found["reads"] = len(reads)
    found["warnings"] = [str(warning.message) for warning in caught if "differ in length" in str(warning.message)]
    found["epochs"] = loader.iteration
    return found


def everything(lengths: list[int]) -> list[int]:
    return sorted(100 * number + index for number, length in enumerate(lengths) for index in range(length))


@pytest.mark.parametrize("lengths", [[4, 4], [5, 4], [3, 6, 2, 3], [7, 2], [0, 3]], ids=str)
def test_each_process_reads_its_own_files(lengths: list[int]) -> None:
    ranks = run_group(read_files, 2, lengths)
    assert sum(rank["reads"] for rank in ranks) == sum(lengths)
    assert len({len(rank["batches"]) for rank in ranks}) == 1
    assert all(rank["end"] and rank["epochs"] == 1 for rank in ranks)
    real = [
        row
        for rank in ranks
        for batch, count in zip(rank["batches"], rank["real"], strict=True)
        for row in batch[:count]
    ]
    assert sorted(real) == everything(lengths)
    assert sorted(ranks[0]["metric"]) == everything(lengths)
    repeats = [rank["real"].count(0) for rank in ranks]
    assert bool(ranks[0]["warnings"]) == (max(repeats) > (0 in ranks[0]["real"][-1:] + ranks[1]["real"][-1:]))


def test_too_few_files_are_read_by_all() -> None:
    ranks = run_group(read_files, 2, [7])
    assert [rank["reads"] for rank in ranks] == [7, 7]
    assert sorted(ranks[0]["metric"]) == everything([7])


@pytest.mark.parametrize(
    ("before", "after", "workers"),
    [(2, 2, 0), (2, 3, 0), (3, 2, 0), (3, 1, 0), (2, 5, 0), (5, 2, 0), (1, 2, 0), (2, 2, 2)],
)
def test_a_resume_sees_what_was_not_seen(before: int, after: int, workers: int, tmp_path: Path) -> None:
    lengths = [6, 8, 9, 6]
    start = run_group(read_files, before, lengths, tmp_path / "checkpoint", 2, workers)
    rest = run_group(read_files, after, lengths, tmp_path / "checkpoint", 0, workers)
    assert start[0]["position"] == len(start[0]["metric"]) == 4 * before
    assert sorted(start[0]["metric"] + rest[0]["metric"]) == everything(lengths)


def test_the_rest_that_is_read_in_common_can_be_stopped_again(tmp_path: Path) -> None:
    lengths = [6, 5, 7, 4]
    seen: list[int] = []
    for count, stop in ((2, 1), (3, 1), (2, 2), (1, 0)):
        ranks = run_group(read_files, count, lengths, tmp_path / "checkpoint", stop)
        seen += ranks[0]["metric"]
    assert sorted(seen) == everything(lengths)
