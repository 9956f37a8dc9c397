"""The lazy tables: every name is there, for people and for type checkers."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import accelerate
import accelerate.utils
from accelerate._base.lazy import stub_names
from accelerate.utils import dataclasses as public_dataclasses

PACKAGE = Path(accelerate.__file__).parent
SUBMODULES = [entry.name for entry in pkgutil.iter_modules(accelerate.utils.__path__)]

# Names of `megatron_lm` that say too little elsewhere: in `utils` these are "megatron_lm_" and the name, or not there.
PREFIXED = {
    "initialize",
    "prepare_data_loader",
    "prepare_model_optimizer_scheduler",
    "prepare_optimizer",
    "prepare_scheduler",
}
WITH_A_PREFIX = {*PREFIXED, "finish_mpu_init", "model_provider_func"}


def declared_names(stub: Path) -> set[str]:
    """Return the names that a stub shows to type checkers: `import x as x`, and assignments."""
    names: set[str] = set()
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names if alias.asname == alias.name}
        elif isinstance(node, ast.Assign):
            names.add(ast.unparse(node.targets[0]))
    return names


def test_every_name_of_the_top_level_resolves() -> None:
    for name in stub_names("accelerate"):
        assert getattr(accelerate, name) is not None, name


def test_the_top_level_shows_the_same_names_to_type_checkers() -> None:
    assert declared_names(PACKAGE / "__init__.pyi") == set(stub_names("accelerate"))


def test_every_name_of_utils_resolves() -> None:
    for name in stub_names("accelerate.utils"):
        assert getattr(accelerate.utils, name) is not None, name


@pytest.mark.parametrize("submodule", [name for name in SUBMODULES if name != "tqdm"])
def test_every_name_of_a_submodule_resolves_and_is_in_utils(submodule: str) -> None:
    module = importlib.import_module(f"accelerate.utils.{submodule}")
    declared = declared_names(PACKAGE / "utils" / f"{submodule}.pyi")
    assert declared
    assert declared == set(stub_names(f"accelerate.utils.{submodule}"))
    for name in declared:
        if name not in WITH_A_PREFIX:
            assert getattr(module, name) is getattr(accelerate.utils, name), name
        elif name in PREFIXED:
            assert getattr(module, name) is getattr(accelerate.utils, f"{submodule}_{name}"), name
    assert getattr(accelerate.utils, submodule) is module


def test_utils_lists_no_name_that_no_submodule_declares() -> None:
    stubs = [PACKAGE / "utils" / f"{submodule}.pyi" for submodule in SUBMODULES if submodule != "tqdm"]
    declared = {name for stub in stubs for name in declared_names(stub)}
    lazy = set(stub_names("accelerate.utils")) - set(SUBMODULES)
    assert lazy - declared == {"ParallelismConfig", "write_basic_config"} | {f"megatron_lm_{name}" for name in PREFIXED}


def test_utils_hold_no_logic() -> None:
    for submodule in SUBMODULES:
        tree = ast.parse((PACKAGE / "utils" / f"{submodule}.py").read_text(encoding="utf-8"))
        defined = [node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
        assert defined == (["tqdm"] if submodule == "tqdm" else []), submodule


def test_dir_lists_lazy_names() -> None:
    assert {"Accelerator", "PartialState", "utils"} <= set(dir(accelerate))
    assert {"gather", "set_seed", "tqdm"} <= set(dir(accelerate.utils))
    assert "TensorInformation" in dir(public_dataclasses)


@pytest.mark.parametrize(
    ("module", "more"),
    [
        ("accelerate", set()),
        ("accelerate.utils", {"tqdm"}),
        ("accelerate.test_utils", set()),
        ("accelerate.utils.constants", {"WEIGHTS_NAME"}),
        ("accelerate.utils.dataclasses", {"DistributedType", "parse_llama_config"}),
        ("accelerate.utils.other", set()),
    ],
)
def test_a_star_import_gives_all_names_and_none_of_the_machinery(module: str, more: set[str]) -> None:
    importlib.import_module(module)
    table = {name for name in stub_names(module) if not name.startswith("_")}
    found = set(run(f"from {module} import *\nprint(*dir())").split())
    assert table | more <= found
    assert not found & {"attach", "attach_stub", "by_home", "env", "TYPE_CHECKING", "_TABLE", "_filter_args"}


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(AttributeError, match="Acelerator"):
        _ = accelerate.Acelerator  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="nonsense"):
        from accelerate.utils import nonsense  # type: ignore[attr-defined]  # noqa: F401


def run(code: str, **variables: str) -> str:
    with accelerate.utils.patch_environment(**variables):
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_importing_the_package_imports_no_torch() -> None:
    assert run("import sys, accelerate, accelerate.utils; print('torch' in sys.modules)") == "False"


@pytest.mark.parametrize(("value", "hooked"), [("0", "False"), ("1", "True")])
def test_rich_tracebacks_come_only_when_asked(value: str, hooked: str) -> None:
    code = "import sys, accelerate; print(sys.excepthook is not sys.__excepthook__)"
    assert run(code, ACCELERATE_ENABLE_RICH=value) == hooked


def test_tqdm_stays_a_function_beside_its_module() -> None:
    code = "import accelerate.utils.tqdm\nfrom accelerate.utils import tqdm\nprint(callable(tqdm), tqdm is accelerate.utils.tqdm)"
    assert run(code) == "True True"
