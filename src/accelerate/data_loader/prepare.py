"""The decision how a loader is read by the processes, and the building of the loader that does it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from accelerate._base.enums import RNGType
from accelerate._base.errors import ConfigurationError, WrongTypeError
from accelerate._base.helpers import Choice
from accelerate.data_loader.adapter import DataLoaderAdapter
from accelerate.data_loader.carrier import CountingCollate
from accelerate.data_loader.dispatcher import DataLoaderDispatcher
from accelerate.data_loader.iterables import IterableDatasetShard
from accelerate.data_loader.parts import as_stateful, copy_loader, copy_part, outer_batch_sampler, stateful_class
from accelerate.data_loader.plan import Windows, data_shard
from accelerate.data_loader.recognise import already_split, is_hf_iterable
from accelerate.data_loader.samplers import EpochSeed, Ordering, SeedableRandomSampler, choose_ordering, seedable
from accelerate.data_loader.shard_loader import DataLoaderShard
from accelerate.data_loader.sharding import BatchSamplerShard, IndexShard, check_splittable
from accelerate.data_loader.windows import WindowBatchSampler, WindowCollate, WindowDataset
from accelerate.runtime import current

logger = logging.getLogger(__name__)


def prepare_data_loader(
    dataloader: Any,
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[str | RNGType] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
    *,
    global_batch_size: int | None = None,
    custom_classes: tuple[type[Any], ...] = (),
    divides_by_tensor_parallel: bool = False,
) -> Any:
    """Return a loader that gives this process its part of the data.

    The given loader is not changed: its copy keeps its class and all its options. A loader whose data is already
    divided among the processes is used as it is. An iterable dataset of the `datasets` package is read by files
    (`dataset.shard`) only with `even_batches=False`, because files differ in length; otherwise every process reads all
    of it and keeps its own elements, so that all take the same number of steps.

    Args:
        device: Where batches go with `put_on_device`; this process's device if None.
        num_processes: Processes that share the data; all of them if None.
        process_index: The place of this process among them.
        split_batches: Whether a batch of the loader is shared by the processes, instead of given to one.
        rng_types: Random generators that take rank 0's state at the start of each pass.
        dispatch_batches: Whether rank 0 reads and the others receive; None means so for iterable datasets only.
        even_batches: Whether the last round is completed with repeats, so that all processes have the same rows.
        slice_fn_for_dispatch: Cuts a process's part out of a dispatched global batch.
        use_seedable_sampler: Whether shuffling starts from `data_seed`, or the seed that torch was started with.
        global_batch_size: Samples of one optimizer step on any number of processes; the loader's batch size is then
            the most rows that a process takes at once.
        custom_classes: Other classes of loaders, used as they are.
        divides_by_tensor_parallel: Whether an engine lays out the mesh, see `plan.data_shard`.

    Raises:
        ConfigurationError: (a ValueError) if the options contradict each other or the loader.
        MissingPackageError: (an ImportError) if torchdata is asked for and not installed.
    """
    request = _Request(
        device=_target(device, put_on_device),
        split=split_batches,
        even=even_batches,
        seeded=use_seedable_sampler or data_seed is not None,
        data_seed=data_seed,
        rng_types=_checked_rng_types(rng_types),
        non_blocking=non_blocking,
        stateful=use_stateful_dataloader,
        global_batch_size=global_batch_size,
    )
    if isinstance(dataloader, custom_classes or ()):
        return DataLoaderShard.around(dataloader, request.device, _non_blocking=non_blocking)
    if isinstance(dataloader, DataLoaderAdapter):
        _say("a loader given to prepare is used as it is: it was prepared before")
        return dataloader
    _check_loader(dataloader)
    is_iterable = isinstance(dataloader.dataset, IterableDataset)
    request.place(num_processes, process_index, torch_device_mesh, divides_by_tensor_parallel)
    dispatches = _choose_dispatch(dispatch_batches, put_on_device, is_iterable, global_batch_size)
    request.check(dataloader, dispatches)
    split = already_split(dataloader, request.num_processes)
    if split.value:
        _say(f"a loader given to prepare is used as it is, without sharding: {split.reason}")
        return request.finish(copy_loader(dataloader), [], split_elsewhere=request.num_processes)
    if dispatches:
        return _dispatcher(dataloader, request, slice_fn_for_dispatch, torch_device_mesh, is_iterable)
    if is_iterable:
        return _shard_iterable(dataloader, request)
    return _shard_map(dataloader, request)


class _Request:
    """The checked options of one call, and what follows from them."""

    num_processes: int
    process_index: int
    has_peers: bool = False
    """Whether other processes read the same part, being ranks of one model."""

    def __init__(
        self,
        *,
        device: torch.device | str | None,
        split: bool,
        even: bool,
        seeded: bool,
        data_seed: int | None,
        rng_types: list[RNGType | str] | None,
        non_blocking: bool,
        stateful: bool,
        global_batch_size: int | None,
    ) -> None:
        self.device = device
        self.split = split
        self.even = even
        self.seeded = seeded
        self.data_seed = data_seed
        self.rng_types = rng_types
        self.non_blocking = non_blocking
        self.stateful = stateful
        self.global_batch_size = global_batch_size

    def place(self, count: int | None, index: int | None, mesh: Any, divides_by_tensor_parallel: bool) -> None:
        """Settle which of how many parts of the data is this process's."""
        runtime = current.runtime()
        sizes = None if mesh is None else dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        self.has_peers = mesh is not None and runtime.world_size > 1
        self.process_index, self.num_processes = data_shard(
            runtime.rank if index is None else index,
            runtime.world_size if count is None else count,
            sizes,
            divides_by_tensor_parallel=divides_by_tensor_parallel,
        )

    def check(self, loader: Any, dispatches: bool) -> None:
        """Raise for what cannot work, before anything is built."""
        batch_size = getattr(outer_batch_sampler(loader), "batch_size", None) or loader.batch_size
        if self.split:
            check_splittable(batch_size, self.num_processes)
        if self.stateful:
            stateful_class()
        if self.global_batch_size is not None:
            self._check_windows(loader, dispatches, batch_size)

    def _check_windows(self, loader: Any, dispatches: bool, batch_size: int | None) -> None:
        size = self.global_batch_size
        is_iterable = isinstance(loader.dataset, IterableDataset)
        reasons = {
            "it must be at least 1": size is not None and size < 1,
            "with split_batches=True the loader's batch size would be a second global size; leave it out": self.split,
            "rank 0 would cut the batches; leave out dispatch_batches=True": dispatches,
            "the loader's batch_size must be known; build the loader with one": not batch_size,
            "a batch sampler of one's own fixes the batches; pass a sampler and a batch_size to the loader": (
                not is_iterable and type(outer_batch_sampler(loader)) is not BatchSampler
            ),
            "several workers would mix the windows of an iterable dataset; use num_workers=1 or 0": (
                is_iterable and loader.num_workers > 1
            ),
        }
        for reason, applies in reasons.items():
            if applies:
                raise ConfigurationError(f"global_batch_size={size!r} cannot be kept for this loader: {reason}")

    @property
    def is_shared(self) -> bool:
        """Whether several processes read the same order and must agree on it."""
        return self.num_processes > 1 or self.has_peers

    def seed_sampler(self, sampler: Any, *, shared: bool) -> Any:
        """Return a sampler whose order depends on seed and epoch, in place of torch's random one."""
        if type(sampler) is not RandomSampler:
            return sampler
        base = None
        if self.seeded:
            base = torch.random.initial_seed() if self.data_seed is None else self.data_seed
        return seedable(sampler, EpochSeed(base, shared=shared))

    def finish(self, base: Any, seeds: list[EpochSeed | None], split_elsewhere: int = 0) -> DataLoaderShard:
        """Return the loader of this process around what it reads."""
        if self.stateful:
            base = as_stateful(base)
        drop_last = bool(getattr(outer_batch_sampler(base), "drop_last", base.drop_last))
        loader = DataLoaderShard.around(
            base,
            self.device,
            _drop_last=drop_last,
            _non_blocking=self.non_blocking,
            use_stateful_dataloader=self.stateful,
        )
        loader.rng_types = self.rng_types
        loader.split_elsewhere = split_elsewhere
        loader._seeds = _distinct(seeds)
        loader._fresh_after_break = bool(loader._seeds) and not self.seeded
        return loader


