"""Questions about packages are answered without importing them."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from accelerate._base import imports
from accelerate._base.errors import ConfigurationError, MissingPackageError


def test_installed_and_absent_packages() -> None:
    assert imports.is_package_available("json")
    assert not imports.is_package_available("a_package_that_nobody_wrote")
    assert not imports.is_package_available("a_package_that_nobody_wrote.part")


def test_a_plain_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder_left_by_a_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not imports.is_package_available("folder_left_by_a_tracker")


def test_a_module_without_metadata_has_no_version_to_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_without_metadata.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert imports.has_package("module_without_metadata")
    assert not imports.has_package("module_without_metadata", minimum="0.1")


def test_version_bounds() -> None:
    assert imports.has_package("packaging", minimum="1.0", below="1000.0")
    assert not imports.has_package("packaging", minimum="1000.0")
    assert not imports.has_package("packaging", below="1.0")
    assert imports.has_package("a_package_that_nobody_wrote", "packaging")
    assert imports.is_numpy_available()
    assert not imports.is_numpy_available("1000.0")


def test_a_package_whose_distribution_has_another_name() -> None:
    assert imports.has_package("yaml", minimum="1.0")


def test_require_returns_the_module() -> None:
    import json

    assert imports.require("json", why="A test") is json


def test_require_says_why_and_what_to_install() -> None:
    with pytest.raises(MissingPackageError, match=r"Flying needs.*'wings_of_wax'.*pip install wings_of_wax"):
        imports.require("wings_of_wax", why="Flying")
    with pytest.raises(MissingPackageError, match=r'pip install "accelerate\[air\]"') as caught:
        imports.require("wings_of_wax", why="Flying", extra="air")
    assert caught.value.name == "wings_of_wax"


def test_require_tells_a_broken_package_from_a_missing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_package.py").write_text("import wings_of_wax")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingPackageError, match=r"fails to import \(No module named 'wings_of_wax'\)"):
        imports.require("broken_package", why="Flying")


def test_torchao_required_names_the_function() -> None:
    @imports.torchao_required
    def convert(number: int) -> int:
        return number + 1

    if imports.is_torchao_available():
        assert convert(1) == 2
    else:
        with pytest.raises(MissingPackageError, match=r"convert needs the package 'torchao'"):
            convert(1)


def test_every_check_answers_with_a_bool_and_has_a_docstring() -> None:
    checks = [value for name, value in vars(imports).items() if name.startswith("is_") and name.endswith("_available")]
    checks.remove(imports.is_package_available)
    assert len(checks) > 40
    for check in checks:
        assert check.__doc__, check
        assert isinstance(check(), bool), check


def test_checks_import_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from accelerate._base import imports\n"
        "imports.is_transformers_available(), imports.is_datasets_available(), imports.is_pippy_available()\n"
        "print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("operation", "other", "expected"),
    [(">", "1.9", True), (">=", "1.10", True), ("==", "1.10", True), ("!=", "1.10", False), ("<=", "1.9", False)],
)
def test_ten_comes_after_nine(operation: str, other: str, expected: bool) -> None:
    assert imports.compare_versions(Version("1.10"), operation, other) is expected


def test_installed_library_by_name() -> None:
    found = importlib.metadata.version("packaging")
    assert imports.compare_versions("packaging", "==", found)
    assert not imports.compare_versions("packaging", "<", found)


def test_torch() -> None:
    assert imports.is_torch_version("==", importlib.metadata.version("torch"))
    assert imports.torch_version == Version(importlib.metadata.version("torch"))


def test_bad_input() -> None:
    with pytest.raises(ConfigurationError, match=r"'=>' is not a comparison.*'>='"):
        imports.compare_versions("packaging", "=>", "1.0")
    with pytest.raises(MissingPackageError, match="pip install wings-of-wax"):
        imports.compare_versions("wings-of-wax", ">", "1.0")
