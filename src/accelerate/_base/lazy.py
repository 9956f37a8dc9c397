"""Modules whose names live elsewhere and are imported when they are first read (PEP 562).

The table of public names is the stubs: `utils/operations.pyi` lists what `accelerate.utils.operations` shows, each name
once with its home. Type checkers read it as a stub, and the module next to it reads it here. `passing_names` lists
re-exports: names that can also be imported from modules that only use them.

Other libraries replace functions by assigning to such a module (`accelerate.accelerator.fsdp2_prepare_model = mine`).
`PublicModule` passes the assignment on to the code that calls the function.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType, ModuleType

Attached = tuple[Callable[[str], object], Callable[[], list[str]]]

_PACKAGE_FOLDER = __file__.rpartition("_base")[0]
_ORIGINALS = "__originals__"
"""The entry of a module's namespace that holds, by name, what its replaced functions and classes were before."""


class PublicModule(ModuleType):
    """Module whose functions and classes other libraries may replace by assignment.

    A replacement is used wherever the private modules of this package use the original. Other public modules keep the
    original, so a replacement can call it through one of them.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) or name.startswith("__"):
            super().__setattr__(name, value)  # by the import system
            return
        old = getattr(self, name, None)
        super().__setattr__(name, value)
        if (isinstance(old, FunctionType | type) or name in vars(self).get(_ORIGINALS, {})) and old is not value:
            self._replace(name, old, value)

    def __delattr__(self, name: str) -> None:
        original = vars(self).get(_ORIGINALS, {}).get(name)
        old = vars(self).get(name)
        super().__delattr__(name)
        # `unittest.mock` restores a name that was not read before by deleting it.
        if original is not None:
            self._replace(name, old, original)

    def _replace(self, name: str, old: object, value: object) -> None:
        original = vars(self).get(_ORIGINALS, {}).get(name, old)
        if not getattr(original, "__module__", "").startswith("accelerate."):
            return
        _remember(vars(self), name, original, value)
        package = [module for key, module in sys.modules.items() if key.startswith("accelerate.")]
        for module in package:
            if isinstance(module, PublicModule) or not isinstance(module, ModuleType):
                continue
            namespace = vars(module)
            originals = namespace.get(_ORIGINALS, {})
            for key, bound in list(namespace.items()):
                # The second case is a module that was imported after the first replacement.
                if originals.get(key, bound) is original or (bound is old and key == name):
                    namespace[key] = value
                    _remember(namespace, key, original, value)
        if value is not original:
            _warn_without_effect(self.__name__, name)


def _remember(namespace: dict[str, object], name: str, original: object, value: object) -> None:
    originals = namespace.setdefault(_ORIGINALS, {})
    assert isinstance(originals, dict)
    if value is original:
        originals.pop(name, None)
    else:
        originals[name] = original


def _warn_without_effect(module_name: str, name: str) -> None:
    from accelerate._base.helpers import user_stacklevel, warn_once
    from accelerate._base.passing_names import NEVER_CALLED, PASSING_NAMES

    if name in NEVER_CALLED.split() and name in by_home(PASSING_NAMES.get(module_name, {})):
        warn_once(
            f"{module_name}.{name} was replaced, which has no effect: Accelerate 2 does not call this function. "
            "Call the replacement from your own code instead.",
            stacklevel=user_stacklevel(),
        )


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
    """Make `__getattr__` and `__dir__` for a module from its stub, which is read with the first name."""
    _make_public(module_name)

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

    _make_public(module_name)
    vars(sys.modules[module_name])["__getattr__"] = resolve


def _make_public(module_name: str) -> None:
    module = sys.modules.get(module_name)
    if module is not None:
        module.__class__ = PublicModule


def attach(module_name: str, table: Mapping[str, str]) -> Attached:
    """Make `__getattr__` and `__dir__` for a module whose names live elsewhere.

    Args:
        module_name: The `__name__` of the module that shows the names.
        table: Public name -> its home: `"package.module"` when the name is the same there, `"package.module:other"`
            when it differs. A home that is the sub-module of that very name (`{"state": "accelerate.state"}`) gives
            the sub-module itself.
    """
    _make_public(module_name)
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
    value: object
    if submodule in (path, f"{path}.{name}"):
        value = importlib.import_module(submodule)
    else:
        source = importlib.import_module(path)
        value = getattr(source, attribute or name)
        value = vars(source).get(_ORIGINALS, {}).get(attribute or name, value)
    # Kept in the module's own namespace: the next reading does not come here.
    vars(sys.modules[module_name])[name] = value
    return value
