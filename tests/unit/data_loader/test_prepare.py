"""The decisions of prepare_data_loader, and its refusals."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.logs import logged
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from accelerate._base.errors import ConfigurationError, WrongTypeError
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, prepare_data_loader
from accelerate.runtime.gradient_clock import GradientState


class Stream(IterableDataset):
    """Some numbers, of unknown count to others."""

    def __init__(self, length: int = 11) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


@pytest.mark.parametrize(
    ("dataset", "put_on_device", "dispatch", "expected"),
    [
        (range(4), True, None, DataLoaderShard),
        (range(4), True, True, DataLoaderDispatcher),
        (Stream(), True, None, DataLoaderDispatcher),
        (Stream(), True, False, DataLoaderShard),
        (Stream(), False, None, DataLoaderShard),
    ],
)
def test_who_reads(dataset: Any, put_on_device: bool, dispatch: bool | None, expected: type) -> None:
    loader = prepare_data_loader(DataLoader(dataset), put_on_device=put_on_device, dispatch_batches=dispatch)
    assert type(loader) is expected


class OwnBatches(BatchSampler):
    """A batch sampler of a user."""


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        (DataLoader(range(8), batch_size=4), {"split_batches": True, "num_processes": 3}, "batch_size=4"),
        (DataLoader(range(8), batch_size=None), {"split_batches": True}, "batch_size=None"),
        (DataLoader(range(8)), {"dispatch_batches": True}, "put_on_device=False"),
        (DataLoader(range(8)), {"rng_types": ["dice"]}, "'dice'"),
        (DataLoader(range(8)), {"global_batch_size": 0}, "at least 1"),
        (DataLoader(range(8)), {"global_batch_size": 4, "split_batches": True}, "split_batches"),
        (
            DataLoader(range(8)),
            {"global_batch_size": 4, "dispatch_batches": True, "put_on_device": True},
            "dispatch_batches",
        ),
        (DataLoader(range(8), batch_size=None), {"global_batch_size": 4}, "batch_size must be known"),
        (
            DataLoader(range(8), batch_sampler=OwnBatches(SequentialSampler(range(8)), 2, False)),
            {"global_batch_size": 4},
            "batch sampler of one's own",
        ),
        (DataLoader(Stream(), num_workers=2), {"global_batch_size": 4}, "num_workers"),
    ],
)
def test_refusals(loader: DataLoader, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        prepare_data_loader(loader, **{"process_index": 0, **options})


def test_something_else_is_refused() -> None:
    with pytest.raises(WrongTypeError, match="custom_classes"):
        prepare_data_loader([1, 2])


def test_custom_classes_are_used_as_they_are() -> None:
    class Endless:
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(torch.arange(6).split(2))

    loader = prepare_data_loader(
        Endless(), custom_classes=(Endless,), device=torch.device("meta"), put_on_device=True, num_processes=2
    )
    clock = GradientState()
    seen = [(batch.device.type, clock.active_dataloader is loader, loader.end_of_dataloader) for batch in loader]
    assert seen == [("meta", True, False), ("meta", True, False), ("meta", True, True)]
    assert isinstance(loader, Endless)


def test_a_prepared_loader_is_returned() -> None:
    loader = prepare_data_loader(DataLoader(range(8)), num_processes=2, process_index=0)
    assert prepare_data_loader(loader, num_processes=2, process_index=0) is loader


def test_a_distributed_sampler_is_detected(caplog: pytest.LogCaptureFixture) -> None:
    seen = []
    with caplog.at_level(logging.INFO):
        for rank in range(2):
            sampler = DistributedSampler(range(64), num_replicas=2, rank=rank, shuffle=True)
            loader = prepare_data_loader(
                DataLoader(range(64), batch_size=4, sampler=sampler), num_processes=2, process_index=rank
            )
            epochs = [[int(entry) for batch in loader for entry in batch] for _ in range(2)]
            assert epochs[0] != epochs[1]
            assert sampler.epoch == 1
            seen += epochs[0]
    assert sorted(seen) == list(range(64))
    assert "DistributedSampler" in caplog.text
    assert loader.total_batch_size == 8


def test_hf_iterable_split_by_node_is_detected() -> None:
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    whole = datasets.Dataset.from_dict({"x": list(range(64))}).to_iterable_dataset(num_shards=4)
    seen: list[int] = []
    for rank in range(2):
        own = split_dataset_by_node(whole, rank=rank, world_size=2)
        loader = prepare_data_loader(DataLoader(own, batch_size=4), num_processes=2, process_index=rank)
        seen += [int(entry) for batch in loader for entry in batch["x"]]
    assert sorted(seen) == list(range(64))


@pytest.mark.parametrize("even", [True, False])
def test_hf_iterable_is_shared_out(even: bool) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"x": list(range(30))}).to_iterable_dataset(num_shards=4)
    loaders = [
        prepare_data_loader(DataLoader(whole, batch_size=4), num_processes=2, process_index=rank, even_batches=even)
        for rank in range(2)
    ]
    parts = [[int(entry) for batch in loader for entry in batch["x"][: loader.share.real]] for loader in loaders]
    assert sorted(parts[0] + parts[1]) == list(range(30))
    if even:
        assert len({loader.iteration for loader in loaders}) == 1


@pytest.mark.parametrize(
    ("files", "even", "said"),
    [
        (1, True, "reads all files of an iterable dataset: 1 are too few for 2 processes"),
        (4, False, "reads its own files of an iterable dataset: there are 4, and even_batches=False"),
        # This process is alone, whatever it is told: nobody is there to keep in step with.
        (4, True, "reads all files of an iterable dataset: processes of one model read the same"),
    ],
)
def test_it_is_said_whether_each_process_reads_its_own_files(files: int, even: bool, said: str) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"x": list(range(30))}).to_iterable_dataset(num_shards=files)
    with logged(said):
        prepare_data_loader(DataLoader(whole, batch_size=4), num_processes=2, process_index=0, even_batches=even)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("dataset", [range(11), Stream(11)])
def test_global_batches_have_the_same_samples_on_any_number_of_processes(count: int, dataset: Any) -> None:
    global_batches: list[list[int]] = []
    loaders = [
        prepare_data_loader(
            DataLoader(dataset, batch_size=2), num_processes=count, process_index=rank, global_batch_size=5
        )
        for rank in range(count)
    ]
    steps = zip(*loaders, strict=True)
    current: list[int] = []
    weight = 0.0
    for batches in steps:
        for loader, batch in zip(loaders, batches, strict=True):
            current += batch.tolist()[: loader.share.real]
            weight += loader.microbatch.weight
            assert len(batch) <= 2
        if loaders[0].microbatch.closes_window:
            assert weight == pytest.approx(count)
            assert len(current) == loaders[0].microbatch.samples
            global_batches.append(current)
            current, weight = [], 0.0
    assert global_batches == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10]]


def test_an_iterable_has_global_batches_without_dispatching() -> None:
    loader = prepare_data_loader(DataLoader(Stream(), batch_size=2), put_on_device=True, global_batch_size=4)
    assert type(loader) is DataLoaderShard
    assert prepare_data_loader(DataLoader(range(8))).microbatch is None


def test_generator_needs_no_synchronisation() -> None:
    loader = prepare_data_loader(DataLoader(range(8), shuffle=True), rng_types=["generator", "torch"])
    assert loader.rng_types == ["torch"]
    assert len(list(loader)) == 8
