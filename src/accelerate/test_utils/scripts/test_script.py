"""The self-check of `accelerate test`: what a run relies on, tried on the processes that are configured."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accelerate.accelerator import Accelerator
from accelerate.collectives.ops import (
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from accelerate.collectives.rng import set_seed, synchronize_rng_states
from accelerate.config.plugins.training import DataLoaderConfiguration, GradientAccumulationPlugin, GradScalerKwargs
from accelerate.data_loader import skip_first_batches
from accelerate.devices import registry
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.test_utils.checkpoint_check import check_checkpoint
from accelerate.test_utils.self_check import Check, Noticeboard, expect, expect_close, noticeboard, run_checks

FEATURES = 4
BATCH = 4
STEPS = 4
# A number of samples that no number of processes and no batch size divides.
SAMPLES = 41


class Pair(NamedTuple):
    """A container that must come back as it was."""

    mask: torch.Tensor
    half: torch.Tensor


def fresh_accelerator(**options: Any) -> Accelerator:
    """Return an `Accelerator` with other settings in the same process group."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    options.setdefault("mixed_precision", "no")
    options.setdefault("gradient_accumulation_plugin", GradientAccumulationPlugin(num_steps=1))
    return Accelerator(**options)


# --- processes --------------------------------------------------------------------------------------------------------


def check_processes(board: Noticeboard) -> None:
    """Ranks are those of the launcher, and decorated functions run where they should."""
    state = PartialState()
    ranks = gather_object([state.process_index])
    expect(ranks, list(range(state.num_processes)), "the ranks")
    ran: list[str] = []
    state.on_main_process(lambda: ran.append("main"))()
    state.on_last_process(lambda: ran.append("last"))()
    state.on_process(lambda: ran.append("first"), process_index=0)()
    wanted = ["main"] if board.rank == 0 else []
    wanted += ["last"] if board.rank == board.world_size - 1 else []
    wanted += ["first"] if board.rank == 0 else []
    expect(ran, wanted, "the functions that are limited to one process")


def check_order(board: Noticeboard) -> None:
    """The main process goes first, and everyone waits for the last."""
    state = PartialState()
    with state.main_process_first():
        expect(board.rank == 0 or board.has("went/0"), True, "main_process_first: the main process being done")
        board.post(f"went/{board.rank}", "")
    state.wait_for_everyone()
    for rank in range(board.world_size):
        expect(board.has(f"went/{rank}"), True, f"wait_for_everyone: rank {rank} being there")


def check_shares(board: Noticeboard) -> None:
    """Work that is split is done once."""
    items = [f"item {number}" for number in range(2 * board.world_size + 1)]
    with PartialState().split_between_processes(items) as mine:
        expect(gather_object(list(mine)), items, "split_between_processes")


def check_random(board: Noticeboard) -> None:
    """Seeds make the same numbers everywhere, or others on each process, as asked."""
    device = PartialState().device
    set_seed(42)
    _expect_same_everywhere(torch.rand(3, device=device), "set_seed")
    torch.manual_seed(board.rank)
    synchronize_rng_states(["torch"])
    _expect_same_everywhere(torch.rand(3).to(device), "synchronize_rng_states")
    set_seed(42, device_specific=True)
    rows = gather(torch.rand(1, 3).to(device))
    expect(len({tuple(row) for row in rows.tolist()}), board.world_size, "set_seed(device_specific=True): the streams")


def _expect_same_everywhere(tensor: torch.Tensor, what: str) -> None:
    for rank, row in enumerate(gather(tensor[None])):
        expect(row, tensor, f"{what} on rank {rank}")


# --- collectives ------------------------------------------------------------------------------------------------------


