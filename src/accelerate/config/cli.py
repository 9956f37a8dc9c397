"""The command line of a launch, made from the declarations of its options."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from accelerate.config.sections.registry import LaunchOption, options


class RecordValue(argparse.Action):
    """Store a value and record that it was given, in `namespace.nondefault`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store and record."""
        value = self.value(namespace, values, option_string)
        setattr(namespace, self.dest, value)
        # New ones each time: those of another parse must not grow.
        namespace.nondefault = {*getattr(namespace, "nondefault", ()), self.dest}
        written = {**getattr(namespace, "written", {})}
        written[self.dest] = {**written.get(self.dest, {}), (option_string or "").lstrip("-").replace("-", "_"): value}
        namespace.written = written

    def value(self, namespace: argparse.Namespace, values: Any, option_string: str | None) -> Any:
        """Return what to store."""
        return values


class _RecordSwitch(RecordValue):
    """Turn a switch on, or off by the flag that says so."""

    def __init__(self, *, off: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(nargs=0, **kwargs)
        self.off = frozenset(off)

    def value(self, namespace: argparse.Namespace, values: Any, option_string: str | None) -> bool:
        return option_string not in self.off


class _RecordList(RecordValue):
    """Collect the values of a flag that is repeated."""

    def value(self, namespace: argparse.Namespace, values: Any, option_string: str | None) -> list[Any]:
        return [*(getattr(namespace, self.dest) or ()), values]


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every launch option to a parser, in groups; each flag may be written with `_` or `-`.

    Values that are given explicitly are named in `nondefault` of the parsed namespace; `written` has, for each of them, the
    value under each name of its flag.
    """
    groups: dict[str, Any] = {"options": parser}
    for option in options().values():
        if option.knob.shape in ("none", "place", "rest"):
            continue
        title = option.section.title
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add(groups[title], option)
    for name in ("training_script", "training_script_args"):
        option = options()[name]
        rest: dict[str, Any] = {"nargs": argparse.REMAINDER} if option.knob.shape == "rest" else {}
        parser.add_argument(name, action=RecordValue, help=option.knob.help, **rest)


def spellings(flag: str) -> list[str]:
    """Return a long flag with `_` and with `-`: `--num_processes` and `--num-processes`."""
    return list(dict.fromkeys([flag, "--" + flag[2:].replace("_", "-")]))


def _add(group: Any, option: LaunchOption) -> None:
    declared = option.knob
    shown = [name for name in (declared.short, option.flag) if name]
    text: dict[str, Any] = {"help": _help(option), "default": option.default, "dest": option.name}
    if declared.shape == "switch":
        off = [f"--{declared.negative}"] if declared.negative else []
        shown += off
        text |= {"action": _RecordSwitch, "off": [name for flag in off for name in spellings(flag)]}
    else:
        text["metavar"] = "{" + ",".join(map(str, declared.choices)) + "}" if declared.choices else option.name.upper()
        text |= {"action": RecordValue, "type": _reader(option)}
    if declared.shape == "repeat":
        text |= {"action": _RecordList, "type": str}
    flags = [*shown, *(f"--{name}" for name in declared.also)]
    names = dict.fromkeys(name for flag in flags for name in (spellings(flag) if flag.startswith("--") else [flag]))
    action = group.add_argument(*names, **text)
    # Both spellings are taken by now; help and messages show one.
    action.option_strings = shown


def _help(option: LaunchOption) -> str:
    also = ", ".join(f"--{name}" for name in option.knob.also)
    return (option.knob.help + (f" (torchrun: {also})" if also else "")).replace("%", "%%")


def _reader(option: LaunchOption) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        declared = option.knob
        try:
            value = declared.codec.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(_refusal(option, text)) from error
        if declared.choices and value not in declared.choices:
            raise argparse.ArgumentTypeError(_refusal(option, text))
        return value

    return read


def _refusal(option: LaunchOption, text: str) -> str:
    # Only a refusal needs what reads files.
    from accelerate.config.files import nearest

    choices = [str(choice) for choice in option.knob.choices]
    meaning = f"one of {', '.join(choices)}" if choices else option.knob.codec.meaning
    hint = nearest(text, choices).strip()
    return f"{text!r} is not {meaning}" + (f" ({hint})" if hint else "")
