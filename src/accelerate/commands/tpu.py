"""`accelerate tpu-config`: run commands on all machines of a TPU pod through gcloud."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from accelerate._base.errors import ConfigurationError
from accelerate.commands import command_parser, run_as_program
from accelerate.config.cli import spellings
from accelerate.config.cluster_config import ClusterConfig, load_config_from_file
from accelerate.config.files import current_default_file, default_config_file

__all__ = ["default_config_file", "load_config_from_file", "main", "tpu_command_launcher", "tpu_command_parser"]

_SOURCE = "git+https://github.com/huggingface/accelerate.git"
# The folder in which every machine of a pod lets commands begin.
_START = "cd /usr/share"


def tpu_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Make the parser of `accelerate tpu-config`."""
    description = "Run commands on all machines of a TPU pod, such as those that set it up."
    parser = command_parser("tpu-config", subparsers, description=description)
    parser.set_defaults(func=tpu_command_launcher)
    pod = parser.add_argument_group("Config Arguments", "Which pod; what is not given comes from the file.")
    pod.add_argument(*spellings("--config_file"), default=None, help="The configuration file to take values from.")
    pod.add_argument(*spellings("--tpu_name"), default=None, help="The name of the pod.")
    pod.add_argument(*spellings("--tpu_zone"), default=None, help="The zone that the pod is in.")
    run = parser.add_argument_group("TPU Arguments", "What to run there.")
    run.add_argument(*spellings("--use_alpha"), action="store_true", help="Use `gcloud alpha`.")
    run.add_argument(*spellings("--command_file"), default=None, help="A file with one command a line.")
    run.add_argument("--command", action="append", nargs="+", help="A command; may be repeated.")
    run.add_argument(*spellings("--install_accelerate"), action="store_true", help="Install this library there first.")
    run.add_argument(
        *spellings("--accelerate_version"), default="latest", help="What to install: latest, dev, or a version."
    )
    run.add_argument("--debug", action="store_true", help="Print the gcloud command and run nothing.")
    return parser


def tpu_command_launcher(args: argparse.Namespace) -> None:
    """Run the commands on every machine of the pod, or print the command that would.

    Raises:
        ConfigurationError: If the pod or the commands are not known, or gcloud is not installed.
    """
    command = _gcloud(args)
    if args.debug:
        # The first line is what programs look for; the second can be pasted.
        sys.stdout.write(f"Running {' '.join(command)}\nIn a shell: {shlex.join(command)}\n")
        return
    if shutil.which(command[0]) is None:
        raise ConfigurationError(
            f"The program {command[0]!r} is not on the PATH, and it is what reaches the machines of a TPU pod. Install "
            "the Google Cloud CLI, or print the command with --debug."
        )
    code = subprocess.run(command, check=False).returncode
    if code:
        sys.exit(code)
    sys.stdout.write("The commands ran on every machine of the pod.\n")


def _gcloud(args: argparse.Namespace) -> list[str]:
    file: ClusterConfig | None = None
    if args.config_file is not None or current_default_file().is_file():
        loaded = load_config_from_file(args.config_file)
        file = loaded if isinstance(loaded, ClusterConfig) else None
    pod = {}
    for option in ("tpu_name", "tpu_zone"):
        pod[option] = getattr(args, option) or getattr(file, option, None)
        if not pod[option]:
            raise ConfigurationError(
                f"No {option} was given, and no configuration file names one, so the pod cannot be reached. "
                f"Pass --{option}, or add {option} to the file."
            )
    commands = [_START]
    if args.install_accelerate:
        known = {"latest": "accelerate -U", "dev": _SOURCE}
        commands.append(f"pip install {known.get(args.accelerate_version, f'accelerate=={args.accelerate_version}')}")
    commands += _commands(args, file)
    alpha = ["alpha"] if args.use_alpha else []
    ssh = ["compute", "tpus", "tpu-vm", "ssh", str(pod["tpu_name"]), "--zone", str(pod["tpu_zone"])]
    return ["gcloud", *alpha, *ssh, "--command", "; ".join(commands), "--worker", "all"]


def _commands(args: argparse.Namespace, file: ClusterConfig | None) -> list[str]:
    """Return what was typed, else the lines of a file of commands, else what the configuration file lists."""
    # A program may give a plain string where the parser makes a list.
    found = [word for given in args.command or () for word in ([given] if isinstance(given, str) else given)]
    path = args.command_file or getattr(file, "command_file", None)
    if not found and path:
        found = _read_commands(Path(path).expanduser())
    found = found or [str(command) for command in getattr(file, "commands", None) or ()]
    if not found and not args.install_accelerate:
        raise ConfigurationError(
            "No command was given, so there is nothing to run on the pod. Pass --command or --command_file, or add "
            "commands to the configuration file."
        )
    return found


def _read_commands(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigurationError(
            f"The file of commands {str(path)!r} cannot be read: {error.strerror}. Check the path in --command_file."
        ) from error
    return [line.strip() for line in lines if line.strip()]


def main() -> None:
    """Run it, as a program of its own."""
    run_as_program("tpu-config")


if __name__ == "__main__":
    main()
