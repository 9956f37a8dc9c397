"""Loaders that start some batches in."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accelerate._base.errors import ConfigurationError
from accelerate.data_loader.adapter import DataLoaderAdapter, DataLoaderStateMixin
from accelerate.data_loader.parts import copy_loader, copy_part, outer_batch_sampler
from accelerate.data_loader.sharding import SkipBatchSampler


class SkipDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A plain loader that draws and drops its first `skip_batches` batches, for data that cannot be indexed."""

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.skip_batches = skip_batches

    @classmethod
    def around(cls, base: Any, skip_batches: int) -> SkipDataLoader:
        """Return a loader that skips the first batches of `base`."""
        loader: SkipDataLoader = object.__new__(cls)
        loader._wrap(base)
        loader.skip_batches = skip_batches
        return loader

    @property
    def total_batch_size(self) -> int:
        """Samples of a step."""
        size: int = self.base_dataloader.batch_size
        return size

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset."""
        return len(self.base_dataloader.dataset)

    def __len__(self) -> int:
        return max(len(self.base_dataloader) - self.skip_batches, 0)

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        try:
            yield from islice(self.base_dataloader, self.skip_batches, None)
        finally:
            self.end()


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """Return a loader of the same kind, with everything kept, that starts `num_batches` batches in.

    It is meant for the rest of one epoch: iterated again, it skips again. Once it was read to its end, the given
    loader goes on with the next epoch. If that loader's position was restored, `num_batches` counts from the start of
    the epoch, not from the position: the result starts at batch `num_batches`.

    Raises:
        ConfigurationError: (a ValueError) if `num_batches` is negative.
    """
    if num_batches < 0:
        raise ConfigurationError(
            f"skip_first_batches was given num_batches={num_batches!r}: there is nothing before the first batch; pass 0 "
            "or more"
        )
    if isinstance(dataloader, SkipDataLoader):
        return SkipDataLoader.around(dataloader.base_dataloader, dataloader.skip_batches + num_batches)
    if isinstance(dataloader, DataLoaderAdapter):
        return _skip_prepared(dataloader, num_batches)
    if isinstance(dataloader, DataLoader) and not isinstance(dataloader.dataset, IterableDataset):
        skipping = _skip_by_sampler(dataloader, num_batches)
        if skipping is not None:
            return skipping
    return SkipDataLoader.around(dataloader, num_batches)


def _skip_prepared(dataloader: Any, num_batches: int) -> Any:
    """Skip in a prepared loader; the given one then no longer goes to a restored position by itself."""
    was_restored = dataloader._goes_on
    dataloader._forget_pending()
    changes: dict[str, Any] = {"_origin": dataloader, "_ledger": None, "_finished": True}
    changes["_skips_to_restored"] = was_restored and num_batches > 0
    base = dataloader.base_dataloader
    skipping = None
    dataset = getattr(base, "dataset", None)
    if dataset is not None and not isinstance(dataset, IterableDataset):
        skipping = _skip_by_sampler(base, num_batches * dataloader._batches_per_step)
    if skipping is not None:
        changes["base_dataloader"] = skipping
    else:
        changes["skip_batches"] = dataloader.skip_batches + num_batches
    return copy_part(dataloader, **changes)


def _skip_by_sampler(loader: Any, num_batches: int) -> Any | None:
    """Return a copy of the loader that passes over indices instead of samples, None if it has no batch sampler."""
    batch_sampler = outer_batch_sampler(loader)
    if batch_sampler is None:
        return None
    skip = num_batches
    if isinstance(batch_sampler, SkipBatchSampler):
        skip, batch_sampler = skip + batch_sampler.skip_batches, batch_sampler.batch_sampler
    name = "sampler" if isinstance(loader.sampler, BatchSampler) else "batch_sampler"
    return copy_loader(loader, **{name: SkipBatchSampler(batch_sampler, skip)})
