"""Loaders that give each process its part of the data, in an order and from a position that can be repeated."""

from __future__ import annotations

from accelerate._base.lazy import attach_passing_names
from accelerate.data_loader.adapter import _PYTORCH_DATALOADER_KWARGS, DataLoaderAdapter, DataLoaderStateMixin
from accelerate.data_loader.dispatcher import DataLoaderDispatcher
from accelerate.data_loader.iterables import IterableDatasetShard
from accelerate.data_loader.loader import DataLoaderShard, SkipDataLoader, skip_first_batches
from accelerate.data_loader.order import SeedableRandomSampler
from accelerate.data_loader.plan import MicroBatch, Share
from accelerate.data_loader.prepare import prepare_data_loader
from accelerate.data_loader.progress import Position
from accelerate.data_loader.samplers import BatchSamplerShard, SkipBatchSampler, get_sampler

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

attach_passing_names(__name__, optional={"MpDeviceLoaderWrapper": "accelerate.data_loader.xla"})