def _distinct(seeds: Iterable[EpochSeed | None]) -> list[EpochSeed]:
    return list({id(seed): seed for seed in seeds if seed is not None}.values())


def _target(device: torch.device | None, put_on_device: bool) -> torch.device | None:
    if not put_on_device:
        return None
    return current.runtime().device if device is None else device


def _checked_rng_types(rng_types: list[str | RNGType] | None) -> list[RNGType | str] | None:
    """Return the generators to synchronise at each pass; samplers' own are seeded, so "generator" has no work left."""
    if rng_types is None:
        return None
    known = {kind.value for kind in RNGType}
    values = [getattr(kind, "value", kind) for kind in rng_types]
    for value in values:
        if value not in known:
            raise ConfigurationError(
                f"rng_types was given {value!r}, which names no random generator; use one of {sorted(known)}"
            )
    return [value for value in values if value != RNGType.GENERATOR.value]


def _check_loader(dataloader: Any) -> None:
    if not all(hasattr(dataloader, name) for name in ("dataset", "sampler", "batch_size", "collate_fn")):
        raise WrongTypeError(
            f"prepare_data_loader was given a {type(dataloader).__name__!r}, which is no torch DataLoader; pass a "
            "DataLoader, or name the class in DataLoaderConfiguration(custom_classes=(...,)) to use it as it is"
        )


