"""Inputs that were kept, because they found a bug or reach code that others do not, and a few that are made anew."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.hostile import fuzz
from tests.hostile.fuzz import CORPUS, SUFFIX, limits
from tests.hostile.inputs import INPUTS
from tests.hostile.targets import TARGETS, is_refused

FOUND_BY_CHANCE = re.compile(r"[0-9a-f]{12}")


@pytest.fixture(autouse=True)
def no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


def test_every_target_has_inputs_and_a_corpus() -> None:
    assert INPUTS.keys() == TARGETS.keys() == {folder.name for folder in CORPUS.iterdir()}
    assert sum(path.stat().st_size for path in CORPUS.rglob(f"*{SUFFIX}")) < 2**20


@pytest.mark.parametrize("name", TARGETS)
def test_kept_inputs_are_taken_or_refused(name: str, tmp_path: Path) -> None:
    kept = sorted((CORPUS / name).glob(f"*{SUFFIX}"))
    assert kept
    wrong = {}
    for path in kept:
        with limits():
            refused = is_refused(TARGETS[name], path.read_bytes(), tmp_path)
        # Inputs without a word for a name may be either; of the others it is known.
        if FOUND_BY_CHANCE.fullmatch(path.stem) is None and refused is path.stem.startswith("taken-"):
            wrong[path.stem] = refused
    assert wrong == {}


@pytest.mark.parametrize("name", TARGETS)
def test_generated_inputs_are_taken_or_refused(name: str, tmp_path: Path) -> None:
    answers: set[bool] = set()

    @settings(max_examples=40, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def feed(data: st.DataObject) -> None:
        content = data.draw(INPUTS[name]())
        with limits():
            answers.add(is_refused(TARGETS[name], content, tmp_path))

    feed()
    assert answers == {True, False}  # inputs that are all right or all wrong would say little


def test_what_is_neither_taken_nor_refused_is_a_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(data: bytes, folder: Path) -> None:
        raise KeyError(data)

    def hanging(data: bytes, folder: Path) -> None:
        while True:
            pass

    def unprintable(data: bytes, folder: Path) -> None:
        raise OSError("\ud800")

    with pytest.raises(KeyError):
        is_refused(broken, b"x", tmp_path)
    with pytest.raises(UnicodeEncodeError):
        is_refused(unprintable, b"x", tmp_path)
    monkeypatch.setattr(fuzz, "SECONDS_FOR_ONE", 0.05)
    with pytest.raises(fuzz.TooSlow), limits():
        is_refused(hanging, b"x", tmp_path)
