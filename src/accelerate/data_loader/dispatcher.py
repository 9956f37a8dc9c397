"""The loader that one process reads for all: rank 0 cuts its batches into pieces and sends each process its own."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

from accelerate._base.errors import ConfigurationError
from accelerate.collectives.nested import place_batch
from accelerate.data_loader.adapter import DataLoaderAdapter, DataLoaderStateMixin
from accelerate.data_loader.assembly import Assembler, Step
from accelerate.data_loader.channel import UNKNOWN, Header, Kind, Message, Receiver, Sender
from accelerate.data_loader.ledgers import Ledger
from accelerate.data_loader.packing import Parcel
from accelerate.data_loader.parts import nested_samplers, outer_batch_sampler
from accelerate.data_loader.plan import Share, data_shard
from accelerate.data_loader.position import Trail
from accelerate.data_loader.sharding import BatchSamplerShard, SkipBatchSampler
from accelerate.runtime import current


class DispatchLedger(Ledger):
    """The account of a dispatched pass, as the reader's messages tell it."""

    def __init__(self, start: int) -> None:
        super().__init__(0, start)
        self.total = start
        self.held = Share(None, None)

    def consumed(self, number: int) -> int:
        return self.total if number else self.start

    def share(self, number: int) -> Share:
        return self.held


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
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self._configure(
            None,
            split_batches=split_batches,
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
            slice_fn=slice_fn,
            torch_device_mesh=torch_device_mesh,
        )
        self.skip_batches = skip_batches
        self.iteration = iteration

    def _configure(
        self,
        device: torch.device | str | None,
        *,
        split_batches: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
    ) -> None:
        names = () if torch_device_mesh is None else torch_device_mesh.mesh_dim_names
        if "tp" in names and {"dp", "fsdp"} & set(names):
            raise ConfigurationError(
                f"torch_device_mesh has the axes {tuple(names)!r}: a dispatcher cannot tell the data axes 'dp' and 'fsdp' "
                "from the tensor axis; name them 'dp_replicate' and 'dp_shard'"
            )
        self.device = device
        self.split_batches = split_batches
        self.skip_batches = 0
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.slice_fn = slice_fn
        self.torch_device_mesh = torch_device_mesh
        self.iteration = 0
        self._channel: Sender | Receiver | None = None

    @classmethod
    def around(cls, base: Any, device: torch.device | str | None = None, **options: Any) -> DataLoaderDispatcher:
        """Return a dispatcher around a loader as it is."""
        loader: DataLoaderDispatcher = object.__new__(cls)
        loader._wrap(base, options.pop("use_stateful_dataloader", False))
        loader._configure(device, **options)
        return loader

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, (cls, attributes) = super().__reduce__()
        return rebuild, (cls, {**attributes, "_channel": None})

    def _place_of(self, rank: int) -> tuple[int, int]:
        mesh = self.torch_device_mesh
        sizes = None if mesh is None else dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        return data_shard(rank, current.runtime().world_size, sizes)

    @property
    def _batches_per_step(self) -> int:  # type: ignore[override]
        return 1 if self.split_batches else self._place_of(0)[1]

    def __iter__(self) -> Iterator[Any]:
        runtime = current.runtime()
        start, trail = self._take_start()
        ledger = DispatchLedger(start)
        self._ledger = ledger
        size = getattr(outer_batch_sampler(self.base_dataloader), "batch_size", None)
        full = size // self._place_of(0)[1] if size is not None and self.split_batches else size
        self._forward_epoch(self.iteration)
        device = runtime.device if self.device is None else torch.device(self.device)
        if self._channel is None and runtime.world_size > 1:
            self._channel = Sender(runtime.world_size) if runtime.rank == 0 else Receiver()
        if self._channel is not None:
            self._channel.begin()
        self.begin()
        self.remainder = -1
        try:
            messages = self._lead(start, trail) if runtime.rank == 0 else self._follow()
            for header, batch in messages:
                self._taken += 1
                ledger.held = Share(_known(header.rows), _known(header.real), full)
                ledger.total = header.consumed
                if header.is_last:
                    self.end_of_dataloader = True
                    self.remainder = header.samples
                yield place_batch(batch, device, self._non_blocking)
            self._flush()
            if self._taken or start:
                self._complete()
        finally:
            self.end()

    def _lead(self, start: int, trail: Trail) -> Iterator[Message]:
        """Read, send every process its pieces ahead of their use, and yield one's own."""
        steps = self._read(start, trail)
        here, ahead = next(steps), next(steps)
        self._send(here, is_last=ahead is None)
        while here is not None:
            further = next(steps) if isinstance(ahead, Step) else None
            if ahead is not None:
                self._send(ahead, is_last=further is None)
            if isinstance(here, Exception):
                self._flush()
                raise here
            if self._has_stateful_base and here.state is not None:
                self.dl_state_dict = {**here.state, "_iterator_finished": ahead is None}
            else:
                self._dataset_state = here.state
            header = self._header(here, 0, is_last=ahead is None)
            yield Message(header, self._own_piece(here.pieces[0], header, 0))
            here, ahead = ahead, further

    def _flush(self) -> None:
        if self._channel is not None:
            self._channel.flush()

    def _follow(self) -> Iterator[Message]:
        """Receive one's pieces until the last."""
        channel = self._channel
        assert isinstance(channel, Receiver)
        place = self._place_of(current.runtime().rank)[0]
        while True:
            header, batch = channel.receive()
            if header.kind == Kind.ERROR:
                channel.flush()
                raise _received_error(batch)
            if header.kind == Kind.END:
                return
            if header.base_seed != UNKNOWN and self._seeds:
                self._seeds[0].restore(header.base_seed)
            if not header.is_last:
                channel.post()
            yield Message(header, self._own_piece(batch, header, place))
            if header.is_last:
                return

    def _own_piece(self, piece: Any, header: Header, place: int) -> Any:
        if self.slice_fn is None:
            return piece
        count = self._place_of(0)[1]
        known = header.rows != UNKNOWN
        part = slice(place * header.rows, (place + 1) * header.rows) if known else slice(None)
        return self.slice_fn(piece, part, process_index=place, num_processes=count)

    def _read(self, start: int, trail: Trail) -> Iterator[Step | Exception | None]:
        """Yield the steps of the pass, an error in their place if one is raised, then None for ever."""
        per_step = self._batches_per_step
        assembler = Assembler(self._place_of(0)[1], per_step, self._drop_last, self.slice_fn is not None)
        try:
            shard = _seekable(self.base_dataloader)
            skipped = sum(
                part.skip_batches
                for part in nested_samplers(self.base_dataloader)
                if isinstance(part, SkipBatchSampler)
            )
            is_placed = start > 0 and self._place_dataset(trail)
            if shard is not None:
                shard.start = start
            batches = islice(self._start_reading(self.base_dataloader), self.skip_batches * per_step, None)
            size = getattr(outer_batch_sampler(self.base_dataloader), "batch_size", None) or 1
            is_there = shard is not None or is_placed
            consumed = (skipped + self.skip_batches * per_step) * size + (start if is_there else 0)
            consumed += self._resumed_samples
            saves = self._saves_state()
            for step in assembler.steps(batches, 0 if is_there else start, consumed):
                step.state = None if saves is None else saves()
                yield step
        except Exception as error:  # noqa: BLE001 - whatever the dataset raises is raised on all ranks
            yield error
        while True:
            yield None

    def _header(self, step: Step, place: int, *, is_last: bool) -> Header:
        rows, real = step.rows[place], step.real[place]
        seed = self._seeds[0].base if self._seeds else None
        return Header(
            0 if self._channel is None else self._channel.pass_number,
            Kind.BATCH,
            is_last,
            UNKNOWN if rows is None else rows,
            UNKNOWN if real is None else real,
            step.samples,
            step.consumed,
            UNKNOWN if seed is None else seed,
        )

    def _send(self, step: Step | Exception | None, *, is_last: bool) -> None:
        channel = self._channel
        if not isinstance(channel, Sender):
            return
        ranks = range(1, current.runtime().world_size)
        if not isinstance(step, Step):
            kind = Kind.END if step is None else Kind.ERROR
            note = b"" if step is None else _pickled_error(step)
            for rank in ranks:
                channel.send(rank, Header(channel.pass_number, kind), note=note)
            return
        parcels: dict[int, Parcel] = {}
        for rank in ranks:
            place = self._place_of(rank)[0]
            piece = step.pieces[place]
            parcel = parcels.get(id(piece)) or Parcel(piece)
            parcels[id(piece)] = parcel
            channel.send(rank, self._header(step, place, is_last=is_last), parcel)

    def __len__(self) -> int:
        length = len(self.base_dataloader) - self.skip_batches * self._batches_per_step
        if self.split_batches:
            return length
        per_step = self._batches_per_step
        return length // per_step if self._drop_last else -(-length // per_step)

    @property
    def total_batch_size(self) -> int:
        """Samples of a step over all processes."""
        size: int = outer_batch_sampler(self.base_dataloader).batch_size
        return size * self._batches_per_step

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset."""
        return len(self.base_dataloader.dataset)


def _known(value: int) -> int | None:
    return None if value == UNKNOWN else value


def _seekable(loader: Any) -> BatchSamplerShard | None:
    return next((part for part in nested_samplers(loader) if isinstance(part, BatchSamplerShard)), None)


def _pickled_error(error: Exception) -> bytes:
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
    except Exception:  # noqa: BLE001 - an exception's class may refuse either for any reason
        packed = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return packed


def _received_error(packed: bytes) -> Exception:
    error: Exception = pickle.loads(packed)
    # Notes came with python 3.11.
    getattr(error, "add_note", id)("raised on rank 0, which reads this loader for all processes")
    return error
