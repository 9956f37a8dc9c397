"""README and the start page show the support matrix and the diff that the tools make, and the matrix tells the truth."""

from __future__ import annotations

import pytest
from tests.contracts.test_strategies import OF_TRANSFORMERS, OF_XLA, REFUSED, RUNS, STRATEGIES
from tools import support_matrix
from tools.pages import write_sections
from tools.write_pages import SECTIONS, Section, main

from accelerate.devices import registry
from accelerate.precision import formats


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_the_pages_show_what_the_tool_writes(section: Section) -> None:
    assert write_sections(section.pages, section.name, section.render(), check=True) == [], "run `make pages`"


def test_the_command_finds_nothing_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0
    assert capsys.readouterr().out == ""


def rows() -> dict[str, list[str]]:
    lines = support_matrix.render().split("\n\n")[0].splitlines()
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("|---")]
    return {row[0]: row[1:] for row in found}


def test_what_is_said_to_run_in_the_tests_does() -> None:
    """Bold stands for the contract of the strategies: every one in every number format, on the CPU or on its XLA runtime."""
    assert {"cpu", "xla"} == support_matrix.RUN_IN_TESTS
    assert {*RUNS, *OF_XLA, *OF_TRANSFORMERS} == set(STRATEGIES)
    assert set(OF_XLA) == support_matrix.XLA_STRATEGIES
    matrix = rows()
    bold = [cell for cells in matrix.values() for cell in cells if cell.startswith("**")]
    assert len(bold) == len(RUNS) + len(OF_XLA) + len(OF_TRANSFORMERS)
    for name in RUNS:
        (cell,) = {*matrix[support_matrix._STRATEGY_TITLES[name]]}.intersection(bold)
        run = [precision for precision in formats.FORMATS if (name, precision) not in REFUSED]
        assert len(cell.strip("*").split(", ")) == len(run)


def test_every_device_and_every_strategy_stands_there_once() -> None:
    matrix = rows()
    devices = ", ".join(matrix[""]).split(", ")
    assert len(devices) == len(set(devices)) == len(registry.all_backends())
    assert {*STRATEGIES} == {name for name, title in support_matrix._STRATEGY_TITLES.items() if title in matrix}
