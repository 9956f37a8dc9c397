"""The counters of a run: updates, samples, epochs."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator
from accelerate.runtime.gradient_clock import Progress
from accelerate.utils import DataLoaderConfiguration

ROWS = torch.arange(20.0).reshape(10, 2)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(ROWS)


class VaryingBatches:
    """A batch sampler whose batches have different sizes: only its notes tell how many samples were handed out."""

    batch_size = None
    drop_last = False

    def __iter__(self) -> Any:
        return iter([[0, 1, 2], [3], [4, 5, 6, 7], [8, 9]])

    def __len__(self) -> int:
        return 4


def prepared(loader: DataLoader[Any], **options: Any) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(cpu=True, **options)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def train(accelerator: Accelerator, model: Any, optimizer: Any, batch: torch.Tensor) -> None:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()


def counters(accelerator: Accelerator) -> tuple[int, int, int]:
    progress = accelerator.progress
    return progress.epoch, progress.step, progress.samples


def test_updates_and_samples_are_counted_batch_by_batch() -> None:
    accelerator, model, optimizer, loader = prepared(DataLoader(ROWS, batch_size=4), gradient_accumulation_steps=2)
    seen = []
    for _ in accelerator.epochs(2):
        for batch in loader:
            train(accelerator, model, optimizer, batch)
            seen.append(counters(accelerator))
    assert seen == [(0, 0, 4), (0, 1, 8), (0, 2, 10), (1, 2, 14), (1, 3, 18), (1, 4, 20)]
    assert counters(accelerator) == (2, 4, 20)


@pytest.mark.parametrize(
    ("loader", "options"),
    [
        (DataLoader(ROWS, batch_size=3), {}),
        (DataLoader(Stream(), batch_size=3), {}),
        (DataLoader(Stream(), batch_size=3, num_workers=2), {}),
        (DataLoader(ROWS, batch_sampler=VaryingBatches()), {}),  # type: ignore[arg-type]
        (DataLoader(ROWS, batch_size=3), {"global_batch_size": 4}),
        (DataLoader(ROWS, batch_size=3), {"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)}),
    ],
    ids=["map", "iterable", "iterable with workers", "varying", "global batch", "dispatched"],
)
def test_every_kind_of_loader_is_counted(loader: DataLoader[Any], options: dict[str, Any]) -> None:
    accelerator, model, optimizer, prepared_loader = prepared(loader, **options)
    rows = 0
    for _ in accelerator.epochs(3):
        for batch in prepared_loader:
            train(accelerator, model, optimizer, batch)
            rows += len(batch)
            assert accelerator.progress.samples == rows
    assert rows >= 30


def test_an_evaluation_and_a_second_training_loader() -> None:
    accelerator, model, optimizer, loader = prepared(DataLoader(ROWS, batch_size=5))
    other, evaluation = accelerator.prepare(DataLoader(ROWS[:4], batch_size=2), DataLoader(ROWS, batch_size=10))
    for batch in loader:
        train(accelerator, model, optimizer, batch)
        for inner in other:
            train(accelerator, model, optimizer, inner)
        for unused in evaluation:
            model(unused)
    assert counters(accelerator) == (0, 6, 18)


def test_a_loop_without_a_window_counts_too() -> None:
    accelerator, model, optimizer, loader = prepared(DataLoader(ROWS, batch_size=5))
    second = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step()
        second.step()  # updates of the run are those of the first optimizer
    assert counters(accelerator) == (0, 2, 10)


def test_the_epoch_to_go_on_with_is_the_next_one_from_the_last_batch_on() -> None:
    accelerator, model, optimizer, loader = prepared(DataLoader(ROWS, batch_size=4))
    states = []
    for _ in accelerator.epochs(2):
        states.append(accelerator.progress.state_dict()["epoch"])
        for batch in loader:
            train(accelerator, model, optimizer, batch)
            states.append(accelerator.progress.state_dict()["epoch"])
        states.append(accelerator.progress.state_dict()["epoch"])
    assert states == [0, 0, 0, 1, 1, 1, 1, 1, 2, 2]


def test_epochs_go_on_where_the_run_stood() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.progress.load_state_dict({"epoch": 3, "step": 7, "samples": 70})
    assert list(accelerator.epochs(5)) == [3, 4]
    assert list(accelerator.epochs(5)) == []
    accelerator.free_memory()
    assert list(accelerator.epochs(2)) == [0, 1]


def test_a_restored_count_goes_on() -> None:
    accelerator, model, optimizer, loader = prepared(DataLoader(ROWS, batch_size=2))
    accelerator.progress.load_state_dict({"epoch": 1, "step": 7, "samples": 14})
    state = loader.state_dict()
    loader.load_state_dict({**state, "epoch": 1, "samples": 4})
    for batch in loader:
        train(accelerator, model, optimizer, batch)
    assert counters(accelerator) == (1, 10, 20)
    assert accelerator.progress.next_epoch == 2


def test_it_can_be_copied_by_pickle_inside_a_loop() -> None:
    accelerator, model, optimizer, loader = prepared(DataLoader(ROWS, batch_size=5))
    for batch in loader:
        train(accelerator, model, optimizer, batch)
        assert pickle.loads(pickle.dumps(accelerator.progress)) == accelerator.progress
    assert repr(accelerator.progress) == "Progress(epoch=0, step=2, samples=10)"
    assert Progress(1, 2, 3) != Progress(1, 2, 4)
