"""How one reader's batches of any content become the pieces of each process, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelerate.collectives.nested import children, is_namedtuple, leaves, rebuilt
from accelerate.data_loader.plan import clamp


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
    """

    pieces: list[Any]
    rows: list[int | None]
    real: list[int | None]
    samples: int
    consumed: int = 0
    state: dict[str, Any] | None = None


@dataclass(frozen=True)
class StepAssembler:
    """Build the steps of `num_parts` processes from groups of batches.

    Args:
        per_step: Batches of a step: one a process, or a single one that they share.
        whole: Whether each process gets the joined batch and cuts its piece itself.
    """

    num_parts: int
    per_step: int
    drop_last: bool = False
    whole: bool = False

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
