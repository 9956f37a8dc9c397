"""Position, seek and share: resuming on any number of processes sees each sample once."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.resuming import RestoredStream, real_samples
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    get_worker_info,
)

from accelerate.data_loader import Position, Share, prepare_data_loader, skip_first_batches
from accelerate.data_loader.plan import BatchSize, GroupNote, GroupPlan, Observations, ObservedPlan, RoundPlan
from accelerate.data_loader.progress import EpochProgress, ResumePoint
from accelerate.runtime.gradient_clock import GradientState


class Untouchable(Dataset):
    """Numbers that note which of them were read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Stream(IterableDataset):
    """Numbers that workers divide among themselves."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(start, self.length, step))


def group(dataset: Any, count: int, **options: Any) -> list[Any]:
    loader_options = {key: options.pop(key) for key in ("batch_size", "shuffle", "num_workers") if key in options}
    return [
        prepare_data_loader(DataLoader(dataset, **loader_options), num_processes=count, process_index=rank, **options)
        for rank in range(count)
    ]


@given(
    samples=st.integers(1, 40),
    batch_size=st.integers(1, 4),
    counts=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    steps=st.integers(1, 4),
    even=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_each_sample_once_on_changing_numbers_of_processes(
    samples: int, batch_size: int, counts: list[int], steps: int, even: bool
) -> None:
    options = {"batch_size": batch_size, "shuffle": True, "data_seed": 1, "even_batches": even}
    seen: list[int] = []
    position = Position()
    for index, count in enumerate(counts):
        if position.epoch:
            break
        loaders = group(range(samples), count, **options)
        for loader in loaders:
            loader.seek(position)
        seen += real_samples(loaders, None if index == len(counts) - 1 else steps)
        position = loaders[0].position
    assert sorted(seen) == list(range(samples))
    assert position == Position(1, 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_resumes_on_another_number(workers: int) -> None:
    before = group(Stream(29), 2, batch_size=2, num_workers=workers)
    seen = real_samples(before, 3)
    assert before[0].position == Position(0, 12)
    after = group(Stream(29), 3, batch_size=2, num_workers=workers)
    for loader in after:
        loader.load_state_dict(before[0].state_dict())
    seen += real_samples(after)
    assert sorted(seen) == list(range(29))


def test_several_workers_resume_in_the_same_order() -> None:
    def make() -> Any:
        return group(Stream(40), 2, batch_size=2, num_workers=2)[1]

    whole = [batch.tolist() for batch in make()]
    stopped = make()
    for number, _ in enumerate(stopped, start=1):
        if number == 3:
            break
    resumed = make()
    resumed.load_state_dict(stopped.state_dict())
    assert [batch.tolist() for batch in resumed] == whole[3:]


def test_several_workers_resume_on_another_number() -> None:
    before = group(Stream(40), 2, batch_size=2, num_workers=2)
    seen = real_samples(before, 3)
    after = group(Stream(40), 3, batch_size=2, num_workers=2)
    for loader in after:
        loader.load_state_dict(before[0].state_dict())
    assert sorted(seen + real_samples(after)) == list(range(40))


@pytest.mark.parametrize("workers", [0, 2])
def test_one_process_seeks_in_an_iterable(workers: int) -> None:
    def make() -> Any:
        return prepare_data_loader(DataLoader(Stream(17), batch_size=2, num_workers=workers))

    whole = [batch.tolist() for batch in make()]
    loader = make()
    loader.seek(Position(3, 8))
    assert [batch.tolist() for batch in loader] == whole[4:]
    assert loader.iteration == 4
    assert [batch.tolist() for batch in loader] == whole


def test_seek_reads_no_sample() -> None:
    data = Untouchable(100)
    loader = prepare_data_loader(DataLoader(data, batch_size=4, shuffle=True), num_processes=2, process_index=1)
    loader.seek(Position(2, 88))
    assert len(list(loader)) == 2
    assert len(data.read) == 8


def test_position_counts_what_was_handed_out() -> None:
    loader = prepare_data_loader(DataLoader(range(7), batch_size=2), num_processes=2, process_index=0)
    assert loader.position == Position(0, 0)
    seen = [loader.position for _ in loader]
    assert seen == [Position(0, 4), Position(1, 0)]
    assert loader.position == Position(1, 0)


def test_position_survives_a_break_and_the_same_epoch_number_keeps_a_restored_one() -> None:
    loader = prepare_data_loader(DataLoader(range(10), batch_size=2))
    for _ in loader:
        break
    assert loader.position == Position(0, 2)
    loader.seek(Position(3, 4))
    loader.set_epoch(3)
    assert loader.position == Position(3, 4)
    loader.set_epoch(5)
    assert loader.position == Position(5, 0)


class Uneven(BatchSampler):
    """Batches of growing size."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


