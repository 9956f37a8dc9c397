"""The decision how a loader is read by the processes, and the building of the loader that does it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from accelerate._base.enums import RNGType
from accelerate._base.errors import ConfigurationError, WrongTypeError
from accelerate._base.helpers import Choice
from accelerate.collectives.base import communicator
from accelerate.collectives.rng import rng_name
from accelerate.data_loader.adapter import DataLoaderAdapter, as_stateful, stateful_class
from accelerate.data_loader.dispatcher import DataLoaderDispatcher
from accelerate.data_loader.draws import nested_samplers
from accelerate.data_loader.file_shards import FileShard
from accelerate.data_loader.global_batches import (
    GlobalBatchCollate,
    GlobalBatchDataset,
    GlobalBatchPlan,
    GlobalBatchSampler,
)
from accelerate.data_loader.iterables import GroupCollate, IterableDatasetShard, is_hf_dataset
from accelerate.data_loader.loader import DataLoaderShard, SkipDataLoader
from accelerate.data_loader.order import DrawnOrder, EpochSeed, SeedableRandomSampler, agree, seeded_order
from accelerate.data_loader.samplers import (
    BatchSamplerShard,
    IndexShard,
    batch_size_of,
    check_splittable,
    copy_loader,
    copy_with_sampler,
    data_shard,
    outer_batch_sampler,
    without_skips,
)
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
        divides_by_tensor_parallel: Whether an engine lays out the mesh, see `samplers.data_shard`.

    Raises:
        ConfigurationError: (a ValueError) if the options contradict each other or the loader.
        MissingPackageError: (an ImportError) if torchdata is asked for and not installed.
    """
    target = None
    if put_on_device:
        target = current.runtime().device if device is None else device
    left_out = 0
    if isinstance(dataloader, SkipDataLoader):
        dataloader, left_out = dataloader.base_dataloader, dataloader.skip_batches
    if isinstance(dataloader, custom_classes or ()):
        return _make_loader(dataloader, target, _non_blocking=non_blocking, skip_batches=left_out)
    if isinstance(dataloader, DataLoaderAdapter):
        _log_on_main("a loader given to prepare is used as it is: it was prepared before")
        return dataloader
    if not all(hasattr(dataloader, name) for name in ("dataset", "sampler", "batch_size", "collate_fn")):
        raise WrongTypeError(
            f"prepare_data_loader was given a {type(dataloader).__name__!r}, which is no torch DataLoader; pass a "
            "DataLoader, or name the class in DataLoaderConfiguration(custom_classes=(...,)) to use it as it is"
        )
    is_iterable = isinstance(dataloader.dataset, IterableDataset)
    runtime = current.runtime()
    mesh_sizes = None
    if torch_device_mesh is not None:
        mesh_sizes = dict(zip(torch_device_mesh.mesh_dim_names, torch_device_mesh.shape, strict=True))
    index, count = data_shard(
        runtime.rank if process_index is None else process_index,
        runtime.world_size if num_processes is None else num_processes,
        mesh_sizes,
        divides_by_tensor_parallel=divides_by_tensor_parallel,
    )
    base_seed = None
    if use_seedable_sampler or data_seed is not None:
        base_seed = torch.random.initial_seed() if data_seed is None else data_seed
    options = _LoaderOptions(
        count,
        index,
        device=target,
        split=split_batches,
        even=even_batches,
        base_seed=base_seed,
        rng_types=_checked_rng_types(rng_types),
        non_blocking=non_blocking,
        stateful=use_stateful_dataloader,
        global_batch_size=global_batch_size,
        left_out=left_out,
        # With a mesh other processes may read the same part, being ranks of one model.
        shares_order=count > 1 or (torch_device_mesh is not None and runtime.world_size > 1),
    )
    dispatches = dispatch_batches
    if dispatch_batches is None:
        dispatches = put_on_device and is_iterable and global_batch_size is None and not _is_recording(target)
    _check_options(dataloader, options, dispatches=bool(dispatches), put_on_device=put_on_device)
    sharding = detect_sharding(dataloader, count)
    if sharding.value:
        _log_on_main(f"a loader given to prepare is used as it is, without sharding: {sharding.reason}")
        return _shard_loader(copy_loader(dataloader), options, split_elsewhere=count, skip_batches=left_out)
    if dispatches:
        return _dispatcher(dataloader, options, slice_fn_for_dispatch, torch_device_mesh)
    if is_iterable:
        return _shard_iterable(dataloader, options)
    changes, seeds = _sharded_samplers(dataloader, options)
    return _shard_loader(copy_loader(dataloader, **changes), options, seeds)


