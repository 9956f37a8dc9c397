"""Run the user's script in a worker as the interpreter would, and leave a record of how it failed.

Started as a file, `worker.py script|module NAME ARGUMENTS...`, with nothing of the library on the way to the script:
`sys.argv`, `sys.path[0]`, `__main__` and the traceback are those of `python NAME ARGUMENTS...`. On a TPU machine
`worker.py xla COUNT FUNCTION script|module NAME ARGUMENTS...` runs a function of the script on every core. With `program`
a program takes the place of the worker; `encoded TEXT` holds all of this, and variables, where a shell is on the way.
"""

from __future__ import annotations

import faulthandler
import io
import os
import sys
import types
from pathlib import Path

# What only a failure needs is imported there: every worker of every run waits for what stands here.


def main(arguments: list[str]) -> None:
    """Run a script or module and record its failure in the file that the agent named."""
    if arguments[0] == "xla":
        _spawn_on_cores(*arguments[1:])
        return
    if arguments[0] == "encoded":
        arguments = _decode(arguments[1])
    if arguments[0] == "program":
        os.execvp(arguments[1], arguments[1:])
    kind, name, *rest = arguments
    _set_arguments(kind, name, rest)
    record = _record_path()
    _end_with_launcher()
    if record is not None:
        # Kept open for the life of the process: the handler writes into it when the process can no longer open one.
        faulthandler.enable(file=record.with_name("fault.txt").open("w"))
    try:
        _run_module(name) if kind == "module" else _run_script(name)
    except SystemExit as error:
        if _stops_for_now(error.code):
            sys.exit(0)
        if error.code not in (None, 0):
            _write_record(record, error, _exit_call(error))
        raise
    except BaseException as error:  # noqa: BLE001 - it is reported as the interpreter does, then the process ends
        import traceback

        error.__traceback__ = _without_own_frames(error.__traceback__)
        _write_record(record, error, "".join(traceback.format_exception(error)))
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def _decode(text: str) -> list[str]:
    """Set the variables of an encoded command and return its arguments."""
    import base64
    import json

    from accelerate.config import env

    content = json.loads(base64.urlsafe_b64decode(text))
    for name, value in content["variables"].items():
        env.put(name, value)
    return list(content["arguments"])


def _set_arguments(kind: str, name: str, rest: list[str]) -> None:
    sys.argv[:] = [name, *rest]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(name).resolve().parent if kind == "script" else Path.cwd())


def _run_script(path: str) -> None:
    if Path(path).is_dir() or path.endswith((".zip", ".pyz", ".pyc")):
        import runpy

        runpy.run_path(path, run_name="__main__")
        return
    # A module that stays: functions pickled by name and exit handlers look for it in sys.modules until the end.
    file = str(Path(path).absolute())
    module = types.ModuleType("__main__")
    module.__file__ = file
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    with io.open_code(file) as stream:
        code = compile(stream.read(), file, "exec", dont_inherit=True)
    exec(code, module.__dict__)  # noqa: S102 - this is what running a script means


def _run_module(name: str) -> None:
    import runpy

    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _spawn_on_cores(count: str, function: str, kind: str, name: str, *rest: str) -> None:
    """Import the script as a module, as each core will, and run its training function on every core."""
    import importlib

    _set_arguments(kind, name, list(rest))
    module = importlib.import_module(Path(name).stem if kind == "script" else name)
    if not hasattr(module, function):
        sys.exit(
            f"{name} has no function {function!r} to run on the TPU. Define it, or name another one with "
            "--main_training_function."
        )
    target = getattr(module, function)

    def call(index: int, *_: object) -> None:
        target()

    # The current runtime takes one core or all of them; another number is its own error to explain.
    importlib.import_module("torch_xla").launch(call, debug_single_process=int(count) == 1)


def _end_with_launcher() -> None:
    """Ask the kernel for SIGTERM when the launcher dies without ending its workers; Linux only."""
    if sys.platform != "linux":
        return
    import ctypes
    import signal

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM, 0, 0, 0)


def _record_path() -> Path | None:
    try:
        from accelerate.config import env
    except ImportError:  # the script may do without the library, and so can the report
        return None
    named = env.get("TORCHELASTIC_ERROR_FILE")
    if not named and env.get("ACCELERATE_FAILURE_FOLDER"):
        rank = env.integer(("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"), 0)
        named = str(Path(env.get("ACCELERATE_FAILURE_FOLDER", "")) / str(rank) / "error.json")
    if not named:
        return None
    path = Path(named)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return path


def _stops_for_now(code: object) -> bool:
    """Tell the launcher that the script ended in order to go on later, and return whether it did.

    To the agent an exit code other than 0 is a failure, after which it ends the other workers and starts all anew.
    """
    try:
        from accelerate._base.constants import PREEMPTED_EXIT_CODE, PREEMPTED_FILE, STOP_FOLDER
        from accelerate.config import env
    except ImportError:
        return False
    folder = env.get(STOP_FOLDER)
    if code != PREEMPTED_EXIT_CODE or not folder or not Path(folder).is_dir():
        return False
    Path(folder, PREEMPTED_FILE).touch()
    return True


def _without_own_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return the frames of the script; none where a file cannot be opened or a module is not there."""
    import runpy

    own = (__file__, runpy.__file__, "<frozen runpy>")
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename in own:
        rest = rest.tb_next
    return rest


def _exit_call(error: SystemExit) -> str:
    """Return the call that ended the script, with its file and line."""
    import traceback

    frames = traceback.extract_tb(_without_own_frames(error.__traceback__))
    at = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"sys.exit({error.code!r}){at}\n"


def _write_record(path: Path | None, error: BaseException, text: str) -> None:
    if path is None:
        return
    import json
    import time

    now = time.time()
    message = {
        "message": f"{type(error).__name__}: {error}",
        # torch's agent reads whole seconds; the order of failures within one second needs more.
        "extraInfo": {"py_callstack": text, "timestamp": str(int(now)), "precise_timestamp": now},
    }
    try:
        path.write_text(json.dumps({"message": message}))
    except OSError as problem:
        sys.stderr.write(f"The failure could not be recorded in {path}: {problem}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
