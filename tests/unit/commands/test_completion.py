"""`accelerate completion`: the scripts, asked in the shells that they are for."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from accelerate.commands import accelerate_cli
from accelerate.config.sections.registry import options

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
needs_zsh = pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")


def script_of(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert accelerate_cli.run(["completion", shell]) == 0
    path = folder / f"completion.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


@pytest.fixture
def bash_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    return script_of("bash", tmp_path, capsys)


def ask_bash(script: Path, *words: str) -> list[str]:
    """Return COMPREPLY for a line whose last word is at the cursor, by the function that `complete` registered."""
    program = (
        f"source {shlex.quote(str(script))}\n"
        f"COMP_WORDS=({shlex.join(words)})\nCOMP_CWORD={len(words) - 1}\n"
        f"spec=$(complete -p {words[0]}) || exit 9\n"
        "spec=${spec##*-F }\n${spec%% *}\n"
        'for reply in "${COMPREPLY[@]}"; do printf "%s\\n" "$reply"; done'
    )
    shell = ["bash", "--norc", "-c", program]
    done = subprocess.run(shell, cwd=script.parent, capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@needs_bash
@pytest.mark.parametrize(
    ("line", "replies"),
    [
        ("accelerate la", ["launch"]),
        ("accelerate launch --mixed_p", ["--mixed_precision"]),
        ("accelerate launch --mixed-p", ["--mixed_precision"]),
        ("accelerate launch --mixed_precision ''", ["no", "fp16", "bf16", "fp8"]),
        ("accelerate launch --mixed-precision b", ["bf16"]),
        ("accelerate launch --mixed_precision = f", ["fp16", "fp8"]),
        ("accelerate launch --mixed_precision = fp16 --num_pro", ["--num_processes"]),
        ("accelerate launch --num_processes 2 --num_mach", ["--num_machines"]),
        ("accelerate launch --config_file com", ["completion.bash"]),
        ("accelerate launch com", ["completion.bash"]),
        # The options of the script are its own, and its files are offered by bash itself.
        ("accelerate launch --cpu train.py --num_pro", []),
        ("accelerate launch --num_processes 2 -m train --num_pro", []),
        ("accelerate config de", ["default"]),
        ("accelerate config default --mixed_precision ''", ["no", "fp16", "bf16"]),
        ("accelerate completion ''", ["bash", "zsh"]),
        ("accelerate test --num_pro", ["--num_processes"]),
        ("accelerate env --j", ["--json"]),
        ("accelerate tpu_config --tpu_z", ["--tpu_zone"]),
        ("accelerate-launch --num_mach", ["--num_machines"]),
    ],
)
def test_bash(bash_script: Path, line: str, replies: list[str]) -> None:
    assert ask_bash(bash_script, *shlex.split(line)) == replies


@needs_bash
def test_bash_knows_every_command_and_launch_option(bash_script: Path) -> None:
    found = ask_bash(bash_script, "accelerate", "")
    assert found == [command.name for command in accelerate_cli.COMMANDS]
    assert ask_bash(bash_script, "accelerate", "--") == ["--help", "--version"]
    offered = set(ask_bash(bash_script, "accelerate", "launch", "--"))
    assert {option.flag for option in options().values() if option.flag} <= offered
    assert "--explain" in offered


class Zsh:
    """An interactive zsh with the completion loaded."""

    def __init__(self, script: Path) -> None:
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(script.parent)
            os.execvp("env", ["env", "TERM=dumb", "PS1=", f"HOME={script.parent}", "zsh", "-f", "-i"])
        self.send(
            f"autoload -Uz compinit; compinit -u -D; eval \"$(<{shlex.quote(str(script))})\"; bindkey '\\t' complete-word; "
            'report() { print -r -- "<$BUFFER>"; BUFFER="" }; zle -N report; bindkey "^X" report; echo rea""dy\n'
        )
        self.read_until(r"ready\r?\n")

    def send(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def read_until(self, pattern: str) -> re.Match[str]:
        text, end = "", time.monotonic() + 600
        while time.monotonic() < end:
            if select.select([self.terminal], [], [], 0.2)[0]:
                text += os.read(self.terminal, 65536).decode(errors="replace")
            found = re.search(pattern, text)
            if found:
                return found
        raise AssertionError(f"zsh did not answer: {text!r}")

    def complete(self, line: str) -> str:
        """Type a line, press the tabulator, and return the line as it is then."""
        self.send(f"{line}\t\x18")
        return self.read_until(r"<(accelerate[^<>]*)>").group(1)

    def close(self) -> None:
        self.send("\x03exit\n")
        os.close(self.terminal)
        os.waitpid(self.pid, 0)


@needs_zsh
def test_zsh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = {
        "accelerate la": "accelerate launch ",
        "accelerate launch --mixed_p": "accelerate launch --mixed_precision ",
        "accelerate launch --mixed_precision b": "accelerate launch --mixed_precision bf16 ",
        "accelerate launch --cpu train.py --num_proc": "accelerate launch --cpu train.py --num_proc",
        "accelerate config def": "accelerate config default ",
        "accelerate config default --mix": "accelerate config default --mixed_precision ",
        "accelerate completion z": "accelerate completion zsh ",
        "accelerate-launch --num_mach": "accelerate-launch --num_machines ",
    }
    zsh = Zsh(script_of("zsh", tmp_path, capsys))
    try:
        assert {line: zsh.complete(line) for line in lines} == lines
    finally:
        zsh.close()
