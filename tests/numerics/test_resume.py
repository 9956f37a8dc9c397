"""A run that was stopped and goes on, on any number of processes, sees each sample once and ends with the same weights."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.support.processes import run_group
from tests.support.resuming import (
    CASES,
    COUNTS,
    SAMPLES,
    TRAININGS,
    Case,
    Curve,
    Numbers,
    Training,
    finish_all,
    merged,
    save_all,
    train,
)
from tests.support.training import assert_same_weights, fresh_accelerator
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accelerate import Accelerator
from accelerate._base.errors import CheckpointError
from accelerate.checkpointing.parts import LoadOptions
from accelerate.data_loader import skip_first_batches
from accelerate.strategies.ddp import BucketOrderPart
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, GradScalerKwargs, set_seed

PAIRS = [(before, after) for before in COUNTS for after in COUNTS]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[str, list[Any]]]:
    """Every case, saved on every number of processes: the folder, and what each rank saw."""
    root = tmp_path_factory.mktemp("saved")
    return {count: (str(root / str(count)), run_group(save_all, count, str(root / str(count)))) for count in COUNTS}


@pytest.fixture(scope="module")
def finished(saved: dict[int, tuple[str, list[Any]]]) -> dict[tuple[int, int], list[Any]]:
    """Every case, finished: what each rank saw, by the numbers of processes before and after."""
    found = {}
    for after in COUNTS:
        ranks = run_group(finish_all, after, tuple(folder for folder, _ in saved.values()))
        for index, before in enumerate(COUNTS):
            found[before, after] = [rank[index] for rank in ranks]
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda count: str(count))
def test_each_sample_of_each_epoch_is_seen_once(
    saved: dict[int, tuple[str, list[Any]]],
    finished: dict[tuple[int, int], list[Any]],
    before: int,
    after: int,
    case: Case,
) -> None:
    first = merged([rank[case.name] for rank in saved[before][1]], case.epoch)
    ranks = [rank[case.name] for rank in finished[before, after]]
    assert sorted(first + merged(ranks, case.epoch)) == list(range(SAMPLES))
    if following := merged(ranks, case.epoch + 1):
        assert sorted(following) == list(range(SAMPLES))
    else:
        assert (case.workers, case.epoch) == (2, 1)
    if case.kind == "map" and following:
        # The order of a later epoch depends on its number alone.
        undisturbed = [rank["map-epoch0-workers0"] for rank in finished[1, 1]]
        assert case.epoch or following == merged(undisturbed, 1)


@cache
def uninterrupted(training: Training) -> Curve:
    """The same run on one process, never stopped."""
    return train(training, None, resumes=False)


@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.name)
@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda count: str(count))
def test_a_global_batch_size_gives_the_same_curve_across_a_resume(
    finished: dict[tuple[int, int], list[Any]], before: int, after: int, training: Training
) -> None:
    whole = uninterrupted(training)
    for rank in finished[before, after]:
        curve = rank[training.name]
        assert_same_weights(curve.weights, whole.weights)
        assert curve.rates == whole.rates[-len(curve.rates) :]
        # The first window may have been open: its loss was begun before.
        rest = curve.losses[1:]
        assert rest == pytest.approx(whole.losses[-len(rest) :], abs=1e-10)
        assert len(whole.losses) == 12


# --- one process: bit for bit ----------------------------------------------------------------------------------------

BATCHES = 6


@dataclass(frozen=True)
class Variant:
    """A way to train and to save."""

    name: str
    accelerator: dict[str, Any] = field(default_factory=dict)
    saving: dict[str, Any] = field(default_factory=dict)
    workers: int = 0
    keeps_workers: bool = False
    counts_items: bool = False


VARIANTS = [
    Variant("plain"),
    Variant("seeded order", {"dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True)}),
    Variant("workers", workers=2),
    Variant("persistent workers", workers=2, keeps_workers=True),
    Variant("torchdata", {"dataloader_config": DataLoaderConfiguration(use_stateful_dataloader=True)}),
    Variant(
        "torchdata, persistent workers",
        {"dataloader_config": DataLoaderConfiguration(use_stateful_dataloader=True)},
        workers=2,
        keeps_workers=True,
    ),
    Variant("open windows", {"gradient_accumulation_steps": 4}),
    Variant("open windows of items", {"gradient_accumulation_steps": 4}, counts_items=True),
    Variant("global batch size", {"global_batch_size": 10}),
    Variant("fp16", {"mixed_precision": "fp16", "kwargs_handlers": [GradScalerKwargs(growth_interval=2)]}),
    Variant("pickled weights", saving={"safe_serialization": False}),
    Variant("in the background", saving={"blocking": False}),
]


@dataclass
class Result:
    """What a run leaves."""

    seen: list[list[int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)


class Program:
    """A training program with everything that draws random numbers."""

    def __init__(self, variant: Variant, seed: int) -> None:
        set_seed(seed)
        self.variant = variant
        self.accelerator = fresh_accelerator(**variant.accelerator)
        model = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        loader = DataLoader(
            Numbers(),
            batch_size=7,
            shuffle=True,
            num_workers=variant.workers,
            persistent_workers=variant.keeps_workers,
        )
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, loader
        )

    def train(self, result: Result, stops_after: int | None = None) -> None:
        accelerator = self.accelerator
        for _ in accelerator.epochs(3):
            for batch in self.loader:
                result.seen.append([int(number) for number in batch[:, 0]])
                with accelerator.accumulate(self.model):
                    # Every generator takes part in the numbers.
                    noise = random.random() + numpy.random.rand() + torch.rand(()).item()
                    rows = (self.model(batch.float() / 40) - noise) ** 2
                    if self.variant.counts_items:
                        accelerator.backward(rows.sum(), num_items=float(len(rows) + len(result.seen)))
                    else:
                        accelerator.backward(rows.mean())
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                result.losses.append(rows.mean().item())
                if len(result.seen) == stops_after:
                    return
        scaler = accelerator.scaler
        result.state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "progress": accelerator.progress.state_dict(),
            "torch": torch.get_rng_state(),
        }


def assert_identical(found: Any, expected: Any, where: str = "") -> None:
    """Compare nested values to the last bit."""
    assert type(found) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_identical(found[key], value, f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_identical(found[index], value, f"{where}[{index}]")
    else:
        assert found == expected, where


@cache
def whole_run(variant_name: str) -> Result:
    result = Result()
    Program(next(variant for variant in VARIANTS if variant.name == variant_name), seed=3).train(result)
    return result


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("stops_after", [1, BATCHES - 1, BATCHES, BATCHES + 3])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_one_process_ends_bit_for_bit_like_the_run_never_stopped(
    variant: Variant, stops_after: int, tmp_path: Path
) -> None:
    result = Result()
    first = Program(variant, seed=3)
    first.train(result, stops_after)
    first.accelerator.save_state(tmp_path / "saved", **variant.saving)
    first.accelerator.wait_for_save()
    second = Program(variant, seed=77)
    second.accelerator.load_state(tmp_path / "saved")
    second.train(result)
    whole = whole_run(variant.name)
    assert result.seen == whole.seen
    assert result.losses == whole.losses
    assert_identical(result.state, whole.state)


# --- the order of sums -----------------------------------------------------------------------------------------------

OF_FOUR = {
    "after the first exchange": (1, {}),
    "after the second": (2, {}),
    "later": (3, {}),
    "inside a window": (3, {"gradient_accumulation_steps": 2}),
    "views into buckets": (2, {"kwargs_handlers": [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]}),
    "unused parameters": (2, {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]}),
}


def train_on_four(folder: str, options: dict[str, Any], stops_after: int | None = None, resumes: bool = False) -> Any:
    """Train a model whose gradients DDP sums in another order from the second step on; return its weights."""
    accelerator = fresh_accelerator(**options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [torch.nn.Linear(37, 51), torch.nn.Linear(51, 29), torch.nn.Linear(29, 3)]
    data = torch.randn(6 * 4 * 5, 37, generator=torch.Generator().manual_seed(1))
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=5))
    if resumes:
        accelerator.load_state(folder)
    for step, batch in enumerate(loader, 1):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if step == stops_after:
            accelerator.save_state(folder)
            return None
    return [parameter.detach() for parameter in model.parameters()]


def differences_on_four(folder: str) -> dict[str, float]:
    found = {}
    for name, (stops_after, options) in OF_FOUR.items():
        straight = train_on_four(folder, options)
        train_on_four(f"{folder}/{name}", options, stops_after)
        resumed = train_on_four(f"{folder}/{name}", options, resumes=True)
        found[name] = max((one - other).abs().max().item() for one, other in zip(straight, resumed, strict=True))
    return found


def test_four_processes_end_bit_for_bit_like_the_run_never_stopped(tmp_path: Path) -> None:
    assert run_group(differences_on_four, 4, str(tmp_path)) == [dict.fromkeys(OF_FOUR, 0.0)] * 4


@pytest.mark.parametrize("content", ["{", '{"order": 1}', "[1]"])
def test_a_broken_bucket_order_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "bucket_order.json").write_text(content)
    part = BucketOrderPart(torch.nn.Linear(1, 1), 0, 0)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"bucket_order\.json"):
        part.read(tmp_path, LoadOptions())


# --- the loops of programs -------------------------------------------------------------------------------------------


def prepare_numbers(**config: Any) -> tuple[Accelerator, Any, Any, Any, Any]:
    """Return an accelerator with a model, an optimizer, a loader to train with and one to evaluate with."""
    accelerator = fresh_accelerator(
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=8, **config)
    )
    model = torch.nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    loaders = [DataLoader(Numbers(), batch_size=4, shuffle=True), DataLoader(Numbers(), batch_size=5)]
    return accelerator, *accelerator.prepare(model, optimizer, *loaders)


def step(accelerator: Accelerator, model: Any, optimizer: Any, batch: torch.Tensor) -> list[int]:
    accelerator.backward(model(batch).mean())
    optimizer.step()
    optimizer.zero_grad()
    return [int(number) for number in batch[:, 0]]


def whole_order() -> list[list[list[int]]]:
    accelerator, model, optimizer, loader, _ = prepare_numbers()
    return [[step(accelerator, model, optimizer, batch) for batch in loader] for _ in range(3)]


@pytest.mark.parametrize("stateful", [False, True], ids=["plain", "torchdata"])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_the_loop_of_programs_that_skip_by_themselves_lands_on_the_same_batch(tmp_path: Path, stateful: bool) -> None:
    whole = whole_order()
    accelerator, model, optimizer, loader, _ = prepare_numbers(use_stateful_dataloader=stateful)
    seen: list[list[int]] = []
    for epoch in range(2):
        for number, batch in enumerate(loader):
            seen.append(step(accelerator, model, optimizer, batch))
            if epoch == 1 and number == 3:
                break
    accelerator.save_state(tmp_path / "first")

    for folder in ("first", "second"):  # the second is saved while the skipping loader is read
        accelerator, model, optimizer, loader, _ = prepare_numbers(use_stateful_dataloader=stateful)
        accelerator.load_state(tmp_path / folder)
        done = len(seen) - len(whole[0])
        assert loader.position.samples == 4 * done
        for epoch in range(1, 3):
            loader.set_epoch(epoch)
            active = skip_first_batches(loader, done) if epoch == 1 else loader
            for batch in active:
                seen.append(step(accelerator, model, optimizer, batch))
                if folder == "first" and len(seen) == len(whole[0]) + 6:
                    assert loader.position.samples == 24
                    accelerator.save_state(tmp_path / "second")
                    break
            else:
                continue
            break
    assert seen == whole[0] + whole[1] + whole[2]


def train_and_skip(folder: str, stops: tuple[int, int] | None, resumes: bool) -> dict[str, Any]:
    """Train as programs do that count the batches of an epoch and skip those that were seen; save where it stops."""
    accelerator = fresh_accelerator()
    set_seed(77 if resumes else 3)
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    start, done = 0, 0
    if resumes:
        accelerator.load_state(folder)
        start, done = map(int, Path(folder, "place.txt").read_text().split())
    seen: list[list[int]] = []
    losses: list[float] = []
    for epoch in range(start, 3):
        active = accelerator.skip_first_batches(loader, done) if epoch == start and done else loader
        for number, batch in enumerate(active, start=done + 1 if epoch == start else 1):
            loss = model(batch / 40).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            seen.append([int(value) for value in batch[:, 0]])
            losses.append(loss.item())
            if (epoch, number) == stops:
                accelerator.save_state(folder)
                Path(folder, "place.txt").write_text(f"{epoch} {number}")
                return {"seen": seen, "losses": losses}
    weights = {name: value.tolist() for name, value in accelerator.unwrap_model(model).state_dict().items()}
    return {"seen": seen, "losses": losses, "weights": weights}


@pytest.mark.multiprocess
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("stops", [(0, 2), (1, 3)], ids=["first epoch", "later epoch"])
def test_a_run_that_skips_the_first_batches_ends_like_the_one_never_stopped(
    tmp_path: Path, stops: tuple[int, int], count: int
) -> None:
    folder = str(tmp_path / "saved")
    whole = run_group(train_and_skip, count, folder, None, False)
    before = run_group(train_and_skip, count, folder, stops, False)
    after = run_group(train_and_skip, count, folder, None, True)
    for uninterrupted, first, second in zip(whole, before, after, strict=True):
        assert first["seen"] + second["seen"] == uninterrupted["seen"]
        assert first["losses"] + second["losses"] == uninterrupted["losses"]
        assert second["weights"] == uninterrupted["weights"]


def test_positions_are_left_alone_if_asked(tmp_path: Path) -> None:
    whole = whole_order()
    accelerator, model, optimizer, loader, _ = prepare_numbers()
    for batch in loader:
        step(accelerator, model, optimizer, batch)
        break
    accelerator.save_state(tmp_path / "saved")
    accelerator, _, _, loader, _ = prepare_numbers(restore_position=False)
    accelerator.load_state(tmp_path / "saved")
    assert (loader.position.epoch, loader.position.samples) == (0, 0)
    assert [[int(number) for number in batch[:, 0]] for batch in loader] == whole[0]


@pytest.mark.parametrize("inside", [False, True], ids=["after the epoch", "inside the training loop"])
def test_an_evaluation_that_was_stopped_starts_anew_and_training_goes_on(tmp_path: Path, inside: bool) -> None:
    whole = whole_order()
    accelerator, model, optimizer, loader, held_out = prepare_numbers()
    stop = 4 if inside else len(whole[0])
    seen: list[list[int]] = []
    for batch in loader:
        seen.append(step(accelerator, model, optimizer, batch))
        if len(seen) == stop:
            for number, _ in enumerate(held_out):
                if number == 2:
                    accelerator.save_state(tmp_path / "saved")
                    break
            break
    accelerator, model, optimizer, loader, held_out = prepare_numbers()
    accelerator.load_state(tmp_path / "saved")
    for epoch in accelerator.epochs(2):
        assert epoch == (0 if inside or len(seen) > stop else 1)
        seen += [step(accelerator, model, optimizer, batch) for batch in loader]
        assert len(torch.cat([accelerator.gather_for_metrics(batch) for batch in held_out])) == SAMPLES
        break
    assert seen == (whole[0] if inside else whole[0] + whole[1])


def test_a_run_without_training_goes_on_inside_its_evaluation(tmp_path: Path) -> None:
    accelerator, _, _, _, held_out = prepare_numbers()
    for number, _ in enumerate(held_out):
        if number == 2:
            accelerator.save_state(tmp_path / "saved")
            break
    accelerator, _, _, _, held_out = prepare_numbers()
    accelerator.load_state(tmp_path / "saved")
    assert torch.cat(list(held_out))[:, 0].tolist() == list(range(15, SAMPLES))


# --- saved between two epochs ----------------------------------------------------------------------------------------


class Words(IterableDataset):
    """Numbers that workers divide among themselves."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(start, SAMPLES, step))


