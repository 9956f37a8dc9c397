"""A run that dies goes on from its newest valid checkpoint when it is started again."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.stopping import Run, checkpoints, notes, rows_that_count

pytestmark = pytest.mark.multiprocess

EVERY_EPOCH = {epoch: [float(row) for row in range(24)] for epoch in range(3)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    """Return the weights after a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    code, errors = Run(folder, "--num_processes", "2", words=["save=4"]).wait()
    assert code == 0, errors
    assert rows_that_count(folder) == EVERY_EPOCH
    (first,), (second,) = notes(folder, "end")
    assert first == second
    assert (first["step"], first["samples"]) == (18, 72)
    weights: list[list[float]] = first["weights"]
    return weights


def test_the_agent_starts_a_killed_run_again_and_it_goes_on(tmp_path: Path, undisturbed: list[list[float]]) -> None:
    options = ["--num_processes", "2", "--max_restarts", "2", "--auto_resume"]
    code, errors = Run(tmp_path, *options, words=["save=4", "kill=1@10"]).wait()
    assert code == 0, errors
    for entries in notes(tmp_path, "batch"):
        steps = {attempt: [e["step"] for e in entries if e["attempt"] == attempt] for attempt in (0, 1)}
        assert steps[0][:10] == list(range(1, 11))
        # The newest checkpoint is that of step 8, in the middle of the second epoch.
        assert steps[1] == list(range(9, 19))
        assert [entry["seen"] for entry in entries if entry["attempt"] == 1] == [4 * step for step in range(9, 19)]
    assert rows_that_count(tmp_path) == EVERY_EPOCH
    for (end,) in notes(tmp_path, "end"):
        assert end["weights"] == undisturbed
    assert len(checkpoints(tmp_path)) == 2


def test_a_broken_checkpoint_is_passed_over(tmp_path: Path, undisturbed: list[list[float]]) -> None:
    code, errors = Run(tmp_path, "--num_processes", "2", words=["save=4", "kill=0@10"]).wait()
    assert code == 137, errors
    _, newest = checkpoints(tmp_path)
    weights = tmp_path / "run" / "checkpoints" / newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    code, errors = Run(tmp_path, "--num_processes", "2", words=["resume=yes"]).wait()
    assert code == 0, errors
    for entries, resumed in zip(notes(tmp_path, "batch"), notes(tmp_path, "resumed"), strict=True):
        assert resumed[-1]["found"] is True
        assert [entry["step"] for entry in entries][-14:] == list(range(5, 19))  # from the one before, of step 4
    assert rows_that_count(tmp_path) == EVERY_EPOCH
    for (end,) in notes(tmp_path, "end"):
        assert end["weights"] == undisturbed


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    code, errors = Run(tmp_path, "--auto_resume", words=["resume=yes"]).wait()
    assert code == 0, errors
    ((resumed,),) = notes(tmp_path, "resumed", ranks=[0])
    assert resumed["found"] is False
    assert rows_that_count(tmp_path, ranks=[0]) == EVERY_EPOCH


def test_a_job_that_slurm_requeues_goes_on(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "1"}
    # The script sends itself the notice that `sbatch --signal=B:USR1@120` sends.
    code, errors = Run(tmp_path, words=["signal=8"], env=job).wait()
    assert code == 75, errors
    ((saved,),) = notes(tmp_path, "saved", ranks=[0])
    assert saved["step"] == 8
    code, errors = Run(tmp_path, words=["signal=8"], env={**job, "SLURM_RESTART_COUNT": "1"}).wait()
    assert code == 0, errors
    (entries,) = notes(tmp_path, "batch", ranks=[0])
    assert [entry["step"] for entry in entries] == list(range(1, 19))
    assert rows_that_count(tmp_path, ranks=[0]) == EVERY_EPOCH
