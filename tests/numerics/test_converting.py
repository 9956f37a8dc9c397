"""A plain loop that is converted gives what it gave before: order, losses and random states, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.processes import run_group
from tests.support.samplers import SAMPLERS, Uncounted, make_loader
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import set_seed

SIZE, EPOCHS = 22, 3


class Noisy(Dataset):
    """Samples that draw from all global streams whenever they are read."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.tensor([index / SIZE, random.random(), np.random.rand(), torch.rand(()).item()])


def random_states() -> list[Any]:
    kind, *numpy_state = np.random.get_state()
    return [random.getstate(), [kind, numpy_state[0].tolist(), *numpy_state[1:]], torch.get_rng_state().tolist()]


def train(
    loader: Any, model: nn.Module, optimizer: Any, backward: Callable[[Any], None], reseed: Any
) -> dict[str, Any]:
    """Train as everybody does, and return all that can differ."""
    order: list[list[int]] = []
    losses: list[float] = []
    for _ in range(EPOCHS):
        reseed()
        order.append([])
        for indices, inputs in loader:
            order[-1] += torch.as_tensor(indices).view(-1).tolist()
            loss = model(inputs.float()).square().mean() + 0.01 * random.random()
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return {"order": order, "losses": losses, "states": random_states()}


def both_ways(make: Callable[[], Any], reseed: Callable[[Any], None] = lambda loader: None) -> list[dict[str, Any]]:
    """Return what the plain loop gives, and the converted one."""
    found = []
    for converts in (False, True):
        set_seed(11)
        loader = make()
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def again(loader: Any = loader) -> None:
            reseed(loader)

        if converts:
            accelerator = Accelerator(cpu=True)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            found.append(train(loader, model, optimizer, accelerator.backward, again))
        else:
            found.append(train(loader, model, optimizer, torch.Tensor.backward, again))
    return found


@pytest.mark.parametrize("kind", SAMPLERS)
def test_nothing_changes(kind: str) -> None:
    plain, converted = both_ways(lambda: make_loader(kind, Noisy()))
    assert converted == plain
    assert kind == "sequential" or plain["order"][0] != plain["order"][1]


@pytest.mark.parametrize(
    "kind", ["shuffle", "shuffle, generator", "python, one at a time", "varying batches, python, opened"]
)
def test_nothing_changes_with_worker_processes(kind: str) -> None:
    plain, converted = both_ways(lambda: make_loader(kind, Noisy(), num_workers=2))
    assert converted == plain


@pytest.mark.parametrize("kind", ["shuffle", "subset", "weighted", "torch, opened", "torch, one at a time"])
def test_a_seed_before_each_epoch_repeats_it(kind: str) -> None:
    def seed(loader: Any) -> None:
        torch.manual_seed(7)

    plain, converted = both_ways(lambda: make_loader(kind, Noisy()), seed)
    assert converted == plain
    assert plain["order"][0] == plain["order"][1]


def test_a_generator_that_is_seeded_before_each_epoch_repeats_it() -> None:
    def seed(loader: Any) -> None:
        loader.generator.manual_seed(7)

    plain, converted = both_ways(lambda: make_loader("shuffle, generator", Noisy()), seed)
    assert converted == plain
    assert plain["order"][0] == plain["order"][1]


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_loop_that_is_left_early_shuffles_as_before(kind: str) -> None:
    found = []
    for prepare in (lambda loader: loader, prepare_data_loader):
        set_seed(4)
        loader = prepare(make_loader(kind, range(SIZE)))
        orders = [[torch.as_tensor(batch).tolist() for batch in islice(loader, 2)] for _ in range(3)]
        found.append((orders, random_states()))
    assert found[0] == found[1]


class Stream(IterableDataset):
    """Samples of unknown or known number that draw when they are read."""

    def __init__(self, length: int | None = None) -> None:
        self.length = length

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        return (Noisy()[random.randrange(SIZE)] for _ in range(SIZE))

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("unknown")
        return self.length


def test_a_stream_of_known_length_changes_nothing() -> None:
    plain, converted = both_ways(lambda: DataLoader(Stream(SIZE), batch_size=4))
    assert converted == plain


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_unknown_number_come_in_the_same_order(workers: int) -> None:
    orders = []
    for prepare in (lambda loader: loader, Accelerator(cpu=True).prepare):
        set_seed(4)
        loader = prepare(DataLoader(Stream(), batch_size=4, num_workers=workers))
        orders.append([[batch[0].tolist() for batch in loader] for _ in range(EPOCHS)])
    assert orders[0] == orders[1]


