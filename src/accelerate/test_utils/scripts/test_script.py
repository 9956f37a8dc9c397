"""The self-check of `accelerate test`: what a run relies on, tried on the processes that are configured."""

from __future__ import annotations

import copy
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
from accelerate.test_utils.self_check import Check, PeerStore, expect, expect_close, peer_store, run_checks
from accelerate.test_utils.training import SmallRun

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


def check_processes(peers: PeerStore) -> None:
    """Ranks are those of the launcher, and decorated functions run where they should."""
    state = PartialState()
    ranks = gather_object([state.process_index])
    expect(ranks, list(range(state.num_processes)), "the ranks")
    ran: list[str] = []
    state.on_main_process(lambda: ran.append("main"))()
    state.on_last_process(lambda: ran.append("last"))()
    state.on_process(lambda: ran.append("first"), process_index=0)()
    wanted = ["main"] if peers.rank == 0 else []
    wanted += ["last"] if peers.rank == peers.world_size - 1 else []
    wanted += ["first"] if peers.rank == 0 else []
    expect(ran, wanted, "the functions that are limited to one process")


def check_order(peers: PeerStore) -> None:
    """The main process goes first, and everyone waits for the last."""
    state = PartialState()
    with state.main_process_first():
        expect(peers.rank == 0 or peers.has("went/0"), True, "main_process_first: the main process being done")
        peers.post(f"went/{peers.rank}", "")
    state.wait_for_everyone()
    for rank in range(peers.world_size):
        expect(peers.has(f"went/{rank}"), True, f"wait_for_everyone: rank {rank} being there")


def check_shares(peers: PeerStore) -> None:
    """Work that is split is done once."""
    items = [f"item {number}" for number in range(2 * peers.world_size + 1)]
    with PartialState().split_between_processes(items) as mine:
        expect(gather_object(list(mine)), items, "split_between_processes")


def check_random(peers: PeerStore) -> None:
    """Seeds make the same numbers everywhere, or others on each process, as asked."""
    device = PartialState().device
    set_seed(42)
    _expect_same_everywhere(torch.rand(3, device=device), "set_seed")
    torch.manual_seed(peers.rank)
    synchronize_rng_states(["torch"])
    _expect_same_everywhere(torch.rand(3).to(device), "synchronize_rng_states")
    set_seed(42, device_specific=True)
    rows = gather(torch.rand(1, 3).to(device))
    expect(len({tuple(row) for row in rows.tolist()}), peers.world_size, "set_seed(device_specific=True): the streams")


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


def _of_all_ranks(peers: PeerStore) -> list[tuple[torch.Tensor, ...]]:
    """Return each leaf of the nested data as all ranks have it."""
    device = PartialState().device
    return list(zip(*(_leaves(nested(rank, device)) for rank in range(peers.world_size)), strict=True))


def check_gather(peers: PeerStore) -> None:
    """Nested data of all ranks is joined, in the same containers."""
    found = gather(nested(peers.rank, PartialState().device))
    expect((type(found["list"]), type(found["pair"]), type(found["tuple"])), (list, Pair, tuple), "gather: containers")
    for leaf, parts in zip(_leaves(found), _of_all_ranks(peers), strict=True):
        wanted = torch.cat([part.reshape(1) if part.ndim == 0 else part for part in parts])
        expect(leaf, wanted if peers.world_size > 1 else parts[0], "gather")
    objects = [{"rank": peers.rank, "text": "é" * peers.rank}, None]
    wanted_objects = [entry for rank in range(peers.world_size) for entry in ({"rank": rank, "text": "é" * rank}, None)]
    expect(gather_object(objects), wanted_objects, "gather_object")


