"""The architecture page names files that exist."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from accelerate.strategies.base import Capabilities

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")


def test_every_path_on_the_page_exists() -> None:
    named = set(re.findall(r"`((?:[\w-]+/)+[\w-]*(?:\.\w+)?|[\w-]+/[\w.-]+)`", PAGE))
    assert len(named) > 15
    roots = (ROOT, ROOT / "src" / "accelerate")
    assert [name for name in sorted(named) if not any((root / name).exists() for root in roots)] == []


def test_every_capability_on_the_page_exists() -> None:
    sentence = re.search(r"asks a capability of the strategy \((.*?)\)", PAGE, re.DOTALL)
    assert sentence is not None
    named = re.findall(r"`(\w+)`", sentence[1])
    assert named
    assert set(named) <= {field.name for field in dataclasses.fields(Capabilities)}
