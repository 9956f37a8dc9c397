"""Loaders that give each process its part of the data, in an order and from a position that can be repeated."""

from __future__ import annotations

from .adapter import DataLoaderAdapter, DataLoaderStateMixin
from .dispatcher import DataLoaderDispatcher
from .iterables import IterableDatasetShard
from .parts import _PYTORCH_DATALOADER_KWARGS, get_sampler
from .plan import MicroBatch, Share
from .position import Position
from .prepare import prepare_data_loader
from .samplers import SeedableRandomSampler
from .shard_loader import DataLoaderShard
from .sharding import BatchSamplerShard, SkipBatchSampler
from .skip import SkipDataLoader, skip_first_batches

__all__ = [
    "_PYTORCH_DATALOADER_KWARGS",
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "MicroBatch",
    "Position",
    "SeedableRandomSampler",
    "Share",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]
