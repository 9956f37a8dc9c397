"""The text of a file of options, YAML or JSON, as a dictionary: nothing in it runs, repeats itself or nests without end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate._base.errors import ConfigurationError
from accelerate._base.untrusted import MOST_LEVELS, check_nesting, check_regular, first_line, parse_json, shown

# A file of options has some hundred bytes; a long one would take minutes to parse.
_MOST_CHARACTERS = 200_000
# With what its aliases repeat.
_MOST_NODES = 100_000
_OPEN_FILES = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")


class ConfigFileNotFoundError(ConfigurationError, FileNotFoundError):
    """Report a file of options that is not there."""


def load_text(path: str | Path) -> dict[str, Any]:
    """Read a YAML or JSON file into a dictionary.

    Raises:
        ConfigurationError: There is no such file, it does not parse, holds no keys, or one of them with two values.
    """
    try:
        # A pipe that a shell opened, as in `--config_file <(envsubst < run.yaml)`, has a writer; any other is waited for.
        if not str(path).startswith(_OPEN_FILES):
            check_regular(Path(path).expanduser())
        with Path(path).expanduser().open(encoding="utf-8") as file:
            text = file.read(_MOST_CHARACTERS + 1)
    except FileNotFoundError as error:
        raise ConfigFileNotFoundError(
            f"The configuration file {str(path)!r} does not exist. Write the path of one that does, or make it with "
            "`accelerate config`."
        ) from error
    except ConfigurationError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # the last two for what is no text, and for a home of nobody
        raise ConfigurationError(
            f"The configuration file {str(path)!r} cannot be read: {error}. Write the path of a YAML or JSON file."
        ) from error
    if len(text) > _MOST_CHARACTERS:
        raise ConfigurationError(
            f"The configuration file {str(path)!r} has more than {_MOST_CHARACTERS} characters, which options never need. "
            "Write the path of a YAML or JSON file of options."
        )
    data = _parse_json(path, text) if str(path).endswith(".json") else _parse_yaml(path, text)
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigurationError(
            f"The configuration file {str(path)!r} holds {type(data).__name__} instead of keys with values. "
            "Write lines such as `num_processes: 2`, or make the file with `accelerate config`."
        )
    return data


def _parse_json(path: str | Path, text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found and not _is_same(found[key], value):
                raise _repeated(path, key, "")
            found[key] = value
        return found

    try:
        data = parse_json(text, unique)
        check_nesting(data)
    except ConfigurationError:
        raise
    except ValueError as error:
        line = f", line {error.lineno}," if hasattr(error, "lineno") else ""
        problem = getattr(error, "msg", None) or first_line(error)
        raise ConfigurationError(
            f"The configuration file {str(path)!r}{line} is not JSON: {problem}. Correct that line."
        ) from error
    return data


def _yaml_loader(path: str | Path) -> Any:
    """Return the class that makes values of a YAML text; PyYAML is loaded here, because JSON needs none of it."""
    import yaml

    def plain(node: yaml.Node) -> Any:
        """Return a node as nested lists of tags and texts, which can be compared."""
        parts = node.value if isinstance(node.value, list) else ()
        inside = [part for entry in parts for part in (entry if isinstance(entry, tuple) else (entry,))]
        return [node.tag, [plain(part) for part in inside] if inside else node.value]

    class UniqueKeyLoader(yaml.SafeLoader):
        """Refuse a dictionary that has a key with two values, of which YAML keeps the last, and what cannot be read."""

        levels = 0

        def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
            # Not left to the limit of recursion: to come there takes a time that grows with the square of the depth.
            self.levels += 1
            if self.levels > MOST_LEVELS:
                raise ValueError("it is nested too deeply")
            node = super().compose_node(parent, index)
            self.levels -= 1
            return node

        def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except ConfigurationError:
                raise
            # Of a text with a tag that does not fit, such as `!!int x`, PyYAML makes errors of Python's own.
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                problem = f"{shown(node.value)} cannot be read as {node.tag.rpartition(':')[2]}"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            lines: dict[tuple[str, str], int] = {}
            values: dict[tuple[str, str], Any] = {}
            for key, value in node.value:
                # A merge (`<<: *defaults`) is an order, not a key.
                if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                    continue
                name, line = (key.tag, key.value), key.start_mark.line + 1
                if name in lines and not _is_same(plain(values[name]), plain(value)):
                    raise _repeated(path, key.value, f", on lines {lines[name]} and {line}")
                lines[name], values[name] = line, value
            return super().construct_mapping(node, deep)

    return UniqueKeyLoader


def _parse_yaml(path: str | Path, text: str) -> Any:
    import yaml

    try:
        # No more than `yaml.load` does: what the text is made of is looked at before values are made of it.
        loader = _yaml_loader(path)(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count_nodes(node, {})
        data = loader.construct_document(node)
        check_nesting(data)
    except ConfigurationError:
        raise
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}," if mark is not None else ""
        problem = getattr(error, "problem", None) or first_line(error)
        raise ConfigurationError(
            f"The configuration file {str(path)!r}{line} is not YAML: {problem}. Correct that line."
        ) from error
    return data


def _is_same(first: Any, second: Any) -> bool:
    # True and 1 are equal in Python, but are different values of an option.
    return repr(first) == repr(second)


def _count_nodes(node: Any, known: dict[int, int]) -> int:
    """Return how many values a text stands for, an alias for as many as what it repeats.

    Args:
        known: Gets the numbers by node: 0 while a node is being counted.

    Raises:
        ValueError: If they are too many to be options, or without end.
    """
    if id(node) not in known:
        known[id(node)] = 0
        inside = node.value if isinstance(node.value, list) else []
        parts = [part for entry in inside for part in (entry if isinstance(entry, tuple) else (entry,))]
        known[id(node)] = 1 + sum(_count_nodes(part, known) for part in parts)
    count = known[id(node)]
    if not 0 < count <= _MOST_NODES:
        raise ValueError("its aliases repeat too much")
    return count


def _repeated(path: str | Path, key: str, lines: str) -> ConfigurationError:
    return ConfigurationError(
        f"The configuration file {str(path)!r} has the key {key!r} twice{lines}, with two values. Remove one of them."
    )