def nested(rank: int, device: torch.device) -> dict[str, Any]:
    """Return every kind of nested data, with other values on each rank."""
    return {
        "matrix": torch.full((2, 3), float(rank), device=device),
        "list": [torch.arange(2, device=device) + 10 * rank, torch.tensor(rank, device=device)],
        "pair": Pair(
            torch.tensor([rank % 2 == 0], device=device),
            torch.full((1, 2), rank, dtype=torch.bfloat16, device=device),
        ),
        "tuple": (torch.zeros(0, 2, device=device), {"deep": torch.full((1,), rank, dtype=torch.uint8, device=device)}),
    }


def _leaves(data: Any) -> list[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        return [data]
    entries = data.values() if isinstance(data, dict) else data
    return [leaf for entry in entries for leaf in _leaves(entry)]


def _of_all_ranks(board: Noticeboard) -> list[tuple[torch.Tensor, ...]]:
    """Return each leaf of the nested data as all ranks have it."""
    device = PartialState().device
    return list(zip(*(_leaves(nested(rank, device)) for rank in range(board.world_size)), strict=True))


def check_gather(board: Noticeboard) -> None:
    """Nested data of all ranks is joined, in the same containers."""
    found = gather(nested(board.rank, PartialState().device))
    expect((type(found["list"]), type(found["pair"]), type(found["tuple"])), (list, Pair, tuple), "gather: containers")
    for leaf, parts in zip(_leaves(found), _of_all_ranks(board), strict=True):
        wanted = torch.cat([part.reshape(1) if part.ndim == 0 else part for part in parts])
        expect(leaf, wanted if board.world_size > 1 else parts[0], "gather")
    objects = [{"rank": board.rank, "text": "é" * board.rank}, None]
    wanted_objects = [entry for rank in range(board.world_size) for entry in ({"rank": rank, "text": "é" * rank}, None)]
    expect(gather_object(objects), wanted_objects, "gather_object")


def check_broadcast(board: Noticeboard) -> None:
    """Data of one rank reaches all others."""
    device = PartialState().device
    for source in {0, board.world_size - 1}:
        found = broadcast(nested(board.rank, device), from_process=source)
        for leaf, wanted in zip(_leaves(found), _leaves(nested(source, device)), strict=True):
            expect(leaf, wanted, f"broadcast from rank {source}")
        words = [{"from": board.rank}, "x" * (board.rank + 1)]
        expect(
            broadcast_object_list(words, from_process=source),
            [{"from": source}, "x" * (source + 1)],
            f"broadcast_object_list from rank {source}",
        )


def check_reduce(board: Noticeboard) -> None:
    """Sums and means go over all ranks."""
    device = PartialState().device
    own = {"a": torch.full((2,), float(board.rank), device=device), "b": [torch.ones(1, 2, device=device)]}
    total = board.world_size * (board.world_size - 1) / 2
    summed = reduce(own, "sum")
    expect(summed["a"], torch.full((2,), total), "reduce by sum")
    expect(summed["b"][0], torch.full((1, 2), float(board.world_size)), "reduce by sum")
    expect(reduce(own, "mean")["a"], torch.full((2,), total / board.world_size), "reduce by mean")


def check_padding(board: Noticeboard) -> None:
    """Tensors of unequal length are made equal."""
    own = torch.ones(board.rank + 1, 2, device=PartialState().device)
    for first in (False, True):
        padded = pad_across_processes([own], pad_index=7, pad_first=first)[0]
        fill = torch.full((board.world_size - board.rank - 1, 2), 7.0, device=own.device)
        expect(padded, torch.cat([fill, own] if first else [own, fill]), f"pad_across_processes(pad_first={first})")


# --- loaders ----------------------------------------------------------------------------------------------------------


class Stream(IterableDataset[torch.Tensor]):
    """Samples without an index."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(SAMPLES)


def _seen(accelerator: Accelerator, loader: Any) -> list[int]:
    return [int(sample) for batch in loader for sample in accelerator.gather_for_metrics(batch)]


def _numbers(**options: Any) -> Any:
    return DataLoader(torch.arange(SAMPLES), batch_size=BATCH, **options)  # type: ignore[arg-type]


def check_sharded_loader(board: Noticeboard) -> None:
    """Each sample is seen once, in order, by all processes together."""
    accelerator = fresh_accelerator(dataloader_config=DataLoaderConfiguration())
    expect(_seen(accelerator, accelerator.prepare(_numbers())), list(range(SAMPLES)), "the loader")
    stream = accelerator.prepare(DataLoader(Stream(), batch_size=BATCH))
    expect(sorted(_seen(accelerator, stream)), list(range(SAMPLES)), "the loader of an iterable dataset")
    loader = accelerator.prepare(_numbers())
    done = BATCH * board.world_size
    rest = list(range(done, SAMPLES)) if done < SAMPLES else []
    expect(_seen(accelerator, skip_first_batches(loader, 1)), rest, "skip_first_batches")


def _seeded_accelerator() -> Accelerator:
    return fresh_accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))


def check_shuffled_loader(board: Noticeboard) -> None:
    """A shuffled epoch holds each sample once, and the next one has another order."""
    accelerator = _seeded_accelerator()
    set_seed(7)
    loader = accelerator.prepare(_numbers(shuffle=True))
    first, second = _seen(accelerator, loader), _seen(accelerator, loader)
    expect(sorted(first), list(range(SAMPLES)), "the first shuffled epoch")
    expect(sorted(second), list(range(SAMPLES)), "the second shuffled epoch")
    expect(first != second, True, "two epochs having different orders")


def check_dispatched_loader(board: Noticeboard) -> None:
    """Batches that the main process reads for all reach each process once."""
    accelerator = fresh_accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    expect(_seen(accelerator, accelerator.prepare(_numbers())), list(range(SAMPLES)), "the dispatching loader")
    stream = accelerator.prepare(DataLoader(Stream(), batch_size=BATCH))
    expect(_seen(accelerator, stream), list(range(SAMPLES)), "the dispatching loader of an iterable dataset")


def check_split_loader(board: Noticeboard) -> None:
    """The batch of the script is shared by all processes."""
    accelerator = fresh_accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    size = BATCH * board.world_size
    loader = accelerator.prepare(DataLoader(torch.arange(4 * size), batch_size=size))  # type: ignore[arg-type]
    sizes = {len(batch) for batch in loader}
    expect(sizes, {BATCH}, "split_batches: rows on this process")
    expect(_seen(accelerator, loader), list(range(4 * size)), "split_batches")


# --- training ---------------------------------------------------------------------------------------------------------


def _task(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    return TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))


def _model() -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def _sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _alone(rows: int, batch: int) -> dict[str, torch.Tensor]:
    """Train in this process only, by plain torch, with the batches that all processes have together."""
    model, data = _model(), _task(rows)
    optimizer = _sgd(model)
    for inputs, targets in DataLoader(data, batch_size=batch):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return model.state_dict()


def _together(accelerator: Accelerator, rows: int) -> dict[str, torch.Tensor]:
    model = _model()
    model, optimizer, loader = accelerator.prepare(model, _sgd(model), DataLoader(_task(rows), batch_size=BATCH))
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs).float(), targets))
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.get_state_dict(model)


def _expect_same_weights(found: dict[str, Any], wanted: dict[str, Any], what: str, tolerance: float) -> None:
    expect(sorted(found), sorted(wanted), f"{what}: the names of the weights")
    for name, value in wanted.items():
        expect_close(found[name], value, f"{what}: {name}", tolerance)


def check_training(board: Noticeboard) -> None:
    """All processes together train as one would."""
    rows = STEPS * BATCH * board.world_size
    found = _together(fresh_accelerator(), rows)
    _expect_same_weights(found, _alone(rows, BATCH * board.world_size), "training", 1e-5)


def check_accumulation(board: Noticeboard) -> None:
    """Two accumulated batches train as one of twice the size."""
    rows = STEPS * BATCH * board.world_size
    plugin = GradientAccumulationPlugin(num_steps=2)
    found = _together(fresh_accelerator(gradient_accumulation_plugin=plugin), rows)
    _expect_same_weights(found, _alone(rows, 2 * BATCH * board.world_size), "accumulation", 1e-5)


def check_precision(board: Noticeboard) -> None:
    """The formats of this device compute in fewer bits and end near the full ones."""
    rows = STEPS * BATCH * board.world_size
    wanted = _alone(rows, BATCH * board.world_size)
    device = PartialState().device
    formats = {"bf16": torch.bfloat16, "fp16": torch.float16}
    for name, dtype in formats.items():
        if not registry.get(device).supports_autocast(str(dtype).removeprefix("torch.")):
            continue
        # At the usual scale fp16 leaves out the first steps, and the weights could not be compared.
        accelerator = fresh_accelerator(mixed_precision=name, kwargs_handlers=[GradScalerKwargs(init_scale=64.0)])
        with accelerator.autocast():
            square = torch.ones(2, 2, device=accelerator.device)
            expect((square @ square).dtype, dtype, f"{name}: the type of a product")
        _expect_same_weights(_together(accelerator, rows), wanted, name, 0.02)


def check_round_trip(board: Noticeboard) -> None:
    """Optimizer and scheduler go on from a saved state as if they had never stopped."""
    accelerator = fresh_accelerator()
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2 * board.world_size, gamma=0.5)
    loader = DataLoader(_task(STEPS * BATCH * board.world_size), batch_size=BATCH)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    def epoch() -> tuple[dict[str, Any], list[float]]:
        for inputs, targets in loader:
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            with warnings.catch_warnings():
                # That it advances once for each process is what the numbers above count with.
                warnings.filterwarnings("ignore", message="This schedule advances")
                scheduler.step()
            optimizer.zero_grad()
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        return weights, scheduler.get_last_lr()

    saved_weights, _ = epoch()
    saved = _copy(optimizer.state_dict()), _copy(scheduler.state_dict())
    weights, rates = epoch()
    epoch()
    model.load_state_dict(saved_weights)
    optimizer.load_state_dict(saved[0])
    scheduler.load_state_dict(saved[1])
    again, rates_again = epoch()
    expect(rates_again, rates, "the learning rate after loading")
    _expect_same_weights(again, weights, "weights after loading", 0.0)


def _copy(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return data.detach().clone()
    if isinstance(data, dict):
        return {key: _copy(value) for key, value in data.items()}
    return [_copy(value) for value in data] if isinstance(data, list) else data


CHECKS = (
    Check("processes and their functions", check_processes),
    Check("the main process first, everyone together", check_order),
    Check("work that is split", check_shares),
    Check("random generators", check_random),
    Check("gather of nested data", check_gather),
    Check("broadcast of nested data", check_broadcast),
    Check("reduce of nested data", check_reduce),
    Check("padding to equal length", check_padding),
    Check("loader: each sample once", check_sharded_loader),
    Check("loader: shuffled", check_shuffled_loader),
    Check("loader: dispatched by the main process", check_dispatched_loader),
    Check("loader: split batches", check_split_loader),
    Check("training equals one process", check_training),
    Check("accumulation equals one large batch", check_accumulation),
    Check("mixed precision", check_precision),
    Check("state of optimizer and scheduler", check_round_trip),
    Check("checkpoint round trip", lambda board: check_checkpoint(_seeded_accelerator(), board)),
)


def main() -> int:
    """Run all checks and return the exit code."""
    state = PartialState()
    if state.is_main_process:
        kind, count = state.distributed_type.value, state.num_processes
        noun = "process" if count == 1 else "processes"
        sys.stdout.write(f"{count} {noun} on {state.device.type} ({kind}), torch {torch.__version__}\n")
        sys.stdout.flush()
    code = run_checks(CHECKS, noticeboard(state.process_index, state.num_processes))
    if code == 0:
        # After a failure others may still be held in a collective, and closing the group would wait for them.
        state.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
