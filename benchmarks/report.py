"""Write measured lines as a table, as JSON, as plots, and as the figures of README.md.

python benchmarks/report.py benchmarks/results/results.json   put the figures of an earlier run into README.md
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from budgets import Case, Line, Results
from measure import OURS

ROOT = Path(__file__).resolve().parent.parent

HEADER = "| what | budget | ours | reference | also measured | |\n|---|---|---:|---:|---|---|\n"


def number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    digits = 3 if unit in {"x", "s"} else 1
    return f"{value:.{digits}f} {unit}".strip()


def row(line: Line) -> str:
    also = ", ".join(f"{name} {value:.1f}" for name, value in line.others)
    verdict = "PASS" if line.passed else "FAIL"
    ours, reference = number(line.ours, line.unit), number(line.reference, line.unit)
    return f"| {line.label} | {line.budget} | {ours} | {reference} | {also} | {verdict} |"


def write_table(lines: Sequence[Line], path: Path) -> None:
    machine = f"{machine_facts()['machine']}, {machine_facts()['date']}"
    head = f"# Benchmark results\n\n{machine}. [How to read it](../README.md).\n\n"
    path.write_text(head + HEADER + "\n".join(row(line) for line in lines) + "\n")


def write_json(lines: Sequence[Line], measured: Sequence[tuple[Case, Results]], path: Path) -> None:
    raw = [
        {
            "case": case.key,
            "script": [case.script.name, *case.script.arguments],
            "results": {name: asdict(samples) for name, samples in results.items()},
        }
        for case, results in measured
    ]
    content = {**machine_facts(), "lines": [asdict(line) for line in lines], "raw": raw}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False))


def machine_facts() -> dict[str, str]:
    """Return what the figures depend on besides the code, and the day."""
    cpu = platform.processor() or platform.machine()
    if (facts := Path("/proc/cpuinfo")).exists():
        names = [line.partition(":")[2].strip() for line in facts.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    software = f"Python {platform.python_version()}, torch {version('torch')}"
    return {"machine": f"{cpu}, {os.cpu_count()} cores, {software}", "date": time.strftime("%Y-%m-%d")}


def readme_figures(results: dict[str, Any]) -> str:
    """Return the figures of a run for README.md: every line that has a reference, in the order of the report."""
    lines = [Line(**{**line, "others": tuple(map(tuple, line["others"]))}) for line in results["lines"]]
    compared = [line for line in lines if line.reference is not None and line.unit]
    if not compared:
        return ""
    rows = [
        f"| {line.label} | {number(line.ours, line.unit)} | {number(line.reference, line.unit)} |" for line in compared
    ]
    head = f"## Measured\n\nBy `make bench` on {results['machine']}, {results['date']}. "
    head += "*Extra* and *over* compare with a plain PyTorch program that does the same by hand.\n\n"
    return head + "| | here | Accelerate 1.15 |\n|---|---:|---:|\n" + "\n".join(rows)


def write_readme(results: dict[str, Any], readme: Path = ROOT / "README.md") -> None:
    sys.path.insert(0, str(ROOT))
    from tools.pages import write_sections

    write_sections((readme,), "figures", readme_figures(results), check=False)


def write_plots(measured: Sequence[tuple[Case, Results]], folder: Path) -> list[Path]:
    """Draw one box plot of all rounds for each case; none without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot

    paths = []
    for key in dict.fromkeys(case.key for case, _ in measured):
        group = [(case, results) for case, results in measured if case.key == key and results[OURS].series]
        figure, axes = pyplot.subplots(
            1, len(group), figsize=(4.5 * len(group), 4), layout="constrained", squeeze=False
        )
        for axis, (case, results) in zip(axes[0], group, strict=True):
            boxes = [
                (f"{series}\n({name})", values)
                for name, samples in results.items()
                for series, values in samples.series.items()
            ]
            axis.boxplot([values for _, values in boxes], showfliers=False)
            axis.set_xticks(range(1, len(boxes) + 1), [label for label, _ in boxes], fontsize=7)
            axis.set_ylabel(str(results[OURS].facts.get("unit", "")))
            axis.set_title(" ".join([case.title, *case.script.arguments[1:]]))
            axis.set_ylim(bottom=0)
        path = folder / f"{key}.png"
        figure.savefig(path, dpi=110)
        pyplot.close(figure)
        paths.append(path)
    return paths


if __name__ == "__main__":
    write_readme(json.loads(Path(sys.argv[1]).read_text()))
