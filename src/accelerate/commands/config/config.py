"""`accelerate config` and `accelerate config show`: ask for the options and write them, or show those in force."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate._base.enums import ComputeEnvironment
from accelerate._base.errors import ConfigurationError
from accelerate.commands import command_parser, run_as_program
from accelerate.commands.config.config_utils import (
    BACK,
    FILE_HELP,
    KEYS,
    add_subcommand,
    ask_all,
    check_terminal,
    choose,
)
from accelerate.config import env
from accelerate.config.cli import spellings
from accelerate.config.cluster_config import ClusterConfig, SageMakerConfig
from accelerate.config.files import current_default_file, place_to_write
from accelerate.devices.machine import detect

if TYPE_CHECKING:
    from accelerate.config.questions import Interview

description = "Make the file of options that `accelerate launch` takes its defaults from."
_SHOW = "Show the options that a launch without flags would use, and where each came from."

_PLACES = (
    (ComputeEnvironment.LOCAL_MACHINE, "this machine, or a cluster"),
    (ComputeEnvironment.AMAZON_SAGEMAKER, "Amazon SageMaker"),
)


def config_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Make the parser of `accelerate config`."""
    texts = {"description": description} if subparsers is None else {"description": description, "help": description}
    parser = command_parser("config", subparsers, **texts)
    parser.add_argument(
        *spellings("--config_file"),
        default=None,
        help="Where to write the answers; the default place is the cache folder of Hugging Face.",
    )
    parser.set_defaults(func=config_command)
    return parser


def config_command(args: argparse.Namespace) -> None:
    """Ask, show the answers, and write them once they are confirmed.

    Raises:
        UsageError: Input or output is no terminal.
        ConfigurationError: The file cannot be written where it was asked for.
        KeyboardInterrupt: The user has left; nothing is written.
        SystemExit: The user has cancelled; nothing is written.
    """
    path = place_to_write(args.config_file or current_default_file())
    questionnaire = _Questionnaire()
    try:
        config = questionnaire.ask()
        while not _confirm(config, path):
            config = questionnaire.ask(again=True)
    except KeyboardInterrupt:
        print("Nothing was written.")
        raise
    if path.suffix == ".json":
        config.to_json_file(path)
    else:
        config.to_yaml_file(path)
    print(f"Written to {path}")


def get_user_input() -> ClusterConfig | SageMakerConfig:
    """Ask where the run is, then the questions of that place, and return the content of the file.

    Raises:
        UsageError: Input or output is no terminal.
    """
    return _Questionnaire().ask()


class _Questionnaire:
    """The place of the run, and the questions that belong to it."""

    def __init__(self) -> None:
        check_terminal()
        print(f"This machine has {detect(env.items())}.\n{KEYS}\n")
        self._place = ComputeEnvironment.LOCAL_MACHINE
        self._interview: Interview | None = None

    def ask(self, *, again: bool = False) -> ClusterConfig | SageMakerConfig:
        """Ask what is not answered yet and return the content of the file; `again` takes the last answer back first."""
        from accelerate.commands.config.cluster import cluster_interview
        from accelerate.commands.config.sagemaker import sagemaker_config, sagemaker_interview
        from accelerate.config.questions import cluster_config

        if again and self._interview is not None:
            self._interview.back()
        while self._interview is None or self._interview.current() is not None:
            if self._interview is None:
                place = choose("Where the run is", _PLACES, self._place)
                if place is BACK:
                    continue
                self._place = place
                self._interview = sagemaker_interview() if self._is_sagemaker else cluster_interview()
            if not ask_all(self._interview):
                self._interview = None
        answers = self._interview.answers
        return sagemaker_config(answers) if self._is_sagemaker else cluster_config(answers)

    @property
    def _is_sagemaker(self) -> bool:
        return self._place is ComputeEnvironment.AMAZON_SAGEMAKER


def _confirm(config: ClusterConfig | SageMakerConfig, path: Path) -> bool:
    """Show the file and let the user decide; False goes back to the last question."""
    _print_summary(config, path)
    verb = "Replace the file" if path.exists() else "Write the file"
    choices = (("write", "yes"), (BACK, "go back to the last question"), ("cancel", "no, leave"))
    decision = choose(verb, choices, "write")
    if decision == "cancel":
        print("Nothing was written.")
        sys.exit(1)
    return decision is not BACK


def _print_summary(config: ClusterConfig | SageMakerConfig, path: Path) -> None:
    """Print what the file will hold, and what a launch on this machine would say against it."""
    from rich.table import Table
    from rich.text import Text

    from accelerate.commands.explain import wide_console

    console = wide_console()
    # Not as the title of the table, which would break a long path in the middle.
    console.print(Text(f"What {path} will hold:", style="italic"), soft_wrap=True)
    table = Table("key", "value")
    for key, value in _rows(config.to_dict()):
        table.add_row(Text(key), Text(value, overflow="fold"))
    console.print(table)
    for opening, text in _foretell(config):
        console.print(Text.assemble((f"A launch on this machine would {opening}: ", "bold yellow"), text))


def _rows(content: Mapping[str, Any], indent: str = "") -> Iterator[tuple[str, str]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield f"{indent}{key}", ""
            yield from _rows(value, indent + "  ")
        else:
            yield f"{indent}{key}", str(value)


def _foretell(config: ClusterConfig | SageMakerConfig) -> Iterator[tuple[str, str]]:
    """Yield what a launch would say about the answers: why it refuses them, else its notes."""
    import tempfile

    from accelerate.config.resolve import resolve

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answers.yaml"
        config.to_yaml_file(path)
        try:
            notes = resolve(argparse.Namespace(config_file=str(path)), detect(env.items())).notes
        except ConfigurationError as error:
            yield "refuse it", str(error).replace(f"{path}: ", "")
        else:
            yield from (("say", note.replace(f"{path}: ", "")) for note in notes)


def show_command_parser(parser: Any, parents: Any) -> argparse.ArgumentParser:
    """Add the parser of `accelerate config show`."""
    made = add_subcommand(parser, parents, "show", _SHOW, show_config_command)
    made.add_argument(*spellings("--config_file"), default=None, help=FILE_HELP)
    made.add_argument("--verbose", action="store_true", help="Show the values that are defaults as well.")
    return made


def show_config_command(args: argparse.Namespace) -> None:
    """Print every option with its origin.

    Raises:
        ConfigurationError: The file is missing or wrong; or a launch here would refuse what was printed.
    """
    from accelerate.commands.explain import table_of, wide_console
    from accelerate.config import conflicts
    from accelerate.config.resolve import merge

    variables = env.items()
    machine = detect(variables)
    config = merge(argparse.Namespace(config_file=args.config_file), machine, environ=variables)
    console = wide_console()
    console.print(f"machine: {machine}", soft_wrap=True)
    console.print(f"file: {config.file.path if config.file is not None else 'none'}", soft_wrap=True)
    console.print(table_of(config, "What a launch would use", verbose=args.verbose))
    if not args.verbose:
        console.print("Values that are defaults are left out; --verbose shows them.", style="dim")
    for note in config.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    conflicts.check(config, variables)


def main() -> None:
    """Run the program `accelerate-config`."""
    run_as_program("config")
