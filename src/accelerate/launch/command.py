"""The command line that runs the user's script, and the variables that every worker gets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate._base.errors import ConfigurationError
from accelerate.config.run_config import encode
from accelerate.launch.site import Site

if TYPE_CHECKING:
    from accelerate.config.run_config import RunConfig

_WORKER = Path(__file__).with_name("worker.py")


def script_command(config: RunConfig, site: Site) -> tuple[str, ...]:
    """Return the command a user would type without a launcher."""
    script, arguments = str(config["training_script"]), _arguments(config)
    if config["no_python"]:
        return (script, *arguments)
    if config["module"]:
        return (site.python, "-m", script, *arguments)
    return (site.python, script, *arguments)


def recorded_command(config: RunConfig, site: Site) -> tuple[str, ...]:
    """Return the command of a worker whose failure is recorded for the launcher's report."""
    if config["no_python"]:
        return script_command(config, site)
    kind = "module" if config["module"] else "script"
    # Unbuffered, so that the lines of several workers appear when they are written.
    return (site.python, "-u", str(_WORKER), kind, str(config["training_script"]), *_arguments(config))


def _arguments(config: RunConfig) -> tuple[str, ...]:
    return tuple(str(argument) for argument in config["training_script_args"] or ())


def check_script(config: RunConfig, site: Site) -> None:
    """Check that there is something to run.

    Raises:
        ConfigurationError: If the file or program does not exist, or two ways to run it were asked for.
    """
    script = config["training_script"]
    if not script:
        raise ConfigurationError(
            "No script was given, so there is nothing to run. Write `accelerate launch script.py`, options before it."
        )
    if config["module"] and config["no_python"]:
        raise ConfigurationError(
            f"--module and --no_python were both given for {script!r}: one runs a Python module, the other a program. "
            "Leave one of them out."
        )
    if config["no_python"]:
        if site.find_program(script) is None:
            raise ConfigurationError(
                f"The program {script!r} is not on the PATH or cannot be executed, and --no_python runs it as it is. "
                "Write its full path, or leave --no_python out for a Python script."
            )
        return
    if not config["module"]:
        _check_file(Path(script))


def _check_file(script: Path) -> None:
    if script.is_file() or (script / "__main__.py").is_file():
        return
    if script.is_dir():
        raise ConfigurationError(
            f"The script {str(script)!r} is a folder without a __main__.py. Write the path of a file in it."
        )
    import difflib

    near = difflib.get_close_matches(script.name, _python_files(script.parent), n=1)
    hint = f"Did you mean {str(script.parent / near[0])!r}?" if near else "Check the path, or use -m to run a module."
    where = "" if script.is_absolute() else f" in {str(Path.cwd())!r}"
    raise ConfigurationError(f"The script {str(script)!r} does not exist{where}. {hint}")


def _python_files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.suffix == ".py"] if folder.is_dir() else []


def worker_environment(config: RunConfig, site: Site, local_processes: int) -> dict[str, str]:
    """Return the variables that tell the workers their settings, with the number of threads each may use."""
    values = {name: value for name, value in encode(config).items() if name not in _DECIDED_BY_THE_PLAN}
    if local_processes > 1:
        # It binds threads to the first cores, the same ones in every process.
        values.pop("KMP_AFFINITY", None)
        if not config["cpu"]:
            links = site.link_variables(config.machine)
            values |= {name: value for name, value in links.items() if name not in site.environment}
    threads = _threads(config, site, local_processes)
    if threads is not None:
        values["OMP_NUM_THREADS"] = str(threads)
    return values


# Where the processes meet depends on how they are started.
_DECIDED_BY_THE_PLAN = frozenset({"MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"})


def _threads(config: RunConfig, site: Site, local_processes: int) -> int | None:
    """Return the threads of one worker; None leaves the choice to torch, as without a launcher."""
    asked = config["num_cpu_threads_per_process"]
    if asked:
        return int(asked)
    if local_processes < 2 or "OMP_NUM_THREADS" in site.environment:
        return None
    # Beside an accelerator the processor mostly waits; on its own it does the work and is shared out.
    return max(1, site.physical_cores() // local_processes) if config["cpu"] else 1


def shell_words(words: Sequence[str]) -> str:
    """Write a command so that it can be pasted into a shell."""
    import shlex

    return shlex.join(words)
