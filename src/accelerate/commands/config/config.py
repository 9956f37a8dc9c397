"""`accelerate config`: ask, show the answers, and write them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from accelerate._base.enums import ComputeEnvironment
from accelerate._base.errors import AccelerateError
from accelerate.config.cli import spellings
from accelerate.config.cluster_config import ClusterConfig, SageMakerConfig
from accelerate.config.files import current_default_file, place_to_write

description = "Make the file of options that `accelerate launch` takes its defaults from."

_PLACES = (
    (ComputeEnvironment.LOCAL_MACHINE, "this machine, or a cluster"),
    (ComputeEnvironment.AMAZON_SAGEMAKER, "Amazon SageMaker"),
)
_WRITE, _CANCEL = "write", "cancel"


def get_user_input() -> ClusterConfig | SageMakerConfig:
    """Ask where the run is, then the questions of that place, and return the content of the file.

    Raises:
        UsageError: Input or output is no terminal.
    """
    return _Conversation().config()


def config_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Make the parser of `accelerate config`."""
    words: dict[str, Any] = {"description": description}
    parser: argparse.ArgumentParser = (
        argparse.ArgumentParser("accelerate config", **words)
        if subparsers is None
        else subparsers.add_parser("config", help=description, **words)
    )
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
    conversation = _Conversation()
    try:
        config = conversation.config()
        while not _confirmed(config, path, conversation):
            config = conversation.config()
    except KeyboardInterrupt:
        print("Nothing was written.")
        raise
    if path.suffix == ".json":
        config.to_json_file(path)
    else:
        config.to_yaml_file(path)
    print(f"Written to {path}")


def main() -> None:
    """Run `accelerate config` without its sub-commands."""
    args = config_command_parser().parse_args()
    try:
        config_command(args)
    except AccelerateError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


class _Conversation:
    """The place of the run, and the questions that belong to it."""

    def __init__(self) -> None:
        from accelerate.commands.config.terminal import KEYS, check_terminal
        from accelerate.config import env
        from accelerate.devices.machine import detect

        check_terminal()
        print(f"This machine has {detect(env.items())}.\n{KEYS}\n")
        self._place: ComputeEnvironment | None = None
        self._interview: Any = None

    def config(self) -> ClusterConfig | SageMakerConfig:
        """Ask what is not answered yet."""
        from accelerate.commands.config import cluster, sagemaker
        from accelerate.commands.config.terminal import BACK, choose, hold
        from accelerate.config.answers import cluster_config

        while self._interview is None or self._interview.current() is not None:
            if self._interview is None:
                place = choose("Where the run is", _PLACES, self._place or _PLACES[0][0])
                if place is BACK:
                    continue
                on_sagemaker = place is ComputeEnvironment.AMAZON_SAGEMAKER
                self._place = place
                self._interview = sagemaker.sagemaker_interview() if on_sagemaker else cluster.cluster_interview()
            if not hold(self._interview):
                self._interview = None
        on_sagemaker = self._place is ComputeEnvironment.AMAZON_SAGEMAKER
        make: Any = sagemaker.sagemaker_config if on_sagemaker else cluster_config
        made: ClusterConfig | SageMakerConfig = make(self._interview.answers)
        return made

    def back(self) -> None:
        """Take the last answer back."""
        self._interview.back()


def _confirmed(config: ClusterConfig | SageMakerConfig, path: Path, conversation: _Conversation) -> bool:
    """Show the file and let the user decide; False goes back to the last question."""
    from accelerate.commands.config.summary import show_summary
    from accelerate.commands.config.terminal import BACK, choose

    show_summary(config, path)
    verb = "Replace the file" if path.exists() else "Write the file"
    decision = choose(verb, ((_WRITE, "yes"), (BACK, "go back to the last question"), (_CANCEL, "no, leave")), _WRITE)
    if decision is BACK:
        conversation.back()
        return False
    if decision == _CANCEL:
        print("Nothing was written.")
        sys.exit(1)
    return True
