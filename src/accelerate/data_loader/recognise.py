"""Recognition of loaders whose data is already divided among the processes."""

from __future__ import annotations

import pickle
from typing import Any

from accelerate._base.helpers import Choice
from accelerate.collectives import communicator
from accelerate.data_loader.iterables import IterableDatasetShard
from accelerate.data_loader.parts import nested_samplers
from accelerate.data_loader.sharding import BatchSamplerShard


def is_hf_iterable(dataset: Any) -> bool:
    """Return whether this is an iterable dataset of the `datasets` package."""
    return _is_hf(dataset, "IterableDataset")


def _is_hf(dataset: Any, name: str) -> bool:
    return any(cls.__module__.startswith("datasets.") and cls.__name__ == name for cls in type(dataset).__mro__)


def already_split(loader: Any, num_processes: int) -> Choice[bool]:
    """Say whether each process already reads its own part of the data, and how that is known."""
    if num_processes == 1:
        return Choice(False, "there is one process")
    for part in nested_samplers(loader):
        if isinstance(part, BatchSamplerShard):
            return Choice(part.num_processes > 1, "its batch sampler is a BatchSamplerShard")
        replicas = getattr(part, "num_replicas", None)
        if isinstance(replicas, int) and replicas > 1 and hasattr(part, "rank"):
            return Choice(True, f"its {type(part).__name__} gives each of {replicas} replicas its own samples")
    return _split_dataset(loader.dataset, num_processes)


def _split_dataset(dataset: Any, num_processes: int) -> Choice[bool]:
    if isinstance(dataset, IterableDatasetShard):
        return Choice(dataset.num_processes > 1, "its dataset is an IterableDatasetShard")
    if getattr(dataset, "_distributed", None) is not None:
        return Choice(True, "its dataset was split by node")
    if _is_hf(dataset, "Dataset") and _differs_between_ranks(dataset, num_processes):
        return Choice(True, "its dataset has other rows on each process, so it was split before")
    return Choice(False, "nothing shows that its data is divided")


def _differs_between_ranks(dataset: Any, num_processes: int) -> bool:
    group = communicator()
    if group.world_size == 1 or num_processes == 1:
        return False
    ends = (dataset[0], dataset[len(dataset) - 1]) if len(dataset) else ()
    return len(set(group.gather_object(pickle.dumps((len(dataset), ends))))) > 1
