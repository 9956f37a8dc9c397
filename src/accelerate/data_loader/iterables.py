"""Iterable datasets: the part that one process takes, notes about its batches, and datasets that save their state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from accelerate.data_loader.order import EpochOrder
from accelerate.data_loader.plan import GroupNote, GroupPlan, Observations
from accelerate.data_loader.progress import DataSource, OpenedPass, ResumePoint
from accelerate.data_loader.samplers import check_splittable, copy_loader, whole_dataset
from accelerate.runtime.torch_private import pin_batch


class AnnotatedBatch:
    """A batch with what only its reader knows; the loader unpacks it before the user sees it.

    Args:
        note: What the plan learns from it, see `EpochProgress.hand_out`.
        state: The state of torchdata's loader, or of a dataset that saves its own, behind the batch.
    """

    __slots__ = ("batch", "note", "state")

    def __init__(self, batch: Any, note: Any = None, state: Any = None) -> None:
        self.batch = batch
        self.note = note
        self.state = state

    def pin_memory(self) -> AnnotatedBatch:
        """Pin the batch as torch would; called by its loader."""
        return AnnotatedBatch(pin_batch(self.batch), self.note, self.state)


class IterableDatasetShard(IterableDataset[Any], DataSource):
    """The elements of an iterable dataset that one process takes.

    Elements are read in groups of one batch a process (with `split_batches`: of one batch), of which each process takes
    its consecutive part. An incomplete last group is completed with the first elements unless `drop_last`.
    `group_real` is the number of real elements of the group at hand. With worker processes each worker does this for
    the elements that the dataset gives it.

    Args:
        left_out: Elements at the start of each epoch that no pass reads.

    Raises:
        ConfigurationError: (a ValueError) if `split_batches` is asked for a size that cannot be split.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        left_out: int = 0,
    ) -> None:
        if split_batches:
            check_splittable(batch_size, num_processes)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.left_out = left_out
        self.epoch = 0
        self.completes = True
        self.group_real = 0
        self.order = EpochOrder()
        self.observed = Observations()
        self._point = ResumePoint()

    @property
    def total_batch_size(self) -> int:
        """Elements of a group, over all processes."""
        return self.batch_size if self.split_batches else self.batch_size * self.num_processes

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, and tell the dataset."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        length, size = len(self.dataset) - self.left_out, self.total_batch_size  # type: ignore[arg-type]
        groups = length // size if self.drop_last else -(-length // size)
        return max(groups, 0) * (size // self.num_processes)

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        is_divided = self.num_processes > 1
        if is_divided and isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        size = self.total_batch_size
        rows = size // self.num_processes
        own = slice(self.process_index * rows, (self.process_index + 1) * rows)
        files = self._point.files
        elements = iter(LeftInFiles(self.dataset, files) if files else self.dataset)
        first = self._pass_over(elements, size)
        while group := list(islice(elements, size)):
            if not first:
                first = list(group)
            self.group_real = len(group)
            if len(group) < size:
                if self.drop_last:
                    return
                if self.completes:
                    group += islice(cycle(first), size - len(group))
            yield from group[own]

    def _pass_over(self, elements: Iterator[Any], size: int) -> list[Any]:
        """Drop the elements that were handed out before, and return the first of them."""
        in_files = sum(self._point.files)
        dropped = samples_of_worker(self._point.samples - in_files, self._point.unit or size, self._point.streams)
        if self.left_out and dropped:
            left_out = min(samples_of_worker(self.left_out, self.batch_size), dropped)
            next(islice(elements, left_out, left_out), None)
            dropped -= left_out
        first = list(islice(elements, min(size, dropped)))
        next(islice(elements, dropped - len(first), dropped - len(first)), None)
        # Only a whole first group completes the last one as in a pass that was never stopped.
        return first if len(first) == size else []

    def open_pass(self, loader: Any, point: ResumePoint, *, dataset_is_placed: bool) -> OpenedPass:
        """Begin a pass: elements are passed over, or whole batches so that several workers keep their turns."""
        workers = loader.num_workers
        if point.samples < self.left_out:
            streams = tuple(turns_of(worker, workers, self.left_out, self.batch_size) for worker in range(workers))
            point = ResumePoint(point.epoch, self.left_out, self.batch_size, streams=streams if workers > 1 else ())
        dropped = self._batches_to_drop(workers, point)
        start = 0 if dropped else point.start
        self._point = ResumePoint(
            samples=0 if dataset_is_placed else start,
            unit=point.unit,
            streams=point.streams if start else (),
            files=point.files if start else (),
        )
        if point.start and loader.persistent_workers:
            loader = copy_loader(loader)  # workers that run already have a copy of the dataset
        streams = ()
        before = start or (point.samples if point.is_reached_by_torchdata else 0)
        if workers > 1:
            is_known = before and len(point.streams) == workers
            streams = point.streams if is_known else (0,) * workers
        rounds = point.rounds if point.is_reached_by_torchdata and point.samples else 0
        plan = GroupPlan(
            self.total_batch_size,
            before,
            self.num_processes,
            self.process_index,
            has_ready_batches=loader.batch_size is None,
            streams=streams,
            rounds=None if start else rounds,
        )
        return OpenedPass(plan, loader, dropped)

    def _batches_to_drop(self, workers: int, point: ResumePoint) -> int:
        size = self.total_batch_size
        if point.start == 0 or point.files or workers <= 1 or point.unit not in (0, size):
            return 0
        if point.streams:
            return 0 if point.rounds is None or len(point.streams) != workers else point.rounds
        return 0 if point.start % size else point.start // size


def samples_of_worker(samples: int, unit: int, streams: tuple[int, ...] = ()) -> int:
    """Return how many elements of its own stream a worker has handed out when all together gave `samples`.

    Workers take turns, a group of `unit` elements at a time, as long as their streams last; `streams` is what each of
    them gave, where that is known.
    """
    worker = get_worker_info()
    if worker is None or worker.num_workers == 1:
        return samples
    if len(streams) == worker.num_workers:
        return streams[worker.id]
    return turns_of(worker.id, worker.num_workers, samples, unit)


def turns_of(worker: int, workers: int, samples: int, unit: int) -> int:
    """Return what one of several workers has read of `samples`, if they take turns of `unit` elements."""
    groups, extra = divmod(samples, unit)
    turns, rest = divmod(groups, workers)
    return (turns + (worker < rest)) * unit + (extra if worker == rest else 0)


class GroupCollate:
    """Collate as asked, and annotate the batches of an incomplete group with its number of real elements.

    It runs where its shard runs (the two are copied into a worker together), so it can ask the shard. Where there are
    several workers each batch is annotated: how far each of their streams was read cannot be known otherwise.
    """

    def __init__(self, collate: Callable[[Any], Any], shard: IterableDatasetShard) -> None:
        self.collate = collate
        self.shard = shard

    def __call__(self, samples: Any) -> Any:
        batch = self.collate(samples)
        shard, worker = self.shard, get_worker_info()
        if worker is not None and worker.num_workers > 1:
            return AnnotatedBatch(batch, GroupNote(shard.group_real, worker.id))
        is_whole = shard.group_real == shard.total_batch_size
        return batch if is_whole else AnnotatedBatch(batch, GroupNote(shard.group_real))


class Offset(IterableDataset[Any]):
    """An iterable dataset without its first elements."""

    def __init__(self, dataset: Iterable[Any], start: int) -> None:
        self.dataset = dataset
        self.start = start

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.dataset), self.start, None)


