"""A strict type checker accepts a program of a user, and sees real types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="mypy is not installed")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def check(path: Path) -> subprocess.CompletedProcess[str]:
    """Run mypy as a user would: from elsewhere, with no settings, on the installed package."""
    # Kept between runs: torch's own sources are what takes the time.
    cache = ROOT / ".mypy_cache" / "user_program"
    options = ["--strict", "--config-file", "", "--cache-dir", str(cache), "--no-error-summary"]
    return subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(path)],
        cwd=path.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_the_package_says_that_it_is_typed() -> None:
    import accelerate

    assert (Path(accelerate.__file__).parent / "py.typed").exists()


def test_a_program_of_a_user_passes() -> None:
    done = check(HERE / "user_program.py")
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_a_star_import_shows_the_names(tmp_path: Path) -> None:
    path = tmp_path / "starred.py"
    path.write_text(
        "from accelerate import *\nfrom accelerate.utils import *\n\nset_seed(0)\ncount: int = Accelerator().num_processes\n"
    )
    done = check(path)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("count: str = Accelerator().num_processes", "assignment"),
        ("Accelerator(mixed_precission='bf16')", "call-arg"),
        ("Accelerator(gradient_accumulation_steps='2')", "arg-type"),
        ("Accelerator().no_such_thing()", "attr-defined"),
    ],
)
def test_wrong_programs_are_found(tmp_path: Path, statement: str, code: str) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(f"from accelerate import Accelerator\n\n{statement}\n")
    done = check(path)
    assert done.returncode == 1
    assert done.stdout.count("error:") == 1
    assert f"[{code}]" in done.stdout
