"""A generated section stands between its markers, and a check finds a page that was changed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.pages import replace_section, write_sections

PAGE = "before\n<!-- table -->\nold\n<!-- end of table -->\nafter\n"


def test_only_the_section_is_replaced() -> None:
    assert replace_section(PAGE, "table", "new\n") == PAGE.replace("old", "new")
    assert replace_section(PAGE, "table", "") == "before\n<!-- table -->\n<!-- end of table -->\nafter\n"
    assert replace_section(replace_section(PAGE, "table", ""), "table", "old") == PAGE


@pytest.mark.parametrize("page", ["", "<!-- table -->", "<!-- end of table -->\n<!-- table -->"])
def test_a_page_without_both_markers_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="no section between '<!-- table -->'"):
        replace_section(page, "table", "new")


def test_a_check_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(PAGE, encoding="utf-8")
    assert write_sections((path,), "table", "new", check=True) == ["page.md"]
    assert path.read_text(encoding="utf-8") == PAGE
    assert write_sections((path,), "table", "new", check=False) == ["page.md"]
    assert path.read_text(encoding="utf-8") == PAGE.replace("old", "new")
    assert write_sections((path,), "table", "new", check=True) == []