@dataclass(frozen=True)
class _LoaderOptions:
    """The checked options of one call.

    Args:
        left_out: The first batches of the loader that every pass leaves out, where no batch sampler does that.
        shares_order: Whether several processes read the same order and must agree on it.
    """

    num_processes: int
    process_index: int
    device: torch.device | None
    split: bool
    even: bool
    base_seed: int | None
    rng_types: list[RNGType | str] | None
    non_blocking: bool
    stateful: bool
    global_batch_size: int | None
    left_out: int
    shares_order: bool

    def global_batch_plan(self, batches: Any) -> GlobalBatchPlan | None:
        """Return the sizes of global batches, None if none are asked for; `batches` is a batch sampler or loader."""
        if self.global_batch_size is None:
            return None
        return GlobalBatchPlan(
            self.global_batch_size,
            batches.batch_size,
            self.num_processes,
            drop_last=batches.drop_last,
            rank=self.process_index,
            left_out=(self.left_out + without_skips(batches)[1]) * batches.batch_size,
        )


def _log_on_main(message: str) -> None:
    if current.runtime().rank == 0:
        logger.warning(message)


def _checked_rng_types(rng_types: list[str | RNGType] | None) -> list[RNGType | str] | None:
    """Return the generators to synchronise at each pass; samplers' own are seeded, so "generator" has no work left."""
    if rng_types is None:
        return None
    known = {kind.value for kind in RNGType}
    values = [getattr(kind, "value", kind) for kind in rng_types]
    return [value if value in known else rng_name(value) for value in values if value != RNGType.GENERATOR.value]


