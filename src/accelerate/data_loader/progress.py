"""Where a loader stands in its epoch: the count of one pass over it, and what a later pass needs to go on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from torch.utils.data import SequentialSampler

from accelerate._base.errors import CheckpointError
from accelerate._base.helpers import warn_once
from accelerate._base.untrusted import is_whole, shown
from accelerate.data_loader.draws import OrderRecord
from accelerate.data_loader.order import EpochOrder
from accelerate.data_loader.plan import (
    UNKNOWN_SHARE,
    BatchSize,
    EpochPlan,
    MicroBatch,
    Observations,
    RoundPlan,
    Share,
)
from accelerate.data_loader.random_states import check_random_states


@dataclass(frozen=True)
class Position:
    """Say where a loader stands: `samples` of epoch `epoch` were handed out, over all processes together.

    It is counted in global samples, so it means the same on any number of processes.
    """

    epoch: int = 0
    samples: int = 0


class EpochSource(NamedTuple):
    """What the samples of an epoch are given by: the kind of the sampler, and their number, None if unknown.

    Iterable datasets have no sampler; theirs is an empty name.
    """

    sampler: str = ""
    samples: int | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return it in plain values."""
        return {"sampler": self.sampler, "epoch_samples": self.samples}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> EpochSource | None:
        """Return what `state_dict` gave, None if nothing was saved."""
        return cls(state["sampler"], state.get("epoch_samples")) if state.get("sampler") is not None else None

    def ends_before(self, point: ResumePoint, before: EpochSource) -> bool:
        """Return whether an epoch has become so short that nothing is left of it.

        Warn of that, and of anything else that keeps the rest of an epoch from being the one that was saved.

        Args:
            before: What gave the samples up to `point`.
        """
        has_other_length = None not in (self.samples, before.samples) and self.samples != before.samples
        # A batch sampler may give more samples than its dataset has; such a position does not tell what is left.
        is_beyond = has_other_length and (self.samples or 0) <= point.samples <= (before.samples or 0)
        reason = None
        if self.sampler != before.sampler:
            names = [source.sampler or "an iterable dataset" for source in (before, self)]
            reason = f"its order was given by {names[0]}, and is given by {names[1]} now"
        # Data in its own order continues where it stopped, however much comes after that.
        elif has_other_length and self.sampler not in ("", SequentialSampler.__name__):
            reason = f"it had {before.samples} samples, and has {self.samples} now, which are shuffled differently"
        if is_beyond:
            warn_once(
                f"This loader stopped after {point.samples} of {before.samples} samples of epoch {point.epoch}, which has "
                f"{self.samples} samples now: nothing is left of it, and epoch {point.epoch + 1} begins."
            )
        elif reason is not None:
            warn_once(
                f"This loader stopped after {point.samples} samples of an epoch that cannot be continued exactly: {reason}. "
                "Some samples may repeat or be missed until the epoch ends. Resume with the dataset and the sampler of the "
                "saved run to see each once."
            )
        return is_beyond


class ResumePoint(NamedTuple):
    """A position and how it was reached, which matters for data that cannot be indexed.

    Args:
        unit: Global samples of a step, 0 if unknown.
        workers: Processes that read for one loader of an iterable dataset, 0 if unknown.
        streams: Samples that each worker's own stream has handed out, where there are several.
        rounds: Batches since the start of the epoch, None if they had different sizes.
        files: Samples that each process has handed out of its own files, where each reads some of them.
        dataset: The state of a dataset that can save its own.
        order: What draws the order of this epoch again, where that does not depend on seed and epoch alone.
        batches: Batches that torchdata's loader passes over by itself.
        is_reached_by_torchdata: Whether torchdata's loader goes there by itself.
        is_saved: Whether it was saved, behind a batch that was not the last of its epoch.
    """

    epoch: int = 0
    samples: int = 0
    unit: int = 0
    workers: int = 0
    streams: tuple[int, ...] = ()
    rounds: int | None = None
    files: tuple[int, ...] = ()
    dataset: Any = None
    order: OrderRecord | None = None
    batches: int = 0
    is_reached_by_torchdata: bool = False
    is_saved: bool = False

    @property
    def position(self) -> Position:
        """The position alone."""
        return Position(self.epoch, self.samples)

    @property
    def start(self) -> int:
        """Samples that we have to pass over ourselves."""
        return 0 if self.is_reached_by_torchdata else self.samples

    def state_dict(self) -> dict[str, Any]:
        """Return it in plain values."""
        state: dict[str, Any] = {"epoch": self.epoch, "samples": self.samples, "unit": self.unit}
        if self.workers:
            state["workers"] = self.workers
        if self.streams:
            state["streams"] = list(self.streams)
        if self.rounds is not None:
            state["rounds"] = self.rounds
        if self.files:
            state["files"] = list(self.files)
        if self.dataset is not None:
            state["dataset"] = self.dataset
        if self.order is not None:
            state["order"] = vars(self.order) | {"entries": list(self.order.entries), "head": list(self.order.head)}
        return state

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], epoch: int = 0) -> ResumePoint:
        """Return what `state_dict` gave; `epoch` where it says none."""
        return cls(
            epoch=state.get("epoch", epoch),
            samples=state.get("samples") or 0,
            unit=state.get("unit") or 0,
            workers=state.get("workers") or 0,
            streams=tuple(state.get("streams") or ()),
            rounds=state.get("rounds"),
            files=tuple(state.get("files") or ()),
            dataset=state.get("dataset"),
            order=OrderRecord(**state["order"]) if state.get("order") else None,
            is_saved=True,
        )


