"""Read a pickle as records of what it would make, without making it: no class is touched, and nothing is called.

This module is imported where torch is not.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import IO, Any, ClassVar, NoReturn, TypeVar

from accelerate._base.errors import printable
from accelerate._base.untrusted import MOST_LEVELS, shown

T = TypeVar("T")
_LONGEST_NAME = 1000
"""Of a class: torch 2.13 searches its message about one in a time that grows with the square of the length."""
_LARGEST_KEY = 100
"""Of how many values a key of a dictionary may be made: it is hashed as a whole each time it is used."""
# What torch's own reader knows, in `weights_only` mode; at every other instruction it stops.
_INSTRUCTIONS = "\x80c\x81Rbaesu(t\x85\x86\x87N\x89\x88)]}\x8fJKMGXUQhjqr\x8a."


def refuse(why: str) -> NoReturn:
    """Refuse a pickle, as torch does what only code could read."""
    raise pickle.UnpicklingError(printable(why))


class Name(str):
    """A class or a function, by its full name."""

    __slots__ = ()


class Tuple(tuple[Any, ...]):  # noqa: SLOT001 - a tuple has no room for slots
    """A tuple that knows of how many values it is made, those inside of it counted."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self.weight = 1 + sum(map(_weight, self))


class Record:
    """What stands in the place of an object: what makes it, from what, and its state.

    Args:
        name: The class or the function.
        args: What that would be called with.
    """

    def __init__(self, name: str, args: Iterable[Any] = ()) -> None:
        self.name = name
        self.args = tuple(args)
        self.state: Any = None
        self.entries: list[Any] = []
        """What was put into it, if it is a dictionary."""
        self.weight = 1 + sum(map(_weight, self.args))

    def field(self, name: str, kind: type[T]) -> T:
        """Return a part of the state.

        Raises:
            TypeError: If it is not there, or of another type.
        """
        value = self.state.get(name) if isinstance(self.state, dict) else None
        if type(value) is not kind:
            raise TypeError(f"{name!r} is a {type(value).__name__} instead of a {kind.__name__}")
        return value

    def is_a(self, name: str) -> bool:
        """Return whether it stands for an object of a class of this name, in whatever module."""
        return self.name.rpartition(".")[2] == name


def _weight(value: object) -> int:
    return value.weight if isinstance(value, Tuple | Record) else 1


