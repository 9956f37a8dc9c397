"""`accelerate completion`: print a script that completes the commands and options in a shell."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from accelerate.commands.accelerate_cli import SubCommand, present

# What a program of its own starts.
_PROGRAMS = ("accelerate-launch", "accelerate-config", "accelerate-estimate-memory", "accelerate-merge-weights")


@dataclass(frozen=True)
class Option:
    """An option as a shell needs to know it.

    Args:
        takes_value: Whether the next word belongs to it.
        values: What that word may be; empty where it is free.
    """

    names: tuple[str, ...]
    help: str
    takes_value: bool
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """A command, its options, and the words that may follow it."""

    name: str
    help: str
    options: tuple[Option, ...]
    words: tuple[str, ...] = ()


def completion_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Make the parser of `accelerate completion`.

    Args:
        subparsers: What `add_subparsers` of another parser returned, to add this one to; None makes one by itself.
    """
    words: dict[str, Any] = {
        "description": "Print a script that completes `accelerate` in a shell.",
        "epilog": "In bash: source <(accelerate completion bash). In zsh: source <(accelerate completion zsh).",
    }
    parser: argparse.ArgumentParser
    if subparsers is None:
        parser = argparse.ArgumentParser("accelerate completion", **words)
    else:
        parser = subparsers.add_parser("completion", **words)
    parser.set_defaults(func=completion_command)
    parser.add_argument("shell", choices=tuple(_WRITERS), help="The shell that the script is for.")
    return parser


def completion_command(args: argparse.Namespace) -> None:
    """Print the script of a shell."""
    sys.stdout.write(_WRITERS[args.shell](list(commands())))


def commands() -> Iterator[Command]:
    """Yield every command, then every sub-command as `config default`, from their parsers."""
    for entry in present():
        parser = _parser(entry)
        yield _command(entry.name, entry.help, parser)
        for name, below in _below(parser).items():
            yield _command(f"{entry.name} {name}", below.description or "", below)


def _parser(entry: SubCommand) -> argparse.ArgumentParser:
    module = importlib.import_module(f"accelerate.commands.{entry.module}")
    parser: argparse.ArgumentParser = getattr(module, entry.parser)()
    return parser


def _below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
    return found


def _command(name: str, text: str, parser: argparse.ArgumentParser) -> Command:
    options = tuple(_option(action) for action in parser._actions if action.option_strings)
    words = [word for action in parser._actions if not action.option_strings for word in action.choices or ()]
    if name == "test":
        # What it does not know itself goes to the launcher.
        own = {option for entry in options for option in entry.names}
        launch = _command("launch", "", _parser(next(entry for entry in present() if entry.name == "launch")))
        options += tuple(option for option in launch.options if not own.intersection(option.names))
    return Command(name, text, options, tuple(map(str, words)))


def _option(action: argparse.Action) -> Option:
    # Of two spellings of one flag, the one with underscores, which the help shows too.
    names = [name for name in action.option_strings if "-" not in name.lstrip("-") or len(action.option_strings) == 1]
    values = tuple(str(choice) for choice in action.choices or ())
    shown = action.metavar if isinstance(action.metavar, str) else ""
    if not values and shown.startswith("{"):
        values = tuple(shown.strip("{}").split(","))
    text = " ".join((action.help or "").replace("%%", "%").split())
    return Option(tuple(names or action.option_strings), text, action.nargs != 0, values)


# --- bash -------------------------------------------------------------------------------------------------------------

_BASH = """\
# Completion of `accelerate` for bash; written by `accelerate completion bash`.

_accelerate_options() {
    case "$1" in
@OPTIONS@
    esac
}

# What may follow an option: nothing (it is a switch), any word, or one of a list.
_accelerate_values() {
    case "$1 $2" in
@VALUES@
        *) printf '%s' '-' ;;
    esac
}

_accelerate_words() {
    case "$1" in
@WORDS@
    esac
}

_accelerate() {
    local current="${COMP_WORDS[COMP_CWORD]}" program="${COMP_WORDS[0]##*/}" command="" place=1 found="" word values
    COMPREPLY=()
    if [[ "$program" == accelerate-* ]]; then
        command="${program#accelerate-}"
    elif (( COMP_CWORD == 1 )); then
        COMPREPLY=( $(compgen -W "@COMMANDS@ --help --version" -- "$current") )
        return
    else
        command="${COMP_WORDS[1]//_/-}"
        place=2
    fi
    # Walk to the word at the cursor: a value belongs to its option, the first other word is the script.
    while (( place < COMP_CWORD )); do
        word="${COMP_WORDS[place]}"
        values="$(_accelerate_values "$command" "$word")"
        if [[ "$word" == -* ]]; then
            if [[ "$values" != '-' ]]; then
                # Bash gives `--option=value` as three words.
                [[ "${COMP_WORDS[place + 1]}" != '=' ]] || (( place += 1 ))
                (( place == COMP_CWORD )) && current="" || (( place += 1 ))
                if (( place == COMP_CWORD )); then
                    [[ "$values" == '*' ]] || COMPREPLY=( $(compgen -W "$values" -- "$current") )
                    return
                fi
            fi
        elif [[ " $(_accelerate_words "$command") " == *" $word "* ]] && [[ -n "$(_accelerate_options "$command $word")" ]]; then
            command="$command $word"
        elif [[ "$command" == launch ]]; then
            return
        fi
        (( place += 1 ))
    done
    if [[ "$current" == -* ]]; then
        COMPREPLY=( $(compgen -W "$(_accelerate_options "$command")" -- "$current") )
        # Options may be written with dashes too; the answer has underscores.
        [[ -n "${COMPREPLY[*]}" ]] || COMPREPLY=( $(compgen -W "$(_accelerate_options "$command")" -- "--$(printf '%s' "${current#--}" | tr - _)") )
    else
        found="$(_accelerate_words "$command")"
        [[ -z "$found" ]] || COMPREPLY=( $(compgen -W "$found" -- "$current") )
    fi
}

# Where there is no answer, files are offered: scripts, folders, values of options.
complete -o default -o bashdefault -F _accelerate accelerate @PROGRAMS@
"""