def check_loader_state(state: Any, origin: str) -> None:
    """Refuse what is not the state of a loader of this library.

    Args:
        origin: What holds it, for the message: "The file 'x'".

    Raises:
        CheckpointError: If something in it is missing, or cannot be.
    """
    if not isinstance(state, dict):
        raise CheckpointError(f"{origin} holds {shown(state)} and no state of a loader. Use another checkpoint.")
    wrong = [
        name for name, is_right in _OF_LOADERS.items() if state.get(name) is not None and not is_right(state[name])
    ]
    order = state.get("order")
    if not wrong and order and not _is_order(order):
        wrong.append("order")
    if wrong:
        raise CheckpointError(
            f"{origin} holds {wrong[0]}={shown(state[wrong[0]])}, which no loader has: it is broken. Use another checkpoint."
        )
    check_random_states(state.get("generators") or {}, origin)
    for _, states in order.get("entries", ()) if order else ():
        check_random_states(states, origin)


# No loader gets here in one epoch: at a million samples per second it would take 11 days.
_MAX_COUNT = 10**12


def _is_count(value: Any) -> bool:
    return is_whole(value, most=_MAX_COUNT)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(map(_is_count, values))


def _are_seeds(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(
        value is None or is_whole(value, -(2**63), 2**64 - 1) for value in values
    )


_OF_LOADERS: dict[str, Any] = {
    **dict.fromkeys(("epoch", "samples", "unit", "workers", "rounds", "batches"), _is_count),
    **dict.fromkeys(("streams", "files", "layout"), _are_counts),
    "base_seeds": _are_seeds,
    "has_drawn_seed": lambda value: isinstance(value, bool),
    "sampler": lambda value: isinstance(value, str),
    "epoch_samples": is_whole,
}


def _is_order(order: Any) -> bool:
    """Return whether a value has what a record of an order has, in a way that it can be followed."""
    if not isinstance(order, dict) or not order.keys() <= {entry.name for entry in fields(OrderRecord)}:
        return False
    record = OrderRecord(**order)
    if not isinstance(record.entries, list | tuple) or not isinstance(record.head, list | tuple):
        return False
    if not all(
        isinstance(entry, list | tuple) and len(entry) == 2 and is_whole(entry[0], -1) for entry in record.entries
    ):
        return False
    counts = [count for count, _ in record.entries]
    flags = (record.is_forked, record.is_complete, record.is_exhausted)
    is_told = all(isinstance(text, str) for text in record.head) and all(isinstance(flag, bool) for flag in flags)
    return is_told and is_whole(record.drawn, -1) and counts == sorted(counts) and not (record.is_forked and not counts)


class EpochProgress:
    """The count of one pass over a loader: what was handed out, and what this process holds of the batch at hand.

    Sizes that the plan can compute are computed when somebody asks; the others are added up batch by batch.

    Args:
        plan: The arithmetic of the pass.
        skipped: Batches of this process that the pass leaves out.
        resumed_batches: How many of them torchdata's loader passes over by itself.
        order: What gives the epoch its order.
    """

    epoch: int = 0
    """Number of the epoch."""
    taken: int = 0
    """Batches that were handed out."""
    is_finished: bool = False
    """Whether the pass was read to its end, or the loader was sent elsewhere."""
    counted: int | None = None
    """How much of it the progress of the run has counted already."""
    torchdata_counts: bool = True
    """Whether the batches that torchdata's loader counts by itself are those of the plan."""
    files: tuple[int, ...] = ()
    """Samples that each process has handed out of its own files, where each reads some of them."""
    dataset_state: Any = None
    """The state of a dataset that saves its own, behind the batch at hand."""

    def __init__(
        self, plan: EpochPlan, skipped: int = 0, resumed_batches: int = 0, order: EpochOrder | None = None
    ) -> None:
        self._plan = plan
        self.order = order or EpochOrder()
        self.observed = Observations()
        self.skipped = skipped
        self.resumed_batches = resumed_batches
        self.size: BatchSize | None = None
        self._sum = self._sum_before = plan.start
        self._streams, self._rounds = list(plan.streams), plan.rounds

    @property
    def plan(self) -> EpochPlan:
        """The arithmetic of the pass, with the total if reading has shown it."""
        total = self.observed.total
        return self._plan if total is None else self._plan.with_total(total)

    @property
    def recorded_order(self) -> OrderRecord | None:
        """What draws the order of the epoch again as it is now, None if that is not needed or not known."""
        record = self.order.record
        return None if record is None or not record.is_complete else copy(record)

    @property
    def num_batches(self) -> int | None:
        """Batches of the pass, None if that is only known when they have come."""
        count = self._plan.num_batches
        return None if count is None else max(count - self.skipped, 0)

    @property
    def _number(self) -> int:
        """Number of the batch at hand, counted from where the plan starts."""
        return self.taken + self.skipped

    @property
    def consumed(self) -> int:
        """Global samples of the epoch handed out so far."""
        return self._sum if self._plan.is_observed else self.plan.consumed(self._number)

    @property
    def consumed_before(self) -> int:
        """Global samples of the epoch handed out before the pass."""
        return self._sum_before if self._plan.is_observed else self.plan.consumed(self.skipped)

    @property
    def share(self) -> Share:
        """Rows of this process's batch, padding included, and how many of the leading ones are real samples."""
        if not self.taken:
            return UNKNOWN_SHARE
        return self.plan.share(self._number) if self.size is None else self.size.share

    @property
    def micro_batch(self) -> MicroBatch | None:
        """The batch's part in its global batch, None without one."""
        return self.plan.micro_batch(self._number) if self.taken else None

    @property
    def remainder(self) -> int | None:
        """Real samples of the batch at hand, which is the last, if it is incomplete; None to ask the dataset."""
        return self.plan.remainder if self.size is None else self.size.remainder

    def go_beyond(self) -> None:
        """Count on after the batches that were said to come: the total is then not known."""
        self.observed.total = None
        if isinstance(self._plan, RoundPlan):
            self._plan = replace(self._plan, is_exact=False, is_believed=False)

    def start_from(self, samples: int) -> None:
        """Begin to count after so many samples of the epoch."""
        self._sum = self._sum_before = samples

    def observe(self, observed: Observations) -> None:
        """Take what a sampler notes of this pass: it has drawn the batches that the pass leaves out, and more."""
        self.observed = observed
        self._sum = self._sum_before = max(self._sum, observed.left_out)
        if observed.batches:
            for _ in range(self.skipped):
                self._add(observed.batches.popleft())
            self._sum_before = self._sum
            self._rounds = None if self._rounds is None else self._rounds + self.skipped

    def pass_over(self, note: Any) -> None:
        """Count a batch of an observed plan that was drawn and dropped before the first one was handed out."""
        self._add(self._plan.size_of(note))
        self._sum_before = self._sum
        self._rounds = None if self._rounds is None else self._rounds + 1

    def hand_out(self, note: Any = None) -> None:
        """Count a batch; `note` is what came along with it, if anything did."""
        self.taken += 1
        if self._plan.is_observed:
            self.size = self._plan.size_of(self.observed.batches.popleft() if self.observed.batches else note)
            self._add(self.size)
        elif note is not None:
            self.observed.total = note

    def _add(self, size: BatchSize) -> None:
        self._sum += size.samples
        if self._streams:
            self._streams[size.worker] += size.samples

    def resume_point(self, position: Position, *, workers: int) -> ResumePoint:
        """Return what a later pass needs to go on behind the batch at hand.

        Args:
            workers: Processes that read an iterable dataset, 0 for indexed data.
        """
        point = ResumePoint(
            position.epoch, position.samples, self._plan.unit, is_reached_by_torchdata=self.torchdata_counts
        )
        if position.samples == 0:
            return point
        return point._replace(
            batches=self.resumed_batches + self.taken,
            workers=workers,
            streams=tuple(self._streams),
            rounds=None if self._rounds is None else self._rounds + self.taken,
            files=self.files,
            dataset=self.dataset_state if self.plan.ends_reading(self._number) else None,
            order=self.recorded_order,
        )


class OpenedPass(NamedTuple):
    """What a pass reads: its plan, the loader to iterate, and how many of its first batches are drawn and dropped."""

    plan: EpochPlan
    loader: Any
    dropped: int = 0


class DataSource:
    """What a loader's data comes from: a sampler or an iterable dataset that knows one process's part of it.

    Kinds of data differ by the plan that their source gives.
    """

    num_processes: int = 1
    """Processes that share the data."""
    observed: Observations
    """What was seen in the iteration that was begun last."""
    believes_length: bool = True
    """Whether one process relies on the lengths that samplers and datasets of the user say they have.

    It must not draw ahead to see the end: what it draws would come before what the model draws.
    """
    order: EpochOrder

    @property
    @abstractmethod
    def total_batch_size(self) -> int:
        """Samples of a step over all processes."""

    def goes_on_after(self, point: ResumePoint) -> bool:
        """Return whether the same data was divided in the same way when the point was reached."""
        return not point.files

    @abstractmethod
    def open_pass(self, loader: Any, point: ResumePoint, *, dataset_is_placed: bool) -> OpenedPass:
        """Begin a pass over `loader`, which reads from this, behind `point`.

        Args:
            dataset_is_placed: Whether a dataset that saves its own state stands there already.
        """
