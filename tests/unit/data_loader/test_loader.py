"""The prepared loader: flags, lookahead, placement, clock, pickling, state."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    SkipBatchSampler,
    SkipDataLoader,
    get_sampler,
    prepare_data_loader,
    skip_first_batches,
)
from accelerate.runtime.gradient_clock import GradientState


class Stream(IterableDataset):
    """The numbers below 7."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


OPTIONS: list[dict[str, Any]] = [{}, {"dispatch_batches": True}, {"num_processes": 2, "process_index": 0}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_loader_shows_the_clock(options: dict[str, Any]) -> None:
    for loader in (DataLoader(range(7)), DataLoader(Stream())):
        assert prepare_data_loader(loader, put_on_device=True, **options).gradient_state.sync_gradients
    assert isinstance(skip_first_batches(DataLoader(Stream()), 1).gradient_state, GradientState)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_loader_without_a_batch_size_has_no_total(options: dict[str, Any]) -> None:
    for loader in (DataLoader(range(7), batch_size=None), DataLoader(range(7), batch_sampler=[[0, 1], [2, 3, 4]])):
        prepared = prepare_data_loader(loader, put_on_device=True, **options)
        assert getattr(prepared, "total_batch_size", None) is None
        assert not hasattr(prepared, "total_batch_size")
    assert not hasattr(skip_first_batches(DataLoader(Stream(), batch_size=None), 1), "total_batch_size")
    whole = prepare_data_loader(DataLoader(range(8), batch_size=2), put_on_device=True, **options)
    assert whole.total_batch_size == 2 * options.get("num_processes", 1)


def test_flags_during_and_after_the_loop() -> None:
    loader = prepare_data_loader(DataLoader(range(7), batch_size=2))
    clock = GradientState()
    during = [(loader.end_of_dataloader, clock.end_of_dataloader, clock.remainder, clock.in_dataloader) for _ in loader]
    assert during == [(False, False, 1, True)] * 3 + [(True, True, 1, True)]
    assert not clock.in_dataloader
    assert (loader.end_of_dataloader, loader.remainder, loader.iteration) == (True, 1, 1)


class Reads(Dataset[int]):
    """Numbers that note when they are read."""

    def __init__(self, length: int) -> None:
        self.length, self.read = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.read += 1
        return index


@pytest.mark.parametrize("shuffle", [False, True])
def test_no_batch_is_read_before_it_is_wanted(shuffle: bool) -> None:
    data = Reads(10)
    loader = prepare_data_loader(DataLoader(data, batch_size=3, shuffle=shuffle))
    read = [(data.read, loader.end_of_dataloader) for _ in loader]
    assert read == [(3, False), (6, False), (9, False), (10, True)]


@pytest.mark.parametrize(
    ("says", "first"), [(100, [False, False, False, False]), (5, [False, True, False, True])], ids=["more", "fewer"]
)
def test_a_sampler_that_miscounts_is_believed_once(
    says: int, first: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    class Miscounting(SequentialSampler):
        def __len__(self) -> int:
            return says

    loader = prepare_data_loader(DataLoader(range(10), batch_size=3, sampler=Miscounting(range(10))))
    assert [loader.end_of_dataloader for _ in loader] == first
    assert "__len__" in caplog.text
    caplog.clear()
    assert [loader.end_of_dataloader for _ in loader] == [False, False, False, True]
    assert not caplog.text


@pytest.mark.parametrize("says", [1, 2, 9])
def test_a_batch_sampler_that_miscounts_is_believed_once(says: int) -> None:
    class Miscounting(list[list[int]]):
        def __len__(self) -> int:
            return says

    loader = prepare_data_loader(DataLoader(range(6), batch_sampler=Miscounting([[0, 1], [2], [3, 4, 5]])))
    for _ in range(2):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2], [3, 4, 5]]
    assert [loader.end_of_dataloader for _ in loader] == [False, False, True]


def test_leaving_the_loop_leaves_no_loader_active() -> None:
    clock = GradientState()
    for kind in (DataLoader(range(7)), DataLoader(Stream())):
        for options in ({}, {"put_on_device": True, "dispatch_batches": True}):
            loader = prepare_data_loader(kind, **options)
            for _ in loader:
                assert clock.active_dataloader is loader
                break
            assert not clock.in_dataloader
            with pytest.raises(KeyError, match="inside"):
                for _ in loader:
                    raise KeyError("inside")
            assert not clock.in_dataloader


