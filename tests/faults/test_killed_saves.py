"""SIGKILL at random moments of saves, of one process or of all: the run goes on as if nothing had happened."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.killing import KILLS, SAMPLES, Killer, Member, Plan
from tests.support.training import assert_same_weights

from accelerate.checkpointing.catalog import catalog

pytestmark = pytest.mark.multiprocess


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--killed-runs", 4)))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: what a killed process has written is there without waiting for a disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as found:
        yield Path(found)


class CountingKiller(Killer):
    """Count the runs that ended by themselves, the last one among them."""

    unharmed = 0

    def _check(self, members: list[Member]) -> None:
        self.unharmed += 1
        super()._check(members)


def test_a_run_that_is_killed_in_its_saves_ends_as_if_it_had_not_been(seed: int, folder: Path) -> None:
    plan = Plan.of(seed)
    (folder / "killed").mkdir()
    (folder / "whole").mkdir()
    if (target := plan.source(folder / "killed")) is not None:
        target.mkdir(mode=0o700)  # a folder that exists stays, from the first save on
        inode = target.stat().st_ino
    killer = CountingKiller(plan, folder / "killed")
    outcomes = killer.execute()
    # A kill may come too late for a run that is through, but not each time.
    assert killer.unharmed <= KILLS, "no kill hit a process that ran"
    # What was never killed, in a process of its own: on one process the numbers are the same to the last bit.
    whole = Killer(plan, folder / "whole").execute_undisturbed()
    report = "\n".join(killer.moments)
    for outcome in outcomes:
        assert outcome.epochs == whole.epochs, report
        for numbers in outcome.epochs:
            assert sorted(numbers) == list(range(SAMPLES)), report
        if plan.solo:
            for name, weight in whole.weights.items():
                assert torch.equal(outcome.weights[name], weight), f"{name}\n{report}"
        assert_same_weights(outcome.weights, whole.weights)
    if target is not None:
        assert (target.stat().st_ino, target.stat().st_mode & 0o777) == (inode, 0o700)
    left = catalog(folder / "killed")
    assert [info.is_valid for info in left] == [True]
    # Each save removes what killed ones have left behind.
    assert not list(folder.rglob(".*")), report
