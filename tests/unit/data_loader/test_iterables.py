"""Resuming data that cannot be indexed: streams that workers share, datasets that save their own place, torchdata."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.resuming import real_samples
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accelerate.data_loader import Position, prepare_data_loader, skip_first_batches

SAMPLES = 61

# torchdata 0.11 calls something that torch 2.13 deprecates.
with_torchdata = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Numbers(IterableDataset):
    """Numbers of which worker 1 has a fourth and worker 0 the rest."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        if worker is None:
            return iter(range(SAMPLES))
        cut = SAMPLES // 4
        return iter(range(cut)) if worker.id else iter(range(cut, SAMPLES))


class Placed(IterableDataset):
    """Numbers that save their own place, and note what was read."""

    def __init__(self) -> None:
        self.at = 0
        self.read: list[int] = []

    def __iter__(self) -> Iterator[int]:
        while self.at < SAMPLES:
            self.at += 1
            self.read.append(self.at - 1)
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def group(make: Callable[[], Any], count: int, workers: int = 0, **options: Any) -> list[Any]:
    return [
        prepare_data_loader(
            DataLoader(make(), batch_size=2, num_workers=workers), num_processes=count, process_index=rank, **options
        )
        for rank in range(count)
    ]


def legs(make: Callable[[], Any], plan: list[tuple[int, int | None]], workers: int = 0, **options: Any) -> list[Any]:
    """Read an epoch in legs of (processes, steps); return what was seen and the last loaders."""
    seen: list[int] = []
    state: dict[str, Any] = {"epoch": 2, "samples": 0}
    loaders: list[Any] = []
    for count, steps in plan:
        loaders = group(make, count, workers, **options)
        for loader in loaders:
            loader.load_state_dict(state)
            assert loader.position == Position(state.get("_accelerate", state)["epoch"], len(seen))
        seen += real_samples(loaders, steps)
        assert len({loader.position for loader in loaders}) == 1
        state = loaders[0].state_dict()
    assert loaders[0].position == Position(3, 0)
    return [seen, loaders]


@pytest.mark.parametrize("plan", [[(2, 3), (1, 5), (3, None)], [(1, 12), (2, 9), (2, None)]], ids=str)
def test_workers_streams_of_unequal_length_are_each_counted(plan: list[tuple[int, int | None]]) -> None:
    seen, _ = legs(Numbers, plan, workers=2)
    assert sorted(seen) == list(range(SAMPLES))


@pytest.mark.parametrize("count", [1, 2])
def test_workers_keep_their_turns_when_one_stream_has_ended(count: int) -> None:
    whole = [batch.tolist() for batch in group(Numbers, count, 2)[0]]
    stop = len(whole) - 3
    loader = group(Numbers, count, 2)[0]
    for number, _ in enumerate(loader, start=1):
        if number == stop:
            break
    resumed = group(Numbers, count, 2)[0]
    resumed.load_state_dict(loader.state_dict())
    assert resumed.position == loader.position
    assert [batch.tolist() for batch in resumed] == whole[stop:]
    skipping = skip_first_batches(group(Numbers, count, 2)[0], stop)
    assert next(iter(skipping)).tolist() == whole[stop]
    assert skipping.position.samples == loader.position.samples + len(whole[stop]) * count


def test_one_process_shows_its_users_dataset() -> None:
    data = Numbers()
    assert prepare_data_loader(DataLoader(data, batch_size=2, num_workers=2)).dataset is data


def test_another_number_of_workers_is_said_to_be_inexact() -> None:
    loader = group(Numbers, 1)[0]
    real_samples([loader], 2)
    with pytest.warns(UserWarning, match="num_workers=1 to see each once"):
        group(Numbers, 1, 2)[0].load_state_dict(loader.state_dict())


def read_by(loader: Any) -> list[int]:
    dataset = loader.base_dataloader.dataset
    return getattr(dataset, "dataset", dataset).read


@pytest.mark.parametrize("plan", [[(2, 4), (1, 6), (3, None)], [(1, 3), (1, 3), (1, None)]], ids=str)
@pytest.mark.parametrize("size", [None, 6], ids=["batches", "global batches"])
def test_a_dataset_that_saves_its_place_reads_nothing_twice(
    plan: list[tuple[int, int | None]], size: int | None
) -> None:
    seen, loaders = legs(Placed, plan, global_batch_size=size)
    assert sorted(seen) == list(range(SAMPLES))
    begin = min(read_by(loaders[0]))
    assert begin > 0
    assert all(read_by(loader) == list(range(begin, SAMPLES)) for loader in loaders)


