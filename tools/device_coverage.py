"""Report what runs on an accelerator: the lines that tests on the toy device reach, and the code that no test runs, by name.

It reads two reports of `coverage json`: of the tests on the device alone, and of all tests.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = "src/accelerate/"
FOLDERS = ("devices", "offload", "hooks", "precision")
"""Where code stands that behaves otherwise on an accelerator."""
XLA_FILE = "devices/xla.py"


@dataclass(frozen=True)
class Region:
    """A file, or a function of one.

    Args:
        path: Place in the package.
        function: The name of the function with those of the classes around it; "" for the whole file.
        silent: The numbers of the lines that did not run.
    """

    path: str
    function: str
    num_lines: int
    num_run: int
    silent: tuple[int, ...]

    @property
    def folder(self) -> str:
        """The folder of the package that holds the file."""
        return self.path.partition("/")[0]


def files(report: Mapping[str, Any], folders: Iterable[str] = FOLDERS) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the files of some folders of the package, with what a report says about each."""
    wanted = set(folders)
    for path, entry in sorted(report["files"].items()):
        place = path.replace("\\", "/").partition(PACKAGE)[2]
        if place.partition("/")[0] in wanted:
            yield place, entry


def file_regions(report: Mapping[str, Any], folders: Iterable[str] = FOLDERS) -> list[Region]:
    """Return the files that have lines to run."""
    return [region for path, entry in files(report, folders) if (region := _region(path, "", entry)).num_lines]


def functions_not_run(report: Mapping[str, Any], folders: Iterable[str] = FOLDERS) -> list[Region]:
    """Return the functions of which some lines, or all, did not run."""
    found = (
        _region(path, name, function)
        for path, entry in files(report, folders)
        for name, function in sorted(entry["functions"].items(), key=lambda item: item[1].get("start_line", 0))
        if name  # the lines outside of functions run at import
    )
    return [region for region in found if region.silent]


def _region(path: str, function: str, entry: Mapping[str, Any]) -> Region:
    summary = entry["summary"]
    lines = tuple(entry["missing_lines"])
    return Region(path, function, summary["num_statements"], summary["covered_lines"], lines)


def render(device: Mapping[str, Any], every: Mapping[str, Any], folders: Sequence[str] = FOLDERS) -> str:
    """Return the report as text.

    Args:
        device: What `coverage json` wrote of the tests on the device.
        every: What it wrote of all tests.
    """
    lines = ["Lines that tests on the toy device run:"]
    measured = file_regions(device, folders)
    for folder in folders:
        parts = [region for region in measured if region.folder == folder]
        lines += [_line(f"{folder}/", parts), *(f"  {_line(region.path, [region])}" for region in parts)]
    found = functions_not_run(every, folders)
    never = [region for region in found if not region.num_run]
    lines += ["", f"Functions that no test runs: {len(never) or 'none'}"]
    lines += [f"  {region.path}: {region.function} ({region.num_lines} lines)" for region in never]
    partly = [region for region in found if region.num_run]
    lines += ["", f"Functions with lines that no test runs: {len(partly) or 'none'}"]
    lines += [f"  {region.path}: {region.function}, line {ranges(region.silent)}" for region in partly]
    if any(region.path == XLA_FILE for region in found):
        lines += [
            "",
            f"{XLA_FILE} is run by `make test-xla`, in an environment of its own, which is not measured here.",
        ]
    return "\n".join(lines)


def ranges(numbers: Sequence[int]) -> str:
    """Return growing numbers with neighbours together: "3-5, 9"."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups)


def _line(name: str, regions: Sequence[Region]) -> str:
    run, total = (sum(getattr(region, count) for region in regions) for count in ("num_run", "num_lines"))
    return f"{name:<40} {run:>5} of {total:>5} {100 * run // total if total else 100:>4}%"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", type=Path, help="what `coverage json` wrote of the tests on the toy device")
    parser.add_argument("every", type=Path, help="what `coverage json` wrote of all tests")
    options = parser.parse_args(arguments)
    reports = (json.loads(path.read_text(encoding="utf-8")) for path in (options.device, options.every))
    print(render(*reports))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
