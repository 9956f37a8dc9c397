"""Write what can be generated into README.md and the start page of the documentation.

python -m tools.write_pages           rewrite the sections between the markers
python -m tools.write_pages --check   change nothing; fail if a page shows something else
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools import support_matrix
from tools.docs_hooks import diff_fence
from tools.pages import ROOT, write_sections

README, START_PAGE = ROOT / "README.md", ROOT / "docs" / "index.md"


@dataclass(frozen=True)
class Section:
    """One generated text and the pages that show it."""

    name: str
    pages: tuple[Path, ...]
    render: Callable[[], str]


def twin_diff() -> str:
    """Return what changes when the plain loop of the examples is converted."""
    return diff_fence(ROOT / "examples" / "plain.py", ROOT / "examples" / "accelerated.py")


SECTIONS = (
    Section("support matrix", (README, START_PAGE), support_matrix.render),
    Section("diff of the twins", (README,), twin_diff),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite or check the pages and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page differs")
    check = parser.parse_args(arguments).check
    stale = [
        f"{page}: {section.name}"
        for section in SECTIONS
        for page in write_sections(section.pages, section.name, section.render(), check=check)
    ]
    for place in stale:
        print(f"{place} {'differs; run `make pages`' if check else 'was rewritten'}")
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main())