BATCHES = [[0], [1, 2], [3, 4, 5], [6, 7], [8, 9, 10]]


def uneven(count: int) -> list[Any]:
    return [
        prepare_data_loader(
            DataLoader(range(11), batch_sampler=Uneven(BATCHES)), num_processes=count, process_index=rank
        )
        for rank in range(count)
    ]


def test_batches_of_varying_size_are_summed() -> None:
    first, second = uneven(2)
    assert [(loader.share[:2], loader.position.samples) for loader in [first] for _ in loader] == [
        ((1, 1), 3),
        ((3, 3), 8),
        ((3, 3), 0),
    ]
    assert [loader.share[:2] for loader in [second] for _ in loader] == [(2, 2), (2, 2), (1, 0)]
    assert second.remainder == 3
    for count in (1, 2, 3):
        loaders = uneven(count)
        for loader in loaders:
            loader.seek(Position(0, 3))
        assert sorted(real_samples(loaders)) == list(range(3, 11))


class Miscounting(Sampler[int]):
    """A sampler that gives more or fewer samples than it says, or says nothing."""

    def __init__(self, gives: int, says: int | None) -> None:
        self.gives, self.says = gives, says

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.gives))

    def __len__(self) -> int:
        if self.says is None:
            raise TypeError("nobody knows")
        return self.says


def miscounting(gives: int, says: int | None, count: int, size: int = 2, **options: Any) -> list[Any]:
    return [
        prepare_data_loader(
            DataLoader(range(gives), batch_size=size, sampler=Miscounting(gives, says)),
            num_processes=count,
            process_index=rank,
            **options,
        )
        for rank in range(count)
    ]


@given(
    gives=st.integers(0, 25),
    says=st.none() | st.integers(0, 25),
    count=st.integers(1, 3),
    size=st.integers(1, 3),
    split=st.booleans(),
    even=st.booleans(),
    steps=st.integers(1, 4),
)
@settings(max_examples=150, deadline=None)
def test_a_sampler_that_miscounts_loses_no_sample(
    gives: int, says: int | None, count: int, size: int, split: bool, even: bool, steps: int
) -> None:
    options = {"split_batches": split, "even_batches": even}
    loaders = miscounting(gives, says, count, size * count if split else size, **options)
    unit = size * count
    for loader in loaders:
        assert count > 1 or [int(index) for batch in loader for index in batch] == list(range(gives))
        loader.set_epoch(0)  # one process believes a sampler, until it knows better
        for number, batch in enumerate(loader, start=1):
            rows, real = loader.share[:2]
            assert rows == len(batch) or (count == 1 and rows is None)
            assert rows is None or 0 <= real <= rows
            if not loader.end_of_dataloader:
                assert loader.position == Position(0, number * unit)
            elif gives:
                assert (loader.position, loader.remainder) == (Position(1, 0), gives % unit)
    assert sorted(real_samples(loaders)) == list(range(gives))
    if gives > steps * unit:
        seen = real_samples(loaders, steps)
        position = loaders[0].position
        for other in (1, 2):
            rest = miscounting(gives, says, other)
            for loader in rest:
                loader.seek(position)
            assert sorted(seen + real_samples(rest)) == list(range(gives))


@pytest.mark.parametrize("says", [None, 3, 40])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_skipped_of_a_sampler_that_miscounts(says: int | None, workers: int) -> None:
    whole = [
        prepare_data_loader(
            DataLoader(range(15), batch_size=2, sampler=Miscounting(15, says), num_workers=workers),
            num_processes=2,
            process_index=rank,
        )
        for rank in range(2)
    ]
    assert sorted(real_samples(whole)) == list(range(15))
    rest = [skip_first_batches(loader, 2) for loader in whole]
    shares = [[(loader.share[:2], loader.position.samples) for _ in loader] for loader in rest]
    assert shares == [[((2, 2), 12), ((2, 2), 0)], [((2, 2), 12), ((2, 1), 0)]]
    # What the first pass had handed out is not forgotten with the second.
    assert [loader.epoch_progress.consumed for loader in whole] == [15, 15]


