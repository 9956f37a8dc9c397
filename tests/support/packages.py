"""Stand-ins for packages that do not install here: importable, with the metadata of an installed distribution."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate._base import imports

SOURCES = Path(__file__).parent / "stand_ins"
"""Those that do something; any other is an empty package."""
DISTRIBUTIONS = {"msamp": "ms_amp"}
"""Those whose distribution has another name."""


def write_stand_in(folder: Path, name: str, version: str = "99.0") -> None:
    """Write the package `name`, or `parent.name`, and its metadata into a folder that is to be on the path."""
    top, *parts = name.split(".")
    if (SOURCES / top).exists():
        shutil.copytree(SOURCES / top, folder / top)
    else:
        for depth in range(len(parts) + 1):
            package = folder.joinpath(top, *parts[:depth])
            package.mkdir(parents=True, exist_ok=True)
            (package / "__init__.py").write_text(f'__version__ = "{version}"\n')
    distribution = DISTRIBUTIONS.get(top, top)
    metadata = folder / f"{distribution}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (metadata / "top_level.txt").write_text(f"{top}\n")


@contextmanager
def installed(folder: Path, *names: str) -> Iterator[None]:
    """Let this process find stand-ins in a folder, as if they had been installed before it started."""
    for name in names:
        write_stand_in(folder, name)
    sys.path.insert(0, str(folder))
    _forget(names)
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        _forget(names)


def _forget(names: tuple[str, ...]) -> None:
    tops = {name.partition(".")[0] for name in names}
    for module in [module for module in sys.modules if module.partition(".")[0] in tops]:
        del sys.modules[module]
    importlib.invalidate_caches()
    for remembered in (imports.is_package_available, imports._distribution_version, imports.installed_version):
        remembered.cache_clear()
