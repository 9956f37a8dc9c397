"""What is installed: the files of the package, and the metadata that other libraries look into."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from tests.support.processes import ROOT

BUILT_FROM = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what the package is built from: a build leaves files beside it."""
    folder = tmp_path_factory.mktemp("source")
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return folder


def build(source: Path, kind: str) -> zipfile.ZipFile:
    """Build a wheel, as pip does by the backend that pyproject.toml names, with the packages that are installed here."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}('.'))"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(source / done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def wheel(source: Path) -> zipfile.ZipFile:
    return build(source, "wheel")


def metadata_of(wheel: zipfile.ZipFile) -> Message:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def check(metadata: Message) -> None:
    # sentence-transformers and setfit ask for these three.
    assert metadata["Name"] == "accelerate"
    assert metadata["Home-page"] == "https://huggingface.co/docs/accelerate"
    assert "huggingface" in metadata["Home-page"]
    assert "independent implementation" in metadata["Summary"]


def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    check(metadata_of(wheel))


def test_an_editable_install_says_the_same(source: Path, wheel: zipfile.ZipFile) -> None:
    editable = build(source, "editable")
    assert metadata_of(editable).items() == metadata_of(wheel).items()


def test_what_is_installed_here_says_so() -> None:
    check(importlib.metadata.metadata("accelerate"))  # type: ignore[arg-type]


def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel: zipfile.ZipFile) -> None:
    package = ROOT / "src"
    files = {path.relative_to(package).as_posix() for path in (package / "accelerate").rglob("*") if path.is_file()}
    wanted = {name for name in files if "__pycache__" not in name}
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == wanted
    assert {"accelerate/py.typed", "accelerate/utils/operations.pyi"} <= wanted


def test_the_programs_are_there(wheel: zipfile.ZipFile) -> None:
    name = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    lines = wheel.read(name).decode().splitlines()
    programs = {line.split(" = ")[0] for line in lines if " = " in line}
    assert programs == {
        "accelerate",
        "accelerate-config",
        "accelerate-estimate-memory",
        "accelerate-launch",
        "accelerate-merge-weights",
    }


def test_the_files_of_the_wheel_run(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = (
        "import accelerate, accelerate.utils\n"
        "assert all(hasattr(accelerate.utils, name) for name in dir(accelerate.utils))\n"
        "print(accelerate.__file__)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "accelerate" / "__init__.py")
