"""`accelerate estimate-memory`: say how much memory a model takes, to run and to train."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import convert_bytes
from accelerate._base.untrusted import number_in
from accelerate.commands.estimate_source import (
    FoundModel,
    add_timm_hub_prefix,
    check_has_model,
    create_empty_model,
    find_model,
    verify_on_hub,
)
from accelerate.config.cli import spellings
from accelerate.offload.estimate import (
    DTYPE_BITS,
    TRAINABLE_DTYPES,
    ModelTensors,
    PlanRow,
    TrainingMemory,
    in_layout,
    per_rank,
    plan_report,
    training_memory,
)

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "add_timm_hub_prefix",
    "check_has_model",
    "create_ascii_table",
    "create_empty_model",
    "estimate_command",
    "estimate_command_parser",
    "estimate_training_usage",
    "gather_data",
    "main",
    "verify_on_hub",
]

_DESCRIPTION = "Say how much memory a model takes, to run and to train; no weights are read."
_DEFAULT_DTYPES = ("float32", "float16", "int8", "int4")
# Both 16-bit dtypes take the same memory.
_LABELS = {"float16": "float16/bfloat16", "bfloat16": "float16/bfloat16"}
_NONE = "-"
_AS_STORED = "stored"


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return the parser of `accelerate estimate-memory`, of its own or under another one."""
    if subparsers is None:
        parser = argparse.ArgumentParser("accelerate estimate-memory", description=_DESCRIPTION)
    else:
        parser = subparsers.add_parser("estimate-memory", description=_DESCRIPTION)
    parser.add_argument(
        "model_name",
        metavar="MODEL",
        help="A folder or file with weights, a config.json of Transformers or timm, or a name on the Hub.",
    )
    parser.add_argument(
        *spellings("--library_name"),
        choices=("timm", "transformers"),
        help="Build the model from its configuration by this library, also where weights are at hand.",
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=tuple(DTYPE_BITS),
        default=list(_DEFAULT_DTYPES),
        help="The dtypes to show (default: %(default)s).",
    )
    parser.add_argument(
        *spellings("--num_processes"), type=int, metavar="N", help="Show the memory of each of N processes in training."
    )
    parser.add_argument("--fsdp", type=int, metavar="N", help="Show the memory with weights sharded over N processes.")
    parser.add_argument("--tp", type=int, metavar="N", help="Show the memory with each layer split over N processes.")
    parser.add_argument(
        "--plan",
        nargs="?",
        const=_AS_STORED,
        choices=(_AS_STORED, *DTYPE_BITS),
        help="Say where each part would go on this machine, with the weights as they are stored or in a dtype.",
    )
    parser.add_argument(
        *spellings("--max_memory"),
        nargs="+",
        default=[],
        metavar="PLACE=SIZE",
        help="Plan with this memory instead of what is free now: 0=10GB cpu=32GB, integers for accelerators.",
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object, with sizes in bytes.")
    parser.add_argument(
        *spellings("--trust_remote_code"),
        action="store_true",
        help="Run modeling code that comes with a configuration; only for code that you have read.",
    )
    parser.set_defaults(func=estimate_command)
    return parser


def estimate_command(args: argparse.Namespace) -> None:
    """Print the estimate of a model, as tables or as JSON.

    Raises:
        ConfigurationError: If the model cannot be found or read, or an option makes no sense.
    """
    for name in ("num_processes", "fsdp", "tp"):
        size = getattr(args, name)
        if size is not None and size < 1:
            raise ConfigurationError(
                f"--{name} {size} leaves nothing to train on. Give the number of processes, 1 or more."
            )
    found = _find(args)
    if args.json:
        sys.stdout.write(json.dumps(_as_json(args, found), indent=2) + "\n")
    else:
        _print(args, found)


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """Return a row for each dtype: its name, bytes of the largest layer, bytes in total, bytes by moment of a step."""
    model = _find(args).model
    whole = model.total("float32")
    return [
        [dtype, model.largest_layer(dtype).bytes, model.total(dtype), estimate_training_usage(whole, dtype)]
        for dtype in args.dtypes
    ]


def estimate_training_usage(bytes: int, mixed_precision: str, msamp_config: str | None = None) -> dict[str, int]:
    """Return the bytes at four moments of a step with Adam as release 1 counted them; -1 where nothing is known.

    The command itself shows what `accelerate.offload.estimate` computes, which is documented with its formulae.

    Args:
        bytes: The size of the model in float32.
        mixed_precision: The dtype of the computation.
        msamp_config: Accepted for old callers, and without effect.
    """
    factors: dict[str, tuple[float, float, float, float]] = {"float32": (1, 2, 1, 4)}
    factors |= dict.fromkeys(("float16", "bfloat16"), (1, 2, 1.5, 2))
    moments = ("model", "optimizer", "gradients", "step")
    if mixed_precision not in factors:
        return dict.fromkeys(moments, -1)
    return {moment: int(bytes * factor) for moment, factor in zip(moments, factors[mixed_precision], strict=True)}


def create_ascii_table(headers: list[str], rows: list[list[Any]], title: str) -> str:
    """Return a table drawn with lines, with a title over all its columns."""
    cells = [[str(value) for value in row] for row in (headers, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    # The title must fit above; the last column takes what is missing.
    widths[-1] += max(0, len(title) - (sum(widths) + len(widths) - 1))

    def rule(left: str, middle: str, right: str) -> str:
        return left + middle.join("─" * width for width in widths) + right

    lines = [
        "│" + "│".join(f"{value:^{width}}" for value, width in zip(row, widths, strict=True)) + "│" for row in cells
    ]
    inner = sum(widths) + len(widths) - 1
    top = ["┌" + "─" * inner + "┐", f"│{title:^{inner}}│", rule("├", "┬", "┤")]
    return "\n".join([*top, lines[0], rule("├", "┼", "┤"), *lines[1:], rule("└", "┴", "┘")])


def _find(args: argparse.Namespace) -> FoundModel:
    return find_model(args.model_name, args.library_name, trust_remote_code=args.trust_remote_code)


def _trained(dtypes: list[str]) -> list[str]:
    return [dtype for dtype in dtypes if dtype in TRAINABLE_DTYPES]


def _as_json(args: argparse.Namespace, found: FoundModel) -> dict[str, Any]:
    model = found.model
    result: dict[str, Any] = {
        "model": args.model_name,
        "source": found.source,
        "tensors": len(model.tensors),
        "parameters": model.parameters,
        "stored_bytes": model.stored_bytes,
        "dtypes": {dtype: _dtype_as_json(model, dtype) for dtype in args.dtypes},
    }
    if _num_processes(args) is not None:
        result["num_processes"] = _num_processes(args)
        result["per_rank"] = {
            dtype: {way: _parts(memory) for way, memory in _ways(args, model, dtype).items()}
            for dtype in _trained(args.dtypes)
        }
    if args.plan is not None:
        limits, rows = _plan(args, model)
        memory = {str(place): limit for place, limit in limits.items()}
        result["plan"] = {"memory": memory, "parts": [asdict(row) for row in rows]}
    return result


def _num_processes(args: argparse.Namespace) -> int | None:
    """Return over how many processes training is shown, None if it is not."""
    layout = (args.fsdp or 1) * (args.tp or 1) if args.fsdp or args.tp else None
    number: int | None = args.num_processes if args.num_processes is not None else layout
    if number is not None and layout is not None and number % layout:
        raise ConfigurationError(
            f"--num_processes {number} cannot be shared out in layouts of {layout} processes (--fsdp {args.fsdp or 1} "
            f"--tp {args.tp or 1}). Give a multiple of {layout}, or leave --num_processes out."
        )
    return number


def _ways(args: argparse.Namespace, model: ModelTensors, dtype: str) -> dict[str, TrainingMemory]:
    """Return the memory of a process by the way the model is shared, the layout asked for last."""
    found = per_rank(model, dtype, args.num_processes) if args.num_processes is not None else {}
    if args.fsdp or args.tp:
        sizes = {"FSDP": args.fsdp or 1, "TP": args.tp or 1}
        name = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one process"
        found[name] = in_layout(model, dtype, fsdp=sizes["FSDP"], tp=sizes["TP"])
    return found


def _dtype_as_json(model: ModelTensors, dtype: str) -> dict[str, Any]:
    training = training_memory(model, dtype)
    return {
        "largest_layer": asdict(model.largest_layer(dtype)),
        "total": model.total(dtype),
        "training": None if training is None else _parts(training),
    }


def _parts(memory: TrainingMemory) -> dict[str, int]:
    return {**asdict(memory), "total": memory.total}


def _print(args: argparse.Namespace, found: FoundModel) -> None:
    from rich.console import Console
    from rich.text import Text

    width = None if sys.stdout.isatty() else max(100, shutil.get_terminal_size().columns)
    console = Console(width=width, highlight=False)
    model = found.model
    intro = f"{model.parameters:,} parameters in {len(model.tensors)} tensors, from {found.source}."
    console.print(Text(intro), soft_wrap=True)
    console.print(_sizes(args, model))
    number = _num_processes(args)
    for dtype in _one_of_a_kind(_trained(args.dtypes)) if number is not None else []:
        console.print(_ranks(dtype, number or 1, _ways(args, model, dtype)))
    if args.plan is not None:
        console.print(_plan_table(args, model))
    largest = model.largest_layer("float32").name
    outro = f"The largest layer is {largest!r}. Activations and the framework's own memory come on top."
    console.print(Text(outro), soft_wrap=True)
    if 10 * model.fixed_bytes > model.stored_bytes:
        note = f"{convert_bytes(model.fixed_bytes)} are integers, such as quantised weights, and keep their size."
        console.print(Text(f"Note: {note}"), soft_wrap=True)


def _one_of_a_kind(dtypes: list[str]) -> list[str]:
    return list({_LABELS.get(dtype, dtype): dtype for dtype in dtypes}.values())


def _sizes(args: argparse.Namespace, model: ModelTensors) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"Memory of {args.model_name}"), title_justify="left")
    table.add_column("dtype")
    for heading in ("largest layer", "total size", "training with Adam"):
        table.add_column(heading, justify="right")
    for dtype in _one_of_a_kind(args.dtypes):
        training = training_memory(model, dtype)
        table.add_row(
            _LABELS.get(dtype, dtype),
            convert_bytes(model.largest_layer(dtype).bytes),
            convert_bytes(model.total(dtype)),
            _NONE if training is None else convert_bytes(training.total),
        )
    return table


def _ranks(dtype: str, num_processes: int, ways: dict[str, TrainingMemory]) -> Table:
    from rich.table import Table

    place = "one process" if num_processes == 1 else f"each of {num_processes} processes"
    title = f"Training in {_LABELS.get(dtype, dtype)}, on {place}"
    table = Table(title=title, title_justify="left")
    table.add_column("shared by")
    for heading in ("weights", "gradients", "optimizer", "working", "total"):
        table.add_column(heading, justify="right")
    for way, memory in ways.items():
        table.add_row(way, *(convert_bytes(size) for size in _parts(memory).values()))
    return table


def _plan_table(args: argparse.Namespace, model: ModelTensors) -> Table:
    from rich.table import Table
    from rich.text import Text

    limits, rows = _plan(args, model)
    room = ", ".join(f"{place}: {convert_bytes(limit)}" for place, limit in limits.items())
    form = "as stored" if args.plan == _AS_STORED else f"in {args.plan}"
    table = Table(title=Text(f"Places of the weights {form}, with room on {room}"), title_justify="left")
    table.add_column("module")
    table.add_column("size", justify="right")
    table.add_column("place")
    table.add_column("why")
    for row in rows:
        table.add_row(Text(row.modules), convert_bytes(row.bytes), str(row.place), Text(row.reason))
    return table


def _plan(args: argparse.Namespace, model: ModelTensors) -> tuple[dict[int | str, int], list[PlanRow]]:
    """Return the memory of each place, and where the modules would go."""
    from accelerate.offload.memory import get_max_memory

    given: dict[int | str, int | str] = {}
    for pair in args.max_memory:
        place, equals, size = pair.partition("=")
        if not (place and equals and size):
            raise ConfigurationError(
                f"--max_memory {pair!r} is not a place with its memory. Write it like 0=10GB or cpu=32GB."
            )
        index, limit = number_in(place), number_in(size, most=2**63)
        given[place if index is None else index] = size if limit is None else limit
    limits = get_max_memory(given or None)
    return limits, plan_report(model, limits, None if args.plan == _AS_STORED else args.plan)


def main() -> None:
    """Run the program `accelerate-estimate-memory`."""
    from accelerate.commands.accelerate_cli import find, run_command

    sys.exit(run_command(find("estimate-memory"), sys.argv[1:]))


if __name__ == "__main__":
    main()
