"""The arithmetic of shares, positions and global batches agrees with what is handed out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler

from accelerate.data_loader import BatchSamplerShard
from accelerate.data_loader.global_batches import GlobalBatchPlan, GlobalBatchSampler
from accelerate.data_loader.plan import (
    GroupNote,
    GroupPlan,
    Observations,
    RoundPlan,
    Share,
    VaryingRoundPlan,
    near_equal,
)

sizes = st.integers(1, 5)


@given(samples=st.integers(0, 40), batch_size=sizes, count=sizes, even=st.booleans(), start=st.integers(0, 40))
@settings(max_examples=300, deadline=None)
def test_shares_agree_with_batches(samples: int, batch_size: int, count: int, even: bool, start: int) -> None:
    for rank in range(count):
        plan = RoundPlan(samples, batch_size, count, False, even, False, start, rank)
        shard = BatchSamplerShard(BatchSampler(SequentialSampler(range(samples)), batch_size, False), count, rank)
        shard.even_batches, shard.start = even, start
        for number, batch in enumerate(shard, start=1):
            share = plan.share(number)
            first = start + (number - 1) * plan.unit + rank * batch_size
            assert share.rows == len(batch)
            assert batch[: share.real] == list(range(first, min(first + batch_size, samples)))


@given(
    samples=st.integers(0, 40),
    batch_size=sizes,
    count=sizes,
    split=st.booleans(),
    even=st.booleans(),
    drop_last=st.booleans(),
    start=st.integers(0, 45),
)
@settings(max_examples=500, deadline=None)
def test_the_number_of_batches_is_known_in_advance(
    samples: int, batch_size: int, count: int, split: bool, even: bool, drop_last: bool, start: int
) -> None:
    size = batch_size * count if split else batch_size
    inner = BatchSampler(SequentialSampler(range(samples)), size, drop_last)
    for rank in range(count):
        shard = BatchSamplerShard(inner, count, rank, split, even)
        shard.start = start
        plan = shard.plan(start)
        assert plan.is_exact
        assert plan.num_batches == len(list(shard))


@given(total=st.integers(0, 60), parts=st.integers(1, 9))
@settings(deadline=None)
def test_near_equal_pieces_are_consecutive(total: int, parts: int) -> None:
    pieces = [near_equal(total, parts, index) for index in range(parts)]
    assert [begin for begin, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
    assert pieces[-1][1] == total
    lengths = [end - begin for begin, end in pieces]
    assert max(lengths) - min(lengths) <= 1


@given(
    samples=st.integers(1, 60),
    size=st.integers(1, 20),
    batch_size=sizes,
    count=sizes,
    drop_last=st.booleans(),
    start=st.integers(0, 30),
)
@settings(max_examples=300, deadline=None)
def test_global_batches(samples: int, size: int, batch_size: int, count: int, drop_last: bool, start: int) -> None:
    samplers = [
        GlobalBatchSampler(
            SequentialSampler(range(samples)), GlobalBatchPlan(size, batch_size, count, None, drop_last, rank=rank)
        )
        for rank in range(count)
    ]
    plans = [sampler.plan(start) for sampler in samplers]
    length = plans[0].length
    passes = []
    for each in samplers:
        each.start = start
        passes.append(list(each))
    assert {len(batches) for batches in passes} == {length}
    seen: list[int] = []
    weight = 0.0
    for number in range(1, length + 1):
        block = plans[0].block(number)
        assert block is not None
        for plan, batches in zip(plans, passes, strict=True):
            share, micro_batch = plan.share(number), plan.micro_batch(number)
            assert micro_batch is not None
            batch = batches[number - 1]
            assert len(batch) == share.rows <= batch_size
            seen += batch[: share.real]
            weight += micro_batch.weight
        if block.is_last:
            whole = block.end - max(start, block.end - block.batch_samples)
            assert weight == pytest.approx(count * whole / block.batch_samples)
            weight = 0.0
    assert plans[0].block(length + 1) is None
    end = samples - samples % size if drop_last else samples
    assert seen == list(range(start, end))


def test_rounds_are_dealt_without_a_loader() -> None:
    batches = [[0, 1], [2, 3], [4, 5], [6]]
    plans = [RoundPlan(7, 2, 2, rank=rank) for rank in range(2)]
    dealt = [[indices for indices, _ in plan.deal(batches)] for plan in plans]
    assert dealt == [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]
    assert [plan.share(2) for plan in plans] == [Share(2, 2), Share(2, 1)]
    # The rest of the epoch is completed with its beginning.
    assert [indices for indices, _ in plans[1].deal(batches[2:], first=batches[:2])] == [[6, 0]]
    assert [size.remainder for _, size in plans[1].deal(batches)] == [0, 3]


def test_a_single_process_completes_nothing() -> None:
    for split in (False, True):
        plan = VaryingRoundPlan(None, 4, split=split)
        assert [indices for indices, _ in plan.deal([[0, 1, 2], [3, 4, 5, 6], [7]])] == [[0, 1, 2], [3, 4, 5, 6], [7]]


def test_a_total_that_is_not_sure_is_not_used_before_it_was_seen() -> None:
    plan = RoundPlan(100, 2, 2, rank=1, is_exact=False)
    assert (plan.num_batches, plan.consumed(2), plan.share(2)) == (None, 8, Share(2, 2))
    seen = plan.with_total(7)
    assert (seen.num_batches, seen.consumed(2), seen.share(2), seen.remainder) == (2, 7, Share(2, 1), 3)


@pytest.mark.parametrize(
    ("note", "share", "remainder"),
    [
        (None, Share(2, 2), 0),
        (GroupNote(5), Share(2, 2), 5),
        (GroupNote(3), Share(2, 1), 3),
        (GroupNote(1), Share(2, 0), 1),
    ],
)
def test_the_size_of_a_group_is_in_its_note(note: GroupNote | None, share: Share, remainder: int) -> None:
    size = GroupPlan(6, num_processes=3, rank=1).size_of(note)
    assert (size.share, size.remainder) == (share, remainder)
    assert size.samples == (6 if note is None else note.real)


def test_a_short_global_batch_shows_the_total() -> None:
    plan, observed = GlobalBatchPlan(4, 2), Observations()
    assert list(plan.slices(iter(range(9)), observed)) == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    assert observed.total == 9
    assert plan.with_total(9).consumed(5) == 9
