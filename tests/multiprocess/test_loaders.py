"""Loaders on real groups of two and three processes."""

from __future__ import annotations

import copy
import pickle
import random
from collections import UserDict
from collections.abc import Callable, Iterator
from itertools import islice, product, zip_longest
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.support.processes import run_group
from tests.support.samplers import TORCH_SAMPLERS, make_loader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    get_worker_info,
)

from accelerate import Accelerator
from accelerate.collectives.base import communicator
from accelerate.data_loader import Position, prepare_data_loader, skip_first_batches
from accelerate.runtime import current
from accelerate.runtime.gradient_clock import GradientState
from accelerate.utils import DataLoaderConfiguration, set_seed

pytestmark = pytest.mark.multiprocess


class Stream(IterableDataset):
    """Numbers that workers divide among themselves; one of them may be broken."""

    def __init__(self, length: int, broken: int = -1) -> None:
        self.length = length
        self.broken = broken

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        start, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for number in range(start, self.length, step):
            if number == self.broken:
                raise LookupError(f"sample {number} is broken")
            yield number


class Pair(NamedTuple):
    left: Any
    right: Any


class Varied(IterableDataset):
    """Ready batches of anything, each of another width, the third too large for the first buffer."""

    def __iter__(self) -> Iterator[Pair]:
        for number in range(5):
            width = 20_000 if number == 2 else number + 1
            values = torch.full((3, width), float(number))
            yield Pair(values, {"text": ["a" * number, "b", "c"], "number": number, "flag": torch.tensor(True)})


