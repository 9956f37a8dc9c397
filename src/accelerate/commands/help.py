"""The help of `accelerate launch`: the groups that matter for the flags that were given."""

from __future__ import annotations

import argparse
import copy
import sys
from typing import Any

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
}
ALWAYS = (
    "positional arguments",
    "options",
    "Hardware Selection Arguments",
    "Resource Selection Arguments",
    "Training Paradigm Arguments",
    "Explaining",
)
MORE = (
    "More options are shown by --help together with "
    + ", ".join(f"--{option}" for option in options_to_group if option != "num_machines")
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
        self.titles = {*ALWAYS, *(group for option, group in options_to_group.items() if option in given)}
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