def check_broadcast(peers: PeerStore) -> None:
    """Data of one rank reaches all others."""
    device = PartialState().device
    for source in {0, peers.world_size - 1}:
        found = broadcast(nested(peers.rank, device), from_process=source)
        for leaf, wanted in zip(_leaves(found), _leaves(nested(source, device)), strict=True):
            expect(leaf, wanted, f"broadcast from rank {source}")
        words = [{"from": peers.rank}, "x" * (peers.rank + 1)]
        expect(
            broadcast_object_list(words, from_process=source),
            [{"from": source}, "x" * (source + 1)],
            f"broadcast_object_list from rank {source}",
        )


def check_reduce(peers: PeerStore) -> None:
    """Sums and means go over all ranks."""
    device = PartialState().device
    own = {"a": torch.full((2,), float(peers.rank), device=device), "b": [torch.ones(1, 2, device=device)]}
    total = peers.world_size * (peers.world_size - 1) / 2
    summed = reduce(own, "sum")
    expect(summed["a"], torch.full((2,), total), "reduce by sum")
    expect(summed["b"][0], torch.full((1, 2), float(peers.world_size)), "reduce by sum")
    expect(reduce(own, "mean")["a"], torch.full((2,), total / peers.world_size), "reduce by mean")


def check_padding(peers: PeerStore) -> None:
    """Tensors of unequal length are made equal."""
    own = torch.ones(peers.rank + 1, 2, device=PartialState().device)
    for first in (False, True):
        padded = pad_across_processes([own], pad_index=7, pad_first=first)[0]
        fill = torch.full((peers.world_size - peers.rank - 1, 2), 7.0, device=own.device)
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


def check_sharded_loader(peers: PeerStore) -> None:
    """Each sample is seen once, in order, by all processes together."""
    accelerator = fresh_accelerator(dataloader_config=DataLoaderConfiguration())
    expect(_seen(accelerator, accelerator.prepare(_numbers())), list(range(SAMPLES)), "the loader")
    stream = accelerator.prepare(DataLoader(Stream(), batch_size=BATCH))
    expect(sorted(_seen(accelerator, stream)), list(range(SAMPLES)), "the loader of an iterable dataset")
    loader = accelerator.prepare(_numbers())
    done = BATCH * peers.world_size
    rest = list(range(done, SAMPLES)) if done < SAMPLES else []
    expect(_seen(accelerator, skip_first_batches(loader, 1)), rest, "skip_first_batches")


def _seeded_accelerator() -> Accelerator:
    return fresh_accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))


def check_shuffled_loader(peers: PeerStore) -> None:
    """A shuffled epoch holds each sample once, and the next one has another order."""
    accelerator = _seeded_accelerator()
    set_seed(7)
    loader = accelerator.prepare(_numbers(shuffle=True))
    first, second = _seen(accelerator, loader), _seen(accelerator, loader)
    expect(sorted(first), list(range(SAMPLES)), "the first shuffled epoch")
    expect(sorted(second), list(range(SAMPLES)), "the second shuffled epoch")
    expect(first != second, True, "two epochs having different orders")


def check_dispatched_loader(peers: PeerStore) -> None:
    """Batches that the main process reads for all reach each process once."""
    accelerator = fresh_accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    expect(_seen(accelerator, accelerator.prepare(_numbers())), list(range(SAMPLES)), "the dispatching loader")
    stream = accelerator.prepare(DataLoader(Stream(), batch_size=BATCH))
    expect(_seen(accelerator, stream), list(range(SAMPLES)), "the dispatching loader of an iterable dataset")


def check_split_loader(peers: PeerStore) -> None:
    """The batch of the script is shared by all processes."""
    accelerator = fresh_accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    size = BATCH * peers.world_size
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


def check_training(peers: PeerStore) -> None:
    """All processes together train as one would."""
    rows = STEPS * BATCH * peers.world_size
    found = _together(fresh_accelerator(), rows)
    _expect_same_weights(found, _alone(rows, BATCH * peers.world_size), "training", 1e-5)


def check_accumulation(peers: PeerStore) -> None:
    """Two accumulated batches train as one of twice the size."""
    rows = STEPS * BATCH * peers.world_size
    plugin = GradientAccumulationPlugin(num_steps=2)
    found = _together(fresh_accelerator(gradient_accumulation_plugin=plugin), rows)
    _expect_same_weights(found, _alone(rows, 2 * BATCH * peers.world_size), "accumulation", 1e-5)


