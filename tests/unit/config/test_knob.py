"""One declaration reads and writes its text without loss."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerate._base.enums import DDPCommunicationHookType, DynamoBackend, PrecisionType
from accelerate._base.errors import ConfigurationError
from accelerate.config import knob as module
from accelerate.config.knob import Codec, Knob, Settings, knob, knobs, member_of
from accelerate.config.plugins import deepspeed, fsdp, megatron, parallelism, quantization, training

SECTIONS = [
    value
    for section in (deepspeed, fsdp, megatron, parallelism, quantization, training)
    for value in vars(section).values()
    if isinstance(value, type) and issubclass(value, Settings) and value.__module__ == section.__name__
]

CODECS: list[tuple[Codec[Any], st.SearchStrategy[Any]]] = [
    (module.TEXT, st.text()),
    (module.INTEGER, st.integers(-(2**63), 2**63 - 1)),
    (module.NUMBER, st.floats(allow_nan=False)),
    (module.YES_NO, st.booleans()),
    (module.UPPER, st.text(alphabet="ABC_123")),
    (member_of(PrecisionType), st.sampled_from(PrecisionType)),
    (member_of(DDPCommunicationHookType), st.sampled_from(DDPCommunicationHookType)),
    (member_of(DynamoBackend, upper=True), st.sampled_from(DynamoBackend)),
]


@pytest.mark.parametrize(("codec", "values"), CODECS)
def test_what_a_codec_writes_it_reads(codec: Codec[Any], values: st.SearchStrategy[Any]) -> None:
    @given(values)
    def check(value: Any) -> None:
        assert codec.parse(codec.format(value)) == value

    check()


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_is_a_knob_with_help(section: type[Settings]) -> None:
    declared = knobs(section)
    assert list(declared) == [item.name for item in dataclasses.fields(section)]
    for name, entry in declared.items():
        assert entry.help.endswith("."), name


@pytest.mark.parametrize("section", SECTIONS)
def test_what_the_environment_can_give_round_trips(section: type[Settings]) -> None:
    for name, entry in knobs(section).items():
        if entry.env is None or entry.fallback is None:
            continue
        assert entry.codec.parse(entry.codec.format(entry.fallback)) == entry.fallback, name
        for choice in entry.choices:
            assert entry.codec.parse(entry.codec.format(choice)) == choice, name


def test_there_are_sections_to_check() -> None:
    assert len(SECTIONS) == 21


def test_a_knob_cannot_be_changed() -> None:
    declared = Knob(help="Something.")
    with pytest.raises(dataclasses.FrozenInstanceError):
        declared.help = "Else."  # type: ignore[misc]


def test_upper_case_enum_reads_any_case() -> None:
    assert member_of(DynamoBackend, upper=True).parse("Inductor") is DynamoBackend.INDUCTOR


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Paint(Settings):
    colour: Colour | None = knob(help="Colour.", env="ACCELERATE_TEST_COLOUR", codec=member_of(Colour))
    coats: int = knob(help="Coats.", env="ACCELERATE_TEST_COATS", codec=module.INTEGER, fallback=2)
    finish: str = knob("matt", help="Finish.", choices=("matt", "gloss"))
    notes: list[str] = knob(help="Notes.", default_factory=list)


def test_text_that_cannot_be_read_names_variable_value_and_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TEST_COLOUR", "green")
    with pytest.raises(ConfigurationError, match="ACCELERATE_TEST_COLOUR='green' is not one of red, blue"):
        Paint()
    monkeypatch.setenv("ACCELERATE_TEST_COLOUR", "red")
    monkeypatch.setenv("ACCELERATE_TEST_COATS", "many")
    with pytest.raises(ConfigurationError, match="ACCELERATE_TEST_COATS='many' is not a whole number"):
        Paint()


def test_a_value_outside_the_choices_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Paint\(finish='shiny'\).*'matt', 'gloss'"):
        Paint(finish="shiny")


def test_explicit_over_environment_over_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Paint().coats == 2
    assert Paint().colour is None
    monkeypatch.setenv("ACCELERATE_TEST_COATS", "5")
    monkeypatch.setenv("ACCELERATE_TEST_COLOUR", "blue")
    assert Paint().coats == 5
    assert Paint().colour is Colour.BLUE
    assert Paint(coats=0).coats == 0
    monkeypatch.setenv("ACCELERATE_TEST_COATS", "")
    assert Paint().coats == 2


def test_a_made_default_is_a_new_object_each_time() -> None:
    first, second = Paint(), Paint()
    first.notes.append("x")
    assert second.notes == []


@pytest.mark.parametrize(
    ("text", "entries"), [('["a", "b c"]', ["a", "b c"]), ("[1, 2]", ["1", "2"]), ("plain", ["plain"]), ("[x", ["[x"])]
)
def test_several_texts_are_json_and_one_is_itself(text: str, entries: list[str]) -> None:
    assert module.REPEATED.parse(text) == entries
