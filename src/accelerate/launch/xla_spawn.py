"""Load the user's script and run its training function on every core of this TPU machine.

Started as a file, `xla_spawn.py COUNT FUNCTION script|module NAME ARGUMENTS...`.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def main(arguments: list[str]) -> None:
    """Import the script as a module, as each core will, and spawn the function."""
    count, function, kind, name, *rest = arguments
    sys.argv[:] = [name, *rest]
    sys.path[0] = str(Path(name).resolve().parent if kind == "script" else Path.cwd())
    module = importlib.import_module(Path(name).stem if kind == "script" else name)
    if not hasattr(module, function):
        sys.exit(
            f"{name} has no function {function!r} to run on the TPU. Define it, or name another one with "
            "--main_training_function."
        )
    target = getattr(module, function)

    def call(index: int, *_: Any) -> None:
        target()

    launcher: Any = importlib.import_module("torch_xla")
    # The current runtime takes one core or all of them; another number is its own error to explain.
    launcher.launch(call, debug_single_process=int(count) == 1)


if __name__ == "__main__":
    main(sys.argv[1:])
