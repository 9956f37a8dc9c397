"""The architecture page names the layers of the dependency law and files that exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no tomllib")
def test_the_layers_are_those_of_the_dependency_law() -> None:
    import tomllib

    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    law = [[name.strip(" ()") for name in line.split("|")] for line in contracts[0]["layers"]]
    drawn = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert drawn is not None
    names = {name for line in law for name in line}
    assert [[word for word in re.split(r" {3,}", line) if word in names] for line in drawn[1].splitlines()] == law


def test_every_path_on_the_page_exists() -> None:
    named = set(re.findall(r"`((?:[\w-]+/)+[\w-]*(?:\.\w+)?|[\w-]+/[\w.-]+)`", PAGE))
    assert len(named) > 15
    roots = (ROOT, ROOT / "src" / "accelerate")
    assert [name for name in sorted(named) if not any((root / name).exists() for root in roots)] == []
