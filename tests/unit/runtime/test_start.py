"""The start of a process: a torch that is newer than the tested ones is reported once."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.support.logs import logged
from tests.support.processes import run_group

from accelerate import PartialState
from accelerate._base.helpers import reset_warnings
from accelerate.runtime import start
from accelerate.runtime.torch_private import NEWEST_TESTED_TORCH

NEWER = f"{NEWEST_TESTED_TORCH[0]}.{NEWEST_TESTED_TORCH[1] + 1}.0.dev20260101+cpu"


def start_twice() -> None:
    reset_warnings()
    for _ in range(2):
        PartialState(cpu=True)
        PartialState._reset_state()


def test_a_newer_torch_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", NEWER)
    with logged(NEWER.replace("+", r"\+")):
        start_twice()


def test_a_tested_torch_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    patched = f"{NEWEST_TESTED_TORCH[0]}.{NEWEST_TESTED_TORCH[1]}.9+cu132"
    for version in ("2.9.0", patched):
        monkeypatch.setattr(torch, "__version__", version)
        with logged("torch", times=0):
            start_twice()


def reports() -> int:
    torch.__version__ = NEWER
    seen: list[logging.LogRecord] = []
    logger = logging.getLogger(start.__name__)
    logger.addFilter(lambda record: bool(seen.append(record)))
    reset_warnings()
    PartialState(cpu=True)
    return len(seen)


@pytest.mark.multiprocess
def test_only_the_main_process_reports() -> None:
    assert run_group(reports, 2) == [1, 0]
