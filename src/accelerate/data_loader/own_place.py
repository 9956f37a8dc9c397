"""Datasets that save their own place, so that nothing is read again when a pass goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from accelerate.data_loader.iterables import IterableDatasetShard
from accelerate.data_loader.recognise import is_hf_iterable
from accelerate.data_loader.windows import WindowDataset


def keeps_its_place(loader: Any) -> bool:
    """Return whether the state of a loader's iterable dataset stands exactly behind the last batch.

    Worker processes have datasets of their own, which have read ahead: it is only so without them.
    """
    dataset = whole_dataset(loader)
    if not isinstance(dataset, IterableDataset) or getattr(loader, "num_workers", 1) != 0:
        return False
    if not all(hasattr(dataset, name) for name in ("state_dict", "load_state_dict")):
        return False
    return not is_hf_iterable(dataset) or _resumes_exactly(dataset)


def whole_dataset(loader: Any) -> Any:
    """Return the dataset of a loader as its user gave it, not one process's view of it."""
    dataset = getattr(loader, "dataset", None)
    return dataset.dataset if isinstance(dataset, (IterableDatasetShard, WindowDataset)) else dataset


def _resumes_exactly(dataset: Any) -> bool:
    """Return whether a dataset of the `datasets` package has no step that loses examples when it is resumed.

    Its page names two: shuffle buffers, and batched maps of formatted data.
    """
    kinds = {type(part).__name__ for part in _steps(getattr(dataset, "_ex_iterable", None))}
    if any("BufferShuffled" in kind for kind in kinds):
        return False
    return getattr(dataset, "_formatting", None) is None or not any("Mapped" in kind for kind in kinds)


def _steps(part: Any) -> Iterator[Any]:
    if part is None:
        return
    yield part
    for inner in (getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())):
        yield from _steps(inner)
