"""Every python block of the documentation runs, and every shell block that says it does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.support.processes import run_warm_script

from accelerate._base.imports import is_torch_version

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(
    r"^(?P<indent> *)(?P<ticks>`{3,})(?P<info>[^`\n]*)\n(?P<body>.*?)^ *(?P=ticks) *$", re.MULTILINE | re.DOTALL
)
_SNIPPET = re.compile(r"^--8<-- ", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block: its info line, its text, and the line on which the text starts."""

    info: str
    text: str
    line: int

    @property
    def language(self) -> str:
        return self.info.split(maxsplit=1)[0] if self.info else ""

    @property
    def options(self) -> str:
        return self.info[len(self.language) :].strip()


def blocks(markdown: str) -> Iterator[Block]:
    for match in _FENCE.finditer(markdown):
        indent = len(match["indent"])
        text = "".join(line[indent:] if line.strip() else line for line in match["body"].splitlines(keepends=True))
        yield Block(match["info"].strip(), text, markdown.count("\n", 0, match.start("body")) + 1)


def python_program(markdown: str) -> str:
    """Join the python blocks of a page into one program whose line numbers are those of the page."""
    lines: list[str] = []
    for block in blocks(markdown):
        included = _SNIPPET.search(block.text) is not None  # a file of examples/, which has its own test
        if block.language != "python" or block.options.startswith("no-run") or included:
            continue
        lines.extend([""] * (block.line - 1 - len(lines)))
        lines.extend(block.text.splitlines())
    return "\n".join(lines) + "\n" if lines else ""


def page_environment() -> dict[str, str]:
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")])),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


PYTHON_PAGES = [page for page in PAGES if python_program(page.read_text(encoding="utf-8"))]
SHELL_BLOCKS = [
    pytest.param(block, id=f"{name(page)}:{block.line}")
    for page in PAGES
    for block in blocks(page.read_text(encoding="utf-8"))
    if block.language == "bash" and block.options == "run"
]


def run_python_blocks(page: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program = folder / "page.py"
    program.write_text(python_program(page), encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-W", "error", str(program)],
        cwd=folder,
        env=page_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


# A fresh interpreter for the first pages that people read; the others start from this process, which has loaded torch.
FRESH = {"README.md", "docs/index.md"}
# Importing DeepSpeed 0.19 warns of what it uses of torch.
WARNS = {"docs/how-to/deepspeed.md": "deepspeed"}
if is_torch_version("<", "2.10"):  # there torchao sets a precision in a way that torch for CUDA warns of
    WARNS["docs/how-to/quantize.md"] = "torchao"


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=name)
def test_python_blocks_of_a_page_run_in_order(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if name(page) in FRESH:
        run = run_python_blocks(text, tmp_path)
        assert run.returncode == 0, f"{name(page)} (line numbers are those of the page)\n{run.stdout}\n{run.stderr}"
        return
    if name(page) in WARNS and find_spec(WARNS[name(page)]) is None:
        pytest.skip(f"{WARNS[name(page)]} is not installed")
    program = tmp_path / "page.py"
    program.write_text(python_program(text), encoding="utf-8")
    run_warm_script(program, 1, env=page_environment(), folder=tmp_path, strict=name(page) not in WARNS)


def test_a_wrong_page_fails_at_its_own_line(tmp_path: Path) -> None:
    page = "```python\nx = 1\n```\n\nNow x is 2:\n\n```python\nassert x == 2\n```\n"
    run = run_python_blocks(page, tmp_path)
    assert run.returncode == 1
    assert "line 8, in <module>" in run.stderr


@pytest.mark.parametrize("block", SHELL_BLOCKS)
def test_shell_block_runs(block: Block) -> None:
    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=ROOT,
        env=page_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert run.returncode == 0, f"{block.text}\n{run.stdout}\n{run.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_fences_are_honest(page: Path) -> None:
    for block in blocks(page.read_text(encoding="utf-8")):
        place = f"{name(page)}:{block.line}"
        assert block.language, f"{place}: a fence without a language"
        assert block.language not in {"py", "python3", "pycon"}, f"{place}: write python, so that the block is run"
        if block.language == "python" and block.options:
            assert re.fullmatch(r"no-run: \S.{10,}", block.options), f"{place}: say why, as in: python no-run: <reason>"
        if block.language == "bash":
            assert block.options in {"", "run"}, f"{place}: unknown option {block.options!r}"


def test_blocks_are_found_with_their_lines() -> None:
    page = "text\n\n```python\nx = 1\n```\n\n=== tab\n\n    ```python\n    if x:\n        y = 2\n    ```\n\n```bash run\nls\n```\n"
    found = list(blocks(page))
    assert [(block.language, block.options, block.line) for block in found] == [
        ("python", "", 4),
        ("python", "", 10),
        ("bash", "run", 15),
    ]
    assert python_program(page).splitlines() == ["", "", "", "x = 1", "", "", "", "", "", "if x:", "    y = 2"]


def test_blocks_that_are_not_run_are_left_out() -> None:
    page = '```python no-run: needs two machines\nraise\n```\n```python\n--8<-- "examples/plain.py"\n```\n'
    assert python_program(page) == ""