def _choose_dispatch(asked: bool | None, put_on_device: bool, is_iterable: bool, global_batch_size: int | None) -> bool:
    if asked and not put_on_device:
        raise ConfigurationError(
            f"dispatch_batches={asked!r} was given with put_on_device=False: what rank 0 reads is sent to each process "
            "and placed on its device; pass put_on_device=True, or leave dispatch_batches out"
        )
    if asked is None:
        return put_on_device and is_iterable and global_batch_size is None
    return asked


def _say(message: str) -> None:
    if current.runtime().rank == 0:
        logger.warning(message)


def _ordered_batches(loader: Any, request: _Request, *, shared: bool) -> tuple[Any, Any, Ordering]:
    """Return (sampler, batch sampler, ordering) of a map-style loader, ready for any epoch; both may be None."""
    batch_sampler = outer_batch_sampler(loader)
    sampler = loader.sampler if batch_sampler is None else getattr(batch_sampler, "sampler", None)
    seeded = request.seed_sampler(sampler, shared=shared)
    if seeded is not sampler and batch_sampler is not None:
        batch_sampler = copy_part(batch_sampler, sampler=seeded)
    return seeded, batch_sampler, choose_ordering(seeded, batch_sampler, shared=shared)


def _shard_map(loader: Any, request: _Request) -> DataLoaderShard:
    sampler, batch_sampler, ordering = _ordered_batches(loader, request, shared=request.is_shared)
    seeds = [getattr(sampler, "seed", None) if isinstance(sampler, SeedableRandomSampler) else None, ordering.seed]
    changes = _sharded_parts(loader, request, sampler, batch_sampler, ordering)
    return request.finish(copy_loader(loader, **changes), seeds)


