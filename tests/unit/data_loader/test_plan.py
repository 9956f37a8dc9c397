"""The arithmetic of shares, positions and windows agrees with what is handed out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler

from accelerate.data_loader import BatchSamplerShard
from accelerate.data_loader.plan import Rounds, Windows, data_shard, near_equal
from accelerate.data_loader.windows import WindowBatchSampler

sizes = st.integers(1, 5)


@given(samples=st.integers(0, 40), batch_size=sizes, count=sizes, even=st.booleans(), start=st.integers(0, 40))
@settings(max_examples=300, deadline=None)
def test_shares_agree_with_batches(samples: int, batch_size: int, count: int, even: bool, start: int) -> None:
    rounds = Rounds(samples, batch_size, count, False, even, False, start)
    for rank in range(count):
        shard = BatchSamplerShard(BatchSampler(SequentialSampler(range(samples)), batch_size, False), count, rank)
        shard.even_batches = even
        for number, batch in enumerate(shard.iterate(start)):
            share = rounds.share(rank, number)
            first = start + number * rounds.unit + rank * batch_size
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
def test_the_number_of_batches_is_known_beforehand(
    samples: int, batch_size: int, count: int, split: bool, even: bool, drop_last: bool, start: int
) -> None:
    size = batch_size * count if split else batch_size
    inner = BatchSampler(SequentialSampler(range(samples)), size, drop_last)
    for rank in range(count):
        shard = BatchSamplerShard(inner, count, rank, split, even)
        rounds = shard.rounds(start)
        assert shard.has_exact_length
        assert rounds is not None
        assert rounds.batches(rank) == len(list(shard.iterate(start)))


@given(total=st.integers(0, 60), parts=st.integers(1, 9))
def test_near_equal_pieces_are_consecutive(total: int, parts: int) -> None:
    pieces = [near_equal(total, parts, index) for index in range(parts)]
    assert [begin for begin, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
    assert pieces[-1][1] == total
    lengths = [end - begin for begin, end in pieces]
    assert max(lengths) - min(lengths) <= 1


@given(
    samples=st.integers(1, 60),
    window=st.integers(1, 20),
    batch_size=sizes,
    count=sizes,
    drop_last=st.booleans(),
    start=st.integers(0, 30),
)
@settings(max_examples=300, deadline=None)
def test_windows(samples: int, window: int, batch_size: int, count: int, drop_last: bool, start: int) -> None:
    windows = Windows(window, batch_size, count, None, drop_last)
    samplers = [WindowBatchSampler(SequentialSampler(range(samples)), windows, rank) for rank in range(count)]
    plan = samplers[0].plan(start)
    passes = []
    for each in samplers:
        each.start = start
        passes.append(list(each))
    assert {len(batches) for batches in passes} == {plan.length}
    seen: list[int] = []
    weight = 0.0
    for number in range(plan.length):
        block = plan.block(number)
        assert block is not None
        for rank in range(count):
            share = plan.share(block, rank)
            batch = passes[rank][number]
            assert len(batch) == share.rows <= batch_size
            seen += batch[: share.real]
            weight += plan.micro_batch(block, rank).weight
        if block.closes_window:
            whole = block.end - max(start, block.end - block.window_samples)
            assert weight == pytest.approx(count * whole / block.window_samples)
            weight = 0.0
    assert plan.block(plan.length) is None
    end = samples - samples % window if drop_last else samples
    assert seen == list(range(start, end))


def test_a_mesh_gives_peers_the_same_share() -> None:
    sizes = {"dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 2}
    assert [data_shard(rank, 8, sizes)[0] for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert data_shard(5, 8, sizes)[1] == 4
    assert data_shard(5, 8, {"tp": 4}, divides_by_tensor_parallel=True) == (1, 2)
    assert data_shard(5, 8, None) == (5, 8)
