"""The helpers of the environment read strictly and put everything back."""

from __future__ import annotations

import asyncio
import os

import pytest
from tests.support.logs import logged

from accelerate._base.errors import ConfigurationError
from accelerate.config import env

NAME = "ACCELERATE_VARIABLE_OF_A_TEST"


@pytest.mark.parametrize("word", ["y", "YES", "t", "True", "on", "1"])
def test_words_for_yes(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.str_to_bool(word) == 1
    assert env.str_to_bool(word, to_bool=True) is True
    monkeypatch.setenv(NAME, word)
    assert env.flag(NAME) is True
    assert env.parse_flag_from_env(NAME) is True


@pytest.mark.parametrize("word", ["n", "No", "f", "FALSE", "off", "0"])
def test_words_for_no(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.str_to_bool(word) == 0
    assert env.str_to_bool(word, to_bool=True) is False
    monkeypatch.setenv(NAME, word)
    assert env.flag(NAME, default=True) is False


def test_other_words_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'maybe' is neither yes nor no"):
        env.str_to_bool("maybe")
    monkeypatch.setenv(NAME, "maybe")
    with pytest.raises(ConfigurationError, match=f"{NAME}='maybe'"):
        env.flag(NAME)


def test_a_flag_that_is_empty_or_absent_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.flag(NAME, default=True) is True
    monkeypatch.setenv(NAME, "")
    assert env.flag(NAME, default=True) is True
    assert env.flag(NAME) is False


def test_integers_come_from_the_first_name_that_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME + "_A", "-1")
    monkeypatch.setenv(NAME + "_B", "3")
    monkeypatch.setenv(NAME + "_C", "4")
    assert env.integer([NAME, NAME + "_A", NAME + "_B", NAME + "_C"], 7) == 3
    assert env.get_int_from_env([NAME + "_C", NAME + "_B"], 7) == 4
    assert env.integer(NAME, 7) == 7
    monkeypatch.setenv(NAME, "three")
    with pytest.raises(ConfigurationError, match=f"{NAME}='three' is not a whole number"):
        env.integer(NAME, 7)


def test_choices_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.parse_choice_from_env(NAME) == "no"
    assert env.parse_choice_from_env(NAME, 4) == "4"
    monkeypatch.setenv(NAME, "bf16")
    assert env.parse_choice_from_env(NAME) == "bf16"


def test_put_drop_update_items() -> None:
    with env.keep_accelerate_environment():
        env.put(NAME, 3)
        assert env.get(NAME) == "3"
        copy = env.items()
        copy[NAME] = "changed"
        assert env.get(NAME) == "3"
        env.update({NAME: None, NAME + "_A": "x"})
        assert env.get(NAME) is None
        assert env.get(NAME + "_A", "default") == "x"
        env.drop(NAME + "_A")
        env.drop(NAME + "_A")
        assert env.get(NAME + "_A", "default") == "default"


def test_patch_environment_restores_also_on_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "old")
    before = dict(os.environ)

    def failing() -> None:
        with env.patch_environment(**{NAME.lower(): 5, "accelerate_other_variable": "x"}):
            assert os.environ[NAME] == "5"
            assert os.environ["ACCELERATE_OTHER_VARIABLE"] == "x"
            os.environ[NAME] = "changed inside"
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        failing()
    assert dict(os.environ) == before


def test_clear_environment_restores_also_on_error() -> None:
    before = dict(os.environ)

    def failing() -> None:
        with env.clear_environment():
            assert not os.environ
            os.environ[NAME] = "inside"
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        failing()
    assert dict(os.environ) == before


def test_without_accelerate_environment_hides_only_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "old")
    with env.without_accelerate_environment():
        assert env.get(NAME) is None
        assert env.get("PATH") is not None
    assert env.get(NAME) == "old"


def test_purge_on_a_function_restores_values_additions_and_removals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "old")
    monkeypatch.setenv(NAME + "_REMOVED", "there")

    @env.purge_accelerate_environment
    def work(answer: int) -> int:
        env.update({NAME: "new", NAME + "_ADDED": "x", NAME + "_REMOVED": None})
        return answer

    assert work(42) == 42
    assert env.get(NAME) == "old"
    assert env.get(NAME + "_ADDED") is None
    assert env.get(NAME + "_REMOVED") == "there"


def test_purge_on_a_coroutine_waits_for_its_end() -> None:
    @env.purge_accelerate_environment
    async def work() -> str | None:
        env.put(NAME, "inside")
        await asyncio.sleep(0)
        return env.get(NAME)

    assert asyncio.run(work()) == "inside"
    assert env.get(NAME) is None


def test_purge_on_a_class_reaches_test_methods_and_subclasses() -> None:
    @env.purge_accelerate_environment
    class Base:
        def test_method(self) -> None:
            env.put(NAME, "x")

        @staticmethod
        def test_static() -> None:
            env.put(NAME, "x")

        def helper(self) -> None:
            env.put(NAME, "x")

    class Child(Base):
        def test_more(self) -> None:
            env.put(NAME, "x")

    for call in (Base().test_method, Base.test_static, Child().test_more, Child().test_method):
        call()
        assert env.get(NAME) is None, call
    with env.keep_accelerate_environment():
        Base().helper()
        assert env.get(NAME) == "x"


def test_purge_on_a_class_keeps_its_own_hook_for_subclasses() -> None:
    seen: list[tuple[str, int]] = []

    @env.purge_accelerate_environment
    class Base:
        def __init_subclass__(cls, size: int = 0) -> None:
            seen.append((cls.__name__, size))

    class Child(Base, size=3):
        def test_more(self) -> None:
            env.put(NAME, "x")

    Child().test_more()
    assert (seen, env.get(NAME)) == ([("Child", 3)], None)


def test_lines_for_a_file_leave_out_what_a_shell_misreads() -> None:
    with logged("left out", times=3) as said:
        lines = env.convert_dict_to_env_variables({"A": "1", "B": "two words", "C": "x;y", "D": "", "E": 5})
    assert lines == ["A=1\n", "E=5\n"]
    assert not any("two words" in message for message in said), "a value may be a secret"


def test_libraries_that_are_imported() -> None:
    assert env.are_libraries_initialized("os", "a_package_that_nobody_wrote", "pytest") == ["os", "pytest"]
