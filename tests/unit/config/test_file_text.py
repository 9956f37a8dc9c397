"""Texts that cannot be options: they repeat themselves, nest or go on without end, or have tags that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate._base.errors import ConfigurationError
from accelerate.config.file_text import load_text


def write(folder: Path, text: str, name: str = "config.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a [*a]", "is not YAML: its aliases repeat too much"),
        ("a: &a {*a : 1}", "is not YAML"),
        ("[" * 101, "is not YAML: it is nested too deeply"),
        ("a: !!int x", ", line 1, is not YAML: 'x' cannot be read as int. Correct that line"),
        ("a: 1\nb: !!int ''", ", line 2, is not YAML: '' cannot be read as int"),
        ("a: !!bool maybe", "'maybe' cannot be read as bool"),
        ("a: !!timestamp now", "'now' cannot be read as timestamp"),
        ("a: 2001-99-99", "'2001-99-99' cannot be read as timestamp"),
        (f"a: {'9' * 5000}", "cannot be read as int"),
        ("a: !!python/object/apply:os.system [x]", "could not determine a constructor for the tag"),
        ("a: " + "x" * 200_000, "has more than 200000 characters"),
    ],
)
def test_what_cannot_be_options_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message.replace("(", r"\(")):
        load_text(write(tmp_path, text))


@pytest.mark.parametrize("entry", ["[%s]", "{<<: [%s]}"])
def test_aliases_may_repeat_but_not_multiply(entry: str, tmp_path: Path) -> None:
    def levels(depth: int) -> str:
        lines = ["a0: &a0 {x: 1}"]
        lines += [f"a{i}: &a{i} {entry % ', '.join([f'*a{i - 1}'] * 9)}" for i in range(1, depth)]
        return "\n".join(lines)

    assert load_text(write(tmp_path, levels(3)))["a0"] == {"x": 1}
    with pytest.raises(ConfigurationError, match="its aliases repeat too much"):
        load_text(write(tmp_path, levels(12)))


def test_json_has_the_same_limits(tmp_path: Path) -> None:
    nested = '{"a": ' * 101 + "1" + "}" * 101
    for text, message in ((nested, "it is nested too deeply"), ("9" * 5000, "a number in it has too many digits")):
        with pytest.raises(ConfigurationError, match=f"is not JSON: {message}"):
            load_text(write(tmp_path, text, "config.json"))


def test_a_path_that_cannot_be_is_told() -> None:
    for path in ("~nobody-of-this-name/config.yaml", "a\0b.yaml"):
        with pytest.raises(ConfigurationError, match="cannot be read"):
            load_text(path)
