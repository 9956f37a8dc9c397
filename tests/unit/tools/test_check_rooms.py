"""The room rules find what they forbid and leave alone what they allow."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "check_rooms.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_rooms", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_rooms"] = module
    spec.loader.exec_module(module)
    return module


check_rooms = load_script()


def rules_broken(place: str, source: str) -> list[tuple[str, int]]:
    return [(finding.rule, finding.line) for finding in check_rooms.check_module(place, source)]


@pytest.mark.parametrize(
    "source",
    ["import os\nx = os.environ['A']", "import os\nx = os.getenv('A')", "import os\nfrom os import environ"],
)
def test_environment_has_two_rooms(source: str) -> None:
    assert rules_broken("src/accelerate/state.py", source) == [("environment", 2)]
    assert rules_broken("src/accelerate/config/env.py", source) == []
    assert rules_broken("src/accelerate/runtime/rank_sources.py", source) == []
    assert rules_broken("tests/test_x.py", source) == []


@pytest.mark.parametrize("expression", ["'cuda'", "'npu:3'", "torch.mps.empty_cache()", "x == 'hpu'"])
def test_vendors_live_in_devices(expression: str) -> None:
    source = f"y = 1\nz = {expression}\n"
    assert rules_broken("src/accelerate/memory.py", source) == [("vendor", 2)]
    assert rules_broken("src/accelerate/devices/any.py", source) == []
    assert rules_broken("src/accelerate/_base/enums.py", source) == []


def test_a_vendor_inside_a_sentence_is_fine() -> None:
    assert rules_broken("src/accelerate/a.py", '"""Works on cuda too."""\nx = "cudagraphs"\n') == []


@pytest.mark.parametrize(
    "source",
    [
        "a = kind == DistributedType.NO",
        "a = kind in (DistributedType.NO, DistributedType.XLA)",
        "a = enums.DistributedType.NO is not kind",
        "match kind:\n    case DistributedType.NO:\n        pass",
    ],
)
def test_distributed_type_is_compared_in_the_registry(source: str) -> None:
    assert [rule for rule, _ in rules_broken("src/accelerate/state.py", source)] == ["distributed-type"]
    assert rules_broken("src/accelerate/strategies/registry.py", source) == []


def test_a_label_may_be_assigned_anywhere() -> None:
    assert rules_broken("src/accelerate/strategies/ddp.py", "label = DistributedType.MULTI_CPU\n") == []


@pytest.mark.parametrize(
    "source", ["import torch", "import torch.nn as nn", "try:\n    from torch import nn\nexcept ImportError:\n    pass"]
)
def test_base_and_config_import_no_torch(source: str) -> None:
    assert [rule for rule, _ in rules_broken("src/accelerate/_base/a.py", source)] == ["torch-free"]
    assert [rule for rule, _ in rules_broken("src/accelerate/config/sections/a.py", source)] == ["torch-free"]
    assert rules_broken("src/accelerate/devices/a.py", source) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    import torch",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        "from . import torch_names",
    ],
)
def test_late_imports_of_torch_are_fine(source: str) -> None:
    assert rules_broken("src/accelerate/config/a.py", source) == []


def test_length() -> None:
    assert rules_broken("tests/test_x.py", "x = 1\n" * 600) == []
    assert rules_broken("tests/test_x.py", "x = 1\n" * 601) == [("length", 601)]


def test_the_front_door_may_be_longer() -> None:
    assert rules_broken("src/accelerate/accelerator.py", "x = 1\n" * 900) == []
    assert rules_broken("src/accelerate/accelerator.py", "x = 1\n" * 901) == [("length", 901)]


@pytest.mark.parametrize(
    "change",
    [
        "global STORE; STORE = 1",
        "STORE['a'] = 1",
        "STORE['a']['b'] += 1",
        "STORE.level = 2",
        "del STORE['a']",
        "STORE.update(a=1)",
        "STORE['a'].append(1)",
        "return next(STORE)",
    ],
)
@pytest.mark.parametrize("start", ["STORE = {}", "STORE: dict[str, int] = dict()", "class STORE:\n    level = 1"])
def test_mutable_state_has_one_room(start: str, change: str) -> None:
    source = f"{start}\n\n\ndef change():\n    {change}\n"
    assert [rule for rule, _ in rules_broken("src/accelerate/hooks/a.py", source)] == ["state"]
    assert rules_broken("src/accelerate/runtime/current.py", source) == []
    assert rules_broken("src/accelerate/devices/registry.py", source) == []
    assert rules_broken("tests/a.py", source) == []


@pytest.mark.parametrize(
    "source",
    [
        "TABLE = {}\nTABLE['a'] = 1\nTABLE.update(b=2)\n",  # built while the module loads
        "TABLE = {}\ndef f(TABLE):\n    TABLE['a'] = 1\n",
        "TABLE = {}\ndef f():\n    TABLE = {}\n    TABLE['a'] = 1\n",
        "TABLE = {}\ndef f():\n    return TABLE['a'].upper()\n",
        "import functools\n@functools.cache\ndef f():\n    return 1\n",
        "_shown_warnings = set()\ndef f():\n    _shown_warnings.add(1)\n",
    ],
)
def test_what_is_not_state(source: str) -> None:
    assert rules_broken("src/accelerate/hooks/a.py", source) == []


def test_every_exception_is_still_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = set(check_rooms.KEPT_STATE)
    monkeypatch.setattr(check_rooms, "KEPT_STATE", {})
    findings = [finding for finding in check_rooms.check_repository(SCRIPT.parents[1]) if finding.rule == "state"]
    assert {finding.message.split()[0] for finding in findings} == kept


def findings_in(root: Path, **files: str) -> list[str]:
    for place, text in files.items():
        path = root / place.replace("__", "/")
        path = path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return [str(finding) for finding in check_rooms.check_repository(root)]


def test_a_class_name_stands_once_in_the_package(tmp_path: Path) -> None:
    first, second = "class _Plan:\n    x = 1\n", "def f():\n    class _Plan:\n        y = 2\n    return _Plan\n"
    found = findings_in(tmp_path, src__accelerate__a=first, src__accelerate__b=second, tests__c=first)
    message = "[class-name] the class _Plan stands in {} too; give each a name of its own"
    assert found == [
        f"src/accelerate/a.py:1: {message.format('src/accelerate/b.py:2')}",
        f"src/accelerate/b.py:2: {message.format('src/accelerate/a.py:1')}",
    ]
    assert findings_in(tmp_path, src__accelerate__b="class Other:\n    y = 2\n") == []


def test_what_a_command_writes_is_not_committed(tmp_path: Path) -> None:
    folder = tmp_path / "docs" / "tmp"
    folder.mkdir(parents=True)
    (folder / "page.md").write_text("text\n", encoding="utf-8")
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    assert check_rooms.check_repository(tmp_path) == []
    subprocess.run(["git", "-C", str(tmp_path), "add", "."], check=True)
    found = [str(finding) for finding in check_rooms.check_repository(tmp_path)]
    assert found == ["docs/tmp/page.md:1: [generated] tmp/ is written by a command; ignore it and remove it"]


@pytest.mark.parametrize("arguments", ["f", "f, weights_only=False", "f, weights_only=choice", "f, **options"])
def test_torch_load_is_safe_everywhere(arguments: str) -> None:
    assert rules_broken("examples/a.py", f"x = torch.load({arguments})") == [("torch-load", 1)]
    assert rules_broken("examples/a.py", "x = torch.load(f, weights_only=True)") == []
    assert rules_broken("examples/a.py", "from torch import load") == [("torch-load", 1)]


def chain(branches: int) -> str:
    tests = [f"{'if' if i == 0 else 'elif'} x == {i}:\n    y = {i}" for i in range(branches)]
    return "\n".join([*tests, "else:\n    y = -1"])


def test_long_chains() -> None:
    assert rules_broken("src/accelerate/a.py", chain(3)) == []
    assert rules_broken("src/accelerate/a.py", chain(5)) == [("branches", 1)]
    assert rules_broken("tests/a.py", chain(5)) == []


@pytest.mark.parametrize("folder", ["work", "root", "home", "Users"])
def test_machine_paths_in_any_text(folder: str) -> None:
    machine_path = f"/{folder}/someone/data"
    findings = list(check_rooms.check_text("README.md", f"fine\nsee {machine_path}\n"))
    assert [(finding.rule, finding.line) for finding in findings] == [("machine-path", 2)]
    assert list(check_rooms.check_text("README.md", f"https://example.org{machine_path} or docs{machine_path}")) == []


def test_a_file_that_does_not_parse_is_named() -> None:
    assert rules_broken("src/accelerate/a.py", "def f(:\n") == [("syntax", 1)]


def test_the_script_reports_places_and_fails(tmp_path: Path) -> None:
    place = tmp_path / "src" / "accelerate" / "state.py"
    place.parent.mkdir(parents=True)
    place.write_text("import os\n\nx = os.environ\n", encoding="utf-8")
    run = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stdout.startswith("src/accelerate/state.py:3: [environment] ")
    assert run.stdout.endswith("check_rooms: 1 finding\n")

    place.write_text("x = 1\n", encoding="utf-8")
    run = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "check_rooms: 0 findings\n")
