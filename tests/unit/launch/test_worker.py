"""The worker as a program: what it runs and records."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.support.processes import script_environment

from accelerate.launch.plan import WORKER

# --- scripts ----------------------------------------------------------------------------------------------------------


def work(
    folder: Path, *words: str, options: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, str(WORKER), *words]
    environment = script_environment(variables)
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=600
    )


def test_a_folder_and_an_archive_are_run_as_by_the_interpreter(tmp_path: Path) -> None:
    main = "import sys\nprint(__name__, sys.argv[1:])\n"
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "__main__.py").write_text(main)
    with zipfile.ZipFile(tmp_path / "program.zip", "w") as archive:
        archive.writestr("__main__.py", main)
    for name in ("program", "program.zip"):
        done = work(tmp_path, "script", name, "--lr", "1")
        assert (done.returncode, done.stdout, done.stderr) == (0, "__main__ ['--lr', '1']\n", "")


FAILING = "raise ValueError('broken on purpose')\n"


@pytest.mark.parametrize("rank", ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"])
def test_a_failure_is_recorded_under_its_rank(tmp_path: Path, rank: str) -> None:
    (tmp_path / "train.py").write_text(FAILING)
    done = work(tmp_path, "script", "train.py", ACCELERATE_FAILURE_FOLDER=str(tmp_path / "failures"), **{rank: "3"})
    assert done.returncode == 1
    record = json.loads((tmp_path / "failures" / "3" / "error.json").read_text())["message"]
    assert record["message"] == "ValueError: broken on purpose"
    assert record["extraInfo"]["py_callstack"] == done.stderr
    assert str(WORKER) not in done.stderr


def test_a_failure_without_a_record_is_shown_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILING)
    (tmp_path / "taken").mkdir()
    shown = "ValueError: broken on purpose\n"
    for record, told in (("", False), ("/proc/none/error.json", False), (str(tmp_path / "taken"), True)):
        done = work(tmp_path, "script", "train.py", TORCHELASTIC_ERROR_FILE=record)
        assert done.returncode == 1
        assert done.stderr.endswith(shown)
        assert ("The failure could not be recorded in" in done.stderr) is told


def test_a_record_that_cannot_be_completed_is_not_left_behind(tmp_path: Path) -> None:
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
    (tmp_path / "train.py").write_text(limit + FAILING)
    done = work(tmp_path, "script", "train.py", TORCHELASTIC_ERROR_FILE="error.json")
    assert "The failure could not be recorded in error.json" in done.stderr
    assert not (tmp_path / "error.json").exists()  # torch's agent would fail to parse its first ten bytes


def test_a_script_may_do_without_the_library(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys\nsys.exit('accelerate' in sys.modules or 7)\n")
    # Without the site packages there is no library to import.
    done = work(tmp_path, "script", "train.py", options=("-S",), PYTHONPATH="", TORCHELASTIC_ERROR_FILE="error.json")
    assert (done.returncode, done.stderr) == (7, "")
    assert not (tmp_path / "error.json").exists()
