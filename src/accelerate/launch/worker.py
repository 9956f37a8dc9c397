"""Run the user's script in a worker as the interpreter would, and leave a record of how it failed.

Started as a file, `worker.py script|module NAME ARGUMENTS...`, with nothing of the library on the way to the script:
`sys.argv`, `sys.path[0]`, `__main__` and the traceback are those of `python NAME ARGUMENTS...`. With XLA devices
`worker.py xla 1|all|spmd FUNCTION script|module NAME ARGUMENTS...` does this in one process, in a process for each device,
or in one that drives all devices; where FUNCTION is not `__main__`, it imports the script and calls that function. With `program` a program takes the place
of the worker; `encoded TEXT` holds all of this, and variables, where a shell is on the way.
"""

from __future__ import annotations

import faulthandler
import io
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path

# What only a failure needs is imported there: every worker of every run waits for what stands here.


def main(arguments: list[str]) -> None:
    """Run a script or module and record its failure in the file that the agent named."""
    if arguments[0] == "xla":
        _run_on_xla(*arguments[1:])
        return
    if arguments[0] == "encoded":
        arguments = _decode(arguments[1])
    if arguments[0] == "program":
        os.execvp(arguments[1], arguments[1:])
    kind, name, *rest = arguments
    _set_arguments(kind, name, rest)
    record = _record_path()
    end_with_parent()
    run_recorded(lambda: _run_module(name) if kind == "module" else _run_script(name), record)


def run_recorded(function: Callable[[], object], record: Path | None) -> None:
    """Call a function; where it fails, leave a record, show the traceback as the interpreter does, and exit.

    Args:
        record: Where the record goes; None for nowhere.
    """
    if record is not None:
        # Kept open for the life of the process: the handler writes into it when the process can no longer open one.
        faulthandler.enable(file=record.with_name("fault.txt").open("w"))
    try:
        function()
        _write_end(record, "It reached the end of the script.")
    except SystemExit as error:
        if _stops_for_now(error.code):
            sys.exit(0)
        if error.code in (None, 0):
            _write_end(record, _exit_call(error))
        else:
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


def _run_script(path: str, module_name: str = "__main__") -> types.ModuleType | None:
    if Path(path).is_dir() or path.endswith((".zip", ".pyz", ".pyc")):
        import runpy

        runpy.run_path(path, run_name=module_name)
        return None
    # A module that stays: functions pickled by name and exit handlers look for it in sys.modules until the end.
    file = str(Path(path).absolute())
    module = types.ModuleType(module_name)
    module.__file__ = file
    module.__dict__["__builtins__"] = __builtins__
    sys.modules[module_name] = module
    with io.open_code(file) as stream:
        code = compile(stream.read(), file, "exec", dont_inherit=True)
    exec(code, module.__dict__)  # noqa: S102 - this is what running a script means
    return module


def _run_module(name: str) -> None:
    import runpy

    runpy.run_module(name, run_name="__main__", alter_sys=True)


# --- XLA devices ------------------------------------------------------------------------------------------------------


class ScriptOnDevice:
    """What torch_xla calls in a process of a device: the script as `__main__`, or a function of it.

    Args:
        function: The function, or `__main__` for the script.
        kind: Whether `name` is a script or a module.
        rest: The arguments of the script.
    """

    def __init__(self, function: str, kind: str, name: str, rest: tuple[str, ...]) -> None:
        self.function = function
        self.kind = kind
        self.name = name
        self.rest = rest

    def __call__(self, index: int) -> None:
        """Run it as the process with this index."""
        _set_arguments(self.kind, self.name, list(self.rest))
        if self.function == "__main__":
            _run_module(self.name) if self.kind == "module" else _run_script(self.name)
            return
        target = getattr(self._imported(), self.function)
        target(index) if _takes_index(target) else target()

    def _imported(self) -> object:
        if self.kind == "module":
            import importlib

            return importlib.import_module(self.name)
        name = Path(self.name).stem
        # The name by which Python's own processes import a script stands in for one that is no name, or is taken.
        return _run_script(self.name, name if name.isidentifier() and name not in sys.modules else "__mp_main__")


def _takes_index(function: Callable[..., object]) -> bool:
    """Say whether a function cannot be called without an argument."""
    import inspect

    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of one that is not written in Python
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(entry.kind in positional and entry.default is entry.empty for entry in parameters)


def _run_on_xla(count: str, function: str, kind: str, name: str, *rest: str) -> None:
    """Run the script in this process, on one device or on all, or in a process for each device."""
    _set_arguments(kind, name, list(rest))
    # By its full name: a process that torch_xla starts imports it from there.
    from accelerate.launch.worker import ScriptOnDevice as Importable

    script = Importable(function, kind, name, rest)
    if count != "all":
        import importlib

        def run(index: int) -> None:
            run_recorded(lambda: script(index), None)

        if count == "spmd":
            run(importlib.import_module("torch_xla.runtime").process_index())
        else:
            importlib.import_module("torch_xla").launch(run, debug_single_process=True)
        return
    from accelerate.config import env
    from accelerate.launch import xla_processes

    named = env.get("ACCELERATE_FAILURE_FOLDER")
    if named is not None:
        end_with_parent()
    with xla_processes.record_folder(named) as folder:
        sys.exit(xla_processes.run_on_all_devices(script, folder))


def end_with_parent() -> None:
    """Ask the kernel for SIGTERM when the process that started this one dies without ending it; Linux only."""
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

    own = (__file__, str(Path(__file__).with_name("xla_processes.py")), runpy.__file__, "<frozen runpy>")
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
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(json.dumps({"message": message}))
        partial.replace(path)  # torch's agent may terminate this process at any time, and fails on incomplete JSON
    except OSError as problem:
        sys.stderr.write(f"The failure could not be recorded in {path}: {problem}\n")


def _write_end(path: Path | None, text: str) -> None:
    """Record an end without a failure: the others fail after it where they still wait for this process."""
    if path is None:
        return
    import json
    import time

    try:
        path.with_name("end.json").write_text(json.dumps({"time": time.time(), "pid": os.getpid(), "text": text}))
    except OSError:
        return  # it only explains the failure of another process


if __name__ == "__main__":
    main(sys.argv[1:])
