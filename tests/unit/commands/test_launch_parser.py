"""How `accelerate launch` reads its command line."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from accelerate.commands import accelerate_cli
from accelerate.commands.launch import launch_command_parser


@pytest.mark.parametrize(
    ("words", "rest"),
    [
        (["train.py"], []),
        (["train.py", "--num_processes", "3", "--", "-x", "--"], ["--num_processes", "3", "--", "-x", "--"]),
        (["--num_processes", "2", "-m", "train.py", "--", "a"], ["--", "a"]),
        (["--num-processes=2", "--cpu", "train.py", "--cpu"], ["--cpu"]),
        (["--cpu", "--", "train.py", "--no-such"], ["--no-such"]),
        (["--vm", "a", "--vm", "b", "train.py", "--vm", "c"], ["--vm", "c"]),
    ],
)
def test_arguments_of_the_script_are_left_alone(words: list[str], rest: list[str]) -> None:
    options = launch_command_parser().parse_args(words)
    assert (options.training_script, options.training_script_args) == ("train.py", rest)


def test_a_programs_own_option_with_several_values_is_left_to_argparse() -> None:
    parser = launch_command_parser()
    parser.add_argument("--tags", nargs="+")
    options = parser.parse_args(["--tags", "a", "b", "--cpu", "train.py", "--lr", "1"])
    assert (options.tags, options.training_script, options.training_script_args) == (
        ["a", "b"],
        "train.py",
        ["--lr", "1"],
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_process", "2", "train.py"], "--num_process is not an option: did you mean --num_processes?"),
        (["--mixed-precison", "bf16", "train.py"], "did you mean --mixed_precision?"),
        (["--learning_speed_of_light", "2", "train.py"], "the options of a script come after it"),
        (["--cpu"], "no script was given"),
        (["--num_processes", "two", "train.py"], "'two' is not a whole number"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        launch_command_parser().parse_args(words)
    told = capsys.readouterr().err
    assert raised.value.code == 2
    assert message in told
    assert told.count("\n") == 1


def test_sub_commands_that_exist_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert accelerate_cli.run(["--help"]) == 0
    told = capsys.readouterr().out
    assert "\n  launch " in told
    for command in accelerate_cli.COMMANDS:
        assert f"\n  {command.name} " in told
        assert find_spec(f"accelerate.commands.{command.module}") is not None


def test_no_command_and_a_wrong_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert accelerate_cli.run([]) == 1
    assert accelerate_cli.run(["lunch"]) == 2
    assert "Did you mean `accelerate launch`?" in capsys.readouterr().err
    assert accelerate_cli.run(["--version"]) == 0


@pytest.mark.parametrize(
    ("words", "shown", "hidden"),
    [
        ([], ["--num_processes", "--explain"], ["--fsdp_version", "--zero_stage", "--num-processes"]),
        (["--use-fsdp"], ["--num_processes", "--fsdp_version"], ["--zero_stage"]),
        (["--verbose"], ["--fsdp_version", "--zero_stage"], []),
    ],
)
def test_help_shows_what_the_flags_call_for(
    words: list[str], shown: list[str], hidden: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["accelerate", "launch", *words, "--help"])
    told = launch_command_parser().format_help()
    assert [option for option in shown if f"\n  {option}" not in told] == []
    assert [option for option in hidden if option in told] == []
