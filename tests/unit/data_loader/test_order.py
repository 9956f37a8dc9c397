"""The order of an epoch depends on seed and epoch alone, and the first one is plain PyTorch's."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from accelerate.data_loader import Position, SeedableRandomSampler, prepare_data_loader
from accelerate.data_loader.order import RecordedOrder


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


def test_first_epoch_and_random_numbers_are_those_of_plain_pytorch() -> None:
    plain = DataLoader(range(20), batch_size=3, shuffle=True)
    torch.manual_seed(5)
    order, after_one = read(plain), torch.rand(2)
    read(plain)
    after_two = torch.rand(2)
    torch.manual_seed(5)
    prepared = prepare_data_loader(plain)
    assert read(prepared) == order
    assert torch.equal(torch.rand(2), after_one)
    assert read(prepared) != order
    assert torch.equal(torch.rand(2), after_two)


def test_two_epochs_differ_and_set_epoch_replays() -> None:
    prepared = prepare_data_loader(DataLoader(range(20), batch_size=3, shuffle=True))
    first, second = read(prepared), read(prepared)
    assert first != second
    prepared.set_epoch(0)
    assert read(prepared) == first


def test_a_pass_left_early_is_shuffled_anew_unless_seeded_by_the_user() -> None:
    free = prepare_data_loader(DataLoader(range(50), batch_size=5, shuffle=True))
    seeded = prepare_data_loader(DataLoader(range(50), batch_size=5, shuffle=True), use_seedable_sampler=True)
    assert next(iter(free)).tolist() != next(iter(free)).tolist()
    assert next(iter(seeded)).tolist() == next(iter(seeded)).tolist()


class Shuffling(Sampler[int]):
    """A sampler of a user who shuffles with one of the global generators."""

    def __init__(self, source: str) -> None:
        self.source = source

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        order = list(range(20))
        if self.source == "python":
            random.shuffle(order)
        elif self.source == "numpy":
            np.random.shuffle(order)
        else:
            order = torch.randperm(20).tolist()
        return iter(order)


SAMPLERS = {
    "random": lambda: RandomSampler(range(20)),
    "replacement": lambda: RandomSampler(range(20), replacement=True, num_samples=30),
    "subset": lambda: SubsetRandomSampler(range(20)),
    "weighted": lambda: WeightedRandomSampler([1.0] * 20, 20, replacement=False),
    "python": lambda: Shuffling("python"),
    "numpy": lambda: Shuffling("numpy"),
    "torch": lambda: Shuffling("torch"),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_saved_base_gives_the_same_epochs(name: str) -> None:
    one = prepare_data_loader(DataLoader(range(20), batch_size=3, sampler=SAMPLERS[name]()))
    epochs = [read(one), read(one)]
    assert epochs[0] != epochs[1]
    two = prepare_data_loader(DataLoader(range(20), batch_size=3, sampler=SAMPLERS[name]()))
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    two.load_state_dict(one.state_dict())
    two.set_epoch(0)
    assert [read(two), read(two)] == epochs


@pytest.mark.parametrize("name", SAMPLERS)
def test_starting_in_the_middle_gives_the_rest(name: str) -> None:
    one = prepare_data_loader(DataLoader(range(20), batch_size=3, sampler=SAMPLERS[name]()))
    whole = read(one)
    two = prepare_data_loader(DataLoader(range(20), batch_size=3, sampler=SAMPLERS[name]()))
    for number, _ in enumerate(one):
        if number == 2:
            break
    one.set_epoch(0)
    state = {**one.state_dict(), "epoch": 0, "samples": 9}
    two.load_state_dict(state)
    assert read(two) == whole[9:]


def test_global_generators_are_put_back() -> None:
    prepared = prepare_data_loader(DataLoader(range(20), batch_size=3, sampler=Shuffling("python")))
    random.seed(3)
    expected = random.random()
    random.seed(3)
    read(prepared)
    assert random.random() == expected


def test_the_users_loader_is_not_changed() -> None:
    loader = DataLoader(range(20), batch_size=3, shuffle=True)
    sampler, batch_sampler = loader.sampler, loader.batch_sampler
    prepare_data_loader(loader, num_processes=2, process_index=0)
    assert loader.sampler is sampler
    assert loader.batch_sampler is batch_sampler
    assert batch_sampler.sampler is sampler


@pytest.mark.parametrize("global_batch_size", [None, 6], ids=["batches", "global batches"])
def test_an_order_that_the_sampler_drew_can_be_recorded_and_gone_on_with(global_batch_size: int | None) -> None:
    def make() -> DataLoader:
        loader = prepare_data_loader(
            DataLoader(range(20), batch_size=3, sampler=Shuffling("python")), global_batch_size=global_batch_size
        )
        loader.batch_sampler.order = RecordedOrder()
        return loader

    random.seed(7)
    expected = list(Shuffling("python"))
    random.seed(7)
    stopped = make()
    seen: list[int] = []
    for batch in stopped:
        seen += batch.tolist()
        if len(seen) == 12:
            break
    assert seen == expected[:12]  # what the sampler drew, with no seed of ours
    resumed = make()
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.position == Position(0, 12)
    assert read(resumed) == expected[12:]
    drawn_anew = read(resumed)
    assert drawn_anew != expected
    assert sorted(drawn_anew) == sorted(expected)
    assert "order" not in resumed.state_dict()
