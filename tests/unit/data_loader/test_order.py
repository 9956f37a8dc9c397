"""The order of an epoch is what its sampler draws, and can be drawn again; or it depends on seed and epoch alone."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.samplers import SAMPLERS, TORCH_SAMPLERS, make_loader
from torch.utils.data import DataLoader, Sampler

from accelerate.data_loader import Position, SeedableRandomSampler, prepare_data_loader, skip_first_batches
from accelerate.utils import load, set_seed

SIZE = 22
SOME_KINDS = (
    "shuffle",
    "shuffle, generator",
    "replacement, generator",
    "python, one at a time",
    "varying batches, python, opened",
)


def read(loader: DataLoader) -> list[int]:
    return [int(entry) for batch in loader for entry in batch]


def test_seedable_sampler_follows_seed_and_epoch() -> None:
    sampler = SeedableRandomSampler(range(10), data_seed=7)
    first, second = list(sampler), list(sampler)
    assert first == torch.randperm(10, generator=torch.Generator().manual_seed(7)).tolist()
    assert second == torch.randperm(10, generator=torch.Generator().manual_seed(8)).tolist()
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert sampler.initial_seed == 7


def test_default_seed_is_torchs() -> None:
    torch.manual_seed(21)
    assert SeedableRandomSampler(range(3)).initial_seed == 21


def test_a_pass_left_early_is_shuffled_anew_unless_seeded_by_the_user() -> None:
    free = prepare_data_loader(DataLoader(range(50), batch_size=5, shuffle=True))
    seeded = prepare_data_loader(DataLoader(range(50), batch_size=5, shuffle=True), use_seedable_sampler=True)
    assert next(iter(free)).tolist() != next(iter(free)).tolist()
    assert next(iter(seeded)).tolist() == next(iter(seeded)).tolist()


def test_global_batches_depend_on_seed_and_epoch_alone() -> None:
    for kind in ("shuffle", "shuffle, generator", "subset", "weighted", "python, opened"):
        loader = prepare_data_loader(make_loader(kind, range(SIZE)), global_batch_size=8)
        first, second = read(loader), read(loader)
        assert first != second
        set_seed(99)
        loader.set_epoch(0)
        assert [read(loader), read(loader)] == [first, second]


def states_of(loader: Any) -> dict[str, Any]:
    """Return what a checkpoint has of a run with one loader, after a way through a file."""
    file = io.BytesIO()
    torch.save({"loader": loader.state_dict(), "torch": torch.get_rng_state()}, file)
    file.seek(0)
    return {**load(file), "python": random.getstate(), "numpy": np.random.get_state()}


def draw_something() -> None:
    """Draw what a model and a loop draw in a step."""
    random.random()
    np.random.rand()
    torch.rand(3)


def run(loader: Any, epochs: int, stop: tuple[int, int] | None = None) -> tuple[list[list[int]], Any]:
    """Read some epochs; return them, and the states behind the batch at which to stop, epoch and number."""
    orders: list[list[int]] = []
    for epoch in range(epochs):
        orders.append([])
        for number, batch in enumerate(loader, 1):
            orders[-1] += torch.as_tensor(batch).view(-1).tolist()
            draw_something()
            if (epoch, number) == stop:
                return orders, states_of(loader)
    return orders, None


@pytest.mark.parametrize(("kind", "workers"), [*((kind, 0) for kind in SAMPLERS), *((kind, 2) for kind in SOME_KINDS)])
def test_a_run_that_is_stopped_goes_on_as_if_it_were_not(kind: str, workers: int) -> None:
    set_seed(2)
    whole, _ = run(prepare_data_loader(make_loader(kind, range(SIZE), num_workers=workers)), 3)
    length = len(prepare_data_loader(make_loader(kind, range(SIZE))))
    for stop in ((0, 1), (1, 3), (1, length - 1), (1, length), (2, length)):
        set_seed(2)
        stopped = prepare_data_loader(make_loader(kind, range(SIZE), num_workers=workers))
        before, states = run(stopped, 3, stop)
        set_seed(77)
        resumed = prepare_data_loader(make_loader(kind, range(SIZE), num_workers=workers))
        resumed.load_state_dict(states["loader"])
        torch.set_rng_state(states["torch"])
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        after, _ = run(resumed, 3 - stop[0] - (stop[1] == length))
        if stop[1] == length:
            assert before + after == whole
        else:
            assert [*before[:-1], before[-1] + after[0], *after[1:]] == whole


@pytest.mark.parametrize("kind", [*TORCH_SAMPLERS, "python, at the first", "own torch, one at a time"])
def test_the_rest_of_an_epoch_can_be_stopped_again(kind: str) -> None:
    set_seed(2)
    whole, _ = run(prepare_data_loader(make_loader(kind, range(SIZE))), 1)
    seen: list[int] = []
    loader = prepare_data_loader(make_loader(kind, range(SIZE)))
    set_seed(2)
    while len(seen) < len(whole[0]):
        orders, states = run(loader, 1, (0, 1))
        seen += orders[0]
        set_seed(len(seen))
        loader = prepare_data_loader(make_loader(kind, range(SIZE)))
        loader.load_state_dict(states["loader"])
    assert seen == whole[0]


@pytest.mark.parametrize("kind", ["shuffle", "subset, generator", "numpy, opened", "varying batches, python, opened"])
def test_batches_skipped_after_a_resume_count_from_the_start_of_the_epoch(kind: str) -> None:
    loader = prepare_data_loader(make_loader(kind, range(SIZE)))
    batches = []
    for batch in loader:
        batches.append(batch.tolist())
        if len(batches) == 2:
            state = loader.state_dict()
    resumed = prepare_data_loader(make_loader(kind, range(SIZE)))
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in skip_first_batches(resumed, 3)] == batches[3:]


def test_seek_goes_back_in_the_epoch_that_was_read_last() -> None:
    loader = prepare_data_loader(DataLoader(range(SIZE), batch_size=4, shuffle=True))
    first = read(loader)
    loader.seek(Position(0, 8))
    assert read(loader) == first[8:]
    second = read(loader)
    assert second != first
    loader.seek(Position(1, 0))
    assert read(loader) == second


def test_a_sampler_that_remembers_what_it_did_is_reported() -> None:
    class Reshuffled(Sampler[int]):
        """Shuffles the order of the epoch before."""

        def __init__(self) -> None:
            self.order = list(range(SIZE))

        def __len__(self) -> int:
            return SIZE

        def __iter__(self) -> Iterator[int]:
            random.shuffle(self.order)
            return iter(self.order)

    def make() -> Any:
        return prepare_data_loader(DataLoader(range(SIZE), batch_size=4, sampler=Reshuffled()))

    loader = make()
    read(loader)
    next(iter(loader))
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    with pytest.warns(UserWarning, match="another order than before"):
        read(resumed)


def test_a_record_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.data_loader.draws._MAX_STATES", 3)
    loader = prepare_data_loader(make_loader("python, one at a time", range(SIZE)))
    with pytest.warns(UserWarning, match="too often to record"):
        _, states = run(loader, 1, (0, 5))
    assert "order" not in states["loader"]


def test_the_users_loader_is_not_changed() -> None:
    loader = DataLoader(range(20), batch_size=3, shuffle=True)
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    prepare_data_loader(loader, num_processes=2, process_index=0)
    assert loader.sampler is sampler
    assert loader.batch_sampler is batch_sampler
    assert batch_sampler.sampler is sampler
