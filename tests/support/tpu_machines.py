"""A torch_xla of two devices that starts processes as release 2.9 does, and a gcloud whose machines are this one."""

from __future__ import annotations

import sys
from pathlib import Path

_PACKAGE = """
import functools
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context


class _XLAC:
    @staticmethod
    def _xla_runtime_is_initialized():
        return False


def launch(fn, args=(), start_method="spawn", debug_single_process=False):
    if debug_single_process:
        return fn(0, *args)
    count = 2
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(count, mp_context=get_context(start_method)) as pool,
    ):
        call = functools.partial(_in_a_thread, fn=functools.partial(fn), args=args, count=count, folder=folder)
        list(pool.map(call, range(count)))


def _in_a_thread(rank, fn, args, count, folder):
    os.environ.update(STAND_IN_RANK=str(rank), STAND_IN_COUNT=str(count))
    # As on real devices, nobody is done before the last one has begun.
    open(os.path.join(folder, str(rank)), "w").close()
    while len(os.listdir(folder)) < count:
        time.sleep(0.01)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(fn, rank, *args).result()
"""
_RUNTIME = """
import os


def local_ordinal():
    return int(os.environ["STAND_IN_RANK"])


def world_size():
    return int(os.environ["STAND_IN_COUNT"])


def process_index():
    return 0
"""
# Its words: compute tpus tpu-vm ssh NAME ... --command COMMAND
_GCLOUD = """#!/bin/sh
name="$5"
while [ "$1" != --command ]; do shift; done
MACHINE="$name" exec sh -c "$2"
"""


def write_torch_xla(folder: Path) -> None:
    """Write the package into a folder that is to be on the path."""
    (folder / "torch_xla").mkdir(parents=True)
    (folder / "torch_xla" / "__init__.py").write_text(_PACKAGE)
    (folder / "torch_xla" / "runtime.py").write_text(_RUNTIME)


def write_gcloud(folder: Path) -> None:
    """Write programs into a folder that is to be on the PATH: gcloud, and the `accelerate` of its machines."""
    folder.mkdir(parents=True, exist_ok=True)
    command = f'#!/bin/sh\nexec {sys.executable} -m accelerate.commands.accelerate_cli "$@"\n'
    for name, content in {"gcloud": _GCLOUD, "accelerate": command}.items():
        (folder / name).write_text(content)
        (folder / name).chmod(0o755)
