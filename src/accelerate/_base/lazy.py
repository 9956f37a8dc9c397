"""Module attributes that are imported when they are first read (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping

# What a lazy module imports for its own making.
_MACHINERY = frozenset({"TYPE_CHECKING", "annotations", "attach", "by_home", "starred"})


def by_home(homes: Mapping[str, str]) -> dict[str, str]:
    """Turn `{"accelerate.home": "first second"}` into the table that `attach` takes."""
    return {name: home for home, names in homes.items() for name in names.split()}


def starred(names: Iterable[str]) -> tuple[str, ...]:
    """Return the `__all__` of a lazy module: a star import reads only what stands in the namespace, or is listed there.

    Args:
        names: All names that the module shows, with whatever else stands in its namespace; private names and those that
            this file gives are left out.
    """
    return tuple(sorted({name for name in names if not name.startswith("_")} - _MACHINERY))


def attach(module_name: str, table: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Make `__getattr__` and `__dir__` for a module whose names live elsewhere.

    Args:
        module_name: The `__name__` of the module that shows the names.
        table: Public name -> its home: `"package.module"` when the name is the same there, `"package.module:other"`
            when it differs. A home that is the sub-module of that very name (`{"state": "accelerate.state"}`) gives
            the sub-module itself.
    """

    def resolve(name: str) -> object:
        home = table.get(name)
        if home is None:
            raise AttributeError(
                f"module {module_name!r} has no attribute {name!r}", name=name, obj=sys.modules.get(module_name)
            )
        path, _, attribute = home.partition(":")
        module = importlib.import_module(path)
        value: object = module if path == f"{module_name}.{name}" else getattr(module, attribute or name)
        # Kept in the module's own namespace: the next reading does not come here.
        vars(sys.modules[module_name])[name] = value
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[module_name]), *table})

    return resolve, names
