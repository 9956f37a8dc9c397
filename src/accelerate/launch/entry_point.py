"""What each process of a TPU run carries out: the script itself or one function of it, found by reading the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import Choice

if TYPE_CHECKING:
    from accelerate.config.run_config import RunConfig

WHOLE_SCRIPT = "__main__"
"""In the place of a function's name: the script runs as `python script.py` would run it."""
_DEFAULT_FUNCTION = "main"
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


def choose_entry_point(config: RunConfig) -> Choice[str]:
    """Return the function of the script that each process calls, or that the whole script runs, and why.

    Raises:
        ConfigurationError: A function was named that the script does not have, or that a process cannot call.
    """
    function = str(config["main_training_function"] or _DEFAULT_FUNCTION)
    tree = _parse(config)
    if function != _DEFAULT_FUNCTION:
        _check_named(config, function, tree)
        return Choice(function, f"main_training_function={function!r} ({config.origin('main_training_function')})")
    if tree is None:
        return Choice(WHOLE_SCRIPT, "its source cannot be read before it runs")
    definition = _definition(tree, function)
    if definition is None:
        return Choice(WHOLE_SCRIPT, f"it defines no function {function!r}")
    if _has_guard(tree):
        return Choice(WHOLE_SCRIPT, f"it says by `if __name__ == {WHOLE_SCRIPT!r}` what to run")
    if any(isinstance(node, ast.Name) and node.id == function for node in _outside_of_definitions(tree)):
        return Choice(WHOLE_SCRIPT, f"it uses {function!r} itself")
    _check_call(config, definition)
    return Choice(function, f"the script defines it, and neither uses it nor has an `if __name__ == {WHOLE_SCRIPT!r}`")


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_named(config: RunConfig, function: str, tree: ast.Module | None) -> None:
    named = f"main_training_function={function!r} ({config.origin('main_training_function')})"
    script = config["training_script"]
    if not config["module"] and (Path(script).is_dir() or Path(script).suffix in (".zip", ".pyz", ".pyc")):
        raise ConfigurationError(
            f"{named} names a function, and {script!r} is a folder or an archive, of which none can be called. Name a "
            "Python file or, with -m, a module, or leave --main_training_function out."
        )
    if tree is None or _may_bind(tree, function):
        definition = None if tree is None else _definition(tree, function)
        if definition is not None:
            _check_call(config, definition)
        return
    known = [node.name for node in _outside_of_definitions(tree) if isinstance(node, ast.FunctionDef)]
    has = f"it has {', '.join(known[:8])}" if known else "it has no function at all"
    raise ConfigurationError(
        f"{named}: {script!r} has no such function ({has}). Name one that it has, or leave --main_training_function out "
        "to run the script itself in each process."
    )


def _check_call(config: RunConfig, definition: ast.FunctionDef) -> None:
    """Refuse a function that cannot be called with nothing, or with the index of the process."""
    if definition.decorator_list:
        return  # what a decorator leaves of the arguments is not in the source
    arguments = definition.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    needed = positional[: len(positional) - len(arguments.defaults)]
    by_name = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    keywords = [argument.arg for argument, default in by_name if default is None]
    if len(needed) > 1 or keywords:
        raise ConfigurationError(
            f"{definition.name}() of {config['training_script']!r} cannot be called in each process: it needs "
            f"{', '.join([*needed, *keywords])}, and a process has its index alone to give. Give the others default "
            "values, or name another function with --main_training_function."
        )


# --- the source -------------------------------------------------------------------------------------------------------


def _parse(config: RunConfig) -> ast.Module | None:
    """Return the syntax tree of the script; None where there is no source that can be read."""
    script = str(config["training_script"])
    path = _file_of_module(script) if config["module"] else Path(script)
    if path is None or path.suffix in (".zip", ".pyz", ".pyc"):
        return None
    try:
        return ast.parse((path / "__main__.py" if path.is_dir() else path).read_bytes())
    except (OSError, SyntaxError, ValueError):  # running it says what is wrong
        return None


def _file_of_module(name: str) -> Path | None:
    """Return the file that `python -m NAME` would run, without importing anything; None where it is not found."""
    import importlib.machinery
    import sys

    locations: list[str] | None = None
    full = ""
    # A package runs its sub-module of that name.
    for part in (*name.split("."), WHOLE_SCRIPT):
        full = f"{full}.{part}" if full else part
        spec = importlib.machinery.PathFinder.find_spec(full, ["", *sys.path] if locations is None else locations)
        if spec is None:
            # An editable installation may have a finder of its own.
            found = (finder.find_spec(full, locations) for finder in sys.meta_path if hasattr(finder, "find_spec"))
            spec = next((entry for entry in found if entry is not None), None)
        if spec is None:
            return None
        if spec.submodule_search_locations is None:
            return Path(spec.origin) if spec.origin else None
        locations = list(spec.submodule_search_locations)
    return None


def _outside_of_definitions(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield what runs when the script does; functions and classes themselves, but nothing inside them."""
    pending: list[ast.AST] = list(reversed(tree.body))
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, _Definition):
            pending.extend(reversed(list(ast.iter_child_nodes(node))))


def _definition(tree: ast.Module, function: str) -> ast.FunctionDef | None:
    nodes = (node for node in _outside_of_definitions(tree) if isinstance(node, ast.FunctionDef))
    return next((node for node in nodes if node.name == function), None)


def _has_guard(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.If) and any(_compares_name(part) for part in ast.walk(node.test))
        for node in _outside_of_definitions(tree)
    )


def _compares_name(node: ast.AST) -> bool:
    if not isinstance(node, ast.Compare):
        return False
    parts = list(ast.walk(node))
    asks = any(isinstance(part, ast.Name) and part.id == "__name__" for part in parts)
    return asks and any(isinstance(part, ast.Constant) and part.value == WHOLE_SCRIPT for part in parts)


def _may_bind(tree: ast.Module, name: str) -> bool:
    """Say whether the script has something of this name that can be called: its own, assigned or imported."""
    for node in _outside_of_definitions(tree):
        match node:
            case ast.FunctionDef(name=bound) | ast.ClassDef(name=bound) | ast.Name(id=bound, ctx=ast.Store()):
                names = {bound}
            case ast.alias(name=original, asname=other):
                names = {other or original.partition(".")[0]}
            case _:
                continue
        if not names.isdisjoint({name, "*"}):
            return True
    return False
