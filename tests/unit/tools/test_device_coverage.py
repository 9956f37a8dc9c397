"""The report of what runs on an accelerator, from real measurements of a small package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tools.device_coverage import Region, file_regions, functions_not_run, main, ranges, render

MODULE = '''
"""A module."""

CONSTANT = 1


def runs_always():
    return CONSTANT


def runs_on_the_device(is_large=False):
    if is_large:
        second = 2
        return second
    return 2


class Backend:
    def runs_never(self):
        first = 1
        return first

    def has_no_body(self): ...
'''


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Measure the package twice, as the Makefile does: on the device, and everything."""
    root = tmp_path_factory.mktemp("repository")
    for folder in ("devices", "other"):
        place = root / "src" / "accelerate" / folder
        place.mkdir(parents=True)
        (place / "base.py").write_text(MODULE)
        (place / "__init__.py").touch()
        (place.parent / "__init__.py").touch()
    # This test may itself be measured.
    own = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    found = []
    for name, calls in (("device", ["runs_on_the_device"]), ("every", ["runs_on_the_device", "runs_always"])):
        program = "; ".join(
            ["import sys", "sys.path.insert(0, 'src')"]
            + [f"from accelerate.{folder} import base as {folder}" for folder in ("devices", "other")]
            + [f"devices.{call}()" for call in calls]
        )
        (root / f"{name}.py").write_text(program)
        coverage = [sys.executable, "-m", "coverage"]
        data = f"--data-file={root / name}"
        for command in (
            ["run", "--rcfile=/dev/null", data, "--source=src", f"{name}.py"],
            ["json", "--rcfile=/dev/null", data, "--quiet", "-o", f"{name}.json"],
        ):
            subprocess.run([*coverage, *command], cwd=root, env=own, check=True, capture_output=True)
        found.append(root / f"{name}.json")
    return found[0], found[1]


def test_functions_that_nothing_runs_are_named(reports: tuple[Path, Path]) -> None:
    device, every = (json.loads(path.read_text()) for path in reports)
    partly = Region("devices/base.py", "runs_on_the_device", 4, 2, (13, 14))
    never = Region("devices/base.py", "Backend.runs_never", 2, 0, (20, 21))
    assert [found for found in functions_not_run(every) if found.function != "Backend.has_no_body"] == [partly, never]
    names = [region.function for region in functions_not_run(device)]
    assert names[:3] == ["runs_always", "runs_on_the_device", "Backend.runs_never"]
    assert functions_not_run(every, ["precision"]) == []


def test_lines_beside_each_other_are_told_together() -> None:
    assert ranges([3, 4, 5, 9, 11, 12]) == "3-5, 9, 11-12"
    assert ranges([]) == ""


def test_lines_of_files_are_counted(reports: tuple[Path, Path]) -> None:
    device, every = (file_regions(json.loads(path.read_text())) for path in reports)
    assert [(region.path, region.folder, region.function) for region in device] == [("devices/base.py", "devices", "")]
    assert every[0].num_run == device[0].num_run + 1
    assert every[0].num_lines == device[0].num_lines


def test_the_report_is_printed(reports: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(path) for path in reports]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("devices/ ")
    assert lines[2].startswith("  devices/base.py ")
    assert "  devices/base.py: Backend.runs_never (2 lines)" in lines
    assert "  devices/base.py: runs_on_the_device, line 13-14" in lines
    assert not any("other" in line for line in lines)
    assert not any("test-xla" in line for line in lines)


def test_the_report_says_where_files_of_xla_are_run(reports: tuple[Path, Path]) -> None:
    device, every = (json.loads(path.read_text().replace("devices/base.py", "devices/xla.py")) for path in reports)
    assert "devices/xla.py is run by `make test-xla`" in render(device, every).splitlines()[-1]
