"""Write measured lines as a table, as JSON and as plots."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from budgets import Case, Line, Results
from measure import OURS

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
    machine = f"Python {platform.python_version()}, {platform.machine()}"
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
    path.write_text(json.dumps({"lines": [asdict(line) for line in lines], "raw": raw}, indent=1, ensure_ascii=False))


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
