"""Signals of one process, and the agreement of several through a store."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from accelerate import Accelerator
from accelerate._base.errors import UsageError
from accelerate.watch import preemption
from accelerate.watch.preemption import Agreement

BOTH = [signal.SIGTERM, signal.SIGUSR1]


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    made = Accelerator(cpu=True)
    before = [signal.getsignal(number) for number in BOTH]
    yield made
    made.reset()
    assert [signal.getsignal(number) for number in BOTH] == before


# --- one process ------------------------------------------------------------------------------------------------------


def test_nothing_listens_before_somebody_asks(accelerator: Accelerator) -> None:
    assert [signal.getsignal(number) for number in BOTH] == [signal.SIG_DFL] * 2


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_stops_the_run(accelerator: Accelerator, number: signal.Signals) -> None:
    assert accelerator.should_stop is False
    os.kill(os.getpid(), number)
    assert accelerator.should_stop is True
    assert accelerator.should_stop is True
    assert accelerator.check_stop() is True


def test_handlers_of_the_program_are_called_and_put_back(accelerator: Accelerator) -> None:
    called = []
    own = lambda number, frame: called.append(number)  # noqa: E731
    before = signal.signal(signal.SIGTERM, own)
    try:
        assert not accelerator.should_stop
        os.kill(os.getpid(), signal.SIGTERM)
        assert accelerator.should_stop
        assert called == [signal.SIGTERM]
        accelerator.end_training()
        assert signal.getsignal(signal.SIGTERM) is own
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_came_later_stays(accelerator: Accelerator) -> None:
    assert not accelerator.should_stop
    later = lambda number, frame: None  # noqa: E731
    signal.signal(signal.SIGTERM, later)
    try:
        accelerator.reset()
        assert signal.getsignal(signal.SIGTERM) is later
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_outside_of_the_main_thread_it_says_that_it_cannot_listen(accelerator: Accelerator) -> None:
    answers = []

    def read() -> None:
        with pytest.warns(UserWarning, match="outside of the main thread"):
            answers.append(accelerator.should_stop)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert answers == [False]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_forked_process_ends_when_it_is_told_to_and_ignores_the_notice(accelerator: Accelerator) -> None:
    assert not accelerator.should_stop
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert not accelerator.should_stop


def test_the_launcher_is_told_while_it_listens(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_STOP_FOLDER", str(tmp_path))
    assert not accelerator.should_stop
    assert [entry.name for entry in tmp_path.iterdir()] == [str(os.getpid())]
    accelerator.end_training()
    assert list(tmp_path.iterdir()) == []


def test_an_accelerator_that_listens_can_be_pickled(accelerator: Accelerator) -> None:
    assert not accelerator.should_stop
    other = pickle.loads(pickle.dumps(accelerator))
    assert other._run_progress.preemption is None


def test_leaving_has_an_exit_code_of_its_own(accelerator: Accelerator, signals_come_back: None) -> None:
    with pytest.raises(SystemExit) as leaving:
        accelerator.exit_for_restart()
    assert leaving.value.code == 75
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN  # nothing disturbs the way out


def test_reads_count_where_no_optimizer_steps(accelerator: Accelerator) -> None:
    assert accelerator._run_progress._current_step() == 1
    assert accelerator._run_progress._current_step() == 2
    accelerator.prepare(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))
    assert accelerator._run_progress._current_step() == 0


# --- several processes, as threads with one store ---------------------------------------------------------------------


class Ranks:
    """Agreements of several ranks; the wish of each can be set."""

    def __init__(self, count: int, present: int | None = None) -> None:
        self.wishes: list[str | None] = [None] * count
        self.store = HashStore()
        self.members = [self._join(rank, count) for rank in range(count if present is None else present)]

    def _join(self, rank: int, count: int) -> Agreement:
        return Agreement(self.store, rank, count, lambda: self.wishes[rank], "test")

    def close(self) -> None:
        for member in self.members:
            member.close()


@pytest.fixture
def three() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    ranks.close()


def await_decision(ranks: Ranks) -> int:
    for member in ranks.members:
        assert member._settled.wait(30)
    (step,) = {member._decided for member in ranks.members}
    assert step is not None
    return step


def test_all_stop_one_step_after_the_latest(three: Ranks) -> None:
    for rank, step in enumerate([5, 7, 6]):
        assert not three.members[rank].is_reached(step)
    three.wishes[2] = "rank 2 got SIGTERM"
    assert await_decision(three) == 8
    for member in three.members:
        assert [member.is_reached(step) for step in (7, 8, 9)] == [False, True, True]


def test_a_rank_that_never_asked_before_takes_part(three: Ranks) -> None:
    three.wishes[0] = "rank 0 got SIGTERM"
    assert await_decision(three) == 0
    assert three.members[1].is_reached(0)


def test_what_was_said_of_a_step_stays_while_the_others_are_asked() -> None:
    ranks = Ranks(2, present=1)
    try:
        member = ranks.members[0]
        assert not member.is_reached(4)
        ranks.wishes[0] = "rank 0 got SIGTERM"
        while not member._is_open:
            time.sleep(0.01)
        assert not member.is_reached(4)  # at once: rank 1 has not answered, and need not
        assert not member.is_reached(3)
        late = ranks._join(1, 2)
        ranks.members.append(late)
        assert member.is_reached(5)  # waits for rank 1
        assert late._settled.wait(30)
        assert not late.is_reached(4)
        assert late.is_reached(5)
    finally:
        ranks.close()


def test_a_rank_that_takes_no_part_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_SECONDS_TO_ANSWER", 0.5)
    ranks = Ranks(2, present=1)
    try:
        ranks.wishes[0] = "rank 0 got SIGTERM"
        while not ranks.members[0]._is_open:
            time.sleep(0.01)
        with pytest.raises(UsageError, match=r"rank\(s\) \[1\], which have not read `accelerator.should_stop`"):
            ranks.members[0].is_reached(1)
    finally:
        ranks.close()


def test_a_store_that_is_gone_ends_the_watch_and_nothing_else() -> None:
    class Gone(HashStore):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection closed")

    member = Agreement(Gone(), 0, 2, lambda: None, "test")
    try:
        assert member._settled.wait(30)
        assert not member.is_reached(3)
    finally:
        member.close()
