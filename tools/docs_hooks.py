"""Prepare pages for mkdocs: diffs made from the files themselves, and fences without the options of the tests."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Alone on its line:  <!-- diff: examples/plain.py examples/accelerated.py -->
_DIFF = re.compile(r"^<!-- diff: (\S+) (\S+) -->$", re.MULTILINE)
# tests/docs reads these options; the highlighter does not know them.
_TEST_OPTIONS = re.compile(r"^(\s*```)(?:(bash) run|(python) no-run: .*)$", re.MULTILINE)


def diff_fence(before: Path, after: Path) -> str:
    """Return a fenced block with the unified diff of two files, one line of context around each change."""
    lines = difflib.unified_diff(
        before.read_text(encoding="utf-8").splitlines(),
        after.read_text(encoding="utf-8").splitlines(),
        before.name,
        after.name,
        n=1,
        lineterm="",
    )
    return "\n".join(["```diff", *lines, "```"])


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Rewrite one page; mkdocs calls this for each."""
    markdown = _TEST_OPTIONS.sub(lambda match: match[1] + (match[2] or match[3]), markdown)
    return _DIFF.sub(lambda match: diff_fence(ROOT / match[1], ROOT / match[2]), markdown)


def on_config(config: Any, **_: Any) -> Any:
    """Rebuild on changes of the examples too while `mkdocs serve` runs."""
    config.watch.append(str(ROOT / "examples"))
    return config
