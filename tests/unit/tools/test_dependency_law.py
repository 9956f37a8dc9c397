"""The layers that the architecture page draws are those that the linter enforces."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
tomllib = pytest.importorskip("tomllib")


def enforced_layers() -> list[set[str]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = [c for c in settings["tool"]["importlinter"]["contracts"] if c["type"] == "layers"]
    return [set(re.findall(r"\w+", layer)) for layer in contract["layers"]]


def drawn_layers() -> list[set[str]]:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("## The house on one screen")[2].partition("\n## ")[0]
    return [set(re.findall(r"`(\w+)`", line.split("|")[1])) for line in section.splitlines() if line.startswith("| `")]


def test_the_page_draws_the_enforced_layers() -> None:
    assert drawn_layers() == enforced_layers()


def test_every_module_of_the_package_has_its_layer() -> None:
    package = ROOT / "src" / "accelerate"
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    modules |= {path.parent.name for path in package.glob("*/__init__.py")}
    assert modules <= set().union(*enforced_layers())
