"""How one reader's batches become the pieces of each process, step by step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from accelerate.data_loader.plan import clamp
from accelerate.data_loader.rows import CannotJoinError, count_rows, cut_rows, join_rows, repeat_rows


@dataclass
class Step:
    """One step of all processes: a piece, its rows and its real rows for each; and the step's real samples."""

    pieces: list[Any]
    rows: list[int | None]
    real: list[int | None]
    samples: int
    consumed: int = 0
    state: dict[str, Any] | None = None


@dataclass(frozen=True)
class Assembler:
    """Build the steps of `num_parts` processes from groups of batches.

    Args:
        per_step: batches of a step: one a process, or a single one that they share.
        whole: whether each process gets the joined batch and cuts its piece itself.
    """

    num_parts: int
    per_step: int
    drop_last: bool = False
    whole: bool = False

    def steps(self, batches: Iterable[Any], start: int = 0, consumed: int = 0) -> Iterator[Step]:
        """Yield the steps of a pass.

        Args:
            start: samples to draw and drop first.
            consumed: samples of the epoch that were handed out before the first batch.
        """
        group: list[Any] = []
        first: Any = None
        for batch in batches:
            if first is None:
                first = batch
            if start > 0:
                start, consumed, batch = self._drop(batch, start, consumed)
                if batch is None:
                    continue
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

    def _drop(self, batch: Any, start: int, consumed: int) -> tuple[int, int, Any]:
        rows = count_rows(batch) or 1
        if rows <= start:
            return start - rows, consumed + rows, None
        return 0, consumed + start, cut_rows(batch, rows, slice(start, None))

    def _build(self, group: list[Any], first: Any) -> Step:
        counts = [count_rows(batch) for batch in group]
        is_round = len(group) == self.num_parts and len(set(counts)) == 1
        if (is_round and not self.whole) or None in counts:
            return self._whole_batches(group, counts)
        rows = [count or 0 for count in counts]
        try:
            return self._cut(group, rows, first)
        except CannotJoinError:
            return self._whole_batches(group, counts)

    def _whole_batches(self, group: list[Any], counts: list[int | None]) -> Step:
        """Give each process a batch of the group; one that is left without repeats another, of which nothing counts."""
        order = [index % len(group) for index in range(self.num_parts)]
        real = [counts[source] if place < len(group) else 0 for place, source in enumerate(order)]
        samples = sum(1 if count is None else count for count in counts)
        return Step([group[source] for source in order], [counts[source] for source in order], real, samples)

    def _cut(self, group: list[Any], rows: list[int], first: Any) -> Step:
        """Join the group, complete it with the pass's first samples, and cut it into equal pieces."""
        samples = sum(rows)
        size = -(-samples // self.num_parts)
        joined = group[0] if len(group) == 1 else join_rows(group, rows)
        missing = size * self.num_parts - samples
        if missing:
            joined = self._completed(joined, samples, missing, first)
        total = size * self.num_parts
        real: list[int | None] = [clamp(samples - place * size, 0, size) for place in range(self.num_parts)]
        if self.whole:
            pieces = [joined] * self.num_parts
        else:
            bounds = [slice(place * size, (place + 1) * size) for place in range(self.num_parts)]
            pieces = [cut_rows(joined, total, bound) for bound in bounds]
        return Step(pieces, [size] * self.num_parts, real, samples)

    def _completed(self, joined: Any, samples: int, missing: int, first: Any) -> Any:
        first_rows = count_rows(first)
        for pool, rows in ((first, first_rows), (joined, samples)):
            if not rows:
                continue
            pieces, sizes = repeat_rows(pool, rows, missing)
            try:
                return join_rows([joined, *pieces], [samples, *sizes])
            except CannotJoinError:
                continue  # the first batch has another shape: repeat the samples at hand
        raise CannotJoinError
