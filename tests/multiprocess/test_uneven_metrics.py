"""Metrics of rounds in which the processes have different numbers of rows, on real groups of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from tests.support.processes import run_group
from torch.utils.data import DataLoader, IterableDataset, Sampler

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate._base.errors import UsageError
from accelerate.collectives import ops
from accelerate.collectives.metrics import gather_for_metrics_rows
from accelerate.data_loader.plan import Share
from accelerate.runtime import current
from accelerate.state import AcceleratorState

pytestmark = pytest.mark.multiprocess


def rank() -> int:
    return current.runtime().rank


def world() -> int:
    return current.runtime().world_size


def uneven_batch() -> tuple[list[int], Share]:
    """Return the sample numbers of this rank's batch of two, and its share; the last rank has one sample only."""
    numbers = [2 * rank(), 2 * rank() + 1][: 1 if rank() == world() - 1 else 2]
    return numbers, Share(len(numbers), len(numbers))


def drop_what_was_padded_across_processes() -> None:
    numbers, share = uneven_batch()
    every = list(range(2 * world() - 1))
    for per_sample in (1, 3):
        expected = [number for number in every for _ in range(per_sample)]
        for width in (1, 300, 100_000):
            rows = torch.tensor(numbers).repeat_interleave(per_sample)[:, None].repeat(1, width)
            padded = ops.pad_across_processes(rows, dim=0, pad_index=-1)
            assert len(padded) == 2 * per_sample
            pair = gather_for_metrics_rows({"one": padded, "two": [padded.half()]}, share)
            for found in (gather_for_metrics_rows(padded, share), pair["one"], pair["two"][0]):
                assert found.shape == (len(expected), width)
                assert found[:, 0].tolist() == found[:, -1].tolist() == expected
        mixed = gather_for_metrics_rows({"name": [f"{n}" for n in numbers], "row": padded[:, 0]}, share)
        assert (mixed["name"], mixed["row"].tolist()) == ([f"{n}" for n in every], expected)
        listed = gather_for_metrics_rows(padded[:, 0], share, use_gather_object=True)
        assert [int(row) for row in listed] == expected


def keep_all_of_batches_of_different_sizes() -> None:
    numbers, share = uneven_batch()
    every = list(range(2 * world() - 1))
    for per_sample in (1, 2, 4):  # two rows of the last rank are as many as two samples have, and are not padding
        rows = torch.tensor(numbers).repeat_interleave(per_sample)
        expected = [number for number in every for _ in range(per_sample)]
        for width in (1, 300, 100_000):
            found = gather_for_metrics_rows({"a": rows[:, None].repeat(1, width)}, share)["a"]
            assert found[:, -1].tolist() == expected
        assert gather_for_metrics_rows({"a": rows, "b": numbers}, share)["a"].tolist() == expected
    assert gather_for_metrics_rows(torch.tensor(1.0), share).tolist() == [1.0] * world()
    odd = gather_for_metrics_rows(torch.arange(3), share)  # no number of rows a sample: not padding of this round
    assert odd.tolist() == [0, 1, 2] * world()


def of_an_uneven_loader_have_every_sample_once() -> None:
    for split in (False, True):
        AcceleratorState._reset_state()
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False, split_batches=split))
        samples = torch.arange(4 * world() - 1)
        loader = accelerator.prepare(DataLoader(samples, batch_size=2 * world() if split else 2))
        padded, as_it_is = [], []
        for batch in loader:
            padded += accelerator.gather_for_metrics(accelerator.pad_across_processes(batch, pad_index=-1)).tolist()
            as_it_is += accelerator.gather_for_metrics(batch).tolist()
        assert padded == as_it_is == samples.tolist()


class Miscounting(Sampler[int]):
    """A sampler that says another number of samples than it gives."""

    def __init__(self, gives: int, says: int) -> None:
        self.gives, self.says = gives, says

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.gives))

    def __len__(self) -> int:
        return self.says


def of_a_sampler_that_miscounts_have_every_sample_once() -> None:
    AcceleratorState._reset_state()
    accelerator = Accelerator()
    for gives in (4 * world(), 4 * world() - 1, 2 * world() + 1):
        for says in (1, 2 * world(), 4 * world(), 20 * world()):
            samples = torch.arange(gives)
            loader = accelerator.prepare(DataLoader(samples, batch_size=2, sampler=Miscounting(gives, says)))
            found: list[int] = []
            for batch in loader:
                found += accelerator.gather_for_metrics(batch).tolist()
            assert found == samples.tolist()


def of_a_dispatched_short_batch_count_each_sample_once() -> None:
    """Repeat a mean for every row of a full batch, as Trainer does."""
    for split in (False, True):
        AcceleratorState._reset_state()
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True, split_batches=split))
        rows = 3
        samples = torch.arange(2.0 * rows * world() + 1)
        loader = accelerator.prepare(DataLoader(samples, batch_size=rows * world() if split else rows))
        found: list[float] = []
        for batch in loader:
            found += accelerator.gather_for_metrics(batch.mean().repeat(rows)).tolist()
        assert len(found) == len(samples)
        assert sum(found) == pytest.approx(samples.sum().item())


