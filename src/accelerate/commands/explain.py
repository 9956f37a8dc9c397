"""Show a launch that is not started: its values and their origins, its command and its environment."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from accelerate.launch.plan import ElasticOptions, LaunchPlan

if TYPE_CHECKING:
    from accelerate.config.run_config import RunConfig

_SECRET = ("secret", "password", "token", "access_key")
_MODES = {
    "exec": "one process, in the place of the launcher",
    "elastic": "torch's elastic agent starts and watches the processes",
    "spawn_command": "another launcher is started",
}
# Wide enough that nothing is cut where the output is no terminal.
_WIDTH_OF_A_FILE = 160


def explain(
    config: RunConfig, plan: LaunchPlan, entries: Sequence[tuple[str, Any, str]] = (), *, verbose: bool = False
) -> None:
    """Print the values, the plan and its notes.

    Args:
        entries: Name, value and origin of each entry of DeepSpeed's configuration, if it is used.
    """
    console = wide_console()
    console.print(table_of(config, "What this launch would use", verbose=verbose))
    if not verbose:
        console.print(Text("Values that are defaults are left out; --verbose shows them.", style="dim"))
    if entries:
        console.print(_table_of_entries(entries))
    console.print()
    _line(console, "launcher", f"{plan.launcher}, because: {plan.reason}")
    _line(console, "mode", f"{plan.mode}: {_MODES[plan.mode]}")
    for machine, argv in (plan.machines or {"": plan.argv}).items():
        _line(console, f"command for {machine}" if machine else "command", shlex.join(argv))
    if plan.elastic is not None:
        _print_elastic(console, plan.elastic)
    _line(console, "environment", "")
    for name, value in sorted(plan.environment.items()):
        console.print(Text(f"  {name}={_masked(name, value)}"), soft_wrap=True)
    for name, content in plan.files.items():
        _line(console, f"file {name}", "")
        console.print(Text("".join(f"  {line}\n" for line in content.splitlines())), soft_wrap=True, end="")
    for note in (*config.notes, *plan.notes):
        _line(console, "note", note)
    console.print(Text("Nothing was started.", style="bold"))


def wide_console() -> Console:
    """Return a console as wide as the terminal, or wide enough where the output is none."""
    width = None if sys.stdout.isatty() else max(_WIDTH_OF_A_FILE, shutil.get_terminal_size().columns)
    return Console(width=width, highlight=False)


def table_of(config: RunConfig, title: str, *, verbose: bool) -> Table:
    """Return the table of values and origins.

    Args:
        verbose: Show defaults as well.
    """
    table = Table("option", "value", "origin", title=title, title_justify="left")
    section = None
    for heading, key, value, origin in config.rows():
        if not verbose and config.is_default(key):
            continue
        if section is not None and heading != section:
            table.add_section()
        section = heading
        table.add_row(Text(key), Text(_masked(key, value), overflow="fold"), Text(str(origin), overflow="fold"))
    return table


def _table_of_entries(entries: Sequence[tuple[str, Any, str]]) -> Table:
    table = Table("entry", "value", "origin", title="DeepSpeed's configuration", title_justify="left")
    for name, value, origin in entries:
        written = json.dumps(value, default=str)
        table.add_row(Text(name), Text(_masked(name, written), overflow="fold"), Text(origin, overflow="fold"))
    return table


def _print_elastic(console: Console, options: ElasticOptions) -> None:
    total = options.nproc_per_node * options.num_nodes
    fewest = f"{options.min_nodes} to " if options.min_nodes else ""
    _line(console, "processes", f"{options.nproc_per_node} here, {total} on {fewest}{options.num_nodes} machine(s)")
    endpoint = options.rdzv_endpoint
    if endpoint.endswith(":0"):
        endpoint = "this machine, on a free port that the system picks at the start"
    extra = "".join(f", {key}={value}" for key, value in options.rdzv_configs.items())
    _line(console, "rendezvous", f"{endpoint} ({options.rdzv_backend}{extra})")
    _line(console, "restarts", str(options.max_restarts))


def _line(console: Console, title: str, text: str) -> None:
    console.print(Text.assemble((f"{title}: ", "bold"), text), soft_wrap=True)


def _masked(name: str, value: object) -> str:
    hidden = value not in {None, ""} if isinstance(value, str | None) else False
    return "***" if hidden and any(word in name.lower() for word in _SECRET) else str(value)