def _check_options(loader: Any, options: _LoaderOptions, *, dispatches: bool, put_on_device: bool) -> None:
    """Raise for what cannot work, before anything is built."""
    if dispatches and not put_on_device:
        raise ConfigurationError(
            f"dispatch_batches={dispatches!r} was given with put_on_device=False: what rank 0 reads is sent to each process "
            "and placed on its device; pass put_on_device=True, or leave dispatch_batches out"
        )
    batch_size = batch_size_of(loader)
    if options.split:
        check_splittable(batch_size, options.num_processes)
    if options.stateful:
        stateful_class()
    size = options.global_batch_size
    if size is None:
        return
    is_iterable = isinstance(loader.dataset, IterableDataset)
    reasons = {
        "it must be at least 1": size < 1,
        "with split_batches=True the loader's batch size would be a second global size; leave it out": options.split,
        "rank 0 would cut the batches; leave out dispatch_batches=True": dispatches,
        "the loader's batch_size must be known; build the loader with one": not batch_size,
        "a batch sampler of one's own fixes the batches; pass a sampler and a batch_size to the loader": (
            not is_iterable and type(without_skips(outer_batch_sampler(loader))[0]) is not BatchSampler
        ),
        "several workers would mix the global batches of an iterable dataset; use num_workers=1 or 0": (
            is_iterable and loader.num_workers > 1
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigurationError(f"global_batch_size={size!r} cannot be kept for this loader: {reason}")


def detect_sharding(loader: Any, num_processes: int) -> Choice[bool]:
    """Say whether each process already reads its own part of the data, and how that is known."""
    if num_processes == 1:
        return Choice(False, "there is one process")
    for part in nested_samplers(loader):
        if isinstance(part, BatchSamplerShard):
            return Choice(part.num_processes > 1, "its batch sampler is a BatchSamplerShard")
        replicas = getattr(part, "num_replicas", None)
        if isinstance(replicas, int) and replicas > 1 and hasattr(part, "rank"):
            return Choice(True, f"its {type(part).__name__} gives each of {replicas} replicas its own samples")
    dataset = loader.dataset
    if isinstance(dataset, IterableDatasetShard):
        return Choice(dataset.num_processes > 1, "its dataset is an IterableDatasetShard")
    if getattr(dataset, "_distributed", None) is not None:
        return Choice(True, "its dataset was split by node")
    if is_hf_dataset(dataset, "Dataset") and _differs_between_ranks(dataset):
        return Choice(True, "its dataset has other rows on each process, so it was split before")
    return Choice(False, "nothing shows that its data is divided")


def _differs_between_ranks(dataset: Any) -> bool:
    group = communicator()
    if group.world_size == 1:
        return False
    # As they are stored: what a format or a decoder makes of them may look different although it is the same.
    stored = dataset.with_format("arrow")
    ends = [stored[index].to_pylist() for index in ((0, len(dataset) - 1) if len(dataset) else ())]
    return len(set(group.gather_object(repr((len(dataset), ends))))) > 1


def _shard_loader(
    base: Any,
    options: _LoaderOptions,
    seeds: list[EpochSeed] | None = None,
    split_elsewhere: int = 0,
    skip_batches: int = 0,
) -> DataLoaderShard:
    """Return the loader of this process around what it reads."""
    if options.stateful:
        base = as_stateful(base)
    loader = _make_loader(
        base,
        options.device,
        rng_types=options.rng_types,
        skip_batches=skip_batches,
        _drop_last=bool(getattr(outer_batch_sampler(base), "drop_last", base.drop_last)),
        _non_blocking=options.non_blocking,
        use_stateful_dataloader=options.stateful,
    )
    loader.split_elsewhere = split_elsewhere
    loader.differs_between_ranks = split_elsewhere > 0 or isinstance(base.dataset, FileShard)
    loader.seed_with(seeds or [], reshuffles_after_break=options.base_seed is None)
    return loader


def _is_recording(device: torch.device | None) -> bool:
    backend = current.runtime().backend
    return backend.records_operations and device is not None and device.type == backend.type


def _make_loader(base: Any, device: torch.device | None, **options: Any) -> DataLoaderShard:
    """Return the loader around what is read, of the kind that the device needs."""
    if device is not None and _is_recording(device):
        from accelerate.data_loader.xla import MpDeviceLoaderWrapper

        return MpDeviceLoaderWrapper(base, device, **options)
    return DataLoaderShard(None, device, _base_dataloader=base, **options)


def _sharded_samplers(loader: Any, options: _LoaderOptions) -> tuple[dict[str, Any], list[EpochSeed]]:
    """Return the samplers of a map-style loader that take one process's part of any epoch, and the epochs' seeds."""
    count, index = options.num_processes, options.process_index
    batch_sampler = outer_batch_sampler(loader)
    sampler = loader.sampler if batch_sampler is None else getattr(batch_sampler, "sampler", None)
    plan = None if batch_sampler is None else options.global_batch_plan(batch_sampler)
    is_seeded = plan is not None or options.base_seed is not None
    seeds = []
    if is_seeded and type(sampler) is RandomSampler:
        # A seed that is known is agreed on here: inside a batch sampler of the user rank 0 alone asks for it.
        base, shared = options.base_seed, options.shares_order
        seed = EpochSeed(shared=shared) if base is None else EpochSeed(agree(base) if shared else base)
        sampler = SeedableRandomSampler.like(sampler, seed)
        if batch_sampler is not None:
            batch_sampler = copy_with_sampler(batch_sampler, sampler)
    if isinstance(sampler, SeedableRandomSampler):
        seeds.append(sampler.seed)
    drawn = DrawnOrder(shared=options.shares_order)
    if batch_sampler is None:
        single = IndexShard(sampler, count, index, options.even, options.left_out)
        single.batch_sampler.order = drawn
        return {"sampler": single}, seeds
    shard: BatchSamplerShard | GlobalBatchSampler
    if plan is None:
        shard = BatchSamplerShard(batch_sampler, count, index, options.split, options.even)
        shard.order = drawn
    else:
        shard = GlobalBatchSampler(sampler, plan)
        shard.order = seeded_order(sampler, shared=options.shares_order)
        seeds += [] if shard.order.seed is None else [shard.order.seed]
    if loader.batch_sampler is None:
        return {"sampler": shard}, seeds
    return {"batch_sampler": shard, "sampler": loader.sampler if sampler is None else sampler}, seeds


def _shard_iterable(loader: Any, options: _LoaderOptions) -> DataLoaderShard:
    count, index = options.num_processes, options.process_index
    plan = options.global_batch_plan(loader)
    if plan is not None:
        dataset = GlobalBatchDataset(loader.dataset, plan)
        collate = GlobalBatchCollate(loader.collate_fn, dataset)
        changes = {"dataset": dataset, "collate_fn": collate, "batch_size": None, "batch_sampler": None}
        return _shard_loader(copy_loader(loader, **changes), options)
    # One process, or processes that share each batch, take as many steps as the loader has batches.
    steps_left_out = options.left_out if count == 1 or options.split else 0
    if count == 1 and loader.num_workers <= 1:
        return _shard_loader(copy_loader(loader), options, skip_batches=steps_left_out)
    by_files = _reads_files(loader, options)
    if is_hf_dataset(loader.dataset, "IterableDataset"):
        reads = "its own files" if by_files.value else "all files"
        _log_on_main(f"each process reads {reads} of an iterable dataset: {by_files.reason}")
    if by_files.value and options.even:
        own = FileShard(loader.dataset, loader.batch_size, count, index)
        return _shard_loader(copy_loader(loader, dataset=own), options)
    if by_files.value:
        own = loader.dataset.shard(num_shards=count, index=index)
        return _shard_loader(copy_loader(loader, dataset=own), options, split_elsewhere=count)
    size = loader.batch_size or 1
    left_out = (options.left_out - steps_left_out) * size
    shard = IterableDatasetShard(loader.dataset, size, loader.drop_last, count, index, options.split, left_out)
    # One process needs the view only to know how far each of its workers has read.
    shard.completes = count > 1
    changes = {"dataset": shard, "collate_fn": GroupCollate(loader.collate_fn, shard)}
    if options.split:
        own_size = loader.batch_size // count
        own_batches = BatchSampler(loader.sampler, own_size, loader.drop_last)
        changes |= {"batch_size": own_size, "batch_sampler": own_batches}
    return _shard_loader(copy_loader(loader, **changes), options, skip_batches=steps_left_out)


def _reads_files(loader: Any, options: _LoaderOptions) -> Choice[bool]:
    """Say whether each process can read some files of the dataset and leave the others to the others."""
    count = options.num_processes
    if not is_hf_dataset(loader.dataset, "IterableDataset") or options.split or loader.batch_size is None:
        return Choice(False, "its elements are shared out one by one")
    if options.left_out:
        return Choice(False, "its first batches are left out, which are of the first files")
    num_files = loader.dataset.num_shards
    if num_files < count:
        return Choice(False, f"{num_files} are too few for {count} processes, so each takes its part of all elements")
    if options.even and communicator().world_size != count:
        return Choice(False, "processes of one model read the same, so each takes its part of all elements")
    in_step = "the processes say at each step what they have" if options.even else "even_batches=False lets them differ"
    return Choice(True, f"there are {num_files}, and {in_step}")


def _dispatcher(
    loader: Any, options: _LoaderOptions, slice_fn: Callable[..., Any] | None, mesh: Any
) -> DataLoaderDispatcher:
    base = copy_loader(loader)
    seeds: list[EpochSeed] = []
    if not isinstance(loader.dataset, IterableDataset):
        # Rank 0 alone reads: it shares its order with nobody, but must be able to start anywhere in it.
        alone = replace(options, num_processes=1, process_index=0, split=False, shares_order=False)
        changes, seeds = _sharded_samplers(loader, alone)
        base = copy_loader(loader, **changes)
    if options.stateful:
        base = as_stateful(base)
    kind = DataLoaderDispatcher
    if _is_recording(options.device):
        from accelerate.data_loader.xla import RecordingDispatcher

        kind = RecordingDispatcher
    dispatcher = kind(
        None,
        split_batches=options.split,
        slice_fn=slice_fn,
        torch_device_mesh=mesh,
        _drop_last=bool(loader.drop_last),
        _non_blocking=options.non_blocking,
        use_stateful_dataloader=options.stateful,
        _base_dataloader=base,
    )
    dispatcher.device = options.device
    dispatcher.left_out = options.left_out if isinstance(loader.dataset, IterableDataset) else 0
    dispatcher.seed_with(seeds, reshuffles_after_break=options.base_seed is None)
    return dispatcher
