"""Comparison of the versions of installed packages, without importing them."""

from __future__ import annotations

import importlib.metadata
from functools import cache
from typing import TYPE_CHECKING

from packaging.version import Version, parse

from accelerate._base.constants import STR_OPERATION_TO_FUNC
from accelerate._base.errors import ConfigurationError, MissingPackageError

if TYPE_CHECKING:
    torch_version: Version


@cache
def installed_version(distribution: str) -> Version:
    """Return the version of an installed distribution.

    Raises:
        MissingPackageError: The distribution is not installed.
    """
    try:
        return parse(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingPackageError(
            f"The version of {distribution!r} was asked for, but it is not installed in this environment. "
            f"Install it with `pip install {distribution}`."
        ) from error


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Compare an installed library (by name) or a version with a required one.

    Args:
        operation: One of `>`, `>=`, `==`, `!=`, `<=`, `<`.

    Raises:
        ConfigurationError: The operation is none of these.
        MissingPackageError: The library is not installed.
    """
    compare = STR_OPERATION_TO_FUNC.get(operation)
    if compare is None:
        raise ConfigurationError(
            f"operation={operation!r} is not a comparison of versions. Write one of {list(STR_OPERATION_TO_FUNC)}."
        )
    ours = installed_version(library_or_version) if isinstance(library_or_version, str) else library_or_version
    return compare(ours, parse(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the installed torch with `version`, without importing torch."""
    return compare_versions("torch", operation, version)


def __getattr__(name: str) -> Version:
    # `torch_version` is read on demand, so that this module loads where torch is not installed.
    if name == "torch_version":
        return installed_version("torch")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