def _bash(known: list[Command]) -> str:
    options = [
        _case(entry.name, " ".join(name for option in entry.options for name in option.names)) for entry in known
    ]
    values = []
    for entry in known:
        for option in entry.options:
            if option.takes_value:
                patterns = "|".join(f"{_quoted(f'{entry.name} {name}')}" for name in _spellings(option))
                values.append(f"        {patterns}) printf '%s' {_quoted(' '.join(option.values) or '*')} ;;")
    words = [_case(entry.name, " ".join(entry.words)) for entry in known if entry.words]
    top = " ".join(entry.name for entry in known if " " not in entry.name)
    parts = {"OPTIONS": options, "VALUES": values, "WORDS": words, "COMMANDS": [top], "PROGRAMS": _programs(known)}
    text = _BASH
    for name, lines in parts.items():
        text = text.replace(f"@{name}@", "\n".join(lines))
    return text


def _case(name: str, text: str) -> str:
    return f"        {_quoted(name)}) printf '%s' {_quoted(text)} ;;"


def _spellings(option: Option) -> list[str]:
    dashed = ("--" + name[2:].replace("_", "-") for name in option.names if name.startswith("--"))
    return list(dict.fromkeys([*option.names, *dashed]))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _programs(known: list[Command]) -> list[str]:
    names = {f"accelerate-{entry.name}" for entry in known}
    return [" ".join(name for name in _PROGRAMS if name in names)]


# --- zsh --------------------------------------------------------------------------------------------------------------

_ZSH = """\
#compdef accelerate @PROGRAMS@
# Completion of `accelerate` for zsh; written by `accelerate completion zsh`.

_accelerate_command() {
    local name="$1"
    case "$name" in
@CASES@
        *) _files ;;
    esac
}

_accelerate() {
    local -a known
    if [[ "${service:-accelerate}" == accelerate-* ]]; then
        _accelerate_command "${service#accelerate-}"
        return
    fi
    if (( CURRENT == 2 )); then
        known=(
@COMMANDS@
        )
        _describe -t commands 'command' known
        return
    fi
    local name="${words[2]//_/-}"
    shift words
    (( CURRENT -= 1 ))
    case "$name ${words[2]}" in
@BELOW@
    esac
    _accelerate_command "$name"
}

if (( ! $+functions[compdef] )); then
    autoload -Uz compinit && compinit
fi
if [[ "${funcstack[1]}" == _accelerate ]]; then
    _accelerate "$@"
else
    compdef _accelerate accelerate @PROGRAMS@
fi
"""


def _zsh(known: list[Command]) -> str:
    cases = [f"        {_quoted(entry.name)}) _arguments {' '.join(_zsh_arguments(entry))} ;;" for entry in known]
    below = [
        f"        {_quoted(entry.name)}) (( CURRENT > 2 )) && {{ shift words; (( CURRENT -= 1 )); "
        f"_accelerate_command {_quoted(entry.name)}; return; }} ;;"
        for entry in known
        if " " in entry.name
    ]
    top = [f"            {_quoted(f'{entry.name}:{entry.help}')}" for entry in known if " " not in entry.name]
    parts = {"CASES": cases, "COMMANDS": top, "BELOW": below, "PROGRAMS": _programs(known)}
    text = _ZSH
    for name, lines in parts.items():
        text = text.replace(f"@{name}@", "\n".join(lines))
    return text


def _zsh_arguments(entry: Command) -> Iterator[str]:
    for option in entry.options:
        text = option.help.replace("\\", "").replace("[", "(").replace("]", ")").replace(":", "\\:")
        after = f":value:({' '.join(option.values)})" if option.values else ":value:_files"
        for name in option.names:
            yield _quoted(f"{name}[{text}]{after if option.takes_value else ''}")
    words = f"({' '.join(entry.words)})" if entry.words else "_files"
    # After the script, everything is the script's own.
    yield from ("'1:script:_files'", "'*::argument:_files'") if entry.name == "launch" else (f"'*:word:{words}'",)


_WRITERS = {"bash": _bash, "zsh": _zsh}


def main() -> None:
    """Print it, as a program of its own."""
    from accelerate.commands.accelerate_cli import find, run_command

    sys.exit(run_command(find("completion"), sys.argv[1:]))


if __name__ == "__main__":
    main()
