"""The speed promises: what is measured, how it is read, and what it may cost."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

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
    """A group of lines that come from one script.

    Args:
        needs: A package without which it is left out.
    """

    key: str
    title: str
    script: Script
    read: Callable[[Results], Iterator[Line]]
    needs: str | None = None


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
            budget="<= 25 µs",
            ours=ours,
            passed=ours <= 25,
            reference=other.extra("accelerate") if other else None,
            others=(*fabric[-1:], ("plain step", plain)),
        )

    return read


def xla_lines(label: str) -> Callable[[Results], Iterator[Line]]:
    """Read the time of a step beside the hand-written loop, and the graphs that both compiled."""
    times = paired_lines(f"{label}, over a hand-written torch_xla loop", 1.05)

    def read(results: Results) -> Iterator[Line]:
        yield from times(results)
        graphs: Any = results[OURS].facts["graphs"]
        yield Line(
            label=f"{label}: graphs compiled",
            unit="graphs",
            budget=f"= {graphs['plain']}, as by hand",
            ours=graphs["accelerate"],
            passed=graphs["accelerate"] == graphs["plain"],
        )

    return read


def paired_lines(label: str, most: float) -> Callable[[Results], Iterator[Line]]:
    def read(results: Results) -> Iterator[Line]:
        ours, other = results[OURS].paired_ratio("accelerate"), results.get(REFERENCE)
        yield Line(
            label=label,
            unit="x",
            budget=f"<= {most} x",
            ours=ours,
            passed=ours <= most,
            reference=other.paired_ratio("accelerate") if other else None,
            others=(("plain, µs", results[OURS].median("plain")),),
        )

    return read


def opening_lines(results: Results) -> Iterator[Line]:
    ours, other = results[OURS].extra("accelerate"), results.get(REFERENCE)
    yield Line(
        label="loader, opening a pass: extra over plain PyTorch",
        unit="µs",
        budget="<= 200 µs",
        ours=ours,
        passed=ours <= 200,
        reference=other.extra("accelerate") if other else None,
        others=(("plain pass of one batch", results[OURS].quiet("plain")),),
    )


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
    samples, other = results[OURS], results.get(REFERENCE)
    for series, label, most in (
        ("help", "accelerate --help", 0.15),
        ("launch help", "accelerate launch --help", 0.15),
        ("config", "accelerate config default", 0.25),
        ("env", "accelerate env", 0.25),
    ):
        ours = samples.quiet(series)
        yield Line(
            label=label,
            unit="s",
            budget=f"<= {most} s",
            ours=ours,
            passed=ours <= most,
            reference=other.quiet(series) if other else None,
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


def save_lines(results: Results) -> Iterator[Line]:
    ours, other = results[OURS].ratio("accelerate"), results.get(REFERENCE)
    yield Line(
        label="save_state of 600 MB over safetensors and torch.save of the same",
        unit="x",
        budget="<= 1.0 x",
        ours=ours,
        passed=ours <= 1.0,
        reference=other.ratio("accelerate") if other else None,
        others=(("plain, s", results[OURS].quiet("plain")),),
    )


def stall_lines(results: Results) -> Iterator[Line]:
    samples = results[OURS]
    blocking = samples.quiet("blocking")
    wait = max(0.0, samples.extra("step after", "step"))
    first, later = (100 * (samples.quiet(name) + wait) / blocking for name in ("first call", "call"))
    yield Line(
        label="save_state(blocking=False): training stands still, of the time of a blocking save; the first one of a run",
        unit="%",
        budget="<= 15 %",
        ours=first,
        passed=max(first, later) <= 15,
        others=(("later ones", later), ("blocking, s", blocking), ("wait of the next step, s", wait)),
    )


def load_lines(results: Results) -> Iterator[Line]:
    ours, other = results[OURS].ratio("accelerate"), results.get(REFERENCE)
    reference = other.ratio("accelerate") if other else None
    yield Line(
        label="load_state of 600 MB in a fresh process over reading the same by hand",
        unit="x",
        budget="<= 1.05 x reference",
        ours=ours,
        passed=reference is None or ours <= 1.05 * reference,
        reference=reference,
        others=(("plain, s", results[OURS].quiet("plain")),),
    )


def resume_lines(results: Results) -> Iterator[Line]:
    ours, reads = results[OURS].quiet("resume"), results[OURS].facts["reads"]
    yield Line(
        label="load_state and the next batch, at batch 1,000,000",
        unit="s",
        budget="<= 1 s, nothing read to skip",
        ours=ours,
        passed=ours <= 1 and reads == 0,
        others=(("samples read to skip", float(str(reads))),),
    )


def _against_reference(results: Results, series: str, label: str, most: float) -> Line:
    ours, other = results[OURS].quiet(series), results.get(REFERENCE)
    reference = other.quiet(series) if other else None
    return Line(
        label=label,
        unit="s",
        budget=f"<= {most} x reference",
        ours=ours,
        passed=reference is None or ours <= most * reference,
        reference=reference,
        others=(("times the reference", ours / reference),) if reference else (),
    )


def out_of_memory_lines(results: Results) -> Iterator[Line]:
    yield _against_reference(results, "tries", "find_executable_batch_size on two processes, eleven tries", 1.2)


def big_load_lines(results: Results) -> Iterator[Line]:
    yield _against_reference(results, "disk", "load 1.6 GB, to the disk", 0.05)
    yield _against_reference(results, "cpu", "load 1.6 GB, to the CPU", 0.3)


def big_forward_lines(results: Results) -> Iterator[Line]:
    ours, other = results[OURS], results.get(REFERENCE)
    for series, label in (("first", "the first one"), ("later", "later ones")):
        yield Line(
            label=f"forward from the disk, pages cached, {label}: over one in memory",
            unit="x",
            budget="<= 1.15 x",
            ours=ours.ratio(series, "memory"),
            passed=ours.ratio(series, "memory") <= 1.15,
            reference=other.ratio(series, "memory") if other else None,
            others=(("in memory, s", ours.quiet("memory")),),
        )


def big_cold_lines(results: Results) -> Iterator[Line]:
    ours, other = results[OURS], results.get(REFERENCE)
    yield Line(
        label="forward from the disk, pages dropped: over the longer of reading and computing",
        unit="x",
        budget="<= 1.2 x",
        ours=ours.median("ratio"),
        passed=ours.median("ratio") <= 1.2,
        reference=other.median("ratio") if other else None,
        others=(("read, s", ours.median("read")), ("compute, s", ours.median("compute"))),
    )


def big_empty_lines(results: Results) -> Iterator[Line]:
    yield _against_reference(results, "empty", "init_empty_weights, 2,800 linear layers", 0.3)


def big_plan_lines(results: Results) -> Iterator[Line]:
    ours, other = results[OURS].quiet("plan"), results.get(REFERENCE)
    yield Line(
        label="plan for 100,000 modules",
        unit="s",
        budget="<= 2 s",
        ours=ours,
        passed=ours <= 2,
        reference=other.quiet("plan") if other else None,
    )


# What the reference takes minutes for is measured without it.
BIG_MODEL = (
    (("load", "2"), big_load_lines),
    (("forward", "3"), big_forward_lines),
    (("cold", "7"), big_cold_lines),
    (("empty", "10"), big_empty_lines),
    (("plan", "3"), big_plan_lines),
)

CASES = (
    *(
        Case("step", "A training step", Script("step.py", ("--variant", variant)), step_lines(label))
        for variant, label in (("fp32", "fp32"), ("accumulation", "accumulation 4"), ("bf16", "bf16"))
    ),
    *(
        Case(
            "loader",
            "A batch",
            # Two loaders are never equally fast in one process, least of all with workers: many processes say more.
            Script("loader.py", ("--kind", kind, "--rounds", "12"), sessions=7),
            paired_lines(f"loader, {label}", 1.02),
        )
        for kind, label in (
            ("tensors", "TensorDataset, batch 32"),
            ("dicts", "dicts, default collate"),
            ("workers", "dicts, two workers"),
        )
    ),
    Case(
        "loader",
        "A pass",
        Script("loader.py", ("--kind", "opening", "--rounds", "100"), sessions=3),
        opening_lines,
    ),
    Case("ddp", "DDP", Script("ddp.py", processes=2), paired_lines("DDP on two processes over hand-written DDP", 1.03)),
    Case(
        "fsdp",
        "FSDP2",
        # The reference shards on accelerators only.
        Script("fsdp.py", processes=2, only_ours=True),
        paired_lines("FSDP2 on two processes over hand-written FSDP2", 1.03),
    ),
    *(
        Case(
            "deepspeed",
            "DeepSpeed",
            # The reference takes no DeepSpeed on a machine without accelerators.
            # Two engines of one session are never equally fast.
            Script("zero.py", ("--stage", stage), processes=2, sessions=3, only_ours=True, timeout=300),
            paired_lines(f"DeepSpeed, ZeRO {stage}, on two processes over a hand-written loop", 1.03),
        )
        for stage in ("2", "3")
    ),
    *(
        Case(
            "xla",
            "XLA",
            Script("xla.py", ("--workers", workers), sessions=3, only_ours=True, timeout=300),
            xla_lines(f"XLA device, {workers} workers"),
            needs="torch_xla",
        )
        for workers in ("0", "2")
    ),
    Case("dispatch", "Dispatched batches", Script("dispatch.py", processes=2), dispatch_lines),
    Case("out_of_memory", "Out of memory", Script("out_of_memory.py", processes=2, sessions=4), out_of_memory_lines),
    *(
        Case("checkpoint", "Checkpoint", Script("checkpoint.py", ("--kind", kind), sessions=sessions), lines)
        for kind, lines, sessions in (
            # A disk is never twice equally fast: many saves say more.
            ("save", save_lines, 5),
            ("stall", stall_lines, 2),
            ("load", load_lines, 2),
            ("resume", resume_lines, 2),
        )
    ),
    Case("import", "Import", Script("imports.py", sessions=7), import_lines),
    Case("import", "Import", Script("imports.py", ("--bare",), sessions=1), bare_import_lines),
    *(
        Case("launch", "Launch", Script("launch.py", ("--kind", kind), sessions=1), lines)
        for kind, lines in (("help", help_lines), ("one", one_process_lines), ("two", two_process_lines))
    ),
    *(
        Case(
            "big_model",
            "A big model",
            Script(
                "big_model.py",
                ("--part", part, "--rounds", rounds),
                sessions=1,
                only_ours=part == "plan",
                timeout=600,
            ),
            lines,
        )
        for (part, rounds), lines in BIG_MODEL
    ),
)
