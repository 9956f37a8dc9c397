"""Modules whose names live elsewhere and are imported when they are first read (PEP 562).

The table of public names is the stubs: `utils/operations.pyi` lists what `accelerate.utils.operations` shows, each name
once with its home. Type checkers read it as a stub, and the module beside it reads it here. `passing_names` lists the
modules that let some of these names be imported from them too, though they only use them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import cache

Attached = tuple[Callable[[str], object], Callable[[], list[str]]]

_PACKAGE_FOLDER = __file__.rpartition("_base")[0]


def by_home(homes: Mapping[str, str]) -> dict[str, str]:
    """Turn `{"accelerate.home": "first second"}` into the table that `attach` takes."""
    return {name: home for home, names in homes.items() for name in names.split()}


@cache
def stub_names(module_name: str) -> dict[str, str]:
    """Return the names that the stub of a module of this package lists, each with its home as `attach` takes it.

    A stub may hold three kinds of statements: `from home import name as name`; `from accelerate.utils.part import *`,
    which stands for the names of that module's stub and for the module itself; and `other = name` after a plain
    `from home import name, ...`.
    """
    path = _PACKAGE_FOLDER + "/".join(module_name.split(".")[1:])
    # By its namespace: to ask a lazy module for an attribute that it lacks would lead here again.
    is_package = module_name in sys.modules and "__path__" in vars(sys.modules[module_name])
    # By the loader, because the package may lie in an archive.
    data: bytes = __loader__.get_data(path.rstrip("/") + ("/__init__.pyi" if is_package else ".pyi"))  # type: ignore[name-defined]
    names: dict[str, str] = {}
    homes: dict[str, str] = {}
    # A statement that is too long for a line stands in parentheses on several.
    for statement in data.decode().replace("(\n", "").replace(",\n)", "").replace(",\n ", ", ").splitlines():
        match statement.split():
            case ["from", home, "import", "*"]:
                names |= {**stub_names(home), home.rpartition(".")[2]: home}
            case ["from", home, "import", name, "as", _]:
                names[name] = home
            case ["from", home, "import", *several]:
                homes |= {name.rstrip(","): home for name in several}
            case [name, "=", original]:
                names[name] = f"{homes[original]}:{original}"
    return names


def attach_stub(module_name: str) -> Attached:
    """Make `__getattr__` and `__dir__` for a module from the stub beside it, which is read with the first name."""

    def resolve(name: str) -> object:
        names = stub_names(module_name)
        if name == "__all__":  # of a star import
            return sorted(public for public in names if not public.startswith("_"))
        return _resolve(module_name, names, name) if name in names else _resolve_passing(module_name, name)

    return resolve, lambda: sorted({*vars(sys.modules[module_name]), *stub_names(module_name)})


def attach_passing_names(module_name: str, optional: Mapping[str, str] | None = None) -> None:
    """Let a module with a body of its own give the names that only pass through it, when somebody asks for one.

    It is set from here, and not written in the module: a type checker would then believe in any name.

    Args:
        optional: Further names, with their homes, that need a package which may be missing.
    """

    def resolve(name: str) -> object:
        return (
            _resolve(module_name, optional, name)
            if optional and name in optional
            else _resolve_passing(module_name, name)
        )

    vars(sys.modules[module_name])["__getattr__"] = resolve


def attach(module_name: str, table: Mapping[str, str]) -> Attached:
    """Make `__getattr__` and `__dir__` for a module whose names live elsewhere.

    Args:
        module_name: The `__name__` of the module that shows the names.
        table: Public name -> its home: `"package.module"` when the name is the same there, `"package.module:other"`
            when it differs. A home that is the sub-module of that very name (`{"state": "accelerate.state"}`) gives
            the sub-module itself.
    """
    return lambda name: _resolve(module_name, table, name), lambda: sorted({*vars(sys.modules[module_name]), *table})


def _resolve_passing(module_name: str, name: str) -> object:
    # Special names are asked of every module, and names of sub-modules, before they are imported, of the package.
    if name.startswith("__") or module_name == "accelerate":
        return _resolve(module_name, {}, name)
    from accelerate._base.passing_names import PASSING_NAMES

    return _resolve(module_name, by_home(PASSING_NAMES.get(module_name, {})), name)


def _resolve(module_name: str, table: Mapping[str, str], name: str) -> object:
    home = table.get(name)
    if home is None:
        raise AttributeError(
            f"module {module_name!r} has no attribute {name!r}", name=name, obj=sys.modules.get(module_name)
        )
    path, _, attribute = home.partition(":")
    submodule = f"{module_name}.{name}"
    value: object = (
        importlib.import_module(submodule)
        if submodule in (path, f"{path}.{name}")
        else getattr(importlib.import_module(path), attribute or name)
    )
    # Kept in the module's own namespace: the next reading does not come here.
    vars(sys.modules[module_name])[name] = value
    return value