@given(
    gives=st.integers(1, 25),
    says=st.none() | st.integers(0, 25),
    count=st.integers(1, 3),
    start=st.integers(0, 12),
    drop_last=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_global_batches_of_a_sampler_that_miscounts(
    gives: int, says: int | None, count: int, start: int, drop_last: bool
) -> None:
    def passed(sampler: Any) -> list[Any]:
        seen = []
        for rank in range(count):
            base = DataLoader(range(gives), batch_size=2, sampler=sampler, drop_last=drop_last)
            loader = prepare_data_loader(base, num_processes=count, process_index=rank, global_batch_size=5)
            loader.seek(Position(0, start))
            seen += [(batch.tolist(), loader.share, loader.microbatch, loader.position) for batch in loader]
        return seen

    assert passed(Miscounting(gives, says)) == passed(SequentialSampler(range(gives)))


def test_padding_of_an_iterable_is_known() -> None:
    for workers in (0, 2):
        loaders = group(Stream(13), 2, batch_size=2, num_workers=workers)
        assert sorted(real_samples(loaders)) == list(range(13))
    loaders = group(Stream(7), 2, batch_size=2)
    assert [[loader.remainder for _ in loader] for loader in loaders] == [[-1, 3], [-1, 3]]


class Ready(IterableDataset):
    """Batches that are already collated."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(10).split(2))


def test_ready_batches_go_round() -> None:
    loaders = group(Ready(), 2, batch_size=None)
    parts = [[(batch.tolist(), loader.share.real) for batch in loader] for loader in loaders]
    assert parts[0] == [([0, 1], None), ([4, 5], None), ([8, 9], None)]
    assert parts[1] == [([2, 3], None), ([6, 7], None), ([0, 1], 0)]


def test_indexed_ready_batches_go_round() -> None:
    data = torch.arange(10).split(2)
    loaders = group(data, 2, batch_size=None)
    assert [[batch.tolist() for batch in loader] for loader in loaders] == [
        [[0, 1], [4, 5], [8, 9]],
        [[2, 3], [6, 7], [0, 1]],
    ]
    loaders[1].seek(Position(0, 2))
    assert [(batch.tolist(), loaders[1].share.real) for batch in loaders[1]] == [([6, 7], 1), ([0, 1], 0)]


def test_skipping_after_a_restored_position_starts_at_that_batch() -> None:
    loader = prepare_data_loader(DataLoader(range(20), batch_size=2, shuffle=True), data_seed=3)
    epochs = [[batch.tolist() for batch in loader] for _ in range(3)]
    restored = prepare_data_loader(DataLoader(range(20), batch_size=2, shuffle=True), data_seed=3)
    restored.seek(Position(1, 8))
    skipping = skip_first_batches(restored, 4)
    assert [batch.tolist() for batch in skipping] == epochs[1][4:]
    assert [batch.tolist() for batch in restored] == epochs[2]


def test_negative_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be negative"):
        prepare_data_loader(DataLoader(range(4))).seek(Position(0, -1))


def test_persistent_workers_hear_of_a_position_and_of_its_end() -> None:
    def make() -> Any:
        loader = DataLoader(Stream(20), batch_size=2, num_workers=1, persistent_workers=True)
        return prepare_data_loader(loader, num_processes=2, process_index=0)

    loader = make()
    whole = [batch.tolist() for batch in loader]
    loader.seek(Position(1, 8))
    assert [batch.tolist() for batch in loader] == whole[2:]
    assert [batch.tolist() for batch in loader] == whole


def test_skipping_micro_batches_keeps_their_global_batches() -> None:
    loader = prepare_data_loader(DataLoader(range(11), batch_size=2), global_batch_size=5)
    whole = [(batch.tolist(), loader.microbatch, loader.position.samples) for batch in loader]
    skipping = skip_first_batches(loader, 2)
    assert [(batch.tolist(), skipping.microbatch, skipping.position.samples) for batch in skipping] == whole[2:]
    loader.seek(Position(0, 4))
    assert [batch.tolist() for batch in loader] == [[4], [5, 6], [7, 8], [9], [10]]


# --- the count alone -------------------------------------------------------------------------------------------------


def test_a_count_of_fixed_sizes_is_computed() -> None:
    progress = EpochProgress(RoundPlan(11, 2, 2, rank=1), skipped=1)
    assert (progress.num_batches, progress.consumed, progress.consumed_before) == (2, 4, 4)
    progress.taken = 2
    assert (progress.consumed, progress.share, progress.remainder) == (11, Share(2, 1), 3)


def test_a_count_of_unknown_sizes_is_added_up() -> None:
    progress = EpochProgress(ObservedPlan())
    progress.start_from(10)
    progress.hand_out(BatchSize(Share(3, 2), samples=5))
    assert (progress.consumed_before, progress.consumed, progress.share) == (10, 15, Share(3, 2))


def test_skipped_batches_of_a_sampler_are_counted_but_not_handed_out() -> None:
    sizes = [BatchSize(Share(rows, rows), rows) for rows in (1, 2, 3)]
    progress = EpochProgress(ObservedPlan(), skipped=2)
    observed = Observations()
    observed.batches.extend(sizes)
    progress.observe(observed)
    progress.hand_out()
    assert (progress.taken, progress.consumed_before, progress.consumed, progress.share) == (1, 3, 6, Share(3, 3))


def test_streams_are_counted_each() -> None:
    progress = EpochProgress(GroupPlan(4, streams=(0, 0)))
    progress.pass_over(GroupNote(4, 0))
    for note in (GroupNote(4, 1), GroupNote(3, 0)):
        progress.hand_out(note)
    point = progress.resume_point(Position(2, progress.consumed), workers=2)
    assert point == ResumePoint(2, 11, 4, 2, (7, 4), rounds=3, batches=2, is_reached_by_torchdata=True)
    assert ResumePoint.from_state_dict(point.state_dict()).streams == (7, 4)


@pytest.mark.parametrize("data", [range(11), Stream(11)], ids=["map", "stream"])
def test_batches_skipped_before_prepare_are_left_out_of_global_batches(data: Any) -> None:
    ranks = []
    for rank in range(2):
        skipping = skip_first_batches(DataLoader(data, batch_size=2), 2)
        loader = prepare_data_loader(skipping, num_processes=2, process_index=rank, global_batch_size=6)
        ranks.append([(batch.tolist(), loader.position.samples) for batch in loader])
        loader.seek(Position(0, 6))
        assert [batch.tolist() for batch in loader] == [batch for batch, _ in ranks[rank][1:]]
    assert ranks[0][0] == ([4], 6)
    assert [entry for batches in zip(*ranks, strict=True) for batch, _ in batches for entry in batch] == [*range(4, 11)]


def test_a_loader_of_another_class_leaves_out_what_was_skipped_before_prepare() -> None:
    class Own:
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    loader = prepare_data_loader(skip_first_batches(Own(), 2), custom_classes=(Own,))
    seen = [(batch, loader.end_of_dataloader, GradientState().active_dataloader is loader) for batch in loader]
    assert seen == [(2, False, True), (3, False, True), (4, True, True)]


def test_a_split_loader_resumes_behind_what_was_skipped_before_prepare() -> None:
    def make() -> Any:
        sampler = DistributedSampler(range(20), num_replicas=2, rank=1, shuffle=False)
        skipping = skip_first_batches(DataLoader(range(20), batch_size=2, sampler=sampler), 1)
        return prepare_data_loader(skipping, num_processes=2, process_index=1)

    stopped = make()
    next(iter(stopped))
    assert stopped.position == Position(0, 8)
    resumed = make()
    resumed.load_state_dict(stopped.state_dict())
    assert [(batch.tolist(), resumed.position.samples) for batch in resumed] == [
        ([9, 11], 12),
        ([13, 15], 16),
        ([17, 19], 0),
    ]


CHANGES: dict[str, tuple[dict[str, Any], int, dict[str, Any], int, str | None]] = {
    "shuffled, longer": ({"shuffle": True}, 20, {"shuffle": True}, 26, "20 samples, and has 26"),
    "shuffled, shorter": ({"shuffle": True}, 20, {"shuffle": True}, 15, "20 samples, and has 15"),
    "shuffled, the same": ({"shuffle": True}, 20, {"shuffle": True}, 20, None),
    "in order, longer": ({}, 20, {}, 26, None),
    "in order, shorter": ({}, 20, {}, 15, None),
    "not shuffled any more": ({"shuffle": True}, 20, {}, 20, "RandomSampler.*SequentialSampler"),
    "shuffled now": ({}, 20, {"shuffle": True}, 20, "SequentialSampler.*RandomSampler"),
    "with replacement now": (
        {"shuffle": True},
        20,
        {"sampler": RandomSampler(range(20), replacement=True)},
        20,
        "by RandomSampler,.*RandomSampler with replacement",
    ),
    "shuffled, ends earlier": ({"shuffle": True}, 20, {"shuffle": True}, 7, "8 of 20 samples of epoch 1, which has 7"),
    "in order, ends earlier": ({}, 20, {}, 8, "8 of 20 samples of epoch 1, which has 8"),
}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("options", [{}, {"dispatch_batches": True}, {"use_stateful_dataloader": True}], ids=str)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_an_epoch_that_cannot_be_continued_exactly_is_reported_once(
    change: tuple[dict[str, Any], int, dict[str, Any], int, str | None], options: dict[str, Any]
) -> None:
    before, length, after, new_length, report = change

    def make(size: int, arguments: dict[str, Any]) -> Any:
        return prepare_data_loader(DataLoader(range(size), batch_size=4, **arguments), put_on_device=True, **options)

    stopped = make(length, before)
    list(stopped)
    for _ in stopped:
        if stopped.position.samples == 8:
            break
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = make(new_length, after)
        resumed.load_state_dict(stopped.state_dict())
        rest = [int(entry) for batch in resumed for entry in batch]
        make(new_length, after).load_state_dict(stopped.state_dict())
    reports = [str(entry.message) for entry in caught if "This loader stopped" in str(entry.message)]
    if report is None:
        assert reports == []
    else:
        assert len(reports) == 1
        assert re.search(report, reports[0])
    if new_length <= 8:
        assert sorted(rest) == list(range(new_length))
        assert resumed.iteration == 3
    else:
        assert len(rest) == new_length - 8
        assert resumed.iteration == 2


def test_a_seeded_order_is_not_that_of_torchs_sampler() -> None:
    stopped = prepare_data_loader(DataLoader(range(12), batch_size=4, shuffle=True))
    next(iter(stopped))
    resumed = prepare_data_loader(DataLoader(range(12), batch_size=4, shuffle=True), use_seedable_sampler=True)
    with pytest.warns(UserWarning, match="RandomSampler.*SeedableRandomSampler"):
        resumed.load_state_dict(stopped.state_dict())


@pytest.mark.parametrize("options", [{}, {"dispatch_batches": True}], ids=str)
def test_a_stream_that_has_become_too_short_is_reported(options: dict[str, Any]) -> None:
    stopped, loader = (
        prepare_data_loader(DataLoader(Stream(length), batch_size=2), put_on_device=True, **options)
        for length in (12, 6)
    )
    stopped.seek(Position(2, 6))
    next(iter(stopped))
    loader.load_state_dict(stopped.state_dict())
    with pytest.warns(UserWarning, match="8 samples of epoch 2"):
        assert list(loader) == []
    assert [int(entry) for batch in loader for entry in batch] == list(range(6))
    assert loader.iteration == 4


def test_a_distributed_sampler_that_no_longer_shuffles_is_reported() -> None:
    def make(shuffle: bool) -> Any:
        sampler = DistributedSampler(range(20), num_replicas=2, rank=0, shuffle=shuffle)
        loader = DataLoader(range(20), batch_size=2, sampler=sampler)
        return prepare_data_loader(loader, num_processes=2, process_index=0)

    stopped = make(shuffle=True)
    next(iter(stopped))
    with pytest.warns(UserWarning, match="DistributedSampler without shuffling"):
        make(shuffle=False).load_state_dict(stopped.state_dict())


def test_batches_beyond_the_length_of_the_dataset_remain_when_it_grows() -> None:
    def make(length: int) -> Any:
        repeated = [[index % length] for index in range(3 * length)]
        return prepare_data_loader(DataLoader(range(length), batch_sampler=repeated))

    stopped = make(4)
    next(islice(stopped, 8, None))
    resumed = make(5)
    with pytest.warns(UserWarning, match="4 samples, and has 5"):
        resumed.load_state_dict(stopped.state_dict())
    assert [int(entry) for batch in resumed for entry in batch] == [4, 0, 1, 2, 3, 4]
    assert resumed.iteration == 1


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("stream", [Stream, RestoredStream])
@pytest.mark.parametrize("dispatch_batches", [False, True])
def test_torchdata_reports_a_stream_that_has_become_too_short(stream: Any, dispatch_batches: bool) -> None:
    stopped, loader = (
        prepare_data_loader(
            DataLoader(stream(length), batch_size=2),
            put_on_device=True,
            use_stateful_dataloader=True,
            dispatch_batches=dispatch_batches,
        )
        for length in (12, 6)
    )
    next(islice(stopped, 3, None))
    loader.load_state_dict(stopped.state_dict())
    with pytest.warns(UserWarning, match="8 samples of epoch 0"):
        assert list(loader) == []
    assert [int(entry) for batch in loader for entry in batch] == list(range(6))
    assert loader.iteration == 2
