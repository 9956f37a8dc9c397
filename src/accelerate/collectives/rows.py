"""Tell the rows that belong to samples from the rows that pad a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from accelerate._base.errors import UsageError
from accelerate._base.helpers import user_stacklevel, warn_once


class RowShare(Protocol):
    """Rows of this process's batch, padding included, and how many of the leading ones are real samples."""

    @property
    def rows(self) -> int | None: ...

    @property
    def real(self) -> int | None: ...

    @property
    def full(self) -> int | None: ...


@dataclass(frozen=True)
class _Cut:
    """The padding of a loader's batch, for values that hold one row, or k rows, per sample.

    A value with the rows of a full batch, as from `loss.repeat(batch_size)`, is cut to the samples of a short batch.
    """

    rows: int = 0
    """The rows of the batch, 0 if unknown."""
    real: int = 0
    full: int | None = None

    @property
    def is_short(self) -> bool:
        return self.full is not None and self.rows < self.full

    @property
    def removes(self) -> bool:
        return self.real < self.rows

    def is_batch(self, size: int) -> bool:
        return size == self.rows or (self.is_short and size == self.full)

    def kept(self, size: int) -> int | None:
        """Return how many leading rows belong to samples, None if unknown."""
        if self.is_short and size == self.full:
            return self.real
        if not self.removes or size == 0:
            return size
        return size // self.rows * self.real if size % self.rows == 0 else None


@dataclass(frozen=True)
class Cuts:
    """Removes padding from values of one or several loaders, which are told apart by their number of rows."""

    of_loaders: tuple[_Cut, ...]

    @classmethod
    def of_shares(cls, shares: Iterable[RowShare | None]) -> Cuts:
        """Return the cuts of loaders; None for a loader of unknown rows."""
        return cls(
            tuple(
                _Cut()
                if share is None or share.rows is None or share.real is None
                else _Cut(share.rows, share.real, share.full)
                for share in shares
            )
        )

    def without_samples(self) -> Cuts:
        """Return cuts that remove every row of a batch."""
        return Cuts(tuple(replace(cut, real=0) for cut in self.of_loaders))

    @property
    def is_needed(self) -> bool:
        """Whether any value can change."""
        return any(cut.removes or cut.is_short for cut in self.of_loaders)

    @property
    def removes(self) -> bool:
        return any(cut.removes for cut in self.of_loaders)

    @property
    def rows(self) -> list[int]:
        return [cut.rows for cut in self.of_loaders]

    def is_batch(self, size: int) -> bool:
        return any(cut.is_batch(size) for cut in self.of_loaders)

    def may_list_samples(self, length: int) -> bool:
        return self.is_batch(length) or any(length % rows == 0 for rows in self.rows if rows)

    def __call__(self, value: Any, size: int, path: str) -> Any:
        counts: set[int] = set()
        for cut in self._possible(size):
            kept = cut.kept(size)
            counts.add(size if kept is None else kept)
            if kept is None:
                warn_once(
                    f"gather_for_metrics cannot tell which rows of {named(path)}, of size {size}, belong to the "
                    f"{cut.rows - cut.real} padded samples of this batch of {cut.rows}, and keeps them all; pass values "
                    "with one row per sample.",
                    stacklevel=user_stacklevel(),
                )
        if len(counts) > 1:
            raise _ambiguous(
                path,
                size,
                " and ".join(
                    f"{cut.real} samples in {cut.rows} rows" if cut.rows else "an unknown number of rows"
                    for cut in self.of_loaders
                ),
            )
        count = counts.pop()
        return value if count == size else value[:count]

    def _possible(self, size: int) -> Sequence[_Cut]:
        """Return the loaders that a value may come from: the closest matches of its rows, and those of unknown rows."""
        exact = [cut for cut in self.of_loaders if cut.rows == size]
        found = exact or [cut for cut in self.of_loaders if cut.is_batch(size)]
        return [*found, *(cut for cut in self.of_loaders if not cut.rows)] if found else self.of_loaders


def _ambiguous(path: str, size: int, batches: str) -> UsageError:
    return UsageError(
        f"gather_for_metrics was given {named(path)} with {size} rows while several loaders are read in step, as by "
        f"zip(), and their batches have {batches}: it cannot tell which of them the rows come from. Read the loaders one "
        "after the other, give them different batch sizes, or prepare one loader over a `torch.utils.data.StackDataset`"
    )


@dataclass(frozen=True)
class RoundRows:
    """The rows that the batch of each process has in this round, 0 if unknown, for each loader."""

    of_loaders: list[list[int]]

    @property
    def differ(self) -> bool:
        return any(0 not in of_ranks and len(set(of_ranks)) > 1 for of_ranks in self.of_loaders)

    def unfilled(self, parts: list[Tensor], path: str) -> list[Tensor]:
        """Remove the rows that `pad_across_processes` added to the values of shorter batches.

        This needs the values of all processes: two rows for a batch of one are padding if a batch of two has two as
        well, and two rows per sample if it has four.
        """
        sizes = {part.shape[0] if part.dim() else 0 for part in parts if part.numel()}
        size = sizes.pop() if len(sizes) == 1 else 0
        if not self.differ or size == 0:
            return parts
        possible = [of_ranks for of_ranks in self.of_loaders if max(of_ranks) == size] or self.of_loaders
        kept = {self._kept(size, of_ranks) for of_ranks in possible}
        if len(kept) > 1:
            raise _ambiguous(path, size, " and ".join(f"{of_ranks} rows on ranks 0, 1, ..." for of_ranks in possible))
        return [part[:count] for part, count in zip(parts, kept.pop(), strict=True)]

    @staticmethod
    def _kept(size: int, of_ranks: list[int]) -> tuple[int, ...]:
        widest = max(of_ranks)
        if 0 in of_ranks or size % widest:
            return (size,) * len(of_ranks)
        return tuple(size // widest * rows for rows in of_ranks)


def named(path: str) -> str:
    """Return a phrase for the value at this path of a structure."""
    return f"the entry {path}" if path else "the value"