class Unpicklable(IterableDataset):
    """Ready batches, the last of which cannot be pickled: as a value, as a type or as a key."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __iter__(self) -> Iterator[dict[Any, Any]]:
        class Local(UserDict):
            pass

        bad: dict[str, Any] = {"value": {"x": lambda: 0}, "type": Local(x=torch.ones(2)), "key": {Local: torch.ones(2)}}
        for number in range(6):
            yield {"n": torch.full((2,), number), "rest": bad[self.place] if number == 5 else None}


def cpu() -> None:
    from accelerate.state import PartialState

    PartialState(cpu=True)
    rank = current.runtime().rank
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)


def observed(loader: Any) -> list[Any]:
    return [
        (batch.tolist(), loader.end_of_dataloader, loader.remainder, loader.share[:2], loader.position.samples)
        for batch in loader
    ]


def dispatched(loader: DataLoader, **options: Any) -> Any:
    return prepare_data_loader(loader, put_on_device=True, dispatch_batches=True, **options)


def every_other(batch: torch.Tensor, part: slice, process_index: int, num_processes: int) -> torch.Tensor:
    return batch[process_index::num_processes]


def dispatch_job() -> dict[str, Any]:
    cpu()
    found: dict[str, Any] = {}
    for length in (8, 7, 5, 1, 0):
        found[f"stream {length}"] = observed(dispatched(DataLoader(Stream(length), batch_size=2)))
    found["automatic"] = observed(prepare_data_loader(DataLoader(Stream(7), batch_size=2), put_on_device=True))
    found["workers"] = observed(dispatched(DataLoader(Stream(8), batch_size=2, num_workers=2)))
    found["drop_last"] = observed(dispatched(DataLoader(Stream(7), batch_size=2, drop_last=True)))
    found["map"] = observed(dispatched(DataLoader(range(7), batch_size=2)))
    found["split"] = observed(dispatched(DataLoader(range(7), batch_size=6), split_batches=True))
    found["slice_fn"] = observed(dispatched(DataLoader(Stream(8), batch_size=2), slice_fn_for_dispatch=every_other))
    varied = dispatched(DataLoader(Varied(), batch_size=None))
    found["varied"] = [
        (
            tuple(batch.left.shape),
            batch.right["text"],
            batch.right["number"],
            bool(batch.right["flag"]),
            varied.share.real,
        )
        for batch in varied
    ]
    with pytest.raises(LookupError, match="sample 6 is broken"):
        list(dispatched(DataLoader(Stream(20, broken=6), batch_size=1)))
    found["active after an error"] = GradientState().in_dataloader

    for place in ("value", "type", "key"):
        seen = []
        with pytest.raises((AttributeError, pickle.PicklingError), match=r"lambda|Local") as caught:
            for batch in dispatched(DataLoader(Unpicklable(place), batch_size=None)):
                seen += batch["n"].tolist()
        found[f"unpicklable {place}"] = (seen, caught.type, str(caught.value))

    left = dispatched(DataLoader(Stream(40), batch_size=2))
    found["left early"] = []
    for stop in (1, 3, 2):
        for number, batch in enumerate(left, start=1):
            found["left early"].append(batch.tolist())
            if number == stop:
                break
    left.seek(Position(3, 32))
    found["seek"] = [batch.tolist() for batch in left]
    shuffled = dispatched(DataLoader(range(12), batch_size=2, shuffle=True))
    found["shuffled"] = [[batch.tolist() for batch in shuffled] for _ in range(2)]
    shuffled.seek(Position(1, 4))
    found["rest"] = [batch.tolist() for batch in shuffled]
    skipping = skip_first_batches(shuffled, 1)
    found["skipped"] = [batch.tolist() for batch in skipping]
    found["length"] = len(shuffled)
    return found


def test_dispatcher_on_two_processes() -> None:
    first, second = run_group(dispatch_job, 2)
    assert first["stream 8"] == [([0, 1], False, -1, (2, 2), 4), ([4, 5], True, 4, (2, 2), 0)]
    assert second["stream 8"] == [([2, 3], False, -1, (2, 2), 4), ([6, 7], True, 4, (2, 2), 0)]
    for name in ("stream 7", "automatic", "map"):
        assert first[name] == [([0, 1], False, -1, (2, 2), 4), ([4, 5], True, 3, (2, 2), 0)]
        assert second[name] == [([2, 3], False, -1, (2, 2), 4), ([6, 0], True, 3, (2, 1), 0)]
    assert first["stream 5"][-1] == ([4], True, 1, (1, 1), 0)
    assert second["stream 5"][-1] == ([0], True, 1, (1, 0), 0)
    assert (first["stream 0"], second["stream 0"]) == ([], [])
    assert first["drop_last"] == [([0, 1], True, 4, (2, 2), 0)]
    assert [entry[0] for entry in first["split"] + second["split"]] == [[0, 1, 2], [6], [3, 4, 5], [0]]
    assert [entry[0] for entry in first["slice_fn"] + second["slice_fn"]] == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert sorted(n for part in (first, second) for entry in part["workers"] for n in entry[0]) == list(range(8))
    assert [entry[0] for entry in first["varied"]] == [(3, 1), (3, 20_000), (2, 5)]
    assert second["varied"][1] == ((3, 4), ["aaa", "b", "c"], 3, True, 3)
    assert second["varied"][2] == ((2, 5), ["c", "aaaa"], 4, True, 1)
    assert (first["active after an error"], second["active after an error"]) == (False, False)
    for place in ("value", "type", "key"):
        seen, *error = first[f"unpicklable {place}"]
        seen_by_second, *error_of_second = second[f"unpicklable {place}"]
        assert (seen, seen_by_second) == ([0, 0, 2, 2], [1, 1, 3, 3])
        assert error == error_of_second
    assert first["left early"] == [[0, 1], [0, 1], [4, 5], [8, 9], [0, 1], [4, 5]]
    assert second["left early"] == [[2, 3], [2, 3], [6, 7], [10, 11], [2, 3], [6, 7]]
    assert first["seek"] + second["seek"] == [[32, 33], [36, 37], [34, 35], [38, 39]]
    for epoch in range(2):
        whole = [n for part in (first, second) for batch in part["shuffled"][epoch] for n in batch]
        assert sorted(whole) == list(range(12))
    assert first["shuffled"][0] != first["shuffled"][1]
    assert [first["rest"], second["rest"]] == [rank["shuffled"][1][1:] for rank in (first, second)]
    assert len({n for part in (first, second) for batch in part["skipped"] for n in batch}) == 8
    assert (first["length"], second["length"]) == (3, 3)


def test_dispatcher_on_three_processes() -> None:
    parts = run_group(dispatch_job, 3)
    assert [part["stream 5"] for part in parts] == [
        [([0, 1], True, 5, (2, 2), 0)],
        [([2, 3], True, 5, (2, 2), 0)],
        [([4, 0], True, 5, (2, 1), 0)],
    ]
    assert [part["stream 8"][-1][0] for part in parts] == [[6], [7], [0]]
    assert [part["varied"][-1][4] for part in parts] == [3, 3, 0]
    assert [part["left early"][-1] for part in parts] == [[6, 7], [8, 9], [10, 11]]


class Shuffling(Sampler[int]):
    """A sampler that shuffles with a global generator, differently seeded on each process."""

    def __init__(self, source: str) -> None:
        self.source = source

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        order = list(range(24))
        if self.source == "python":
            random.shuffle(order)
        elif self.source == "numpy":
            np.random.shuffle(order)
        else:
            order = torch.randperm(24).tolist()
        return iter(order)


class ShufflingBatches(BatchSampler):
    """A batch sampler that shuffles whole batches."""

    def __init__(self) -> None:
        self.batch_size = 2
        self.drop_last = False

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[list[int]]:
        batches = [[2 * number, 2 * number + 1] for number in range(12)]
        random.shuffle(batches)
        return iter(batches)


def order_job(count: int) -> dict[str, Any]:
    cpu()
    samplers: dict[str, Any] = {
        "random": RandomSampler(range(24)),
        "own generator": RandomSampler(range(24), generator=torch.Generator().manual_seed(current.runtime().rank)),
        "subset": SubsetRandomSampler(range(24)),
        "python": Shuffling("python"),
        "numpy": Shuffling("numpy"),
        "torch": Shuffling("torch"),
    }
    found = {}
    for name, sampler in samplers.items():
        loader = prepare_data_loader(DataLoader(range(24), batch_size=2, sampler=sampler), put_on_device=True)
        found[name] = [[int(n) for batch in loader for n in batch] for _ in range(2)]
    seeded = prepare_data_loader(DataLoader(range(24), batch_size=2, shuffle=True), use_seedable_sampler=True)
    found["seeded"] = [[int(n) for batch in seeded for n in batch] for _ in range(2)]
    batches = prepare_data_loader(DataLoader(range(24), batch_sampler=ShufflingBatches()))
    found["batches"] = [[int(n) for batch in batches for n in batch] for _ in range(2)]

    distributed = DistributedSampler(range(64), num_replicas=count, rank=current.runtime().rank, shuffle=True)
    loader = prepare_data_loader(DataLoader(range(64), batch_size=4, sampler=distributed))
    found["distributed"] = [int(n) for batch in loader for n in batch]
    for workers in (0, 2):
        stream = prepare_data_loader(DataLoader(Stream(37), batch_size=2, num_workers=workers))
        found[f"workers {workers}"] = [n for batch in stream for n in batch.tolist()[: stream.share.real]]
    found["split"] = split_datasets(count)
    return found


def split_datasets(count: int) -> dict[str, list[int]]:
    import datasets
    from datasets.distributed import split_dataset_by_node

    rank = current.runtime().rank
    whole = datasets.Dataset.from_dict({"x": list(range(64))})
    found = {}
    for name, data in {
        "map by node": split_dataset_by_node(whole, rank=rank, world_size=count),
        "map": whole,
        "stream by node": split_dataset_by_node(whole.to_iterable_dataset(count), rank=rank, world_size=count),
    }.items():
        loader = prepare_data_loader(DataLoader(data, batch_size=4), even_batches=False)
        found[name] = [int(n) for batch in loader for n in batch["x"]]
    return found


@pytest.mark.parametrize("count", [2, 3])
def test_every_process_has_its_own_samples(count: int) -> None:
    parts = run_group(order_job, count, count, env={"HF_HUB_OFFLINE": "1"})
    shuffles = ("random", "own generator", "subset", "python", "numpy", "torch", "seeded", "batches")
    for name in shuffles:
        for epoch in range(2):
            assert sorted(n for part in parts for n in part[name][epoch]) == list(range(24)), name
        assert parts[0][name][0] != parts[0][name][1], name
    for name in ("workers 0", "workers 2"):
        assert sorted(n for part in parts for n in part[name]) == list(range(37))
    for name in ("map by node", "map", "stream by node"):
        assert sorted(n for part in parts for n in part["split"][name]) == list(range(64)), name
    seen = [n for part in parts for n in part["distributed"]]
    assert set(seen) == set(range(64))
    assert len(seen) == -(-64 // count) * count


class Endless(Sampler[int]):
    """A sampler without an end, which may claim to have one, and draws as it goes."""

    def __init__(self, says: int | None) -> None:
        self.says = says

    def __len__(self) -> int:
        if self.says is None:
            raise TypeError("there is no end")
        return self.says

    def __iter__(self) -> Iterator[int]:
        while True:
            yield random.randrange(1000)


def drawn_loader(kind: str) -> Any:
    if kind.startswith("endless"):
        loader = DataLoader(range(1000), batch_size=2, sampler=Endless(6 if kind == "endless, counted" else None))
    else:
        loader = make_loader(kind, range(24), batch_size=2)
    return prepare_data_loader(loader)


DRAWN_KINDS = (
    "shuffle",
    "shuffle, generator",
    "subset",
    "weighted, generator",
    "replacement, generator",
    "twice, generator",
    "python, opened",
    "numpy, one at a time",
    "own torch, one at a time",
    "varying batches, python, opened",
    "endless",
    "endless, counted",
)


def drawn_epoch(states: dict[str, Any] | None, taken: int) -> dict[str, Any]:
    """Read the rest of an epoch, or its first batches; return the samples that were not repeated, and the state."""
    cpu()
    found = {}
    for kind in DRAWN_KINDS:
        set_seed(3 if states is None else 50, device_specific=True)
        loader = drawn_loader(kind)
        if states is not None:
            loader.load_state_dict(states[kind][1])
        samples = []
        for batch in islice(loader, taken):
            draw = random.random(), np.random.rand(), torch.rand(1)
            samples.append(batch.tolist()[: loader.share.real] if draw else [])
            state = loader.state_dict()
        found[kind] = (samples, state)
    return found


def rounds(ranks: list[dict[str, Any]], kind: str) -> list[int]:
    """Return the samples of all ranks in the order of rounds."""
    batches = zip_longest(*(rank[kind][0] for rank in ranks), fillvalue=[])
    return [index for turn in batches for batch in turn for index in batch]


def bytes_that_are_sent(kinds: list[str]) -> dict[str, int]:
    """Shuffle much data, and return what rank 0 sends at most for it at once."""
    cpu()
    group = communicator()
    send, sizes = group.broadcast_objects, [0]

    def noted(objects: list[Any], *args: Any) -> Any:
        sizes.append(len(pickle.dumps(objects)))
        return send(objects, *args)

    group.broadcast_objects = noted  # type: ignore[method-assign, assignment]
    found = {}
    for kind in kinds:
        sizes.clear()
        first = next(iter(prepare_data_loader(make_loader(kind, range(20_000)))))
        assert len(torch.as_tensor(first).view(-1)) <= 4
        found[kind] = max(sizes)
    return found


def test_the_order_of_torchs_samplers_is_never_sent() -> None:
    kinds = [kind for kind in TORCH_SAMPLERS if kind != "sequential"]
    found, _ = run_group(bytes_that_are_sent, 2, [*kinds, "python, opened"])
    assert found.pop("python, opened") > 20_000
    assert max(found.values()) < 10_000


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_an_order_that_was_drawn_is_gone_on_with_on_another_number_of_processes(before: int, after: int) -> None:
    whole = run_group(drawn_epoch, before, None, 100 // before)
    start = run_group(drawn_epoch, before, None, 2)
    rest = run_group(drawn_epoch, after, start[0], 30)
    for kind in DRAWN_KINDS:
        order = rounds(whole, kind)
        seen = rounds(start, kind) + rounds(rest, kind)
        if kind == "numpy, one at a time" and before == 1:
            # What one process draws between its training steps depends on them.
            assert sorted(seen) == sorted(order)
        elif kind.startswith("endless"):
            length = min(len(seen), len(order)) if before > 1 else len(rounds(start, kind))
            assert seen[:length] == order[:length]
        else:
            assert seen == order, kind


def formatted_epoch() -> dict[str, Any]:
    """Read a table whose rows come out as tensors, and one that was split before."""
    datasets = pytest.importorskip("datasets")
    cpu()
    rank, count = current.runtime().rank, current.runtime().world_size
    table = datasets.Dataset.from_dict({"x": list(range(12))}).with_format("torch")
    own = table.shard(count, rank)
    return {
        name: [int(entry) for batch in prepare_data_loader(DataLoader(data, batch_size=2)) for entry in batch["x"]]
        for name, data in {"whole": table, "split": own}.items()
    }


def test_a_table_with_a_format_is_divided_unless_it_was_split_before() -> None:
    ranks = run_group(formatted_epoch, 2)
    for name in ("whole", "split"):
        assert sorted(ranks[0][name] + ranks[1][name]) == list(range(12))


class OwnBatches(BatchSampler):
    """A batch sampler of a user, as sentence-transformers has."""


def own_batches() -> list[list[int]]:
    cpu()
    sampler = OwnBatches(RandomSampler(range(12)), 2, drop_last=False)
    loader = prepare_data_loader(DataLoader(range(12), batch_sampler=sampler), use_seedable_sampler=True, data_seed=3)
    return [[int(entry) for batch in loader for entry in batch] for _ in range(2)]


def test_a_seedable_sampler_inside_of_a_batch_sampler_of_the_user() -> None:
    ranks = run_group(own_batches, 2)
    for epoch in range(2):
        assert sorted(ranks[0][epoch] + ranks[1][epoch]) == list(range(12))
    assert ranks[0][0] != ranks[0][1]


class Counted(Stream):
    """A stream that says how long it is."""

    def __len__(self) -> int:
        return self.length


VARYING = [[0], [1, 2], [3, 4, 5], [6], [7, 8], [9, 10]]
SKIPPABLE: dict[str, Callable[[], DataLoader]] = {
    "map": lambda: DataLoader(range(11), batch_size=2),
    "shuffled": lambda: DataLoader(range(11), batch_size=2, shuffle=True),
    "varying": lambda: DataLoader(range(11), batch_sampler=VARYING),
    "single": lambda: DataLoader(torch.arange(11).view(11, 1), batch_size=None),
    "stream": lambda: DataLoader(Counted(11), batch_size=2),
    "workers": lambda: DataLoader(Stream(11), batch_size=2, num_workers=2),
}


SKIPS: tuple[tuple[int, Callable[[DataLoader], DataLoader]], ...] = (
    (0, lambda loader: loader),
    (1, lambda loader: pickle.loads(pickle.dumps(loader))),
    (2, lambda loader: loader),
    (3, copy.deepcopy),
    (8, lambda loader: loader),
)
"""Batches to skip, and what happens to the loader before it is prepared."""


def skipped_before_prepare() -> dict[tuple[str, str], list[str]]:
    """Return what is wrong with loaders that leave out batches before they are prepared; nothing should be."""
    accelerator = Accelerator(cpu=True)
    found: dict[tuple[str, str], list[str]] = {}
    for config in ("dispatch_batches", "even_batches", "split_batches", "use_seedable_sampler"):
        accelerator.dataloader_config = DataLoaderConfiguration(**{config: True}, data_seed=3)
        accelerator.dataloader_config.dispatch_batches = config == "dispatch_batches"
        for kind, make in SKIPPABLE.items():
            if config == "split_batches" and kind in ("varying", "single"):
                continue
            wrong = found.setdefault((config, kind), [])
            for count, duplicated in SKIPS[1:4:2] if kind == "workers" else SKIPS:
                rest = sorted(int(entry) for batch in skip_first_batches(make(), count) for entry in batch)
                prepared = accelerator.prepare(duplicated(skip_first_batches(make(), count)))
                seen: list[int] = []
                steps = 0
                for batch in prepared:
                    steps += 1
                    seen += accelerator.gather_for_metrics(batch).view(-1).tolist()
                    left = len(rest) - len(seen)
                    if left and prepared.position.samples != 11 - left:
                        wrong.append(f"{count}: {prepared.position} with {left} samples left")
                if sorted(seen) != rest if kind != "shuffled" else len(set(seen)) != len(rest):
                    wrong.append(f"{count}: {seen} instead of {rest}")
                if kind != "workers" and len(prepared) != steps:
                    wrong.append(f"{count}: {steps} steps instead of {len(prepared)}")
    return found


@pytest.mark.parametrize("count", [1, 2])
def test_batches_that_are_skipped_before_prepare_are_left_out_of_the_whole_epoch(count: int) -> None:
    for rank in run_group(skipped_before_prepare, count):
        assert {case: wrong for case, wrong in rank.items() if wrong} == {}
        assert len(rank) == 4 * len(SKIPPABLE) - 2


def skipped_and_resumed(states: dict[str, Any] | None) -> dict[str, Any]:
    """Stop a whole epoch, or go on with the rest of it in a loader that leaves out its beginning."""
    cpu()
    found: dict[str, Any] = {}
    for kind, make in SKIPPABLE.items():
        set_seed(4)
        prepared = prepare_data_loader(make() if states is None else skip_first_batches(make(), 2))
        if states is not None:
            prepared.load_state_dict(states[kind][1])
        samples: list[int] = []
        for number, batch in enumerate(prepared, 1):
            samples += batch.view(-1).tolist()[: prepared.share.real]
            if states is None and number == 2:
                break
        found[kind] = (samples, prepared.state_dict())
    return found


@pytest.mark.parametrize("count", [1, 2])
def test_a_position_counts_what_was_skipped_before_prepare(count: int) -> None:
    begun = run_group(skipped_and_resumed, count, None)
    rest = run_group(skipped_and_resumed, count, begun[0])
    for kind in SKIPPABLE:
        assert sorted(n for part in (*begun, *rest) for n in part[kind][0]) == list(range(11)), kind


def resumed_dispatchers() -> list[str]:
    """Return which dispatched epochs end otherwise after a resume, or after batches were skipped; none should."""
    cpu()
    wrong = []
    configs: tuple[dict[str, Any], ...] = ({}, {"use_stateful_dataloader": True}, {"use_seedable_sampler": True})
    for (kind, make), options, left_out in product(SKIPPABLE.items(), configs, (0, 1)):
        loader = dispatched(skip_first_batches(make(), left_out), **options)
        whole, states = [], []
        for batch in loader:
            whole.append(batch.tolist())
            states.append(loader.state_dict())
        for done, state in enumerate(states[:-1], 1):
            for skips in (False, True):
                resumed = dispatched(skip_first_batches(make(), left_out), **options)
                resumed.load_state_dict(state)
                rest = [batch.tolist() for batch in (skip_first_batches(resumed, done) if skips else resumed)]
                if rest != whole[done:]:
                    wrong.append(f"{kind}, {options}, {left_out}, {skips}: {rest} instead of {whole[done:]}")
    return wrong


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("count", [2, 3])
def test_a_dispatched_epoch_is_completed_from_its_first_batch_after_a_resume(count: int) -> None:
    assert run_group(resumed_dispatchers, count) == [[]] * count