def test_a_sampler_of_unknown_length_keeps_its_order() -> None:
    orders = []
    for prepare in (lambda loader: loader, Accelerator(cpu=True).prepare):
        set_seed(4)
        loader = prepare(DataLoader(range(SIZE), batch_size=4, sampler=Uncounted(SIZE, "numpy", "one at a time")))
        orders.append([[batch.tolist() for batch in loader] for _ in range(EPOCHS)])
    assert orders[0] == orders[1]


def learn(loader: Any, model: nn.Module, optimizer: Any, backward: Callable[[Any], None]) -> dict[str, Any]:
    """Train on numbers, drawing nothing, and return the batches and losses of some epochs."""
    order: list[list[list[int]]] = []
    losses: list[float] = []
    for _ in range(EPOCHS):
        order.append([])
        for batch in loader:
            indices = torch.as_tensor(batch).view(-1)
            order[-1].append(indices.tolist())
            loss = model(indices.double().view(-1, 1) / SIZE).square().mean()
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return {"order": order, "losses": losses}


def line() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model that begins with the same weights everywhere, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def learn_on_each_rank(kinds: list[str], size: int, workers: int) -> dict[str, Any]:
    """Train on each rank, with random streams of its own; note what was used of them."""
    accelerator = Accelerator(cpu=True)
    found: dict[str, Any] = {}
    for kind in kinds:
        model, optimizer = accelerator.prepare(*line())
        set_seed(11, device_specific=True)
        loader = accelerator.prepare(make_loader(kind, range(size), batch_size=2, num_workers=workers))
        found[kind] = {**learn(loader, model, optimizer, accelerator.backward), "states": random_states()}
    return found


WITH_WORKERS = (
    "shuffle",
    "twice, generator",
    "torch, one at a time",
    "python, at the first",
    "no batches, python, at the first",
    "no batches, torch, one at a time",
    "no batches, torch, opened",
    "varying batches, torch, at the first",
)
"""Torch opens a sampler twice where there are workers: each of these draws at another moment."""


@pytest.mark.multiprocess
@pytest.mark.parametrize(("size", "workers"), [(SIZE, 0), (24, 0), (24, 1)])
def test_two_processes_give_what_rank_0s_plain_loop_gives(size: int, workers: int) -> None:
    kinds = list(WITH_WORKERS if workers else SAMPLERS)
    ranks = run_group(learn_on_each_rank, 2, kinds, size, workers)
    compared = set()
    for kind in kinds:
        model, optimizer = line()
        set_seed(11)
        loader = make_loader(kind, range(size), batch_size=4, num_workers=workers)
        plain = learn(loader, model, optimizer, torch.Tensor.backward)
        after = random_states()
        for epoch, batches in enumerate(plain["order"]):
            whole = [index for batch in batches for index in batch]
            if kind == "batch sampler":  # of batches of three; it drops the last, and so does a round
                whole = whole[: len(whole) // 6 * 6]
            dealt = dealt_in_turns([rank[kind]["order"][epoch] for rank in ranks])
            assert dealt[: len(whole)] == whole, kind
        assert ranks[0][kind]["states"] == after, kind
        if all(len(batch) == 4 for batches in plain["order"] for batch in batches) and "batch" not in kind:
            both = zip(*(rank[kind]["losses"] for rank in ranks), strict=True)
            assert [(one + other) / 2 for one, other in both] == pytest.approx(plain["losses"], rel=1e-12), kind
            compared.add(kind)
        set_seed(12)
        for _ in range(EPOCHS):
            iter(DataLoader(range(2), generator=loader.generator))  # draws a seed for workers, and nothing else
        assert ranks[1][kind]["states"] == random_states(), kind
    assert compared >= ({"replacement", "twice"} if size == SIZE else {"shuffle", "torch, one at a time"})


def dealt_in_turns(ranks: list[list[list[int]]]) -> list[int]:
    """Return the samples of all ranks in the order of rounds."""
    return [index for batches in zip(*ranks, strict=True) for batch in batches for index in batch]
