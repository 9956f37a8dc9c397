"""`accelerate launch`: read the options, resolve them, and carry out or explain the plan."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from accelerate import launch
from accelerate._base.lazy import attach_passing_names
from accelerate.commands import run_as_program
from accelerate.config import conflicts, env
from accelerate.config.cli import add_launch_arguments
from accelerate.config.resolve import resolve
from accelerate.devices.machine import detect
from accelerate.launch.host import Host
from accelerate.launch.plan import Launcher

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

attach_passing_names(__name__)

# --- the command line -------------------------------------------------------------------------------------------------

options_to_group = {
    "multi_gpu": "Distributed GPUs",
    "tpu": "TPU",
    "use_deepspeed": "DeepSpeed Arguments",
    "use_fsdp": "FSDP Arguments",
    "use_megatron_lm": "Megatron-LM Arguments",
    "fp8_backend": "FP8 Arguments",
    "mpirun_hostfile": "MPI Arguments",
    "use_parallelism_config": "ParallelismConfig Arguments",
    "num_machines": "Distributed GPUs",
    "num_processes": "Distributed GPUs",
    "nproc_per_node": "torchrun Arguments",
    "nnodes": "torchrun Arguments",
    "standalone": "torchrun Arguments",
}
_ALWAYS_SHOWN = (
    "positional arguments",
    "options",
    "Hardware Selection Arguments",
    "Resource Selection Arguments",
    "Training Paradigm Arguments",
    "Explaining",
)
_MORE = (
    "More options are shown by --help together with "
    + ", ".join(f"--{option}" for option in options_to_group if option not in ("num_machines", "nnodes", "standalone"))
    + ", or with --verbose."
)


def clean_option(option: str) -> str:
    """Return the name of an option without dashes and value, with underscores: `--use-fsdp=x` is `use_fsdp`."""
    return option.split("=", maxsplit=1)[0].lstrip("-").replace("-", "_")


class CustomHelpFormatter(argparse.HelpFormatter):
    """Show the groups that always matter and those that the flags of this command line call for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = {clean_option(word) for word in sys.argv[1:] if word.startswith("-")}
        self.everything = "verbose" in given
        self.titles = {*_ALWAYS_SHOWN, *(group for option, group in options_to_group.items() if option in given)}
        self._shown = True

    def start_section(self, heading: str | None) -> None:
        """Begin a group and decide whether it is shown."""
        self._shown = self.everything or heading is None or heading in self.titles
        super().start_section(heading)

    def add_text(self, text: str | None) -> None:
        """Add text unless it belongs to a group that is not shown."""
        if self._shown:
            super().add_text(text)

    def add_argument(self, action: argparse.Action) -> None:
        """Add an option in the spelling with underscores, unless its group is not shown."""
        if not self._shown:
            return
        shown = copy.copy(action)
        shown.option_strings = [
            option
            for option in action.option_strings
            if "-" not in option.lstrip("-") or len(action.option_strings) < 2
        ]
        super().add_argument(shown)

    def end_section(self) -> None:
        """End a group."""
        self._shown = True
        super().end_section()


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
        end = self._script_index(words)
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
            import difflib

            option = unknown[0].split("=", maxsplit=1)[0]
            known = {name.replace("-", "_"): name for name in reversed(self._option_string_actions)}
            near = difflib.get_close_matches(option.replace("-", "_"), known, n=1)
            hint = f": did you mean {known[near[0]]}?" if near else "; the options of a script come after it"
            self.error(f"{option} is not an option{hint}")
        return options

    def error(self, message: str) -> NoReturn:
        """End with code 2 and one line."""
        if "training_script" in message:
            message = f"no script was given, so there is nothing to run. Write `{self.prog} [options] script.py`"
        end = "" if message.endswith("?") else "."
        self.exit(2, f"{self.prog}: error: {message}{end} `{self.prog} --help` lists the options.\n")

    def _script_index(self, words: list[str]) -> int | None:
        """Return the index of the script, None if there is none or it is for argparse to find."""
        index = 0
        while index < len(words):
            word = words[index]
            if word == "--":
                return index + 1 if index + 1 < len(words) else None
            if not word.startswith("-") or word == "-":
                return index
            option, equals, _ = word.partition("=")
            if option not in self._option_string_actions:
                # Its value, if it has one, cannot be told from the script: stop here and let it be named.
                return None
            values = self._option_string_actions[option].nargs
            if isinstance(values, str):
                return None
            index += 1 + (0 if equals else 1 if values is None else values)
        return None


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Make the parser of `accelerate launch`."""
    texts: dict[str, Any] = {
        "description": "Start a script on one process or many. Options of the launcher come before the script.",
        "usage": "%(prog)s [options] script.py [arguments of the script]",
        "epilog": _MORE,
        "formatter_class": CustomHelpFormatter,
    }
    parser: argparse.ArgumentParser
    if subparsers is None:
        parser = LaunchParser("accelerate launch", **texts)
    else:
        parser = subparsers.add_parser("launch", allow_abbrev=False, **texts)
        parser.set_defaults(func=launch_command)
    add_launch_arguments(parser)
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
    return parser


# --- the launch -------------------------------------------------------------------------------------------------------


def launch_command(args: argparse.Namespace) -> None:
    """Start what parsed options ask for and wait for it; a run that fails ends this program with its exit code.

    Raises:
        ConfigurationError: If the options cannot work, alone or together.
    """
    _launch(args)


def launch_in_place(args: argparse.Namespace) -> None:
    """Start it, a single process in the place of this one."""
    _launch(args, in_place=True)


def simple_launcher(args: argparse.Namespace) -> None:
    """Start one process."""
    _launch(args, [launch.ONE_PROCESS])


def multi_gpu_launcher(args: argparse.Namespace) -> None:
    """Start this machine's processes under torch's elastic agent."""
    _launch(args, [launch.ELASTIC])


def deepspeed_launcher(args: argparse.Namespace) -> None:
    """Start by DeepSpeed's launcher, or under torch's agent where that does the same."""
    _launch(args, [launch.DEEPSPEED, launch.ELASTIC])


def tpu_launcher(args: argparse.Namespace) -> None:
    """Start the script on the XLA devices of this machine."""
    args.tpu_cluster = False
    _launch(args, [launch.TPU])


def tpu_pod_launcher(args: argparse.Namespace) -> None:
    """Start the script on every machine of a TPU pod."""
    args.tpu_cluster = True
    _launch(args, [launch.TPU])


def sagemaker_launcher(sagemaker_config: Any, args: argparse.Namespace) -> None:
    """Refuse: jobs of Amazon SageMaker are started with its own package.

    Raises:
        ConfigurationError: Always.
    """
    raise conflicts.sagemaker_job(type(sagemaker_config).__name__)


def _launch(
    args: argparse.Namespace, launchers: Sequence[Launcher] = launch.LAUNCHERS, *, in_place: bool = False
) -> None:
    config = resolve(args, detect(env.items()))
    conflicts.check_sagemaker(config)
    entries: list[tuple[str, Any, str]] = []
    if config["use_deepspeed"]:
        # Other launches do not load what knows DeepSpeed's configuration.
        from accelerate.config.deepspeed import explain_launch

        entries = explain_launch(config)
    plan = launch.make_plan(config, Host(arguments=tuple(getattr(args, "typed_arguments", ()))), launchers)
    if getattr(args, "explain", False):
        from accelerate.commands.explain import explain

        explain(config, plan, entries, verbose=getattr(args, "verbose", False))
        return
    for note in (*config.notes, *plan.notes):
        sys.stderr.write(f"accelerate launch: {note}\n")
    code = launch.run(plan, in_place=in_place)
    if code:
        sys.exit(code)


def main() -> None:
    """Run the program `accelerate-launch`."""
    run_as_program("launch")


if __name__ == "__main__":
    main()
