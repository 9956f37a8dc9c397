"""Measure every speed promise and say whether it holds.

python benchmarks/run.py --reference .venv-reference/bin/python --output benchmarks/results
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import time
from pathlib import Path

from budgets import CASES, Case, Line, Results
from measure import CaseFailure, default_interpreters, log, measure
from report import row, write_json, write_plots, write_readme, write_table


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure every speed promise and say whether it holds.")
    parser.add_argument("--reference", type=Path, help="interpreter with the package to compare with")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--readme", action="store_true", help="put the figures into README.md")
    parser.add_argument("--cases", nargs="+", choices=sorted({case.key for case in CASES}), help="default: all")
    return parser.parse_args()


def main() -> int:
    """Run the cases, write the results, and return 0 if every budget holds."""
    options = parse_arguments()
    if options.reference is not None and not options.reference.exists():
        log([f"no interpreter at {options.reference}: measuring without a reference"])
        options.reference = None
    interpreters = default_interpreters(options.reference and options.reference.absolute())
    started = time.perf_counter()
    measured: list[tuple[Case, Results]] = []
    lines: list[Line] = []
    broken = 0
    for case in CASES:
        if options.cases and case.key not in options.cases:
            continue
        if case.needs is not None and importlib.util.find_spec(case.needs) is None:
            log([f"{case.title} is left out: {case.needs} is not installed"])
            continue
        try:
            results = measure(case.script, interpreters)
        except (CaseFailure, subprocess.TimeoutExpired) as failure:
            # One broken case must not cost the numbers of the others; it still fails the run.
            log([f"{case.title} was not measured: {failure}"])
            broken += 1
            continue
        measured.append((case, results))
        for line in case.read(results):
            lines.append(line)
            print(row(line), flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    write_table(lines, options.output / "results.md")
    write_json(lines, measured, options.output / "results.json")
    if options.readme:
        write_readme(json.loads((options.output / "results.json").read_text()))
    plots = write_plots(measured, options.output)
    failed = sum(not line.passed for line in lines)
    log([f"{len(lines) - failed} of {len(lines)} budgets hold, {time.perf_counter() - started:.0f} s;"])
    log([f"results in {options.output / 'results.md'}, {len(plots)} plots beside it"])
    return 1 if failed or broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
