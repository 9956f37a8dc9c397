"""`accelerate checkpoints`: show the checkpoints of a run, verify them, and remove old ones."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate._base.errors import ConfigurationError, printable
from accelerate._base.helpers import convert_bytes
from accelerate.checkpointing.catalog import CheckpointInfo, catalog, inspect, is_checkpoint, surplus, verify
from accelerate.commands import command_parser
from accelerate.runtime.atomic import remove_folder

_DESCRIPTION = "Show the checkpoints of a run, verify them, and remove old ones."
_EPILOG = (
    "The newest checkpoint is the last one shown. A checkpoint is valid if all its files are there with their sizes; "
    "--verify reads every byte, and ends with code 1 if one has changed."
)
_UNKNOWN = "-"
# How long it is until a time is told in the next unit.
_UNITS = ((60.0, 1.0, "s"), (3600.0, 60.0, "min"), (48 * 3600.0, 3600.0, "h"), (float("inf"), 24 * 3600.0, "d"))


def checkpoints_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Make the parser of `accelerate checkpoints`."""
    parser = command_parser("checkpoints", subparsers, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument(
        "folder", metavar="DIR", type=Path, help="The folder of the project, of its checkpoints, or of one of them."
    )
    parser.add_argument("--verify", action="store_true", help="Read every file and compare its checksum.")
    parser.add_argument(
        "--prune", action="store_true", help="Remove all but the newest valid checkpoints; it asks before it does."
    )
    parser.add_argument("--keep", type=int, metavar="N", help="With --prune: how many valid checkpoints stay.")
    parser.add_argument("--yes", action="store_true", help="With --prune: do not ask.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object, with sizes in bytes.")
    parser.set_defaults(func=checkpoints_command)
    return parser


def checkpoints_command(args: argparse.Namespace) -> None:
    """Show, verify and prune the checkpoints of a folder.

    Raises:
        ConfigurationError: If the folder is not there, or the options do not go together.
        SystemExit: With code 1, if verifying found a checkpoint that is broken.
    """
    _check_options(args)
    infos = catalog(args.folder)
    if not infos and is_checkpoint(args.folder.resolve()):
        infos = [inspect(args.folder.resolve())]
    if args.verify:
        infos = _verify_all(infos)
    excess = surplus(infos, args.keep) if args.prune else []
    if not args.json:
        _print_table(args, infos, excess)
    removed = excess if excess and (args.yes or _confirm(excess)) else []
    for info in removed:
        remove_folder(info.path)
    if args.json:
        result: dict[str, Any] = {"folder": str(args.folder), "verified": args.verify}
        result["checkpoints"] = [_to_json(info) for info in infos if info not in removed]
        if args.prune:
            result["removed"] = [_to_json(info) for info in removed]
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    elif args.prune:
        sys.stdout.write(f"{_removal_sentence(infos, excess, removed)}\n")
    if args.verify and any(not info.is_valid for info in infos):
        sys.exit(1)


def _check_options(args: argparse.Namespace) -> None:
    if not args.folder.is_dir():
        raise ConfigurationError(
            f"{str(args.folder)!r} is not a folder, so there are no checkpoints in it. Give the project_dir of the run, "
            "the folder of its checkpoints, or that of one checkpoint."
        )
    if args.prune and args.keep is None:
        raise ConfigurationError("--prune was given without --keep, so it is open what stays. Add --keep N.")
    if not args.prune and (args.keep is not None or args.yes):
        option = "--yes" if args.keep is None else f"--keep {args.keep}"
        raise ConfigurationError(f"{option} was given without --prune, so nothing would be removed. Add --prune.")
    if args.prune and not args.yes and (args.json or not sys.stdin.isatty()):
        raise ConfigurationError(
            "--prune asks before it removes anything, and there is nobody to ask here. Add --yes to remove without a "
            "question."
        )


def _verify_all(infos: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=sum(info.size for info in infos))
        results = []
        for info in infos:
            progress.update(task, description=f"reading {printable(info.name)}")
            results.append(verify(info, lambda size: progress.advance(task, size)))
    return results


def _confirm(excess: Sequence[CheckpointInfo]) -> bool:
    from rich.console import Console
    from rich.prompt import Confirm

    names = ", ".join(printable(info.name) for info in excess)
    question = f"Remove {_count(excess)} ({_total_size(excess)}): {names}?"
    return Confirm.ask(question, console=Console(stderr=True), default=False)


def _to_json(info: CheckpointInfo) -> dict[str, Any]:
    return {**asdict(info), "path": str(info.path)}


def _print_table(args: argparse.Namespace, infos: Sequence[CheckpointInfo], excess: Sequence[CheckpointInfo]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 160)
    if not infos:
        console.print(Text(f"There are no checkpoints in {str(args.folder)!r}."), soft_wrap=True)
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("name", overflow="fold", min_width=12)
    for title in ("step", "epoch", "samples", "age", "size", "processes"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("state", overflow="fold", ratio=1)
    now = time.time()
    for info in infos:
        known = info.world_size > 0
        numbers = [f"{value:,}" if known else _UNKNOWN for value in (info.step, info.epoch, info.samples)]
        processes = str(info.world_size) if known else _UNKNOWN
        cells = [printable(info.name), *numbers, _age(now - info.created), convert_bytes(info.size), processes]
        state, colour = _state(info, args.verify)
        note = " (to be removed)" if info in excess else ""
        table.add_row(*map(Text, cells), Text(state + note, style=colour))
    console.print(table)
    valid = [info for info in infos if info.is_valid]
    newest = f"newest valid: {printable(valid[-1].name)}" if valid else "none is valid"
    console.print(Text(f"{_count(infos)}, {_total_size(infos)}; {newest}."), soft_wrap=True)


def _state(info: CheckpointInfo, verified: bool) -> tuple[str, str]:
    """Return what is known of a checkpoint, and its colour."""
    if not info.is_valid:
        return f"broken: {info.problem}", "red"
    if info.problem is not None:
        return f"valid ({info.problem})", "yellow"
    return "valid, checksums compared" if verified else "valid", "green"


def _age(seconds: float) -> str:
    _, unit, name = next(entry for entry in _UNITS if seconds < entry[0])
    return f"{max(0, int(seconds / unit))} {name}"


def _count(infos: Sequence[CheckpointInfo]) -> str:
    return f"{len(infos)} checkpoint{'' if len(infos) == 1 else 's'}"


def _total_size(infos: Sequence[CheckpointInfo]) -> str:
    return convert_bytes(sum(info.size for info in infos))


def _removal_sentence(
    infos: Sequence[CheckpointInfo], excess: Sequence[CheckpointInfo], removed: Sequence[CheckpointInfo]
) -> str:
    if removed:
        return f"Removed {_count(removed)} ({_total_size(removed)})."
    if excess:
        return "Nothing was removed."
    if infos and not any(info.is_valid for info in infos):
        return "Nothing was removed: none is valid, so none is surplus."
    return "There is nothing to remove."
