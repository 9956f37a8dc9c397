"""Pages are rewritten for mkdocs: diffs come from the files, test options leave the fences."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "docs_hooks.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


docs_hooks = load_script()


def test_a_diff_is_made_from_two_files(tmp_path: Path) -> None:
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text("a\nb\nc\nd\n", encoding="utf-8")
    after.write_text("a\nb\nC\nd\n", encoding="utf-8")
    assert docs_hooks.diff_fence(before, after).splitlines() == [
        "```diff",
        "--- before.py",
        "+++ after.py",
        "@@ -2,3 +2,3 @@",
        " b",
        "-c",
        "+C",
        " d",
        "```",
    ]


def test_the_twins_differ_in_few_lines() -> None:
    page = docs_hooks.on_page_markdown("text\n\n<!-- diff: examples/plain.py examples/accelerated.py -->\n")
    changed = [line for line in page.splitlines() if line[:1] in "+-" and line[:3] not in {"+++", "---"}]
    assert "+    accelerator = Accelerator()" in changed
    assert len([line for line in changed if line.startswith("+")]) <= 15


def test_options_of_the_tests_leave_the_fences() -> None:
    page = "```bash run\nls\n```\n    ```python no-run: needs a person\n    x\n    ```\n```python\ny\n```\n"
    assert docs_hooks.on_page_markdown(page) == ("```bash\nls\n```\n    ```python\n    x\n    ```\n```python\ny\n```\n")