def check_precision(peers: PeerStore) -> None:
    """The formats of this device compute in fewer bits and end near the full ones."""
    rows = STEPS * BATCH * peers.world_size
    wanted = _alone(rows, BATCH * peers.world_size)
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


# --- saved states -----------------------------------------------------------------------------------------------------


def check_round_trip(peers: PeerStore) -> None:
    """Optimizer and scheduler go on from a saved state as if they had never stopped."""
    run = SmallRun(fresh_accelerator(), shuffle=False)
    parts = (run.model, run.optimizer, run.scheduler)
    run.train()
    saved = copy.deepcopy([part.state_dict() for part in parts])
    run.train()
    weights, rates = copy.deepcopy(run.model.state_dict()), run.scheduler.get_last_lr()
    run.train()
    for part, state in zip(parts, saved, strict=True):
        part.load_state_dict(state)
    run.train()
    expect(run.scheduler.get_last_lr(), rates, "the learning rate after loading")
    _expect_same_weights(run.model.state_dict(), weights, "weights after loading", 0.0)


def check_checkpoint(peers: PeerStore) -> None:
    """A run saves in the middle of an epoch, changes everything, loads, and goes on as if it had never stopped."""
    with _shared_folder(peers) as folder:
        if folder is None:
            return
        accelerator = _seeded_accelerator()
        run = SmallRun(accelerator, shuffle=True)
        run.train()
        batches = iter(run.loader)
        run.train(batches, limit=2)
        accelerator.save_state(folder / "checkpoint")
        saved = run.state()
        rest, after = run.train(batches), run.train()
        final = run.state()

        run.spoil()
        accelerator.load_state(folder / "checkpoint")
        _compare_states(run.state(), saved, "after loading")
        expect(run.train(), rest, "the rest of the epoch after loading")
        expect(run.train(), after, "the epoch after that")
        _compare_states(run.state(), final, "at the end", tolerance=1e-6)
        accelerator.wait_for_everyone()  # the folder goes when all have read it


def _compare_states(found: dict[str, Any], wanted: dict[str, Any], when: str, tolerance: float = 0.0) -> None:
    expect(sorted(found), sorted(wanted), f"the parts of the state {when}")
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            expect_close(found[name], value, f"{name} {when}", tolerance)
        elif isinstance(value, torch.Tensor):
            expect(torch.equal(found[name], value), True, f"{name} {when} being what it was")
        else:
            expect(found[name], value, f"{name} {when}")


@contextmanager
def _shared_folder(peers: PeerStore) -> Iterator[Path | None]:
    """Make a folder that all processes see, None where machines share neither of the usual places."""
    for place in (None, Path.cwd()):
        made = [tempfile.mkdtemp(prefix="accelerate-test-", dir=place) if peers.rank == 0 else ""]
        folder = Path(str(broadcast_object_list(made)[0]))
        try:
            if all(gather_object([folder.is_dir()])):
                yield folder
                return
        finally:
            if peers.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
    if peers.rank == 0:
        sys.stderr.write(
            "The machines share neither the folder for temporary files nor the current one, so no checkpoint was tried. "
            "Run the check from a folder that all of them see.\n"
        )
    yield None


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
    Check("checkpoint round trip", check_checkpoint),
)


def main() -> int:
    """Run all checks and return the exit code."""
    state = PartialState()
    if state.is_main_process:
        kind, count = state.distributed_type.value, state.num_processes
        noun = "process" if count == 1 else "processes"
        sys.stdout.write(f"{count} {noun} on {state.device.type} ({kind}), torch {torch.__version__}\n")
        sys.stdout.flush()
    code = run_checks(CHECKS, peer_store(state.process_index, state.num_processes))
    if code == 0:
        # After a failure others may still be held in a collective, and closing the group would wait for them.
        state.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
