"""`accelerate completion`: print a script that completes the commands and options in a shell."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from accelerate.commands import command_parser, run_as_program
from accelerate.commands.accelerate_cli import COMMANDS

# The sub-commands that are programs of their own, such as `accelerate-launch`.
_PROGRAMS = ("launch", "config", "estimate-memory", "merge-weights")
# After what shtab writes: both read `accelerate-launch` as `accelerate launch`. Bash gives `--option=value` as three
# words; options may be written with dashes and are offered with underscores; what follows a script is its own.
_WRAPPERS = {
    "bash": """
_accelerate() {
    local word nargs value_next="" script="" program="${COMP_WORDS[0]##*/}"
    local -a words=(accelerate)
    [[ "$program" == accelerate ]] || words+=("${program#accelerate-}")
    for word in "${COMP_WORDS[@]:1:COMP_CWORD}"; do
        if [[ -n "$script" ]]; then
            COMPREPLY=()
            return
        fi
        case "$word" in
            =) continue ;;
            --*) word="${word#--}"; word="--${word//-/_}" ;;
            *) (( ${#words[@]} > 1 )) || word="${word//_/-}" ;;
        esac
        words+=("$word")
        nargs="_shtab_accelerate_launch_${word//[^[:alnum:]]/_}_nargs"
        if [[ "${words[1]}" != launch || ${#words[@]} -eq 2 || -n "$value_next" ]]; then
            value_next=""
        elif [[ "$word" == -* ]]; then
            [[ "${!nargs-1}" == 0 ]] || value_next=yes
        else
            script=yes
        fi
    done
    [[ "${COMP_WORDS[COMP_CWORD]}" != = ]] || words+=("")
    local -a COMP_WORDS=("${words[@]}")
    local COMP_CWORD=$(( ${#words[@]} - 1 ))
    _shtab_accelerate
}
complete -o bashdefault -o default -F _accelerate accelerate @PROGRAMS@
""",
    "zsh": """
_accelerate_program() {
    words=(accelerate "${service#accelerate-}" "${(@)words[2,-1]}")
    (( CURRENT += 1 ))
    _shtab_accelerate
}
compdef _accelerate_program @PROGRAMS@
""",
}


def completion_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Make the parser of `accelerate completion`."""
    parser = command_parser(
        "completion",
        subparsers,
        description="Print a script that completes `accelerate` in a shell.",
        epilog='In bash: eval "$(accelerate completion bash)". In zsh: eval "$(accelerate completion zsh)".',
    )
    parser.set_defaults(func=completion_command)
    parser.add_argument("shell", choices=tuple(_WRAPPERS), help="The shell that the script is for.")
    return parser


def completion_command(args: argparse.Namespace) -> None:
    """Print the script of a shell."""
    import shtab

    programs = " ".join(f"accelerate-{name}" for name in _PROGRAMS)
    wrapper = _WRAPPERS[args.shell].replace("@PROGRAMS@", programs)
    sys.stdout.write(f"{shtab.complete(_whole_parser(), args.shell)}\n{wrapper}")


def _whole_parser() -> argparse.ArgumentParser:
    """Return the parser of `accelerate` with those of all sub-commands below, as shtab reads them."""
    whole = argparse.ArgumentParser("accelerate")
    whole.add_argument("--version", action="store_true", help="Show the version.")
    subparsers = whole.add_subparsers()
    for command in COMMANDS:
        module = importlib.import_module(f"accelerate.commands.{command.module}")
        getattr(module, command.parser)(_WithHelp(subparsers, command.help))
    test, launch = subparsers.choices["test"], subparsers.choices["launch"]
    # What the test does not know itself goes to the launcher.
    for action in launch._get_optional_actions():
        if not test._option_string_actions.keys() & set(action.option_strings):
            test._add_action(action)
    _adapt(whole)
    return whole


class _WithHelp:
    """Add parsers with a line of help: shtab leaves out those without one."""

    def __init__(self, subparsers: Any, text: str) -> None:
        self._subparsers = subparsers
        self._text = text

    def add_parser(self, name: str, **texts: Any) -> Any:
        return self._subparsers.add_parser(name, **{"help": self._text, **texts})


def _adapt(parser: argparse.ArgumentParser) -> None:
    """Leave one spelling of each option, name the values that its help lists, and offer files for other values."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                _adapt(below)
            continue
        action.option_strings = [name for name in action.option_strings if "-" not in name[2:]] or action.option_strings
        if isinstance(action.metavar, str) and action.metavar.startswith("{"):
            action.choices = action.metavar.strip("{}").split(",")
        if action.nargs != 0 and not action.choices:
            vars(action)["complete"] = shtab.FILE


def main() -> None:
    """Print it, as a program of its own."""
    run_as_program("completion")


if __name__ == "__main__":
    main()
