"""Every name that release 1.15 lets one import can be imported here, from the same module."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from accelerate._base.passing_names import PASSING_NAMES

FOLDER = Path(__file__).parent


def read(file: str) -> dict[str, list[str]]:
    """Return the names of each module."""
    return {module: names.split() for module, names in json.loads((FOLDER / file).read_text()).items()}


PUBLIC, REACHABLE = read("public_names.json"), read("reachable_names.json")


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names(module: str) -> None:
    loaded = importlib.import_module(module)
    assert [name for name in PUBLIC[module] if not hasattr(loaded, name)] == []


@pytest.mark.parametrize("module", REACHABLE)
def test_names_that_pass_through(module: str) -> None:
    loaded = importlib.import_module(module)
    assert [name for name in REACHABLE[module] if not hasattr(loaded, name)] == []


@pytest.mark.parametrize("module", PASSING_NAMES)
def test_a_name_that_passes_through_is_the_public_one(module: str) -> None:
    loaded = importlib.import_module(module)
    for home, names in PASSING_NAMES[module].items():
        path, _, attribute = home.partition(":")
        public = importlib.import_module(path)
        for name in names.split():
            assert getattr(loaded, name) is getattr(public, attribute or name), name


def test_every_module_of_the_table_lists_names_that_programs_know() -> None:
    assert PASSING_NAMES.keys() <= REACHABLE.keys()
    for module, homes in PASSING_NAMES.items():
        assert {name for names in homes.values() for name in names.split()} <= set(REACHABLE[module])


@pytest.mark.parametrize("module", PASSING_NAMES)
def test_other_names_are_still_errors(module: str) -> None:
    loaded = importlib.import_module(module)
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'a_name_that_nobody_wrote'"):
        loaded.a_name_that_nobody_wrote  # noqa: B018
    with pytest.raises(ImportError, match="a_name_that_nobody_wrote"):
        exec(f"from {module} import a_name_that_nobody_wrote")
    assert not hasattr(loaded, "__wrapped__")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_nobody_pays_for_the_table_who_does_not_use_it() -> None:
    loaded = "print('accelerate._base.passing_names' in sys.modules)\n"
    code = (
        "import sys, accelerate, accelerate.utils, accelerate.commands.launch, accelerate.utils.dataclasses\n" + loaded
    )
    code += "from accelerate.commands.accelerate_cli import main\nsys.argv = ['accelerate', 'launch', '--help']\n"
    code += "try:\n    main()\nexcept SystemExit:\n    " + loaded
    code += "from accelerate.commands.launch import is_xpu_available\n" + loaded
    found = [line for line in run(code).splitlines() if line in ("True", "False")]
    assert found == ["False", "False", "True"]


def test_names_of_the_launcher_come_without_torch() -> None:
    code = "import sys\nfrom accelerate.commands.launch import ComputeEnvironment, patch_environment, str_to_bool\n"
    assert run(code + "print('torch' in sys.modules)") == "False"


def test_the_older_home_of_the_memory_helpers_warns_once() -> None:
    from accelerate.utils import find_executable_batch_size

    sys.modules.pop("accelerate.memory_utils", None)
    with pytest.warns(FutureWarning, match=r"accelerate\.utils import find_executable_batch_size") as caught:
        from accelerate.memory_utils import find_executable_batch_size as older
    assert older is find_executable_batch_size
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings(record=True) as again:
        warnings.simplefilter("always")
        importlib.import_module("accelerate.memory_utils")
    assert again == []
    names: dict[str, object] = {}
    exec("from accelerate.memory_utils import *", names)
    assert names["find_executable_batch_size"] is find_executable_batch_size
