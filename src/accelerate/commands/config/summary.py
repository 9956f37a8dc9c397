"""Show a file of options before it is written."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from accelerate._base.errors import ConfigurationError
from accelerate.commands.explain import wide_console
from accelerate.config import env
from accelerate.config.cluster_config import ClusterConfig, SageMakerConfig
from accelerate.config.resolve import resolve
from accelerate.devices.machine import detect


def show_summary(config: ClusterConfig | SageMakerConfig, path: Path) -> None:
    """Print what the file will hold, and what a launch on this machine would say against it."""
    console = wide_console()
    # Not as the title of the table, which would break a long path in the middle.
    console.print(Text(f"What {path} will hold:", style="italic"), soft_wrap=True)
    table = Table("key", "value")
    for key, value in _rows(config.to_dict()):
        table.add_row(Text(key), Text(value, overflow="fold"))
    console.print(table)
    problem = _problem(config)
    if problem is not None:
        console.print(Text.assemble(("A launch on this machine would refuse it: ", "bold yellow"), problem))


def _rows(content: Mapping[str, Any], indent: str = "") -> Iterator[tuple[str, str]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield f"{indent}{key}", ""
            yield from _rows(value, indent + "  ")
        else:
            yield f"{indent}{key}", str(value)


def _problem(config: ClusterConfig | SageMakerConfig) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answers.yaml"
        config.to_yaml_file(path)
        try:
            resolve(argparse.Namespace(config_file=str(path)), detect(env.items()))
        except ConfigurationError as error:
            return str(error).replace(f"{path}: ", "")
    return None
