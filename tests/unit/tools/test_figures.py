"""The figures of a benchmark run are put into README.md with machine and date, and nothing stands there without a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = "# Page\n\n<!-- figures -->\n<!-- end of figures -->\n\nend\n"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import report

    yield report
    for name in set(sys.modules) - before:
        if name in {"report", "budgets", "measure"}:
            del sys.modules[name]


def results(reference: float | None) -> dict[str, Any]:
    line = {"label": "step: extra", "unit": "µs", "budget": "<= 40 µs", "ours": 12.5, "passed": True}
    return {
        "machine": "A CPU, 2 cores",
        "date": "2026-01-02",
        "lines": [{**line, "reference": reference, "others": []}],
    }


def test_figures_stand_beside_the_reference(report: Any, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(PAGE, encoding="utf-8")
    report.write_readme(results(99.0), page)
    text = page.read_text(encoding="utf-8")
    assert "| step: extra | 12.5 µs | 99.0 µs |" in text
    assert "A CPU, 2 cores, 2026-01-02" in text
    report.write_readme(results(None), page)
    assert page.read_text(encoding="utf-8") == PAGE


def test_the_machine_and_the_day_are_known(report: Any) -> None:
    facts = report.machine_facts()
    assert "torch" in facts["machine"]
    assert len(facts["date"].split("-")) == 3


def test_the_readme_has_a_place_for_them() -> None:
    assert "<!-- figures -->" in (ROOT / "README.md").read_text(encoding="utf-8")