class RecordUnpickler(pickle._Unpickler):
    """Read a pickle as records: no class is touched, and nothing is called.

    Args:
        file: Begins with the pickle.
        most_values: How large a tuple may be, with all that is in it.
    """

    # The one written in Python: a few bytes make that written in C ask for gigabytes.
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        ord(code): pickle._Unpickler.dispatch[ord(code)] for code in _INSTRUCTIONS
    }
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: IO[bytes], most_values: int) -> None:
        super().__init__(file, encoding="bytes")
        self.most_values = max(most_values, _LARGEST_KEY)

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return what stands for a class or a function."""
        if len(module_name) + len(global_name) > _LONGEST_NAME:
            refuse(f"it names the class {shown(global_name)}")
        return Name(f"{'builtins' if module_name == '__builtin__' else module_name}.{global_name}")

    def call(self, name: Name, args: Iterable[Any]) -> Any:
        """Return what stands for the result of a call."""
        return Record(name, args)

    def build(self, record: Record, state: Any) -> None:
        """Give a record its state."""
        record.state = state

    def persistent_load(self, pid: Any) -> Any:
        """Return what stands for something that is stored elsewhere."""
        refuse("it names an object outside of it")

    def _reduce(self) -> None:
        args, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, Name) or not isinstance(args, tuple):
            refuse("it calls what is no function, or without arguments")
        self.append(self.call(name, args))

    def _build(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        if not isinstance(record, Record):
            refuse(f"it gives a state to a {type(record).__name__}")
        self.build(record, state)

    def _append(self) -> None:
        self._extend([self.stack.pop()])

    def _appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            refuse(f"it appends to a {type(self.stack[-1]).__name__}")
        self.stack[-1].extend(items)

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def _set_items(self) -> None:
        self._update(self.pop_mark())

    def _update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        for key in items[::2]:
            check_key(key)
        if type(target) is dict:
            target.update(zip(items[::2], items[1::2], strict=True))
        elif isinstance(target, Record) and target.is_a("OrderedDict") | target.is_a("Counter"):
            target.entries += items
        else:
            refuse(f"it sets items of a {type(target).__name__}")

    def _add_items(self) -> None:
        items = self.pop_mark()
        for item in items:
            check_key(item)
        if type(self.stack[-1]) is not set:
            refuse(f"it adds to a {type(self.stack[-1]).__name__}")
        self.stack[-1].update(items)

    def _tuple(self) -> None:
        self._push_tuple(self.pop_mark())

    def _push_last(self, count: int) -> None:
        items = self.stack[-count:]
        del self.stack[-count:]
        self._push_tuple(items)

    def _push_tuple(self, items: list[Any]) -> None:
        made = Tuple(items)
        if made.weight > self.most_values:
            refuse("tuples in it are made of each other, too many times")
        self.append(made)

    dispatch |= {
        pickle.REDUCE[0]: _reduce,
        pickle.NEWOBJ[0]: _reduce,
        pickle.BUILD[0]: _build,
        pickle.APPEND[0]: _append,
        pickle.APPENDS[0]: _appends,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
        pickle.ADDITEMS[0]: _add_items,
        pickle.TUPLE[0]: _tuple,
        pickle.TUPLE1[0]: lambda self: self._push_last(1),
        pickle.TUPLE2[0]: lambda self: self._push_last(2),
        pickle.TUPLE3[0]: lambda self: self._push_last(3),
    }


def check_key(key: object) -> None:
    """Refuse a key that cannot be hashed quickly, or not at all."""
    if key is None or isinstance(key, str | bytes | float | bool):
        return
    if isinstance(key, int):
        fits = key.bit_length() <= 64
    else:
        fits = isinstance(key, Tuple | Record | tuple) and _weight(key) <= _LARGEST_KEY
        for entry in key if fits and isinstance(key, tuple) else ():
            check_key(entry)
    if not fits:
        refuse(f"a key of a dictionary is a {type(key).__name__}, or too large")


def check_size(value: object, most: int) -> None:
    """Refuse a value of which a function that goes through all of it would see no end.

    Args:
        most: How many values it may hold, each counted as often as it is reached.
    """
    sizes: dict[int, int] = {}
    heights: dict[int, int] = {}
    # Each with those of its parts that have parts themselves, once all of those are looked at, and the number of the others.
    pending: list[tuple[Any, list[Any] | None, int]] = [(value, None, 0)]
    while pending:
        entry, inner, others = pending.pop()
        if inner is None:
            if id(entry) in sizes or type(entry) not in _CONTAINERS:
                continue
            parts = _parts(entry)
            inner = [part for part in parts if type(part) in _CONTAINERS]
            others = len(parts) - len(inner)
            sizes[id(entry)], heights[id(entry)] = 1, 0  # until all of it was seen: it may be a part of itself
            if inner:
                pending.append((entry, inner, others))
                pending += [(part, None, 0) for part in inner]
                continue
        sizes[id(entry)] = 1 + others + sum([sizes[id(part)] for part in inner])
        heights[id(entry)] = 1 + max([heights[id(part)] for part in inner], default=0)
        if sizes[id(entry)] > most or heights[id(entry)] > MOST_LEVELS:
            refuse("lists and dictionaries in it are made of each other, too deeply or too many times")


def _parts(value: Any) -> list[Any]:
    if type(value) is Record:
        return [*value.args, value.state, *value.entries]
    return [*value, *value.values()] if type(value) is dict else list(value)


_CONTAINERS = frozenset({Record, Tuple, tuple, list, dict, set})