class Uneven(IterableDataset[torch.Tensor]):
    """A stream of ready batches, each of another number of rows."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(float(sum(self.rows))).unsqueeze(1).split(self.rows))


def of_a_stream_of_unequal_batches_have_every_sample_once() -> None:
    """Train on what each rank has of it: their shares differ, their numbers of steps do not."""
    for rows in ([3, 1, 4, 2, 5], [4, 4, 2], [1, 5, 1], [2]):
        AcceleratorState._reset_state()
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        loader = DataLoader(Uneven(rows), batch_size=None)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        found: list[float] = []
        steps = 0
        for batch in loader:
            accelerator.backward(model(batch).mean())
            optimizer.step()
            optimizer.zero_grad()
            found += accelerator.gather_for_metrics(batch).flatten().tolist()
            steps += 1
        assert found == list(range(sum(rows)))
        assert steps == -(-len(rows) // world())


def numbers_of(accelerator: Accelerator, samples: int, rows: int, **options: bool) -> DataLoader[torch.Tensor]:
    """Prepare a loader of the numbers below `samples`, `rows` to a batch."""
    accelerator.dataloader_config = DataLoaderConfiguration(**options)
    loader: DataLoader[torch.Tensor] = accelerator.prepare(DataLoader(torch.arange(samples), batch_size=rows))
    return loader


def of_zipped_loaders_are_cut_by_the_loader_they_come_from() -> None:
    AcceleratorState._reset_state()
    accelerator = Accelerator()
    for options in ({}, {"dispatch_batches": True}, {"even_batches": False}):
        for steps in (1, 3):
            short, long = 4 * steps * world() - 1, 8 * steps * world() - 3
            for order in (1, -1):
                loaders = [numbers_of(accelerator, short, 4, **options), numbers_of(accelerator, long, 8, **options)]
                found: tuple[list[int], list[int]] = ([], [])
                for batch in zip(*loaders[::order], strict=True):
                    padded = accelerator.pad_across_processes(batch, pad_index=-1)
                    for listed, rows in zip(found, accelerator.gather_for_metrics(padded), strict=True):
                        listed += rows.tolist()
                assert found[::order] == (list(range(short)), list(range(long)))


def of_zipped_loaders_that_cannot_be_told_apart_raise_on_all_ranks() -> None:
    AcceleratorState._reset_state()
    accelerator = Accelerator()
    for steps in (1, 2):
        loaders = [numbers_of(accelerator, 4 * steps * world() - missing, 4) for missing in (1, 0)]
        for number, (one, two) in enumerate(zip(*loaders, strict=True), 1):
            if number < steps:
                assert len(accelerator.gather_for_metrics((one, two))[0]) == 4 * world()
                continue
            for value in (one, {"a": {"b": two}}, [{"id": int(n)} for n in one]):
                with pytest.raises(UsageError, match="4 rows"):
                    accelerator.gather_for_metrics(value)
            assert len(accelerator.gather_for_metrics(one[:0])) == 0
    alike = [numbers_of(accelerator, 4 * world() - 1, 4) for _ in range(2)]
    for batches in zip(*alike, strict=True):
        assert [len(rows) for rows in accelerator.gather_for_metrics(batches)] == [4 * world() - 1] * 2


def of_nested_and_unfinished_loops_are_those_of_the_inner_loop() -> None:
    AcceleratorState._reset_state()
    accelerator = Accelerator()
    for train_samples in (4 * world() - 1, 8 * world() - 1):
        train = numbers_of(accelerator, train_samples, 4)
        for samples in (4 * world(), 12 * world() - 2):
            evaluation = numbers_of(accelerator, samples, 4)

            def evaluate(batches: Iterable[torch.Tensor]) -> list[int]:
                return [int(number) for batch in batches for number in accelerator.gather_for_metrics(batch)]

            trained: list[int] = []
            for batch in train:
                trained += accelerator.gather_for_metrics(batch).tolist()
                assert evaluate(evaluation) == list(range(samples))
            assert trained == list(range(train_samples))
            unfinished, created_early = iter(train), iter(evaluation)
            for _ in range(len(train)):
                next(unfinished)
            assert evaluate(evaluation) == list(range(samples))
            if len(train) > 1:
                assert evaluate(created_early) == list(range(samples))


CHECKS: list[Callable[[], None]] = [
    of_zipped_loaders_are_cut_by_the_loader_they_come_from,
    of_zipped_loaders_that_cannot_be_told_apart_raise_on_all_ranks,
    of_nested_and_unfinished_loops_are_those_of_the_inner_loop,
    drop_what_was_padded_across_processes,
    keep_all_of_batches_of_different_sizes,
    of_an_uneven_loader_have_every_sample_once,
    of_a_sampler_that_miscounts_have_every_sample_once,
    of_a_dispatched_short_batch_count_each_sample_once,
    of_a_stream_of_unequal_batches_have_every_sample_once,
]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_metrics(check: Callable[[], None], world_size: int) -> None:
    run_group(check, world_size)