def _sharded_parts(
    loader: Any, request: _Request, sampler: Any, batch_sampler: Any, ordering: Ordering
) -> dict[str, Any]:
    count, index = request.num_processes, request.process_index
    if batch_sampler is None:
        single = IndexShard(sampler, count, index, request.even)
        single.batch_sampler.ordering = ordering
        return {"sampler": single}
    shard: BatchSamplerShard | WindowBatchSampler
    if request.global_batch_size is not None:
        windows = Windows(request.global_batch_size, batch_sampler.batch_size, count, None, batch_sampler.drop_last)
        shard = WindowBatchSampler(sampler, windows, index)
    else:
        shard = BatchSamplerShard(batch_sampler, count, index, request.split, request.even)
    shard.ordering = ordering
    if loader.batch_sampler is None:
        return {"sampler": shard}
    return {"batch_sampler": shard, "sampler": loader.sampler if sampler is None else sampler}


def _shard_iterable(loader: Any, request: _Request) -> DataLoaderShard:
    count, index = request.num_processes, request.process_index
    if request.global_batch_size is not None:
        windows = Windows(request.global_batch_size, loader.batch_size, count, None, loader.drop_last)
        dataset = WindowDataset(loader.dataset, windows, index)
        collate = WindowCollate(loader.collate_fn, dataset)
        return request.finish(
            copy_loader(loader, dataset=dataset, collate_fn=collate, batch_size=None, batch_sampler=None), []
        )
    if count == 1 and loader.num_workers <= 1:
        return request.finish(copy_loader(loader), [])
    by_files = _reads_files(loader.dataset, request)
    if by_files.value:
        _say(f"each process reads its own files of an iterable dataset: {by_files.reason}")
        own = loader.dataset.shard(num_shards=count, index=index)
        return request.finish(copy_loader(loader, dataset=own), [], split_elsewhere=count)
    shard = IterableDatasetShard(loader.dataset, loader.batch_size or 1, loader.drop_last, count, index, request.split)
    # One process needs the view only to know how far each of its workers has read.
    shard.completes = count > 1
    changes: dict[str, Any] = {"dataset": shard, "collate_fn": CountingCollate(loader.collate_fn, shard)}
    if request.split:
        own_size = loader.batch_size // count
        own_batches = BatchSampler(loader.sampler, own_size, loader.drop_last)
        changes |= {"batch_size": own_size, "batch_sampler": own_batches}
    return request.finish(copy_loader(loader, **changes), [])


def _reads_files(dataset: Any, request: _Request) -> Choice[bool]:
    if not is_hf_iterable(dataset) or request.split:
        return Choice(False, "elements are shared out one by one")
    if request.even:
        return Choice(False, "files differ in length, and even_batches=True keeps the processes in step")
    if dataset.num_shards < request.num_processes:
        return Choice(False, f"{dataset.num_shards} files are too few for {request.num_processes} processes")
    return Choice(True, f"it has {dataset.num_shards} files, and even_batches=False allows different lengths")


def _dispatcher(
    loader: Any, request: _Request, slice_fn: Callable[..., Any] | None, mesh: Any, is_iterable: bool
) -> DataLoaderDispatcher:
    changes: dict[str, Any] = {}
    seeds: list[EpochSeed | None] = []
    if not is_iterable:
        # Rank 0 alone reads: it shares its order with nobody, but must be able to start anywhere in it.
        alone = copy_part(request, num_processes=1, process_index=0, split=False)
        sampler, batch_sampler, ordering = _ordered_batches(loader, alone, shared=False)
        seeds = [sampler.seed if isinstance(sampler, SeedableRandomSampler) else None, ordering.seed]
        changes = _sharded_parts(loader, alone, sampler, batch_sampler, ordering)
    base = copy_loader(loader, **changes)
    if request.stateful:
        base = as_stateful(base)
    dispatcher = DataLoaderDispatcher.around(
        base,
        request.device,
        split_batches=request.split,
        slice_fn=slice_fn,
        torch_device_mesh=mesh,
        _drop_last=bool(loader.drop_last),
        _non_blocking=request.non_blocking,
        use_stateful_dataloader=request.stateful,
    )
    dispatcher._seeds = _distinct(seeds)
    dispatcher._fresh_after_break = bool(dispatcher._seeds) and not request.seeded
    return dispatcher