def test_a_place_inside_a_global_batch_is_counted() -> None:
    seen, _ = legs(Placed, [(1, 1), (2, None)], global_batch_size=6)
    assert sorted(seen) == list(range(SAMPLES))


def test_a_second_epoch_begins_at_the_start_after_a_place_was_restored() -> None:
    _, (loader,) = legs(Placed, [(1, 3), (1, None)])
    assert [batch.tolist()[0] for batch in loader] == list(range(0, SAMPLES, 2))


@with_torchdata
@pytest.mark.parametrize("make", [Numbers, Placed], ids=["plain", "placed"])
@pytest.mark.parametrize("plan", [[(2, 3), (2, 2), (2, None)], [(1, 3), (1, 4), (2, 2), (2, None)]], ids=str)
def test_torchdatas_loader_resumes_again_and_again(
    make: Callable[[], Any], plan: list[tuple[int, int | None]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        seen, _ = legs(make, plan, use_stateful_dataloader=True)
    assert sorted(seen) == list(range(SAMPLES))


@with_torchdata
@pytest.mark.parametrize("size", [None, 6], ids=["batches", "global batches"])
def test_torchdatas_loader_of_indexed_data_resumes_on_other_numbers(size: int | None) -> None:
    options = {"use_stateful_dataloader": True, "global_batch_size": size, "data_seed": 3}
    seen, _ = legs(lambda: range(SAMPLES), [(2, 2), (2, 3), (3, 2), (1, None)], **options)
    assert sorted(seen) == list(range(SAMPLES))


@with_torchdata
def test_torchdata_can_be_taken_up_and_left_off() -> None:
    seen, state = [], None
    for stateful in (False, True, False):
        (loader,) = group(Numbers, 1, use_stateful_dataloader=stateful)
        if state is not None:
            loader.load_state_dict(state)
        seen += real_samples([loader], 4)
        state = loader.state_dict()
    assert seen == list(range(24))


@with_torchdata
def test_skipping_after_torchdata_was_restored_starts_at_that_batch() -> None:
    loader = group(Numbers, 1, use_stateful_dataloader=True)[0]
    real_samples([loader], 4)
    resumed = group(Numbers, 1, use_stateful_dataloader=True)[0]
    resumed.load_state_dict(loader.state_dict())
    assert next(iter(skip_first_batches(resumed, 4))).tolist() == [8, 9]


def test_a_state_of_torchdata_alone_is_refused_where_it_says_nothing() -> None:
    with pytest.raises(ValueError, match="use_stateful_dataloader=True"):
        group(Numbers, 1)[0].load_state_dict({"_snapshot": {}, "_iterator_finished": False})


def hf_dataset() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"n": list(range(SAMPLES))}).to_iterable_dataset(num_shards=3)


def hf_samples(loaders: list[Any], steps: int | None = None) -> list[int]:
    seen: list[int] = []
    for loader in loaders:
        for number, batch in enumerate(loader, start=1):
            seen += batch["n"].tolist()[: loader.share.real]
            if number == steps:
                break
    return seen


@pytest.mark.parametrize("shuffles", [False, True], ids=["in order", "shuffled"])
def test_an_iterable_dataset_of_the_datasets_package_resumes(shuffles: bool) -> None:
    def make() -> Any:
        return hf_dataset().shuffle(seed=5, buffer_size=16) if shuffles else hf_dataset()

    state: dict[str, Any] = {"epoch": 1, "samples": 0}
    seen: list[int] = []
    for count, steps in ((2, 4), (1, 6), (3, None)):
        loaders = group(make, count)
        for loader in loaders:
            loader.load_state_dict(state)
        seen += hf_samples(loaders, steps)
        state = loaders[0].state_dict()
        # A shuffle buffer is not in the dataset's state: its loader counts instead.
        assert ("dataset" in state) == (not shuffles and steps is not None)
    assert sorted(seen) == list(range(SAMPLES))


def test_an_epoch_that_was_resumed_can_be_read_again_from_its_start() -> None:
    loader = group(hf_dataset, 1)[0]
    hf_samples([loader], 4)
    resumed = group(hf_dataset, 1)[0]
    resumed.load_state_dict(loader.state_dict())
    assert hf_samples([resumed], 1) == [8, 9]
    resumed.seek(Position(0, 0))
    assert hf_samples([resumed], 1) == [0, 1]