def test_nested_loops() -> None:
    outer, inner = (prepare_data_loader(DataLoader(range(3))) for _ in range(2))
    clock = GradientState()
    for _ in outer:
        assert clock.active_dataloader is outer
        for _ in inner:
            assert clock.active_dataloader is inner
    assert not clock.in_dataloader


def test_an_empty_loader_ends_at_once() -> None:
    loader = prepare_data_loader(DataLoader([]))
    assert list(loader) == []
    assert loader.iteration == 0


def test_it_is_both_its_own_class_and_the_inner_loaders() -> None:
    class Own(DataLoader):
        extra = "kept"

        def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
            return (batch * 10 for batch in super().__iter__())

    loader = prepare_data_loader(Own(range(4), batch_size=2), num_processes=2, process_index=1)
    assert isinstance(loader, DataLoader)
    assert isinstance(loader, Own)
    assert isinstance(loader, DataLoaderShard)
    assert loader.extra == "kept"
    assert [batch.tolist() for batch in loader] == [[20, 30]]
    with pytest.raises(AttributeError):
        _ = loader.no_such_attribute


class Labelled(DataLoader):
    """A loader of a user with a constructor, attributes and methods of its own."""

    def __init__(self, label: str, size: int) -> None:
        super().__init__(range(size), batch_size=2, shuffle=True)
        self.label = label
        self.seen: list[int] = []

    def described(self) -> str:
        return f"{self.label} of {len(self)}"


@pytest.mark.parametrize("options", [*OPTIONS, {"use_seedable_sampler": True}], ids=str)
def test_a_subclass_keeps_its_class_and_attributes(options: dict[str, Any]) -> None:
    given = Labelled("mine", 8)
    loader = prepare_data_loader(given, put_on_device=True, **options)
    for prepared in (loader, skip_first_batches(loader, 1)):
        assert isinstance(prepared, Labelled)
        assert prepared.label == "mine"
        assert prepared.seen is given.seen
        assert prepared.described().startswith("mine of ")
    loader.label = "changed"
    loader.later = 5
    assert (loader.label, loader.later) == ("changed", 5)
    assert (given.label, hasattr(given, "later")) == ("mine", False)


def test_options_are_kept() -> None:
    def collate(samples: list[int]) -> str:
        return "-".join(map(str, samples))

    loader = prepare_data_loader(
        DataLoader(range(8), batch_size=2, collate_fn=collate), num_processes=2, process_index=0
    )
    assert list(loader) == ["0-1", "4-5"]
    assert loader.collate_fn is collate
    assert (loader.total_batch_size, loader.total_dataset_length, len(loader)) == (4, 8, 2)


@pytest.mark.parametrize("duplicate", [copy.copy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_copies_go_on_alike(duplicate: Any) -> None:
    loader = prepare_data_loader(DataLoader(range(20), batch_size=4, shuffle=True), num_processes=2, process_index=0)
    list(loader)
    twin = duplicate(loader)
    assert type(twin) is DataLoaderShard
    torch.manual_seed(3)
    order = [batch.tolist() for batch in twin]
    torch.manual_seed(3)
    assert order == [batch.tolist() for batch in loader]


def test_a_dispatcher_pickles() -> None:
    loader = prepare_data_loader(DataLoader(range(7), batch_size=2), put_on_device=True, dispatch_batches=True)
    list(loader)
    twin = pickle.loads(pickle.dumps(loader))
    assert type(twin) is DataLoaderDispatcher
    assert [batch.tolist() for batch in twin] == [[0, 1], [2, 3], [4, 5], [6]]


def test_batches_are_placed() -> None:
    data = TensorDataset(torch.arange(6.0))
    loader = prepare_data_loader(DataLoader(data, batch_size=2), device=torch.device("meta"), put_on_device=True)
    assert {batch[0].device.type for batch in loader} == {"meta"}
    unplaced = prepare_data_loader(DataLoader(data, batch_size=2), device=torch.device("meta"))
    assert {batch[0].device.type for batch in unplaced} == {"cpu"}


def test_public_constructor() -> None:
    sampler = BatchSamplerShard(BatchSampler(SequentialSampler(range(7)), 2, False), 2, 1)
    loader = DataLoaderShard(range(7), batch_sampler=sampler, device="cpu")
    assert [batch.tolist() for batch in loader] == [[2, 3], [6, 0]]
    assert loader.remainder == 3
    skipping = DataLoaderShard(range(7), batch_size=2, skip_batches=2)
    assert [batch.tolist() for batch in skipping] == [[4, 5], [6]]


def test_even_batches_is_read_at_each_pass() -> None:
    loader = prepare_data_loader(DataLoader(range(5), batch_size=2), num_processes=2, process_index=1)
    assert [batch.tolist() for batch in loader] == [[2, 3], [1, 2]]
    loader.batch_sampler.even_batches = False
    assert [batch.tolist() for batch in loader] == [[2, 3]]
    assert loader.share[:2] == (2, 2)


def test_a_batch_sampler_given_as_sampler() -> None:
    data = torch.arange(7)
    for count, expected in ((1, [[0, 1], [2, 3], [4, 5], [6]]), (2, [[0, 1], [4, 5]])):
        sampler = BatchSampler(SequentialSampler(range(7)), 2, False)
        loader = prepare_data_loader(
            DataLoader(data, sampler=sampler, batch_size=None), num_processes=count, process_index=0
        )
        assert [batch.tolist() for batch in loader] == expected
        assert type(get_sampler(loader)) is SequentialSampler
        assert [batch.tolist() for batch in skip_first_batches(loader, 1)] == expected[1:]


def test_set_epoch_reaches_samplers_and_datasets() -> None:
    class Told(IterableDataset):
        epoch = -1

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch] * 2)

    loader = prepare_data_loader(DataLoader(Told(), batch_size=1), num_processes=2, process_index=0)
    assert [[int(batch) for batch in loader] for _ in range(3)] == [[0], [1], [2]]
    loader.set_epoch(9)
    assert [int(batch) for batch in loader] == [9]


