from __future__ import annotations

import threading

import pytest

from accelerate.checkpointing.helper_thread import run_side_by_side


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_every_item_is_done_once(num_threads: int) -> None:
    done: list[int] = []
    run_side_by_side(done.append, range(1000), num_threads)
    assert sorted(done) == list(range(1000))


def test_threads_work_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=120)
    run_side_by_side(lambda _: together.wait(), range(3), 3)
    assert not together.broken


def test_the_first_failure_is_raised_and_the_rest_is_left_out() -> None:
    done: list[int] = []

    def work(item: int) -> None:
        if item == 3:
            raise OSError("the disk is full")
        done.append(item)

    with pytest.raises(OSError, match="the disk is full"):
        run_side_by_side(work, range(1000), 1)
    assert done == [0, 1, 2]
