"""Samplers of a `DataLoader`: finding and exchanging them, taking one process's part, leaving out the first batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from accelerate._base.enums import MeshAxis
from accelerate._base.errors import ConfigurationError
from accelerate.data_loader.order import EpochOrder, SingleIndices, batched, has_exact_length, head_and_rest, length_of
from accelerate.data_loader.plan import BatchSize, Observations, RoundPlan, Share, VaryingRoundPlan
from accelerate.data_loader.progress import DataSource, EpochSource, OpenedPass, ResumePoint


def data_shard(
    rank: int, world_size: int, mesh_sizes: dict[str, int] | None, *, divides_by_tensor_parallel: bool = False
) -> tuple[int, int]:
    """Return (index, count) of the data-parallel share of a process.

    Args:
        mesh_sizes: Size of each named axis of the device mesh; tensor-, context- and pipeline-parallel peers read the
            same data.
        divides_by_tensor_parallel: Whether an engine owns the layout, so that only tensor parallelism is divided out.
    """
    if not mesh_sizes:
        return rank, world_size
    tensor, context = mesh_sizes.get(MeshAxis.TP, 1), mesh_sizes.get(MeshAxis.CP, 1)
    if divides_by_tensor_parallel:
        return rank // tensor, world_size // tensor
    shares = mesh_sizes.get(MeshAxis.DP_REPLICATE, 1) * mesh_sizes.get(MeshAxis.DP_SHARD, 1)
    # The stages of a pipeline are the outermost axis.
    return rank // (tensor * context) % shares, shares


def outer_batch_sampler(loader: Any) -> Any:
    """Return the batch sampler of a loader; it may be given as `sampler=`, for datasets that are indexed by lists."""
    sampler = getattr(loader, "sampler", None)
    return sampler if isinstance(sampler, BatchSampler) else getattr(loader, "batch_sampler", None)


def batch_size_of(loader: Any) -> int | None:
    """Return the size of a loader's batches; with a batch sampler of the user, torch keeps it in that sampler alone."""
    size: int | None = getattr(outer_batch_sampler(loader), "batch_size", None) or getattr(loader, "batch_size", None)
    return size


def get_sampler(dataloader: Any) -> Any:
    """Return the sampler inside the batch sampler of a loader, None if it has none."""
    return getattr(_inner_batch_sampler(dataloader), "sampler", None)


def set_sampler(dataloader: Any, sampler: Any) -> None:
    """Replace the sampler inside the batch sampler of a loader."""
    part = _inner_batch_sampler(dataloader)
    if part is not None:
        part.sampler = sampler


def _inner_batch_sampler(loader: Any) -> Any:
    part = outer_batch_sampler(loader)
    while (inner := getattr(part, "batch_sampler", None)) is not None:
        part = inner
    return part


def innermost_sampler(loader: Any) -> Any:
    """Return what gives a map-style loader its order: a sampler, or a batch sampler without one."""
    part = loader
    while True:
        # Not joined by `or`, which asks a sampler for its length.
        batch_sampler, sampler = outer_batch_sampler(part), getattr(part, "sampler", None)
        inner = sampler if batch_sampler is None else batch_sampler
        if inner is None:
            return part
        part = inner


def whole_dataset(loader: Any) -> Any:
    """Return the dataset of a loader as its user gave it, not one process's view of it."""
    dataset: Any = getattr(loader, "dataset", None)
    is_view = isinstance(dataset, DataSource)
    return dataset.dataset if is_view else dataset


def epoch_source(loader: Any, split_elsewhere: int = 0) -> EpochSource:
    """Return what gives the samples of an epoch of a prepared loader.

    Args:
        split_elsewhere: Among how many processes the samplers of the user have divided the data, 0 if they have not.
    """
    dataset = whole_dataset(loader)
    if dataset is None or isinstance(dataset, IterableDataset):
        return EpochSource(samples=length_of(dataset))
    sampler = innermost_sampler(loader)
    has_indices = isinstance(sampler, Sampler) and not isinstance(sampler, BatchSampler)
    kind = type(sampler).__name__
    if getattr(sampler, "replacement", False):
        kind += " with replacement"
    if getattr(sampler, "shuffle", None) is False:
        kind += " without shuffling"
    return EpochSource(kind, length_of(sampler if has_indices and not split_elsewhere else dataset))


def copy_with(part: Any, **changes: Any) -> Any:
    """Return a shallow copy of an object with some attributes exchanged, whatever its class does on assignment."""
    twin = object.__new__(type(part))
    twin.__dict__.update(part.__dict__)
    twin.__dict__.update(changes)
    return twin


