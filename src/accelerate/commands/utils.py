"""A parser for command lines like that of `accelerate launch`: flags in both spellings, and a record of those given."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from accelerate.config.cli import RecordValue, spellings

__all__ = ["CustomArgumentGroup", "CustomArgumentParser"]


class _Store(RecordValue):
    """Store a value under a flag that may be written with `_` or `-`."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        flags = [name for flag in option_strings for name in (spellings(flag) if flag[:2] == "--" else [flag])]
        super().__init__(flags, dest, **kwargs)


class _StoreConst(_Store):
    """Store a constant: the flag takes no value."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: Any = None, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, const=const, **kwargs)

    def value(self, namespace: argparse.Namespace, values: Any, option_string: str | None) -> Any:
        return self.const


class _StoreTrue(_StoreConst):
    """Store True; False without the flag."""

    def __init__(self, option_strings: Sequence[str], dest: str, default: Any = False, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, const=True, default=default, **kwargs)


class _StoreFalse(_StoreConst):
    """Store False; True without the flag."""

    def __init__(self, option_strings: Sequence[str], dest: str, default: Any = True, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, const=False, default=default, **kwargs)


_ACTIONS = {
    None: _Store,
    "store": _Store,
    "store_const": _StoreConst,
    "store_true": _StoreTrue,
    "store_false": _StoreFalse,
}


class CustomArgumentGroup(argparse._ArgumentGroup):
    """Collect options that are taken as `CustomArgumentParser` takes them, under a title."""

    def __init__(self, container: Any, title: str | None = None, description: str | None = None, **kwargs: Any) -> None:
        super().__init__(container, title, description, **kwargs)
        # Of this group alone: its parser may be another one.
        self._registries = {kind: dict(entries) for kind, entries in self._registries.items()}
        self._registries["action"].update(_ACTIONS)


class CustomArgumentParser(argparse.ArgumentParser):
    """Take flags with `_` or `-`, and name the values that were given in `nondefault` of the namespace.

    This holds for flags that store a value or a constant; other actions are argparse's own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._registries["action"].update(_ACTIONS)

    def add_argument_group(self, *args: Any, **kwargs: Any) -> CustomArgumentGroup:
        """Add a group of options."""
        group = CustomArgumentGroup(self, *args, **kwargs)
        self._action_groups.append(group)
        return group
