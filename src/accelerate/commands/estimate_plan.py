"""The part of `accelerate estimate-memory` that says where a model would go on this machine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import convert_bytes
from accelerate.config.cli import spellings
from accelerate.offload.estimate import DTYPE_BITS, Model

if TYPE_CHECKING:
    from rich.table import Table

    from accelerate.offload.where import Part

STORED = "stored"


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that ask for a plan."""
    parser.add_argument(
        "--plan",
        nargs="?",
        const=STORED,
        choices=(STORED, *DTYPE_BITS),
        help="Say where each part would go on this machine, with the weights as they are stored or in a dtype.",
    )
    parser.add_argument(
        *spellings("--max_memory"),
        nargs="+",
        default=[],
        metavar="PLACE=SIZE",
        help="Plan with this memory instead of what is free now: 0=10GB cpu=32GB, integers for accelerators.",
    )


def plan_as_json(args: argparse.Namespace, model: Model) -> dict[str, Any]:
    """Return the memory of each place and the parts of the model, with sizes in bytes."""
    limits, parts = _plan(args, model)
    return {
        "memory": {str(place): limit for place, limit in limits.items()},
        "parts": [
            {"modules": part.modules, "bytes": part.bytes, "place": part.place, "reason": part.reason} for part in parts
        ],
    }


def plan_table(args: argparse.Namespace, model: Model) -> Table:
    """Return the plan as a table."""
    from rich.table import Table
    from rich.text import Text

    limits, parts = _plan(args, model)
    told = ", ".join(f"{place}: {convert_bytes(limit)}" for place, limit in limits.items())
    form = "as stored" if args.plan == STORED else f"in {args.plan}"
    table = Table(title=Text(f"Places of the weights {form}, with room on {told}"), title_justify="left")
    table.add_column("module")
    table.add_column("size", justify="right")
    table.add_column("place")
    table.add_column("why")
    for part in parts:
        table.add_row(Text(part.modules), convert_bytes(part.bytes), str(part.place), Text(part.reason))
    return table


def _plan(args: argparse.Namespace, model: Model) -> tuple[dict[int | str, int], list[Part]]:
    from accelerate.offload.memory import get_max_memory
    from accelerate.offload.where import plan_parts

    limits = get_max_memory(_given(args.max_memory))
    return limits, plan_parts(model, limits, None if args.plan == STORED else args.plan)


def _given(pairs: list[str]) -> dict[int | str, int | str] | None:
    found: dict[int | str, int | str] = {}
    for pair in pairs:
        place, equals, size = pair.partition("=")
        if not (place and equals and size):
            raise ConfigurationError(
                f"--max_memory {pair!r} is not a place with its memory. Write it like 0=10GB or cpu=32GB."
            )
        found[int(place) if place.isdecimal() else place] = int(size) if size.isdecimal() else size
    return found or None
