"""Put generated text between markers of a page, so that a tool can write it and a test can compare it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def markers(name: str) -> tuple[str, str]:
    """Return the two comments between which a generated section stands."""
    return f"<!-- {name} -->", f"<!-- end of {name} -->"


def replace_section(page: str, name: str, section: str) -> str:
    """Return the text of a page with a new section between its markers.

    Raises:
        ValueError: The page does not have both markers, in their order.
    """
    start, end = markers(name)
    before, found_start, rest = page.partition(start)
    _, found_end, after = rest.partition(end)
    if not (found_start and found_end):
        raise ValueError(f"the page has no section between {start!r} and {end!r}; write both lines where it goes")
    return f"{before}{start}\n{section.strip()}\n{end}{after}" if section else f"{before}{start}\n{end}{after}"


def write_sections(pages: tuple[Path, ...], name: str, section: str, *, check: bool) -> list[str]:
    """Rewrite a section on every page, or with `check` change nothing; return the pages that differ or differed."""
    stale = []
    for path in pages:
        page = path.read_text(encoding="utf-8")
        wanted = replace_section(page, name, section)
        if page != wanted:
            stale.append(path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name)
            if not check:
                path.write_text(wanted, encoding="utf-8")
    return stale