def test_skipping_keeps_everything() -> None:
    loader = prepare_data_loader(
        DataLoader(range(10), batch_size=2, drop_last=True),
        device=torch.device("cpu"),
        put_on_device=True,
        non_blocking=True,
        num_processes=2,
        process_index=0,
    )
    loader.set_epoch(4)
    skipping = skip_first_batches(loader, 1)
    assert isinstance(skipping, DataLoaderShard)
    assert isinstance(skipping.batch_sampler, SkipBatchSampler)
    kept = ("device", "_non_blocking", "_drop_last", "iteration", "rng_types")
    assert [getattr(skipping, name) for name in kept] == [getattr(loader, name) for name in kept]
    assert [batch.tolist() for batch in skipping] == [[4, 5]]
    assert [batch.tolist() for batch in skipping] == [[4, 5]]
    assert len(skipping) == 1
    assert [batch.tolist() for batch in skip_first_batches(skipping, 1)] == []


@pytest.mark.parametrize("options", [{}, {"put_on_device": True}])
def test_skipping_in_iterables(options: dict[str, Any]) -> None:
    loader = prepare_data_loader(DataLoader(Stream(), batch_size=2), **options)
    skipping = skip_first_batches(loader, 2)
    assert type(skipping) is type(loader)
    assert [(batch.tolist(), skipping.position.samples) for batch in skipping] == [([4, 5], 6), ([6], 0)]


def test_the_sampler_can_be_exchanged() -> None:
    loader = prepare_data_loader(DataLoader(range(6), batch_size=2), num_processes=2, process_index=1)
    assert type(loader.get_sampler()) is SequentialSampler
    loader.set_sampler(SequentialSampler(range(4)))
    assert [batch.tolist() for batch in loader] == [[2, 3]]


def test_skipping_in_plain_loaders() -> None:
    class Own(DataLoader):
        pass

    mapped = skip_first_batches(Own(range(7), batch_size=2), 2)
    assert type(mapped) is Own
    assert [batch.tolist() for batch in mapped] == [[4, 5], [6]]
    assert len(mapped) == 2
    streamed = skip_first_batches(DataLoader(Stream(), batch_size=2), 3)
    assert type(streamed) is SkipDataLoader
    counted = SkipDataLoader(list(range(7)), skip_batches=1, batch_size=2)
    assert (len(counted), counted.total_batch_size, counted.total_dataset_length) == (3, 2, 7)
    assert [batch.tolist() for batch in streamed] == [[6]]
    with pytest.raises(ValueError, match="num_batches=-1"):
        skip_first_batches(mapped, -1)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("shuffle", [False, True])
