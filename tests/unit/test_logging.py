"""Loggers that know about ranks, on a single process."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator

import pytest

from accelerate import PartialState
from accelerate._base.errors import UsageError
from accelerate.config.env import patch_environment
from accelerate.logging import MultiProcessAdapter, get_logger


@pytest.fixture(autouse=True)
def root_level() -> Iterator[None]:
    before = logging.root.level
    yield
    logging.root.setLevel(before)


def line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_an_error_before_the_start() -> None:
    logger = get_logger("tests.early")
    assert isinstance(logger, MultiProcessAdapter)
    with pytest.raises(UsageError, match=r"'tests\.early' was used before"):
        logger.info("nobody knows the rank")


def test_levels() -> None:
    PartialState()
    assert not get_logger("tests.default").isEnabledFor(logging.INFO)
    assert get_logger("tests.argument", log_level="debug").logger.level == logging.DEBUG
    assert logging.root.level == logging.DEBUG
    with patch_environment(accelerate_log_level="info"):
        assert get_logger("tests.environment").logger.level == logging.INFO
        assert get_logger("tests.both", log_level="ERROR").logger.level == logging.ERROR


def test_messages_carry_rank_arguments_and_extra(caplog: pytest.LogCaptureFixture) -> None:
    PartialState()
    logger = get_logger("tests.message", log_level="INFO")
    logger.info("%d of %s", 1, "two")
    logger.debug("hidden")
    logger.log(logging.ERROR, "logged", main_process_only=False)
    assert [record.getMessage() for record in caplog.records] == ["[RANK 0] 1 of two", "[RANK 0] logged"]


def test_a_record_names_the_line_of_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    PartialState()
    logger = get_logger("tests.lines", log_level="INFO")
    expected = []
    logger.info("plain"), expected.append(line())
    logger.log(logging.INFO, "log"), expected.append(line())
    logger.warning("in order", main_process_only=False, in_order=True), expected.append(line())
    logger.warning_once("once"), expected.append(line())
    try:
        raise ValueError("with traceback")
    except ValueError:
        logger.exception("failed"), expected.append(line())
    assert [record.lineno for record in caplog.records] == expected
    assert {record.pathname for record in caplog.records} == {__file__}
    assert caplog.records[-1].exc_info is not None


def test_a_helper_may_name_its_own_caller(caplog: pytest.LogCaptureFixture) -> None:
    PartialState()
    logger = get_logger("tests.helper", log_level="INFO")

    def helper() -> None:
        logger.info("from a helper", stacklevel=3)

    helper(), (expected := line())
    assert caplog.records[0].lineno == expected


def test_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    PartialState()
    logger = get_logger("tests.once", log_level="INFO")
    for text in ("a", "b", "a"):
        logger.warning_once(text)
    assert [record.getMessage() for record in caplog.records] == ["[RANK 0] a", "[RANK 0] b"]
