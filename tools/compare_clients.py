"""Run the client programs on release 1.15 and on this package, and write how their values compare.

python -m tools.compare_clients --reference .venv-reference/bin/python            run both, and rewrite the page
python -m tools.compare_clients --reference ... --programs lora diffusion         only these

What release 1.15 gave is written to tests/clients/recorded, where the test suite compares with it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.support.clients import (
    DIFFERENCES,
    PROGRAMS,
    Comparison,
    Program,
    compare,
    run_on_reference,
    run_program,
    write_recorded,
)
from tools.pages import ROOT, write_sections

PAGE = ROOT / "docs" / "explanation" / "clients.md"
_Compared = dict[Program, dict[int, Comparison]]


def compare_programs(programs: Iterable[Program], python: Path) -> _Compared:
    """Run each program on both packages, record what the other gave, and tell of each as it is done."""
    compared: _Compared = {}
    for program in programs:
        recorded = {}
        compared[program] = {}
        for processes in program.processes:
            with tempfile.TemporaryDirectory() as folder:
                started = time.perf_counter()
                theirs = recorded[processes] = run_on_reference(program, processes, Path(folder, "reference"), python)
                between = time.perf_counter()
                ours = run_program(program, processes, Path(folder, "ours"))
                ended = time.perf_counter()
            comparison = compared[program][processes] = compare(program, processes, ours.parts, theirs.parts)
            print(
                f"{program.name} on {processes}: {cell(comparison)}; "
                f"{ended - between:.0f} s beside {between - started:.0f} s",
                flush=True,
            )
            for path, (here, there) in comparison.unexplained.items():
                print(f"    {path}: {here!r} here, {there!r} there")
        write_recorded(program, recorded)
    return compared


def cell(comparison: Comparison) -> str:
    """Return what a cell of the table says."""
    words = [f"{comparison.equal} equal"]
    if comparison.close:
        words.append(f"{comparison.close} within {comparison.largest:.0e}")
    explained = sum(comparison.explained.values())
    if explained:
        words.append(f"{explained} explained")
    if comparison.unexplained:
        words.append(f"{len(comparison.unexplained)} unexplained")
    return ", ".join(words)


def render(compared: _Compared) -> str:
    """Return the table of the page, and below it the reasons."""
    lines = ["| program | one process | two processes |", "|---|---|---|"]
    for program, runs in compared.items():
        cells = [cell(runs[processes]) if processes in runs else "" for processes in (1, 2)]
        lines.append(f"| {program.does} (`{program.name}.py`) | {cells[0]} | {cells[1]} |")
    lines += ["", "| program | processes | what differs | why |", "|---|---|---|---|"]
    for entry in DIFFERENCES:
        processes = " and ".join(map(str, entry.processes))
        lines.append(f"| `{entry.program}.py` | {processes} | {entry.what} | {entry.reason} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, write the page if all programs were run, and return 0 if every difference has its reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, required=True, help="the interpreter with release 1.15")
    names = [program.name for program in PROGRAMS]
    parser.add_argument(
        "--programs", nargs="+", choices=names, default=names, help="default: all; they alone rewrite the page"
    )
    options = parser.parse_args(arguments)
    chosen = [program for program in PROGRAMS if program.name in options.programs]
    compared = compare_programs(chosen, options.reference.absolute())
    results = [comparison for runs in compared.values() for comparison in runs.values()]
    unexplained = sum(len(comparison.unexplained) for comparison in results)
    used = {entry for comparison in results for entry in comparison.explained}
    idle = [entry for entry in DIFFERENCES if entry.program in options.programs and entry not in used]
    for entry in idle:
        print(f"{entry.program}: nothing differs any more by {entry.values}; take the reason out")
    print(f"{sum(comparison.equal for comparison in results)} values equal, {unexplained} differ without a reason")
    if len(chosen) == len(PROGRAMS):
        write_sections((PAGE,), "clients", render(compared), check=False)
    return 1 if unexplained or idle else 0


if __name__ == "__main__":
    sys.exit(main())
