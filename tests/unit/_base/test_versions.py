"""Versions are compared by meaning, not by text."""

from __future__ import annotations

import importlib.metadata

import pytest
from packaging.version import Version

from accelerate._base import versions
from accelerate._base.errors import ConfigurationError, MissingPackageError


@pytest.mark.parametrize(
    ("operation", "other", "expected"),
    [(">", "1.9", True), (">=", "1.10", True), ("==", "1.10", True), ("!=", "1.10", False), ("<=", "1.9", False)],
)
def test_ten_comes_after_nine(operation: str, other: str, expected: bool) -> None:
    assert versions.compare_versions(Version("1.10"), operation, other) is expected


def test_installed_library_by_name() -> None:
    found = importlib.metadata.version("packaging")
    assert versions.compare_versions("packaging", "==", found)
    assert not versions.compare_versions("packaging", "<", found)


def test_torch() -> None:
    assert versions.is_torch_version("==", importlib.metadata.version("torch"))
    assert versions.torch_version == Version(importlib.metadata.version("torch"))


def test_bad_input() -> None:
    with pytest.raises(ConfigurationError, match=r"'=>' is not a comparison.*'>='"):
        versions.compare_versions("packaging", "=>", "1.0")
    with pytest.raises(MissingPackageError, match="pip install wings-of-wax"):
        versions.compare_versions("wings-of-wax", ">", "1.0")