class LeftInFiles(IterableDataset[Any]):
    """What processes that each read files of their own have left of an epoch.

    Args:
        dataset: A dataset of the `datasets` package.
        files: Samples that each of the processes has taken of its files.
    """

    def __init__(self, dataset: Any, files: tuple[int, ...]) -> None:
        self.dataset = dataset
        self.files = files

    def __iter__(self) -> Iterator[Any]:
        count = len(self.files)
        for index, taken in enumerate(self.files):
            yield from islice(iter(self.dataset.shard(num_shards=count, index=index)), taken, None)


def saves_its_state(loader: Any) -> bool:
    """Return whether the state of a loader's iterable dataset stands exactly behind the last batch.

    Worker processes have datasets of their own, which have read ahead: it is only so without them.
    """
    dataset = whole_dataset(loader)
    if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        return False
    if not isinstance(dataset, IterableDataset) or getattr(loader, "num_workers", 1) != 0:
        return False
    return not is_hf_dataset(dataset, "IterableDataset") or _resumes_exactly(dataset)


def is_hf_dataset(dataset: Any, name: str) -> bool:
    """Return whether this is a `Dataset` or `IterableDataset`, as `name` says, of the `datasets` package."""
    return any(cls.__module__.startswith("datasets.") and cls.__name__ == name for cls in type(dataset).__mro__)


def _resumes_exactly(dataset: Any) -> bool:
    """Return whether a dataset of the `datasets` package has no step that loses examples when it is resumed.

    Its page names two: shuffle buffers, and batched maps of formatted data.
    """
    kinds, waiting = set(), [getattr(dataset, "_ex_iterable", None)]
    while waiting:
        step = waiting.pop()
        if step is not None:
            kinds.add(type(step).__name__)
            waiting += [getattr(step, "ex_iterable", None), *getattr(step, "ex_iterables", ())]
    if any("BufferShuffled" in kind for kind in kinds):
        return False
    return getattr(dataset, "_formatting", None) is None or not any("Mapped" in kind for kind in kinds)
