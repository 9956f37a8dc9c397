"""Every section of launch options passes the same checks: each option says the same by flag, file and variable."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import yaml

from accelerate._base.errors import ConfigurationError
from accelerate.config.cli import add_launch_arguments
from accelerate.config.knob import knobs
from accelerate.config.resolve import resolve
from accelerate.config.run_config import RunConfig
from accelerate.config.sections.registry import SECTIONS, LaunchOption, options
from accelerate.devices.machine import Machine

MACHINE = Machine(device_type="cuda", device_count=4, cpu_count=8, visible_devices_variable="CUDA_VISIBLE_DEVICES")
WRONG = "\N{SNOWMAN}"
CANDIDATES = ("true", "false", "7", "1,0,1", "0.25", "words")
# The values that agree with the machine above, where not every value does.
VALUES = {
    "fp8_override_linear_precision": "true,false,true",
    "gpu_ids": "0,1,2,3",
    "machine_rank": "0",
    "max_restarts": "3",
    "num_machines": "1",
    "num_processes": "2",
}


def section_name(section: type) -> str:
    return section.__name__


def options_of(section: type) -> list[LaunchOption]:
    return [option for option in options().values() if option.section is section]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("accelerate launch", allow_abbrev=False)
    add_launch_arguments(made)
    return made


def launch(*words: str) -> RunConfig:
    return resolve(parser().parse_args([*words, "train.py"]), environ={}, machine=MACHINE)


def accepts(option: LaunchOption, text: str) -> bool:
    """Whether the option can hold a text."""
    try:
        value = option.knob.codec.parse(text)
    except (ValueError, ConfigurationError):
        return False
    return not option.knob.choices or value in option.knob.choices


def sample(option: LaunchOption) -> str | None:
    """Return a text for the option that is not its default; None where every text is the default."""
    if option.name in VALUES:
        return VALUES[option.name]
    for text in (*map(str, option.knob.choices), *CANDIDATES):
        if accepts(option, text) and option.knob.codec.parse(text) != option.default:
            return text
    return None


@pytest.fixture(autouse=True)
def no_default_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("section", SECTIONS, ids=section_name)
class TestSection:
    def test_every_field_is_an_option_with_a_sentence_of_help(self, section: type) -> None:
        declared = [name for name in section.__annotations__ if name in knobs(section)]
        assert declared
        assert declared == [option.name for option in options_of(section)]
        for option in options_of(section):
            assert option.knob.help.endswith("."), option.name
            assert option.default is None or not option.knob.choices or option.default in option.knob.choices

    def test_its_heading_and_flags_stand_in_the_help(self, section: Any) -> None:
        text = parser().format_help()
        assert section.title in text or not any(option.flag for option in options_of(section))
        for option in options_of(section):
            assert option.flag is None or option.flag in text

    def test_its_switch_is_an_option(self, section: Any) -> None:
        assert section.switch is None or section.switch in options()

    def test_a_variable_holds_every_value_that_a_flag_can_give(self, section: type) -> None:
        for option in options_of(section):
            text = sample(option)
            if option.knob.env is None or text is None:
                continue
            value = option.knob.codec.parse(text)
            assert option.knob.decode(option.knob.encode(value)) == value, option.name

    def test_a_wrong_text_in_a_variable_is_named(self, section: type) -> None:
        """Only an option that may hold any text takes every text."""
        for option in options_of(section):
            names = list(filter(None, (option.knob.env or "").split(",")))
            wrong = ",".join([WRONG] * len(names))
            if not names or accepts(option, wrong):
                continue
            with pytest.raises(ConfigurationError, match=rf"{names[0]}.*{WRONG}"):
                option.knob.decode(dict.fromkeys(names, WRONG))

    def test_a_flag_and_a_file_say_the_same(self, section: Any, tmp_path: Path) -> None:
        compared = 0
        for option in options_of(section):
            text = sample(option)
            if option.flag is None or not option.file_key or text is None:
                continue
            value = option.knob.codec.parse(text)
            words = [option.flag] if option.knob.shape == "switch" else [option.flag, text]
            content = {option.file_key: list(value) if isinstance(value, tuple) else value}
            file = tmp_path / f"{option.name}.yaml"
            content = {section.file_key: content} if section.file_key else content
            # A file of the kind NO is for one process.
            kind = "MULTI_CPU" if option.name == "num_processes" else "NO"
            file.write_text(yaml.safe_dump({"distributed_type": kind} | content))
            try:
                by_flag, by_file = launch(*words), launch("--config_file", str(file))
            except ConfigurationError:
                continue  # it contradicts this machine, or needs another option
            assert by_file[option.name] == by_flag[option.name], option.name
            assert by_flag.origin(option.name) == f"flag {option.flag}"
            compared += 1
        in_both = [option for option in options_of(section) if option.flag and option.file_key]
        assert compared >= min(1, len(in_both))
