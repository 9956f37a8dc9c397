"""The pictures of the pages on layouts are those that their script draws now."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[3]
_SPEC = importlib.util.spec_from_file_location("draw_layouts", ROOT / "tools" / "draw_layouts.py")
assert _SPEC is not None
assert _SPEC.loader is not None
draw_layouts = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(draw_layouts)


@pytest.mark.parametrize("name", draw_layouts.PICTURES)
def test_a_picture_is_current(name: str) -> None:
    drawn = draw_layouts.PICTURES[name]()
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert (ROOT / "docs" / "assets" / name).read_text(encoding="utf-8") == drawn


def test_the_chart_says_what_the_page_says() -> None:
    curves = {name: dict(points) for name, points in draw_layouts.curves().items()}
    parameters = draw_layouts.large_model().parameters
    assert curves["replicas (DDP)"][2] == pytest.approx((20 + 2) * parameters / draw_layouts.GIB)
    assert curves["split layers (TP)"][8] == pytest.approx((16 + 2) * parameters / 8 / draw_layouts.GIB, rel=0.001)
    assert curves["shards (FSDP)"][64] == pytest.approx(16 * parameters / 64 / draw_layouts.GIB, rel=0.5)
    assert curves["shards of layers split over 8"][64] < curves["shards (FSDP)"][64]