def copy_loader(loader: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Return the same loader (class, options, workers' settings) with some parts exchanged.

    `DataLoader` forbids to assign its parts once it is built, because its options depend on each other: the caller sees
    to it that they fit.
    """
    twin: DataLoader[Any] = copy_with(loader, _iterator=None, **changes)
    return twin


def copy_with_sampler(batch_sampler: Any, sampler: Any) -> Any:
    """Return a copy of a batch sampler that takes its indices from another sampler."""
    if isinstance(batch_sampler, SkipBatchSampler):
        return SkipBatchSampler(copy_with_sampler(batch_sampler.batch_sampler, sampler), batch_sampler.skip_batches)
    return copy_with(batch_sampler, sampler=sampler)


def copy_with_batch_sampler(loader: Any, batch_sampler: Any) -> Any:
    """Return the same loader with another batch sampler, where its own was given."""
    is_given_as_sampler = isinstance(loader.sampler, BatchSampler)
    return copy_loader(loader, **{"sampler" if is_given_as_sampler else "batch_sampler": batch_sampler})


def known_size(batch_size: int | None) -> int:
    """Return the size of a batch; where it is not known there is no such attribute, so `getattr` gives its default."""
    if batch_size is None:
        raise AttributeError("This loader has no batch_size, so the size of its batches is not known before they come.")
    return batch_size


def check_splittable(batch_size: int | None, num_processes: int) -> None:
    """Refuse to split batches of a size that is unknown or no multiple of the number of processes.

    Raises:
        ConfigurationError: (a ValueError) if the batches cannot be split.
    """
    if batch_size is None:
        raise ConfigurationError(
            "split_batches=True was given a loader of batch_size=None: batches of unknown size cannot be cut into equal "
            "parts; give the loader or its batch sampler a `batch_size`, or leave split_batches=False"
        )
    if batch_size % num_processes:
        fitting = max(batch_size // num_processes, 1) * num_processes
        raise ConfigurationError(
            f"split_batches=True was given batch_size={batch_size!r}, which {num_processes} processes cannot share "
            f"equally; use a multiple of {num_processes} such as batch_size={fitting}, or leave split_batches=False"
        )


class BatchSamplerShard(BatchSampler, DataSource):
    """The batches of a batch sampler that one process takes.

    Batches go to the processes in turns; with `split_batches` each batch is cut into one part a process. Unless the
    batch sampler drops its last batch, the last round is completed with the first samples of the epoch
    (`even_batches`), or handed out as it is.

    The first batches that a `SkipBatchSampler` inside leaves out count as consumed, so that a position means the same
    with and without it.

    Args:
        batch_sampler: Any iterable of lists of indices; `batch_size` and `drop_last` are read from it if it has them.

    Raises:
        ConfigurationError: (a ValueError) if `split_batches` is asked for a size that cannot be split.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_size: int = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        if split_batches:
            check_splittable(self.batch_size, num_processes)
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.order = EpochOrder()
        self.epoch = 0
        self.start = 0
        # The plan of a pass that was opened, until its iteration begins.
        self._opened: RoundPlan | None = None
        self.observed = Observations()

    @property
    def total_length(self) -> int:
        """The number of batches before sharding."""
        return len(self.batch_sampler)

    @property
    def total_batch_size(self) -> int:
        """Samples of a round over all processes."""
        return known_size(self.batch_size) * (1 if self.split_batches else self.num_processes)

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler of the inner batch sampler."""
        return self.batch_sampler.sampler

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has."""
        self.epoch = epoch

    def __len__(self) -> int:
        length = len(self.batch_sampler)
        if self.split_batches:
            return length
        full, rest = divmod(length, self.num_processes)
        if rest == 0 or self.drop_last:
            return full
        return full + (self.even_batches or self.process_index < rest)

    def plan(self, start: int = 0, rounds: int | None = None) -> RoundPlan:
        """Return the plan of a pass that begins after `start` samples, which were `rounds` batches of one process."""
        inner, left_out = without_skips(self.batch_sampler)
        has_fixed_size = type(inner) is BatchSampler
        total = length_of(inner.sampler) if has_fixed_size else None
        sizes = (self.batch_size, self.num_processes, self.split_batches, self.even_batches, self.drop_last)
        is_alone = self.num_processes == 1
        if has_fixed_size:
            start = max(start, left_out * self.batch_size)
            is_exact = has_exact_length(inner.sampler)
            is_believed = not is_exact and is_alone and self.believes_length and total is not None
            return RoundPlan(total, *sizes, start, self.process_index, is_exact or is_believed, is_believed)
        length = length_of(inner) if is_alone and self.believes_length else None
        before = (rounds if start else left_out) if is_alone else None
        return VaryingRoundPlan(total, *sizes, start, self.process_index, False, length=length, rounds=before)

    def open_pass(self, loader: Any, point: ResumePoint, *, dataset_is_placed: bool) -> OpenedPass:
        """Begin a pass: indices are passed over, no sample is read."""
        self.start = point.start
        self.order.restore(point.order)
        self._opened = self.plan(point.start, point.rounds)
        return OpenedPass(self._opened, loader)

    def __iter__(self) -> Iterator[list[int]]:
        return self.iterate()

    def iterate(self, skip: int = 0) -> Iterator[list[int]]:
        """Yield the batches of a pass after the first `skip` of this process."""
        observed = self.observed = Observations()
        opened, self._opened = self._opened, None
        plan = self.plan(self.start) if opened is None else opened
        inner, left_out = without_skips(self.batch_sampler)
        if plan.is_observed:
            # Opened at once, as the loader opens a batch sampler of the user.
            batches = self.order.watched(self.order.open(inner, self.epoch))
            return islice(self._varying_batches(plan, observed, batches, left_out), skip, None)
        start, origin = plan.start + skip * plan.unit, left_out * self.batch_size
        return chain.from_iterable(self._fixed_batches(plan, observed, start, origin))

    def _fixed_batches(
        self, plan: RoundPlan, observed: Observations, start: int, origin: int
    ) -> Iterator[Iterator[list[int]]]:
        """Yield the batches after `start` samples; the sampler is opened at the first one, as `BatchSampler` does."""
        order, size, sampler = self.order, self.batch_size, self.sampler
        head, rest = head_and_rest(sampler, plan.unit if start > origin else 0, start, order, self.epoch, origin)
        batches = order.watched(batched(rest, size, self.drop_last))
        if not has_exact_length(sampler):
            batches = _counted(batches, observed, start, replace(plan, start=start).num_batches)
        if self.num_processes == 1:
            opening: list[int] = next(batches, [])
            observed.first = head or opening
            # Not `yield from`, which takes a step in Python for each batch.
            yield chain([opening] if opening else [], batches)
        else:
            yield (indices for indices, _ in plan.deal(batches, list(batched(iter(head), size, False))))

    def _varying_batches(
        self, plan: RoundPlan, observed: Observations, batches: Iterator[list[int]], left_out: int
    ) -> Iterator[list[int]]:
        passed = observed.left_out = sum(map(len, islice(batches, left_out)))
        if self.num_processes == 1 and plan.start == 0:
            # Handed out as they come: nobody waits for the next to see whether a short one was the last.
            for batch in batches:
                observed.first = observed.first or batch
                real = len(batch)
                is_short = self.batch_size is not None and real < self.batch_size
                observed.batches.append(BatchSize(Share(real, real), real, real if is_short else 0))
                yield batch
            return
        first: list[list[int]] = []
        while passed < plan.start and (batch := next(batches, [])):
            if len(first) < plan.batches_per_round:
                first.append(batch)
            passed += len(batch)
            if passed > plan.start:
                batches = chain([batch[plan.start - passed :]], batches)
        observed.first = first[0] if first else []
        for indices, size in plan.deal(batches, first):
            observed.batches.append(size)
            yield indices


def _counted(
    batches: Iterator[list[int]], observed: Observations, start: int, length: int | None
) -> Iterator[list[int]]:
    """Pass the batches on, and note at the last one, or at their end, how many samples the epoch had."""
    total = start
    for number, batch in enumerate(batches, 1):
        total += len(batch)
        if number == length:
            observed.total = total
        yield batch
    observed.total = total


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first `skip_batches` batches."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.batch_size: int = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))

    @property
    def sampler(self) -> Any:  # type: ignore[override]
        """The sampler of the inner batch sampler."""
        return self.batch_sampler.sampler

    @property
    def total_length(self) -> int:
        """The number of batches before skipping."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.skip_batches, 0)

    def __iter__(self) -> Iterator[list[int]]:
        inner, skip = self.batch_sampler, self.skip_batches
        if isinstance(inner, BatchSamplerShard):
            return inner.iterate(0 if inner.start else skip)  # a position counts what is skipped
        if type(inner) is BatchSampler and skip:
            _, rest = head_and_rest(inner.sampler, 0, skip * inner.batch_size, EpochOrder(), 0)
            return batched(rest, inner.batch_size, inner.drop_last)
        return islice(iter(inner), skip, None)


def without_skips(batch_sampler: Any) -> tuple[Any, int]:
    """Return the batch sampler of a whole epoch, and how many of its first batches are skipped."""
    skipped = 0
    while isinstance(batch_sampler, SkipBatchSampler):
        batch_sampler, skipped = batch_sampler.batch_sampler, skipped + batch_sampler.skip_batches
    return batch_sampler, skipped


def skipped_batches(samplers: list[Any]) -> int:
    """Return how many of its first batches a process leaves out, by the samplers of its loader from the outside in."""
    skipped = 0
    for part in samplers:
        if isinstance(part, DataSource):
            break  # its plan counts what is skipped before the data is divided
        if isinstance(part, SkipBatchSampler):
            skipped += part.skip_batches
    return skipped


class IndexShard(Sampler[int]):
    """The indices that one process takes of a sampler whose every index stands for a whole batch."""

    def __init__(
        self, sampler: Any, num_processes: int, process_index: int, even_batches: bool = True, left_out: int = 0
    ) -> None:
        single = SkipBatchSampler(SingleIndices(sampler), left_out)
        self.batch_sampler = BatchSamplerShard(single, num_processes, process_index, False, even_batches)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[int]:
        return (indices[0] for indices in self.batch_sampler)
