"""Who speaks, and in which order, on real groups of processes."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from tests.support.processes import run_group

from accelerate import Accelerator
from accelerate.logging import get_logger

pytestmark = pytest.mark.multiprocess


def speak(path: str) -> None:
    """All ranks append to one file, the earlier ranks slower than the later ones."""
    accelerator = Accelerator()
    logger = get_logger("tests.group", log_level="INFO")
    logger.logger.addHandler(logging.FileHandler(path))  # appends each record at once
    for round_number in range(3):
        logger.info("main %d", round_number)
        accelerator.wait_for_everyone()
        time.sleep(0.03 * (accelerator.num_processes - accelerator.process_index))
        logger.info("turn %d", round_number, main_process_only=False, in_order=True)
    logger.info("all", main_process_only=False)
    accelerator.wait_for_everyone()
    # A rank whose level hides the message still takes its turn.
    logger.setLevel(logging.ERROR if accelerator.is_main_process else logging.INFO)
    logger.info("quiet", main_process_only=False, in_order=True)


def test_main_process_all_and_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "log"
    run_group(speak, 3, str(path))
    lines = path.read_text().splitlines()
    turns = [[f"[RANK 0] main {number}", *(f"[RANK {rank}] turn {number}" for rank in range(3))] for number in range(3)]
    assert lines[:12] == [line for turn in turns for line in turn]
    assert sorted(lines[12:15]) == [f"[RANK {rank}] all" for rank in range(3)]
    assert lines[15:] == ["[RANK 1] quiet", "[RANK 2] quiet"]
