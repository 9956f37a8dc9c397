"""Batches on the toy device, what is gathered from them, and random numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from tests.support.toy_device import on_toy
from tests.support.training import fresh_accelerator
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator, PartialState
from accelerate.collectives.rng import synchronize_rng_state
from accelerate.utils import (
    DataLoaderConfiguration,
    broadcast,
    broadcast_object_list,
    gather_object,
    pad_across_processes,
    send_to_device,
    set_seed,
    synchronize_rng_states,
)


class Rows(Dataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"number": torch.tensor(index), "row": torch.full((3,), float(index)), "name": f"row {index}"}


@pytest.mark.parametrize(
    ("processes", "non_blocking", "num_workers"),
    [(1, False, 0), (1, True, 0), (1, False, 2), (1, True, 1), (2, True, 0), (2, True, 1)],
)
@on_toy()
def test_batches_land_on_the_device(processes: int, non_blocking: bool, num_workers: int) -> None:
    config = DataLoaderConfiguration(non_blocking=non_blocking)
    accelerator = Accelerator(dataloader_config=config)
    loader = accelerator.prepare(DataLoader(Rows(10), batch_size=4, num_workers=num_workers, pin_memory=non_blocking))
    own = torch.device("toy", accelerator.process_index)
    seen: list[int] = []
    for batch in loader:
        assert {value.device for key, value in batch.items() if key != "name"} == {own}
        # Work on the device comes after the copy, also where nobody waited for it.
        assert torch.equal((batch["row"] * 2)[:, 0], batch["number"] * 2.0)
        assert batch["name"] == [f"row {number}" for number in batch["number"].tolist()]
        seen += accelerator.gather_for_metrics(batch["number"]).tolist()
    assert accelerator.num_processes == processes
    assert seen == list(range(10))


@pytest.mark.parametrize("dispatch", [False, True])
@on_toy(processes=2)
def test_every_sample_is_gathered_once(dispatch: bool) -> None:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    # The last batch is uneven: 11 samples, 3 for each process and step.
    columns: dict[str, list[Any]] = {"number": [], "row": [], "name": []}
    if dispatch:
        columns.pop("name")
    rows: Any = Rows(11)
    loader = DataLoader(rows, batch_size=3, collate_fn=None if not dispatch else without_names)
    for batch in accelerator.prepare(loader):
        assert batch["row"].device == accelerator.device
        gathered = accelerator.gather_for_metrics({name: batch[name] for name in columns})
        assert gathered["row"].device == accelerator.device
        for name, values in columns.items():
            values += gathered[name] if name == "name" else gathered[name].tolist()
    assert columns["number"] == list(range(11))
    assert columns["row"] == [[float(index)] * 3 for index in range(11)]
    assert columns.get("name", [f"row {index}" for index in range(11)]) == [f"row {index}" for index in range(11)]


def without_names(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in ("number", "row")}


@on_toy(processes=2)
def test_collectives_of_nested_data() -> None:
    accelerator = Accelerator()
    rank, device = accelerator.process_index, accelerator.device
    own = {"x": torch.tensor([rank], device=device), "y": (torch.tensor(rank + 1.0, device=device),)}
    gathered = accelerator.gather(own)
    assert gathered["x"].device == device
    assert (gathered["x"].tolist(), gathered["y"][0].tolist()) == ([0, 1], [1.0, 2.0])
    assert accelerator.reduce(own["y"][0], "mean").item() == 1.5
    assert accelerator.reduce(torch.tensor([rank + 1], device=device), "sum").tolist() == [3]
    assert broadcast(torch.tensor([rank + 5], device=device), 1).tolist() == [6]
    uneven = torch.ones(1 + rank, 2, device=device)
    assert pad_across_processes(uneven).shape == (2, 2)
    assert [len(part) for part in accelerator.gather_for_metrics([uneven], use_gather_object=True)] == [1, 2]
    assert gather_object([{"rank": rank}]) == [{"rank": 0}, {"rank": 1}]
    assert broadcast_object_list([f"of {rank}"], 1) == ["of 1"]
    # What a program left on the CPU comes back to the CPU, though the group reaches devices alone.
    gathered = accelerator.gather(torch.tensor([rank]))
    assert (gathered.device.type, gathered.tolist()) == ("cpu", [0, 1])
    assert accelerator.weighted_mean(torch.tensor(1.0 + rank, device=device), 1 + 2 * rank).item() == 1.75
    accelerator.set_trigger() if rank else None
    assert accelerator.check_trigger()


@on_toy(devices=2)
def test_structures_are_sent() -> None:
    sent = send_to_device(
        {"a": [torch.ones(2)], "b": (torch.zeros(1), "text"), "c": torch.ones(1)}, "toy:1", skip_keys="c"
    )
    assert (sent["a"][0].device, sent["b"][0].device) == (torch.device("toy:1"), torch.device("toy:1"))
    assert (sent["b"][1], sent["c"].device.type) == ("text", "cpu")


def draws(device: torch.device | str) -> list[float]:
    own = torch.device(device)
    return [random.random(), float(numpy.random.rand()), torch.rand(1).item(), torch.rand(1, device=own).item()]


@pytest.mark.parametrize("devices", [1, 2])
@on_toy()
def test_a_seed_reaches_every_device(devices: int) -> None:
    for seeded in (lambda: set_seed(7), lambda: [Accelerator(), set_seed(7)]):
        seeded()
        first = [torch.rand(2, device=f"toy:{index}").tolist() for index in range(devices)]
        set_seed(7)
        assert first == [torch.rand(2).tolist()] * devices  # the numbers of the CPU
        assert [torch.rand(2, device=f"toy:{index}").tolist() for index in range(devices)] == first


@on_toy(processes=2)
def test_seeds_and_states_of_ranks() -> None:
    state = PartialState()
    accelerator = Accelerator()
    set_seed(7)
    same = accelerator.gather(torch.rand(1, device=state.device))
    assert same[0] == same[1]
    set_seed(7, device_specific=True)
    other = accelerator.gather(torch.rand(1, device=state.device))
    assert other[0] != other[1]
    generator = torch.Generator(device=state.device).manual_seed(state.process_index)
    synchronize_rng_states(["torch", "generator"], generator)
    drawn = torch.stack([torch.rand(1)[0], torch.rand(1, device=state.device, generator=generator)[0].cpu()])
    drawn = accelerator.gather(drawn.to(state.device)[None])
    assert torch.equal(drawn[0], drawn[1])


@on_toy(processes=2)
def test_ranks_agree_on_the_state_of_their_device() -> None:
    accelerator = fresh_accelerator()
    torch.toy.manual_seed_all(accelerator.process_index)
    synchronize_rng_state("toy")
    drawn = accelerator.gather(torch.rand(1, device=accelerator.device))
    assert drawn[0] == drawn[1]


@on_toy(processes=2)
def test_shuffled_loaders_agree_on_the_order() -> None:
    accelerator = Accelerator(rng_types=["torch", "toy"])
    torch.manual_seed(accelerator.process_index)
    loader = accelerator.prepare(DataLoader(Rows(8), batch_size=2, shuffle=True))
    for _ in range(2):
        seen = torch.cat([accelerator.gather(batch["number"]) for batch in loader])
        assert sorted(seen.tolist()) == list(range(8))
