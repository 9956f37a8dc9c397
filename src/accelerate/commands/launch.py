"""`accelerate launch`: read the options, resolve them, and carry out or explain the plan."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from accelerate._base.errors import ConfigurationError
from accelerate.commands.help import MORE, CustomHelpFormatter, clean_option, options_to_group
from accelerate.config import env
from accelerate.config.cli import add_launch_arguments
from accelerate.config.resolve import resolve
from accelerate.config.run_config import RunConfig
from accelerate.devices.machine import detect
from accelerate.launch import deepspeed, elastic, simple, tpu
from accelerate.launch.command import check_script
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.registry import choose, make_plan
from accelerate.launch.run import run
from accelerate.launch.site import here

__all__ = [
    "CustomHelpFormatter",
    "clean_option",
    "deepspeed_launcher",
    "launch_command",
    "launch_command_parser",
    "main",
    "multi_gpu_launcher",
    "options_to_group",
    "sagemaker_launcher",
    "simple_launcher",
    "tpu_launcher",
    "tpu_pod_launcher",
]


class LaunchParser(argparse.ArgumentParser):
    """A parser that hands the script's arguments on word for word and names the option a misspelt one is near to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["allow_abbrev"] = False
        super().__init__(*args, **kwargs)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse up to the script; what follows it is the script's own, also a `--` or an option of this parser."""
        words = list(sys.argv[1:] if args is None else args)
        end = self._place_of_script(words)
        options, unknown = super().parse_known_args(words if end is None else words[: end + 1], namespace)
        if end is not None:
            options.training_script_args = words[end + 1 :]
        options.typed_arguments = tuple(words)
        return options, unknown

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse, and end with one line for an option that does not exist."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._misspelt(unknown[0]))
        return options

    def error(self, message: str) -> NoReturn:
        """End with code 2 and one line."""
        if "training_script" in message:
            message = f"no script was given, so there is nothing to run. Write `{self.prog} [options] script.py`"
        end = "" if message.endswith("?") else "."
        self.exit(2, f"{self.prog}: error: {message}{end} `{self.prog} --help` lists the options.\n")

    def _place_of_script(self, words: list[str]) -> int | None:
        """Return where the script stands, None if there is none or its place is for argparse to find."""
        place = 0
        while place < len(words):
            word = words[place]
            if word == "--":
                return place + 1 if place + 1 < len(words) else None
            if not word.startswith("-") or word == "-":
                return place
            option, equals, _ = word.partition("=")
            if option not in self._option_string_actions:
                # Its value, if it has one, cannot be told from the script: stop here and let it be named.
                return None
            values = self._option_string_actions[option].nargs
            if isinstance(values, str):
                return None
            place += 1 + (0 if equals else 1 if values is None else values)
        return None

    def _misspelt(self, word: str) -> str:
        import difflib

        option = word.split("=", maxsplit=1)[0]
        near = difflib.get_close_matches(option.replace("-", "_"), self._underscored(), n=1)
        hint = f": did you mean {self._underscored()[near[0]]}?" if near else ""
        return f"{option} is not an option{hint or '; the options of a script come after it'}"

    def _underscored(self) -> dict[str, str]:
        return {option.replace("-", "_"): option for option in reversed(self._option_string_actions)}


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Make the parser of `accelerate launch`."""
    description = "Start a script on one process or many. Options of the launcher come before the script."
    parser: argparse.ArgumentParser
    texts: dict[str, Any] = {"description": description, "epilog": MORE, "formatter_class": CustomHelpFormatter}
    texts["usage"] = "%(prog)s [options] script.py [arguments of the script]"
    if subparsers is None:
        parser = LaunchParser("accelerate launch", **texts)
    else:
        parser = subparsers.add_parser("launch", allow_abbrev=False, **texts)
        parser.set_defaults(func=launch_command)
    add_launch_arguments(parser)
    _add_explain(parser)
    return parser


def _add_explain(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Explaining", "Show what would be started, and start nothing.")
    group.add_argument(
        "--explain",
        "--dry_run",
        "--dry-run",
        action="store_true",
        help="Print each value with its origin, the command and its environment, and end.",
    )
    group.add_argument(
        "--verbose",
        action="store_true",
        help="With --explain also the values that are defaults; with --help every group of options.",
    )


def launch_command(args: argparse.Namespace) -> None:
    """Start what parsed options ask for and wait for it; a run that fails ends this program with its exit code.

    Raises:
        ConfigurationError: If the options cannot work, alone or together.
    """
    _launch(args, in_place=False)


def launch_in_place(args: argparse.Namespace) -> None:
    """Start it, a single process in the place of this one."""
    _launch(args, in_place=True)


def simple_launcher(args: argparse.Namespace) -> None:
    """Start one process."""
    _start_by(simple, args)


def multi_gpu_launcher(args: argparse.Namespace) -> None:
    """Start this machine's processes under torch's elastic agent."""
    _start_by(elastic, args)


def deepspeed_launcher(args: argparse.Namespace) -> None:
    """Start by DeepSpeed's launcher, or under torch's agent where that does the same."""
    accepted = deepspeed.accepts(_resolved(args), here()).value
    _start_by(deepspeed if accepted else elastic, args)


def tpu_launcher(args: argparse.Namespace) -> None:
    """Start a training function on the cores of this TPU machine."""
    args.tpu_cluster = False
    _start_by(tpu, args)


def tpu_pod_launcher(args: argparse.Namespace) -> None:
    """Start the script on every machine of a TPU pod."""
    args.tpu_cluster = True
    _start_by(tpu, args)


def sagemaker_launcher(sagemaker_config: Any, args: argparse.Namespace) -> None:
    """Refuse: jobs of Amazon SageMaker are started with its own package.

    Raises:
        ConfigurationError: Always.
    """
    raise _no_sagemaker(type(sagemaker_config).__name__)


def _resolved(args: argparse.Namespace) -> RunConfig:
    return resolve(args, detect(env.items()))


def _start_by(launcher: ModuleType, args: argparse.Namespace) -> None:
    config, site = _resolved(args), here()
    check_script(config, site)
    plan: LaunchPlan = launcher.plan(config, site)
    code = run(plan)
    if code:
        sys.exit(code)


def _launch(args: argparse.Namespace, *, in_place: bool) -> None:
    config = _resolved(args)
    _refuse_sagemaker(config)
    site = here(tuple(getattr(args, "typed_arguments", ())))
    plan = make_plan(config, site)
    if getattr(args, "explain", False):
        from accelerate.commands.explain import explain

        explain(config, plan, choose(config, site).reason, verbose=getattr(args, "verbose", False))
        return
    for note in (*config.notes, *plan.notes):
        sys.stderr.write(f"accelerate launch: {note}\n")
    code = run(plan, in_place=in_place)
    if code:
        sys.exit(code)


def _refuse_sagemaker(config: RunConfig) -> None:
    if config.file is not None and config.file.sagemaker is not None:
        raise _no_sagemaker(str(config.file.path))


def _no_sagemaker(place: str) -> ConfigurationError:
    return ConfigurationError(
        f"{place} describes a job of Amazon SageMaker (compute_environment), which this command does not start. "
        "Start it with the sagemaker package, or name another file with --config_file."
    )


def main() -> None:
    """Run the program `accelerate-launch`."""
    from accelerate.commands.accelerate_cli import find, leave, run_command

    leave(lambda: run_command(find("launch"), sys.argv[1:]))


if __name__ == "__main__":
    main()
