"""Counting, cutting and joining the rows of a nested batch of any content."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelerate.collectives.containers import children, is_namedtuple, leaves, rebuilt


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
    for child in children(batch) or ():
        length = _first_list_length(child.value)
        if length is not None:
            return length
    return None


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


def repeat_rows(batch: Any, rows: int, count: int) -> tuple[list[Any], list[int]]:
    """Return pieces of a batch, and their sizes, that together repeat its samples up to `count`."""
    pieces, sizes = [], []
    while count > 0:
        size = min(rows, count)
        pieces.append(cut_rows(batch, rows, slice(0, size)))
        sizes.append(size)
        count -= size
    return pieces, sizes
