"""Run torch's profiler on every rank and keep its traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate._base.constants import PROFILE_PATTERN_NAME
from accelerate.config.plugins.training import ProfileKwargs
from accelerate.runtime import current, process_control


@contextmanager
def run_profile(options: ProfileKwargs) -> Iterator[Any]:
    """Profile the block, then write this rank's trace where the options say, once all ranks are done."""
    profiler = options.build()
    with profiler:
        yield profiler
    if options.output_trace_dir is None:
        return
    folder = Path(options.output_trace_dir)
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / PROFILE_PATTERN_NAME.format(suffix=current.runtime().rank)))
    process_control.barrier()