class CountedPasses(Words):
    """A dataset that counts how often it was read, and saves that."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return (number + 100 * self.passes for number in super().__iter__())

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes = state["passes"]


BETWEEN: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "in order": (lambda: {"dataset": range(SAMPLES)}, {}),
    "shuffled": (lambda: {"dataset": range(SAMPLES), "shuffle": True}, {}),
    "generator": (
        lambda: {"dataset": range(SAMPLES), "shuffle": True, "generator": torch.Generator().manual_seed(2)},
        {},
    ),
    "seeded": (lambda: {"dataset": range(SAMPLES), "shuffle": True}, {"use_seedable_sampler": True, "data_seed": 5}),
    "dispatched": (lambda: {"dataset": range(SAMPLES), "shuffle": True}, {"dispatch_batches": True}),
    "stream": (lambda: {"dataset": Words()}, {"dispatch_batches": False}),
    "dispatched stream": (lambda: {"dataset": Words()}, {"dispatch_batches": True}),
    "stateful stream": (lambda: {"dataset": CountedPasses()}, {"dispatch_batches": True}),
}


def epochs_after_each_save(folder: str) -> dict[str, Any]:
    """Return which epochs differ from those of the run that never stopped, by how it is read and where it was saved."""
    found: dict[str, Any] = {}
    persistent = {"num_workers": 2, "persistent_workers": True}
    for (kind, (data, config)), stateful, reading in product(BETWEEN.items(), (False, True), ({}, persistent)):
        if (not stateful and not reading) or (kind == "stateful stream" and reading):
            continue
        name = f"{kind}, {stateful}, {len(reading)}"

        def start(
            data: Any = data, config: Any = config, stateful: bool = stateful, reading: Any = reading
        ) -> tuple[Accelerator, Any]:
            options = DataLoaderConfiguration(use_stateful_dataloader=stateful, **config)
            accelerator = fresh_accelerator(dataloader_config=options)
            set_seed(7, device_specific=True)
            return accelerator, accelerator.prepare(DataLoader(**data(), batch_size=6, **reading))

        def epoch(loader: Any) -> tuple[list[list[int]], float, float]:
            batches = [batch.tolist() for batch in loader if torch.rand(()) < 2 and random.random() < 2]
            return batches, torch.rand(()).item(), random.random()

        accelerator, loader = start()
        whole = []
        for number in range(3):
            accelerator.save_state(f"{folder}/{name}/{number}")
            whole.append(epoch(loader))
        for number in range(3):
            accelerator, loader = start()
            accelerator.load_state(f"{folder}/{name}/{number}")
            for later in range(number, 3):
                if epoch(loader) != whole[later]:
                    found.setdefault(name, []).append((number, later))
    return found


@pytest.mark.multiprocess
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("count", [1, 2])
def test_epochs_after_a_save_between_two_are_those_of_the_run_never_stopped(tmp_path: Path, count: int) -> None:
    assert run_group(epochs_after_each_save, count, str(tmp_path)) == [{}] * count
