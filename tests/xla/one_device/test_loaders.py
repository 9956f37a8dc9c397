"""Loaders of an XLA device: every sample once and in order, positions that count what was handed out, errors that are seen."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.training import Stream
from tests.support.xla import Task
from torch.utils.data import DataLoader, Dataset, TensorDataset

from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration


class Numbers(Dataset[Any]):
    """Numbers, one of which cannot be read."""

    def __init__(self, count: int, broken: int | None = None) -> None:
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.broken:
            raise OSError(f"sample {index} is on a bad sector")
        return torch.tensor(float(index))


def read(loader: Any) -> list[list[float]]:
    return [batch.cpu().tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_come_once_and_in_order(workers: int) -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Numbers(10), batch_size=4, num_workers=workers))
    assert read(loader) == read(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_sent_ahead_is_not_counted(workers: int) -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Numbers(40), batch_size=4, num_workers=workers))
    ends = []
    for number, batch in enumerate(loader, 1):
        assert batch.device == accelerator.device
        ends.append(accelerator.gradient_state.end_of_dataloader)
        assert loader.position.samples == (0 if ends[-1] else number * 4)
        if number == 3:
            saved = loader.state_dict()
    assert ends == [False] * 9 + [True]
    loader.load_state_dict(saved)
    assert read(loader) == [[float(4 * number + place) for place in range(4)] for number in range(3, 10)]


def test_the_error_of_a_sample_ends_the_loop_with_it() -> None:
    """torch_xla's own threads would end the loop as if the data were over."""
    loader = Accelerator().prepare(DataLoader(Numbers(40, broken=17), batch_size=4, num_workers=1))
    seen = []
    with pytest.raises(OSError, match="sample 17 is on a bad sector"):
        for batch in loader:
            seen += [batch.cpu().tolist()]
    assert len(seen) == 4


class Stuck:
    """A batch that cannot be moved."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Stuck:
        raise RuntimeError("this batch stays")


@pytest.mark.parametrize("workers", [0, 1])
def test_the_error_of_sending_ends_the_loop_with_it(workers: int) -> None:
    data = DataLoader(Numbers(4), batch_size=2, num_workers=workers, collate_fn=lambda rows: Stuck())
    with pytest.raises(RuntimeError, match="this batch stays"):
        list(Accelerator().prepare(data))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_can_be_left_and_begun_again(workers: int) -> None:
    loader = Accelerator().prepare(DataLoader(Numbers(40), batch_size=4, num_workers=workers))
    for batch in loader:
        assert batch.cpu().tolist() == [0, 1, 2, 3]
        break
    assert len(read(loader)) == 10
    assert read(skip_first_batches(loader, 8)) == [[32, 33, 34, 35], [36, 37, 38, 39]]


class Pair(NamedTuple):
    image: torch.Tensor
    name: str


class Images(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return {"pair": Pair(torch.full((2,), float(index)), f"image {index}"), "more": OrderedDict(place=index)}


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_keep_their_form(workers: int) -> None:
    from transformers import BatchEncoding

    accelerator = Accelerator()
    [batch] = accelerator.prepare(DataLoader(Images(), batch_size=4, num_workers=workers))
    assert (type(batch["pair"]), type(batch["more"])) == (Pair, OrderedDict)
    assert batch["pair"].name == tuple(f"image {index}" for index in range(4))
    assert batch["pair"].image.device == batch["more"]["place"].device == accelerator.device
    encode = DataLoader(Numbers(2), batch_size=2, collate_fn=lambda rows: BatchEncoding({"ids": torch.stack(rows)}))
    [encoded] = accelerator.prepare(encode)
    assert (type(encoded), encoded["ids"].device) == (BatchEncoding, accelerator.device)


def test_streams_are_read_to_their_end() -> None:
    accelerator = Accelerator()
    stream = Stream(TensorDataset(torch.arange(10.0)))
    loader = accelerator.prepare(DataLoader(stream, batch_size=4))
    assert [accelerator.gradient_state.end_of_dataloader for _ in loader] == [False, False, True]


def test_a_dispatcher_ends_steps_too() -> None:
    config = DataLoaderConfiguration(dispatch_batches=True)
    loader = Accelerator(dataloader_config=config).prepare(DataLoader(Numbers(6), batch_size=2))
    assert loader.ends_steps
    assert read(loader) == [[0, 1], [2, 3], [4, 5]]


def test_metrics_count_every_sample_once() -> None:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Numbers(10), batch_size=4))
    seen = torch.cat([accelerator.gather_for_metrics(batch) for batch in loader])
    assert seen.tolist() == list(range(10))


def test_stateful_loaders_say_where_they_stand() -> None:
    pytest.importorskip("torchdata")
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    loader = Accelerator(dataloader_config=config).prepare(DataLoader(Numbers(12), batch_size=2, num_workers=2))
    batches = iter(loader)
    assert [next(batches).cpu().tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    saved = loader.state_dict()
    batches.close()
    loader.load_state_dict(saved)
    assert read(loader)[0] == [4, 5]


def test_without_placement_the_program_moves_batches() -> None:
    accelerator = Accelerator(device_placement=False)
    model = Task().model().to(accelerator.device)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Task().loader(shuffle=True)
    )
    for inputs, _ in loader:
        assert inputs.device.type == "cpu"
        accelerator.backward(model(inputs.to(accelerator.device)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
