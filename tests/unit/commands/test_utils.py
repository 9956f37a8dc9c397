"""A parser that takes flags in both spellings and records what was given."""

from __future__ import annotations

import argparse

import pytest

from accelerate.commands.utils import CustomArgumentGroup, CustomArgumentParser


def make_parser() -> CustomArgumentParser:
    parser = CustomArgumentParser("program")
    parser.add_argument("--batch_size", "-b", type=int, default=3)
    parser.add_argument("--use_this", action="store_true")
    parser.add_argument("--not_that", action="store_false")
    parser.add_argument("--fixed_number", action="store_const", const=4)
    parser.add_argument("--many_words", action="append")
    parser.add_argument("--with-dash", dest="renamed")
    group = parser.add_argument_group("A group", "of options")
    assert isinstance(group, CustomArgumentGroup)
    group.add_argument("--two_words", nargs=2)
    group.add_argument("--a_switch", action="store_true")
    parser.add_mutually_exclusive_group().add_argument("--one_of")
    return parser


def test_without_flags_nothing_is_recorded() -> None:
    found = make_parser().parse_args([])
    assert vars(found) == {
        "batch_size": 3,
        "use_this": False,
        "not_that": True,
        "fixed_number": None,
        "many_words": None,
        "renamed": None,
        "two_words": None,
        "a_switch": False,
        "one_of": None,
    }


@pytest.mark.parametrize("dash", ["_", "-"])
def test_both_spellings_are_taken_and_recorded(dash: str) -> None:
    words = "--batch_size 5 --use_this --not_that --fixed_number --two_words a b --a_switch --one_of c"
    found = make_parser().parse_args(words.replace("_", dash).split())
    given = {"batch_size", "use_this", "not_that", "fixed_number", "two_words", "a_switch", "one_of"}
    assert found.nondefault == given
    assert {name: getattr(found, name) for name in given} == {
        "batch_size": 5,
        "use_this": True,
        "not_that": False,
        "fixed_number": 4,
        "two_words": ["a", "b"],
        "a_switch": True,
        "one_of": "c",
    }


def test_short_flags_and_names_of_their_own_are_recorded() -> None:
    found = make_parser().parse_args(["-b", "1", "--with-dash", "x"])
    assert (found.batch_size, found.renamed, found.nondefault) == (1, "x", {"batch_size", "renamed"})


def test_a_default_that_is_given_counts_as_given() -> None:
    assert make_parser().parse_args(["--batch-size", "3"]).nondefault == {"batch_size"}


def test_other_actions_are_argparse_s_own() -> None:
    parser = make_parser()
    found = parser.parse_args(["--many_words", "a", "--many_words", "b"])
    assert found.many_words == ["a", "b"]
    assert "nondefault" not in found
    with pytest.raises(SystemExit):
        parser.parse_args(["--many-words", "a"])


def test_a_group_of_a_plain_parser_changes_only_itself() -> None:
    parser = argparse.ArgumentParser()
    CustomArgumentGroup(parser, "A group").add_argument("--in_group")
    parser.add_argument("--out_side")
    assert "--in-group" in parser._option_string_actions
    assert "--out-side" not in parser._option_string_actions
