"""`accelerate tpu-config`: the gcloud command that it builds."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate.commands import accelerate_cli

POD = ["--tpu_name", "pod", "--tpu-zone", "zone-a"]


@pytest.fixture(autouse=True)
def no_default_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("words", "gcloud"),
    [
        (
            [*POD, "--command", "echo hi", "--command", "ls"],
            "gcloud compute tpus tpu-vm ssh pod --zone zone-a --command cd /usr/share; echo hi; ls --worker all",
        ),
        (
            [*POD, "--use_alpha", "--command", "ls", "--install_accelerate", "--accelerate_version", "1.0.0"],
            "gcloud alpha compute tpus tpu-vm ssh pod --zone zone-a --command cd /usr/share; pip install accelerate==1.0.0; ls --worker all",
        ),
        (
            [*POD, "--install-accelerate"],
            "gcloud compute tpus tpu-vm ssh pod --zone zone-a --command cd /usr/share; pip install accelerate -U --worker all",
        ),
    ],
)
def test_debug_prints_the_command(words: list[str], gcloud: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert accelerate_cli.run(["tpu-config", "--debug", *words]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"Running {gcloud}"


def test_values_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = tmp_path / "setup.txt"
    commands.write_text("pip list\n\n  uname -a\n")
    file = tmp_path / "pod.yaml"
    file.write_text(f"distributed_type: XLA\ntpu_name: mine\ntpu_zone: here\ncommand_file: {commands}\n")
    assert accelerate_cli.run(["tpu-config", "--debug", "--config_file", str(file)]) == 0
    told = capsys.readouterr().out
    assert "ssh mine --zone here --command cd /usr/share; pip list; uname -a --worker all" in told
    assert accelerate_cli.run(["tpu-config", "--debug", "--config_file", str(file), "--command", "ls"]) == 0
    assert "--command cd /usr/share; ls --worker all" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--command", "ls"], "--tpu_name"),
        (["--tpu_name", "pod", "--command", "ls"], "--tpu_zone"),
        (POD, "No command was given"),
        ([*POD, "--command_file", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert accelerate_cli.run(["tpu-config", "--debug", *words]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_the_command_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "gcloud"
    program.write_text('#!/bin/sh\nprintf \'%s\\n\' "$@" > "$(dirname "$0")/words"\n[ "$5" != broken ] || exit 3\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert accelerate_cli.run(["tpu-config", *POD, "--command", "echo 'a b'"]) == 0
    words = (tmp_path / "words").read_text().splitlines()
    assert words[words.index("--command") + 1] == "cd /usr/share; echo 'a b'"
    with pytest.raises(SystemExit) as raised:
        accelerate_cli.run(["tpu-config", "--tpu_name", "broken", "--tpu_zone", "z", "--command", "ls"])
    assert raised.value.code == 3


def test_no_gcloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert accelerate_cli.run(["tpu-config", *POD, "--command", "ls"]) == 2
    assert "Google Cloud CLI" in capsys.readouterr().err
