"""Build the device "toy" from its source once, give it to processes, and run tests on it.

A process cannot forget a device type that torch has learned, so no test process loads it: bodies of tests run in
processes of their own that load it (`on_toy`), and programs get it by `environment`.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.support.processes import ROOT, close_process_group, forget_inherited_state, run_group, script_environment
from torch.utils.cpp_extension import include_paths, library_paths

from accelerate.config.env import patch_environment
from accelerate.devices.machine import get_free_port

SOURCE = Path(__file__).parent / "toy.cpp"
PACKAGE = Path(__file__).parent / "torch_toy.py"
BUILDS = ROOT / "build" / "toy_device"
LIBRARIES = ("torch", "torch_cpu", "torch_python", "c10")


@functools.cache
def build() -> Path:
    """Return the folder with the package, which holds for this source, this torch and this compiler."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise RuntimeError(
            "There is no C++ compiler here, and the toy device is built by one. Install g++ (torch.compile needs it "
            "too), or set CXX."
        )
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    sources = sorted([SOURCE, *SOURCE.parent.glob("*.h")])
    facts = (
        *(path.read_text() for path in sources),
        PACKAGE.read_text(),
        *_flags(),
        torch.__version__,
        version,
        sys.version,
    )
    folder = BUILDS / hashlib.sha256("\0".join(facts).encode()).hexdigest()[:16]
    if folder.is_dir():
        return folder
    BUILDS.mkdir(parents=True, exist_ok=True)
    # The lock goes with the process that holds it, so a build that is killed stops no later one.
    with open(BUILDS / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=BUILDS) as unfinished:
                _make_package(compiler, Path(unfinished, "package"))
                Path(unfinished, "package").rename(folder)
    return folder


def _flags() -> list[str]:
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-w"]
    flags += [f"-isystem{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
    flags += [flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    return [*flags, *(f"-l{name}" for name in LIBRARIES)]


def _make_package(compiler: str, folder: Path) -> None:
    """Put the compiled library, the package and its entry point, by which torch loads it, into a folder."""
    info = folder / "torch_toy-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntoy = torch_toy:register\n")
    shutil.copy(PACKAGE, folder)
    command = [compiler, str(SOURCE), "-o", str(folder / "_toy.so"), *_flags()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"The toy device does not compile:\n{done.stderr[-6000:]}")


def load() -> None:
    """Teach torch the device in this process."""
    if not hasattr(torch, "toy"):
        sys.path.insert(0, str(build()))
        __import__("torch_toy").register()


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which torch of a child python finds the device by itself."""
    around = script_environment(env)
    return {**around, "PYTHONPATH": os.pathsep.join([str(build()), around["PYTHONPATH"]])}


def on_toy(*, processes: int = 1, devices: int | None = None, memory: int | None = None) -> Callable[[Any], Any]:
    """Run the body of a test in processes of their own that have the device.

    A test that is parametrised over `processes` or `devices` takes them as arguments instead.

    They are not forked from the test process: torch counts the devices at the first backward pass of a process, and a
    process that was forked after one finds no place for those that it learns of.

    Args:
        processes: How many, each of which runs the body as one rank of a group that it can make.
        devices: How many devices each of them sees; as many as there are processes, if it is not said.
        memory: The bytes that each device has.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def test(**arguments: Any) -> None:
            build()
            size = arguments.get("processes", processes)
            variables = {"TOY_DEVICE_COUNT": str(arguments.get("devices", devices or size))}
            if memory is not None:
                variables["TOY_DEVICE_MEMORY"] = str(memory)
            given = (function.__module__, function.__name__, arguments, list(warnings.filters))
            run_group(_run_body, size, *given, env=variables, timeout=120, start_method="forkserver")

        return test

    return decorate


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """Let what is made in the block compute on the CPU, in a group of its own, as if no device were there."""
    _start_anew()
    with patch_environment(accelerate_use_cpu="true"):
        yield
    _start_anew()


def _start_anew() -> None:
    """Leave the group, if there is one, and forget what the library knows; the next group meets at another port."""
    if dist.is_initialized():
        ports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ports, get_free_port())
        close_process_group()
        os.environ["MASTER_PORT"] = str(ports[0])
    forget_inherited_state()


def _run_body(module: str, name: str, arguments: dict[str, Any], filters: list[Any]) -> None:
    """Run the body of a test under the warning filters of its test process."""
    load()
    function = getattr(importlib.import_module(module), name).__wrapped__
    warnings.resetwarnings()
    warnings.filters.extend(filters)
    function(**arguments)
