"""The speed promises: what is measured, how it is read, and what it may cost."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from measure import OURS, REFERENCE, Samples, Script

Results = dict[str, Samples]


@dataclass(frozen=True)
class Line:
    """One line of the report: a number of ours, the reference's, and the budget."""

    label: str
    unit: str
    budget: str
    ours: float
    passed: bool
    reference: float | None = None
    others: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Case:
    """A group of lines that come from one script."""

    key: str
    title: str
    script: Script
    read: Callable[[Results], Iterator[Line]]


def step_lines(label: str) -> Callable[[Results], Iterator[Line]]:
    def read(results: Results) -> Iterator[Line]:
        ours = results[OURS].extra("accelerate")
        other = results.get(REFERENCE)
        fabric = [
            ("Lightning Fabric", samples.extra("fabric")) for samples in results.values() if "fabric" in samples.series
        ]
        plain = statistics.median([value for samples in results.values() for value in samples.series["plain"]])
        yield Line(
            label=f"step, {label}: extra over plain PyTorch",
            unit="µs",
            budget="<= 40 µs",
            ours=ours,
            passed=ours <= 40,
            reference=other.extra("accelerate") if other else None,
            others=(*fabric[-1:], ("plain step", plain)),
        )

    return read


def ratio_lines(label: str) -> Callable[[Results], Iterator[Line]]:
    def read(results: Results) -> Iterator[Line]:
        ours = results[OURS].ratio("accelerate")
        other = results.get(REFERENCE)
        yield Line(
            label=label,
            unit="x",
            budget="<= 1.03 x",
            ours=ours,
            passed=ours <= 1.03,
            reference=other.ratio("accelerate") if other else None,
            others=(("plain, µs", results[OURS].median("plain")),),
        )

    return read


def dispatch_lines(results: Results) -> Iterator[Line]:
    ours = results[OURS].median("accelerate")
    other = results.get(REFERENCE)
    reference = other.median("accelerate") if other else None
    yield Line(
        label="dispatch_batches on two processes",
        unit="batches/s",
        budget=">= 3 x reference",
        ours=ours,
        passed=reference is None or ours >= 3 * reference,
        reference=reference,
        others=(("times the reference", ours / reference),) if reference else (),
    )


def import_lines(results: Results) -> Iterator[Line]:
    other = results.get(REFERENCE)
    ours = results[OURS].median("package")
    yield Line(
        label="import accelerate, on top of import torch",
        unit="ms",
        budget="<= 30 ms",
        ours=ours,
        passed=ours <= 30,
        reference=other.median("package") if other else None,
        others=(("with Accelerator", results[OURS].median("accelerator")),),
    )


def bare_import_lines(results: Results) -> Iterator[Line]:
    brings = {name: float(bool(samples.facts["torch_imported"])) for name, samples in results.items()}
    yield Line(
        label="import accelerate brings torch in (0 no, 1 yes)",
        unit="",
        budget="0",
        ours=brings[OURS],
        passed=not brings[OURS],
        reference=brings.get(REFERENCE),
    )


def help_lines(results: Results) -> Iterator[Line]:
    ours, other = results[OURS].quiet("accelerate"), results.get(REFERENCE)
    yield Line(
        label="accelerate launch --help",
        unit="s",
        budget="<= 0.25 s",
        ours=ours,
        passed=ours <= 0.25,
        reference=other.quiet("accelerate") if other else None,
    )


def one_process_lines(results: Results) -> Iterator[Line]:
    ours, other = results[OURS].extra("accelerate"), results.get(REFERENCE)
    yield Line(
        label="accelerate launch of one process: extra over python",
        unit="s",
        budget="<= 0.15 s",
        ours=ours,
        passed=ours <= 0.15,
        reference=other.extra("accelerate") if other else None,
        others=(("python", results[OURS].quiet("plain")),),
    )


def two_process_lines(results: Results) -> Iterator[Line]:
    ours, other = results[OURS].ratio("accelerate"), results.get(REFERENCE)
    yield Line(
        label="accelerate launch of two processes over torchrun",
        unit="x",
        budget="<= 1.05 x",
        ours=ours,
        passed=ours <= 1.05,
        reference=other.ratio("accelerate") if other else None,
        others=(("torchrun, s", results[OURS].quiet("plain")),),
    )


CASES = (
    *(
        Case("step", "A training step", Script("step.py", ("--variant", variant)), step_lines(label))
        for variant, label in (("fp32", "fp32"), ("accumulation", "accumulation 4"), ("bf16", "bf16"))
    ),
    *(
        Case("loader", "A batch", Script("loader.py", ("--kind", kind)), ratio_lines(f"loader, {label}"))
        for kind, label in (
            ("tensors", "TensorDataset, batch 32"),
            ("dicts", "dicts, default collate"),
            ("workers", "dicts, two workers"),
        )
    ),
    Case("ddp", "DDP", Script("ddp.py", processes=2), ratio_lines("DDP on two processes over hand-written DDP")),
    Case("dispatch", "Dispatched batches", Script("dispatch.py", processes=2), dispatch_lines),
    Case("import", "Import", Script("imports.py", sessions=7), import_lines),
    Case("import", "Import", Script("imports.py", ("--bare",), sessions=1), bare_import_lines),
    *(
        Case("launch", "Launch", Script("launch.py", ("--kind", kind), sessions=1), lines)
        for kind, lines in (("help", help_lines), ("one", one_process_lines), ("two", two_process_lines))
    ),
)