def test_stateful_loader_resumes_after_the_batch_at_hand(workers: int, shuffle: bool) -> None:
    def make() -> Any:
        loader = DataLoader(range(12), batch_size=2, shuffle=shuffle, num_workers=workers)
        return prepare_data_loader(loader, use_stateful_dataloader=True, data_seed=4)

    reference = make()
    epochs = [[batch.tolist() for batch in reference] for _ in range(2)]
    stopped = make()
    for number, _ in enumerate(stopped, start=1):
        if number == 2:
            break
    resumed = make()
    resumed.load_state_dict(pickle.loads(pickle.dumps(stopped.state_dict())))
    assert [batch.tolist() for batch in resumed] == epochs[0][2:]
    assert [batch.tolist() for batch in resumed] == epochs[1]
    assert resumed.state_dict()["_iterator_finished"]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_state_taken_at_the_last_batch_goes_on_with_the_next_epoch() -> None:
    loader = prepare_data_loader(DataLoader(range(6), batch_size=2), use_stateful_dataloader=True)
    states = [loader.state_dict() for _ in loader]
    twin = prepare_data_loader(DataLoader(range(6), batch_size=2), use_stateful_dataloader=True)
    twin.load_state_dict(states[-1])
    assert [batch.tolist() for batch in twin] == [[0, 1], [2, 3], [4, 5]]
    assert twin.iteration == 2


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_dispatcher_resumes_although_it_reads_ahead() -> None:
    def make() -> Any:
        loader = DataLoader(range(12), batch_size=2)
        return prepare_data_loader(loader, put_on_device=True, dispatch_batches=True, use_stateful_dataloader=True)

    stopped = make()
    for number, _ in enumerate(stopped, start=1):
        if number == 2:
            break
    resumed = make()
    resumed.load_state_dict(stopped.state_dict())
    assert [(batch.tolist(), resumed.position.samples) for batch in resumed] == [
        ([4, 5], 6),
        ([6, 7], 8),
        ([8, 9], 10),
        ([10, 11], 0),
    ]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_loader_resumes_on_another_number_of_processes() -> None:
    def make(count: int, rank: int) -> Any:
        loader = DataLoader(range(12), batch_size=2)
        return prepare_data_loader(
            loader, num_processes=count, process_index=rank, use_stateful_dataloader=True, even_batches=False
        )

    stopped = make(2, 0)
    next(iter(stopped))
    seen = []
    for rank in range(3):
        resumed = make(3, rank)
        resumed.load_state_dict(stopped.state_dict())
        seen += [int(entry) for batch in resumed for entry in batch]
    assert sorted(seen) == list(range(4, 12))


@pytest.mark.parametrize("epochs", [(0, 1, 2), (5, 6, 7), (3, 9, 0)], ids=str)
def test_the_epoch_that_the_user_tells_a_sampler_counts(epochs: tuple[int, ...]) -> None:
    orders = []
    for prepare in (lambda loader: loader, prepare_data_loader):
        sampler = DistributedSampler(range(20), num_replicas=1, rank=0)
        loader = prepare(DataLoader(range(20), batch_size=4, sampler=sampler))
        orders.append([])
        for epoch in epochs:
            sampler.set_epoch(epoch)
            orders[-1].append([int(index) for batch in loader for index in batch])
    assert orders[0] == orders[1]
    assert loader.iteration == epochs[-1] + 1


@pytest.mark.parametrize("is_told", [False, True], ids=["by the loader", "by the user"])
@pytest.mark.parametrize("stops", [(0, 2), (1, 1), (2, 4)], ids=str)
def test_epochs_of_a_sampler_go_on_after_a_loader_that_skips(stops: tuple[int, int], is_told: bool) -> None:
    def make() -> tuple[Any, Any]:
        sampler = DistributedSampler(range(20), num_replicas=1, rank=0)
        return sampler, prepare_data_loader(DataLoader(range(20), batch_size=4, sampler=sampler))

    def read(sampler: Any, loader: Any, epoch: int) -> Iterator[list[int]]:
        if is_told:
            sampler.set_epoch(epoch)
        return (batch.tolist() for batch in loader)

    sampler, loader = make()
    whole = [list(read(sampler, loader, epoch)) for epoch in range(4)]
    epoch, number = stops
    sampler, loader = make()
    for earlier in range(epoch):
        list(read(sampler, loader, earlier))
    seen = list(islice(read(sampler, loader, epoch), number))
    state = loader.state_dict()

    sampler, loader = make()
    loader.load_state_dict(state)
    seen += read(sampler, skip_first_batches(loader, number), epoch)
    assert seen == whole[epoch]
    assert [list(read(sampler, loader, later)) for later in range(epoch + 1, 4)] == whole[epoch + 1 :]
