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
    drawing = page.split("```text\n", 1)[1].split("```", 1)[0]
    # A remark stands behind four or more spaces; the names of a line are parted by three.
    return [set(re.split(r" {3}", re.split(r" {4,}", line)[0])) for line in drawing.splitlines()]


def test_the_page_draws_the_enforced_layers() -> None:
    assert drawn_layers() == enforced_layers()


def test_every_module_of_the_package_has_its_layer() -> None:
    package = ROOT / "src" / "accelerate"
    modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
    modules |= {path.parent.name for path in package.glob("*/__init__.py")}
    assert modules <= set().union(*enforced_layers())
