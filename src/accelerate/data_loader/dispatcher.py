"""The loader that one process reads for all: rank 0 cuts its batches into pieces and sends each process its own."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from operator import getitem
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from accelerate._base.errors import ConfigurationError
from accelerate.collectives.nested import children, is_namedtuple, leaves, place_batch, rebuilt
from accelerate.data_loader.adapter import DataLoaderAdapter, DataLoaderStateMixin
from accelerate.data_loader.channel import (
    UNKNOWN,
    MessageHeader,
    MessageKind,
    PackedBatch,
    ReceivingEnd,
    SendingEnd,
    StepMessage,
)
from accelerate.data_loader.draws import RandomStreams, nested_samplers
from accelerate.data_loader.iterables import is_hf_dataset, saves_its_state
from accelerate.data_loader.order import length_of
from accelerate.data_loader.plan import BatchSize, ObservedPlan, Share, clamp
from accelerate.data_loader.progress import DataSource, EpochProgress, ResumePoint
from accelerate.data_loader.samplers import (
    IndexShard,
    copy_loader,
    data_shard,
    known_size,
    outer_batch_sampler,
    skipped_batches,
    without_skips,
)
from accelerate.runtime import current


class DataLoaderDispatcher(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader that rank 0 reads for all processes.

    Rank 0 reads one batch a process (with `split_batches`: one for all) and sends each its piece, two steps ahead.
    Batches may be nested, vary in shape and hold any picklable object. An error in the dataset is raised on all ranks.

    Args:
        slice_fn: `slice_fn(batch, slice, process_index=, num_processes=)` cuts a process's piece out of the joined batch,
            which is then sent to everyone.
        torch_device_mesh: Tensor- and context-parallel peers of this mesh receive the same piece.
        kwargs: Arguments of `torch.utils.data.DataLoader`.

    Raises:
        ConfigurationError: (a ValueError) if the mesh has an axis "tp" beside "dp" or "fsdp".
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        names = () if torch_device_mesh is None else torch_device_mesh.mesh_dim_names
        if "tp" in names and {"dp", "fsdp"} & set(names):
            raise ConfigurationError(
                f"torch_device_mesh has the axes {tuple(names)!r}: a dispatcher cannot tell the data axes 'dp' and 'fsdp' "
                "from the tensor axis; name them 'dp_replicate' and 'dp_shard'"
            )
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.device: torch.device | str | None = None
        self.split_batches = split_batches
        self.skip_batches = skip_batches
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.slice_fn = slice_fn
        self.torch_device_mesh = torch_device_mesh
        self.iteration = iteration
        self._channel: SendingEnd | ReceivingEnd | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        create, cls, attributes = super().__reduce__()
        return create, cls, {**attributes, "_channel": None}

    def _shard_of(self, rank: int) -> tuple[int, int]:
        mesh = self.torch_device_mesh
        sizes = None if mesh is None else dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        return data_shard(rank, current.runtime().world_size, sizes)

    @property
    def _num_shards(self) -> int:
        return self._shard_of(0)[1]

    @property
    def _batches_per_step(self) -> int:  # type: ignore[override]
        return 1 if self.split_batches else self._num_shards

    def __iter__(self) -> Iterator[Any]:
        self._passes_at_iter = self.gradient_state.passes
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        runtime = current.runtime()
        samplers = nested_samplers(self.base_dataloader)
        point = self._begin_pass(samplers)
        source = self._sampler_source()
        order = None if source is None else source.order
        progress = EpochProgress(ObservedPlan(point.start), resumed_batches=point.batches, order=order)
        self._start_progress(progress, point)
        size = getattr(outer_batch_sampler(self.base_dataloader), "batch_size", None)
        full = size // self._num_shards if size is not None and self.split_batches else size
        self._forward_epoch(samplers)
        device = runtime.device if self.device is None else torch.device(self.device)
        if self._channel is None and runtime.world_size > 1:
            self._channel = SendingEnd(runtime.world_size) if runtime.rank == 0 else ReceivingEnd()
        if self._channel is not None:
            self._channel.begin()
        self.begin()
        self.remainder = -1
        try:
            for header, batch in self._read_and_send(point) if runtime.rank == 0 else self._receive():
                if progress.taken == 0:
                    progress.start_from(header.consumed - header.samples)
                share = Share(_known(header.rows), _known(header.real), full)
                progress.hand_out(BatchSize(share, header.samples))
                self.end_of_dataloader = bool(header.is_last)
                if header.is_last:
                    self.remainder = header.samples
                yield place_batch(batch, device, self._non_blocking)
            self._flush()
            if progress.taken:
                self._complete()
            elif point.samples:
                self._end_empty_rest(point.samples)
        finally:
            self.end()

    def _read_and_send(self, point: ResumePoint) -> Iterator[StepMessage]:
        """Read, send every process its pieces ahead of their use, and yield one's own."""
        steps = self._steps(point)
        if self._channel is None:
            yield from self._read_alone(steps, point)
            return
        here, ahead = next(steps), next(steps)
        self._send(here, is_last=ahead is None)
        while here is not None:
            further = next(steps) if isinstance(ahead, DispatchStep) else None
            if ahead is not None:
                self._send(ahead, is_last=further is None)
            if isinstance(here, Exception):
                self._flush()
                raise here
            if here.state is not None:
                self._keep_state(here.state, is_last=ahead is None)
            header = self._header(here, 0, is_last=ahead is None)
            yield StepMessage(header, self._own_piece(here.pieces[0], header, 0))
            here, ahead = ahead, further

    def _read_alone(
        self, steps: Iterator[DispatchStep | Exception | None], point: ResumePoint
    ) -> Iterator[StepMessage]:
        """Read for one process, a step ahead only where the number of steps is not known."""
        length, number = self._num_steps(point), 0
        here = next(steps)
        while here is not None:
            if isinstance(here, Exception):
                raise here
            number += 1
            ahead = next(steps) if length is None else None
            is_last = ahead is None if length is None else number == length
            if here.state is not None:
                self._keep_state(here.state, is_last=is_last)
            header = self._header(here, 0, is_last=is_last)
            yield StepMessage(header, self._own_piece(here.pieces[0], header, 0))
            here = next(steps) if length is not None else ahead
        if length is not None and number != length:
            self._warn_of_length(number, length)

    def _num_steps(self, point: ResumePoint) -> int | None:
        """Return how many steps are left of the epoch, None if nobody can say."""
        length = None if self._misstates_length else length_of(self)
        if length is None or not point.samples:
            return length
        size: int | None = getattr(outer_batch_sampler(self.base_dataloader), "batch_size", None)
        if not size or point.samples % size:
            return None
        left_out = self.left_out + without_skips(getattr(self._sampler_source(), "batch_sampler", None))[1]
        return length + left_out - point.samples // size

    def _flush(self) -> None:
        if self._channel is not None:
            self._channel.flush()

    def _receive(self) -> Iterator[StepMessage]:
        """Receive one's pieces until the last."""
        channel = self._channel
        assert isinstance(channel, ReceivingEnd)
        place = self._shard_of(current.runtime().rank)[0]
        while True:
            header, batch = channel.receive()
            if header.kind == MessageKind.ERROR:
                channel.flush()
                error: Exception = pickle.loads(batch)
                # Notes came with python 3.11.
                getattr(error, "add_note", id)("raised on rank 0, which reads this loader for all processes")
                raise error
            if header.kind == MessageKind.END:
                return
            if not header.is_last:
                channel.post()
            yield StepMessage(header, self._own_piece(batch, header, place))
            if header.is_last:
                return

    def _own_piece(self, piece: Any, header: MessageHeader, place: int) -> Any:
        if self.slice_fn is None:
            return piece
        known = header.rows != UNKNOWN
        part = slice(place * header.rows, (place + 1) * header.rows) if known else slice(None)
        return self.slice_fn(piece, part, process_index=place, num_processes=self._num_shards)

    def _steps(self, point: ResumePoint) -> Iterator[DispatchStep | Exception | None]:
        """Yield the steps of the pass, an error in their place if one is raised, then None for ever."""
        try:
            yield from self._read(point)
        except Exception as error:  # noqa: BLE001 - whatever the dataset raises is raised on all ranks
            yield error
        while True:
            yield None

    def _read(self, point: ResumePoint) -> Iterator[DispatchStep]:
        base, per_step = self.base_dataloader, self._batches_per_step
        opening = self._read_opening(point)
        is_placed = point.start > 0 and self._place_dataset(point)
        source = self._sampler_source()
        is_there = source is not None or is_placed or point.is_reached_by_torchdata
        size = getattr(outer_batch_sampler(base), "batch_size", None) or 1
        left_out = 0 if is_there else self.left_out
        consumed = point.samples if is_there else left_out * size
        if source is not None:
            consumed = max(consumed, source.open_pass(base, point, dataset_is_placed=is_placed).plan.start)
        start = 0 if is_there else max(point.start - consumed, 0)
        batches = islice(self._start_reading(base), left_out, None)
        skipped = 0 if point.start else self.skip_batches * per_step
        passed_over = list(islice(batches, min(skipped, 1)))
        opening = opening or passed_over
        batches = islice(batches, skipped - len(passed_over), None)
        skipped_by_samplers = 0 if point.start else skipped_batches(nested_samplers(base))
        read_first: Callable[[], Any] | None = None
        if source is not None and (point.samples or skipped_by_samplers):
            read_first = cache(partial(self._read_first, source))
        elif opening:
            read_first = partial(getitem, opening, 0)
        consumed += (skipped_by_samplers + skipped) * size
        is_cut_by_user = self.slice_fn is not None
        assembler = StepAssembler(self._num_shards, per_step, self._drop_last, is_cut_by_user, read_first)
        saves = self._saves_state()
        for step in assembler.steps(batches, start, consumed):
            if source is not None:
                step.consumed += max(source.observed.left_out - consumed, 0)
            step.state = None if saves is None else saves()
            self._pack(step)
            yield step

    def _start_progress(self, progress: EpochProgress, point: ResumePoint) -> None:
        super()._start_progress(progress, point)
        dataset = getattr(self.base_dataloader, "dataset", None)
        if isinstance(dataset, IterableDataset) and not hasattr(dataset, "load_state_dict"):
            # Torchdata's loader would read everything again too, and keep the epoch's first batch to itself.
            progress.torchdata_counts = False

    def _read_first(self, source: DataSource) -> Any:
        """Read the epoch's first batch, from which a pass that began later completes its last step."""
        base, indices = self.base_dataloader, source.observed.first
        changes: dict[str, Any] = {"num_workers": 0, "persistent_workers": False, "timeout": 0}
        if base.batch_sampler is not None:
            changes["batch_sampler"] = [indices]
        else:
            changes["sampler"] = indices if isinstance(base.sampler, IndexShard) else [indices]
        with RandomStreams(base).borrowed():
            return next(iter(copy_loader(base, **changes)))

    def _read_opening(self, point: ResumePoint) -> list[Any]:
        """Read the epoch's first batch if the dataset restores its own position, which leaves it unread otherwise."""
        base = self.base_dataloader
        dataset: Any = getattr(base, "dataset", None)
        restores = point.is_reached_by_torchdata or (point.dataset is not None and saves_its_state(base))
        is_stateful = isinstance(dataset, IterableDataset) and hasattr(dataset, "load_state_dict")
        if not (is_stateful and restores and point.samples) or self._num_shards == 1 or self._drop_last:
            return []
        if is_hf_dataset(dataset, "IterableDataset"):
            dataset.load_state_dict(None)  # or it begins where it was placed before
        # Restoring the position afterwards undoes what this read changes in the dataset.
        copy = copy_loader(base, persistent_workers=False, next_iter_state=None)
        with RandomStreams(base).borrowed():
            return list(islice(copy, self.left_out, self.left_out + 1))

    def _sampler_source(self) -> DataSource | None:
        return next((part for part in nested_samplers(self.base_dataloader) if isinstance(part, DataSource)), None)

    def _header(self, step: DispatchStep, place: int, *, is_last: bool) -> MessageHeader:
        rows, real = step.rows[place], step.real[place]
        return MessageHeader(
            0 if self._channel is None else self._channel.pass_number,
            MessageKind.BATCH,
            is_last,
            UNKNOWN if rows is None else rows,
            UNKNOWN if real is None else real,
            step.samples,
            step.consumed,
        )

    def _send(self, step: DispatchStep | Exception | None, *, is_last: bool) -> None:
        channel = self._channel
        if not isinstance(channel, SendingEnd):
            return
        ranks = range(1, current.runtime().world_size)
        if not isinstance(step, DispatchStep):
            kind = MessageKind.END if step is None else MessageKind.ERROR
            error = b"" if step is None else _pickled_error(step)
            for rank in ranks:
                channel.send(rank, MessageHeader(channel.pass_number, kind), error=error)
            return
        for rank in ranks:
            place = self._shard_of(rank)[0]
            channel.send(rank, self._header(step, place, is_last=is_last), step.packed[id(step.pieces[place])])

    def _pack(self, step: DispatchStep) -> None:
        """Pack the pieces of a step before any is sent: one that cannot be pickled is an error on all ranks."""
        channel = self._channel
        if isinstance(channel, SendingEnd):
            for rank in range(1, current.runtime().world_size):
                piece = step.pieces[self._shard_of(rank)[0]]
                if id(piece) not in step.packed:
                    step.packed[id(piece)] = channel.pack(piece)

    def __len__(self) -> int:
        per_step = self._batches_per_step
        length = max(len(self.base_dataloader) - self.left_out - self.skip_batches * per_step, 0)
        return length // per_step if self._drop_last else -(-length // per_step)

    @property
    def total_batch_size(self) -> int:
        """Samples of a step over all processes."""
        return known_size(outer_batch_sampler(self.base_dataloader).batch_size) * self._batches_per_step

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset."""
        return len(self.base_dataloader.dataset)


def _known(value: int) -> int | None:
    return None if value == UNKNOWN else value


def _pickled_error(error: Exception) -> bytes:
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:  # noqa: BLE001 - an exception's class may refuse either for any reason
        packed = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return packed


class CannotJoinError(Exception):
    """Batches of different structure or trailing shape cannot become one."""


def count_rows(batch: Any) -> int | None:
    """Return the number of samples of a batch: the first tensor's rows, else the first list's; None if it has none."""
    for _, leaf in leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    return _first_list_length(batch)


def _first_list_length(batch: Any) -> int | None:
    is_list = isinstance(batch, (list, tuple)) and not is_namedtuple(batch)
    if is_list and not any(isinstance(entry, (list, tuple)) for entry in batch):
        return len(batch)
    lengths = (_first_list_length(child.value) for child in children(batch) or ())
    return next((length for length in lengths if length is not None), None)


def _lists_samples(value: Any, rows: int) -> bool:
    """Return whether a list has one entry a sample, and is not a list of columns."""
    if not isinstance(value, (list, tuple)) or is_namedtuple(value) or len(value) != rows:
        return False
    inside = [leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor)]
    return not inside or not all(leaf.dim() > 0 and leaf.shape[0] == rows for leaf in inside)


def cut_rows(value: Any, rows: int, part: slice) -> Any:
    """Return the samples `part` of a batch of `rows`; what is not one entry a sample stays whole."""
    if isinstance(value, Tensor):
        return value[part] if value.dim() > 0 and value.shape[0] == rows else value
    if _lists_samples(value, rows):
        return value[part]
    inside = children(value)
    return value if inside is None else rebuilt(value, [cut_rows(child.value, rows, part) for child in inside])


def join_rows(batches: list[Any], rows: list[int]) -> Any:
    """Return one batch with the samples of all.

    Raises:
        CannotJoinError: If structures, dtypes or trailing shapes differ.
    """
    first = batches[0]
    if any(type(batch) is not type(first) for batch in batches):
        raise CannotJoinError
    if isinstance(first, Tensor):
        return _join_tensors(batches, rows)
    if all(_lists_samples(batch, count) for batch, count in zip(batches, rows, strict=True)):
        return type(first)(entry for batch in batches for entry in batch)
    columns = [children(batch) for batch in batches]
    if columns[0] is None:
        if any(batch is not first and batch != first for batch in batches):
            raise CannotJoinError
        return first
    names = [[child.step for child in column or ()] for column in columns]
    if any(other != names[0] for other in names):
        raise CannotJoinError
    across = zip(*([child.value for child in column or ()] for column in columns), strict=True)
    return rebuilt(first, [join_rows(list(values), rows) for values in across])


def _join_tensors(tensors: list[Tensor], rows: list[int]) -> Tensor:
    first = tensors[0]
    if all(tensor.dim() > 0 and tensor.shape[0] == count for tensor, count in zip(tensors, rows, strict=True)):
        if any(tensor.shape[1:] != first.shape[1:] or tensor.dtype != first.dtype for tensor in tensors):
            raise CannotJoinError
        return torch.cat(tensors)
    if all(tensor.shape == first.shape and torch.equal(tensor, first) for tensor in tensors):
        return first
    raise CannotJoinError


@dataclass
class DispatchStep:
    """One step of all processes: a piece, its rows and its real rows for each; and the step's real samples.

    Args:
        consumed: Samples of the epoch that were handed out with this step and before.
        state: What the reader's loader or dataset saved behind it.
        packed: The pieces of other processes, ready to be sent, by the id of the piece.
    """

    pieces: list[Any]
    rows: list[int | None]
    real: list[int | None]
    samples: int
    consumed: int = 0
    state: dict[str, Any] | None = None
    packed: dict[int, PackedBatch] = field(default_factory=dict)


@dataclass(frozen=True)
class StepAssembler:
    """Build the steps of `num_parts` processes from groups of batches.

    Args:
        per_step: Batches of a step: one a process, or a single one that they share.
        whole: Whether each process gets the joined batch and cuts its piece itself.
        read_first: Returns the first batch of the epoch, where that is not the first one of the pass.
    """

    num_parts: int
    per_step: int
    drop_last: bool = False
    whole: bool = False
    read_first: Callable[[], Any] | None = None

    def steps(self, batches: Iterable[Any], start: int = 0, consumed: int = 0) -> Iterator[DispatchStep]:
        """Yield the steps of a pass.

        Args:
            start: Samples to draw and drop first.
            consumed: Samples of the epoch that were handed out before the first batch.
        """
        group: list[Any] = []
        first: Any = None
        for batch in batches:
            if first is None:
                first = batch
            if start > 0:
                rows = count_rows(batch) or 1
                dropped = min(rows, start)
                start, consumed = start - dropped, consumed + dropped
                if dropped == rows:
                    continue
                batch = cut_rows(batch, rows, slice(dropped, None))
            group.append(batch)
            if len(group) == self.per_step:
                step = self._build(group, first)
                consumed += step.samples
                step.consumed = consumed
                yield step
                group = []
        if group and not self.drop_last:
            step = self._build(group, first)
            step.consumed = consumed + step.samples
            yield step

    def _build(self, group: list[Any], first: Any) -> DispatchStep:
        counts = [count_rows(batch) for batch in group]
        is_round = len(group) == self.num_parts and len(set(counts)) == 1
        if (is_round and not self.whole) or None in counts:
            return self._whole_batches(group, counts)
        try:
            return self._cut(group, [count or 0 for count in counts], first)
        except CannotJoinError:
            return self._whole_batches(group, counts)

    def _whole_batches(self, group: list[Any], counts: list[int | None]) -> DispatchStep:
        """Give each process a batch of the group; one that is left without repeats another, of which nothing counts."""
        order = [index % len(group) for index in range(self.num_parts)]
        real = [counts[source] if place < len(group) else 0 for place, source in enumerate(order)]
        samples = sum(1 if count is None else count for count in counts)
        return DispatchStep([group[source] for source in order], [counts[source] for source in order], real, samples)

    def _cut(self, group: list[Any], rows: list[int], first: Any) -> DispatchStep:
        """Join the group, complete it with the pass's first samples, and cut it into equal pieces."""
        samples = sum(rows)
        size = -(-samples // self.num_parts)
        total = size * self.num_parts
        joined = group[0] if len(group) == 1 else join_rows(group, rows)
        if total > samples:
            joined = self._completed(joined, samples, total, first)
        real: list[int | None] = [clamp(samples - place * size, 0, size) for place in range(self.num_parts)]
        bounds = [slice(place * size, (place + 1) * size) for place in range(self.num_parts)]
        pieces = [joined if self.whole else cut_rows(joined, total, bound) for bound in bounds]
        return DispatchStep(pieces, [size] * self.num_parts, real, samples)

    def _completed(self, joined: Any, samples: int, total: int, first: Any) -> Any:
        """Repeat samples of the first batch up to `total`, or of the step itself where that has another shape."""
        first = first if self.read_first is None else self.read_first()
        for pool, rows in ((first, count_rows(first)), (joined, samples)):
            if not rows:
                continue
            sizes = [min(rows, total - begin) for begin in range(samples, total, rows)]
            pieces = [cut_rows(pool, rows, slice(0, size)) for size in sizes]
            try:
                return join_rows([joined, *pieces], [samples, *sizes])
            except CannotJoinError:
                continue
        raise CannotJoinError
