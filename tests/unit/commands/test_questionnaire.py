"""`accelerate config` in a real terminal: what is asked, what is written, and that it launches."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from accelerate.commands.config import load_config_from_file
from accelerate.config.resolve import resolve
from accelerate.devices.machine import detect

pexpect = pytest.importorskip("pexpect", reason="needs pexpect, which needs a pseudo-terminal")

SOURCES = str(Path(__file__).parents[3] / "src")
COMMAND = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
DOWN, ENTER, BACK, CLEAR, CTRL_C = "\x1b[B", "\r", "\x1b[Z", "\x15", "\x03"


class Terminal:
    """A person at a terminal: waits for a question, then types."""

    def __init__(self, path: Path, environ: dict[str, str], code: str | None = None) -> None:
        self.path = path
        arguments = ["-c", code] if code else [*COMMAND[1:], "config", "--config_file", str(path)]
        self.child: Any = pexpect.spawn(
            COMMAND[0], arguments, env=environ, dimensions=(70, 150), timeout=600, encoding="utf-8"
        )

    def sees(self, text: str) -> None:
        self.child.expect_exact(text)

    def answers(self, question: str, *keys: str) -> None:
        """Wait for a question and type; Enter comes last."""
        self.sees(f"{question}:")
        self.child.send("".join(keys) + ENTER)

    def types(self, question: str, text: str) -> None:
        """Wait for a question and replace the answer that is offered."""
        self.answers(question, CLEAR, text)

    def goes_back(self, question: str) -> None:
        self.sees(f"{question}:")
        self.child.send(BACK)

    def accepts(self, *questions: str) -> None:
        """Take what is offered."""
        for question in questions:
            self.answers(question)

    def ends(self) -> int:
        self.child.expect(pexpect.EOF)
        self.child.close()
        return int(self.child.exitstatus)

    def written(self, *seen: str) -> dict[str, Any]:
        """Confirm the summary and return the content of the file, which must load."""
        for text in ("will hold", *seen):
            self.sees(text)
        self.accepts("Write the file")
        assert self.ends() == 0
        load_config_from_file(self.path)
        content: dict[str, Any] = yaml.safe_load(self.path.read_text())
        return content


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine without accelerators, so that one process is offered."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "SLURM_"))}
    # The size is that of the pseudo-terminal, not of the one where the tests were started.
    kept = {name: value for name, value in kept.items() if name not in ("COLUMNS", "LINES")}
    # A pseudo-terminal does not say where its cursor is.
    kept |= {"PYTHONPATH": SOURCES, "HF_HOME": str(tmp_path / "home"), "PROMPT_TOOLKIT_NO_CPR": "1", "TERM": "xterm"}
    kept["CUDA_VISIBLE_DEVICES"] = ""
    if detect(kept).has_accelerator:
        pytest.skip("this machine has accelerators that cannot be hidden")
    return kept


@pytest.fixture
def terminal(tmp_path: Path, environ: dict[str, str]) -> Iterator[Terminal]:
    session = Terminal(tmp_path / "answers.yaml", environ)
    yield session
    session.child.close(force=True)


@pytest.fixture
def four_gpus(tmp_path: Path, environ: dict[str, str]) -> dict[str, str]:
    """The environment of a machine whose vendor tool lists four accelerators."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\nfor i in 0 1 2 3; do echo "GPU $i: a card"; done\n')
    tool.chmod(0o755)
    changed = {**environ, "PATH": f"{tool.parent}{os.pathsep}{environ['PATH']}"}
    changed.pop("CUDA_VISIBLE_DEVICES", None)
    if detect(changed).device_count != 4:
        pytest.skip("this machine has accelerators of its own")
    return changed


def test_one_process_on_the_cpu_is_written_and_launches(
    terminal: Terminal, tmp_path: Path, environ: dict[str, str]
) -> None:
    terminal.accepts("Where the run is")
    terminal.accepts("What the run is on")
    terminal.accepts("Compute on the CPU alone")
    terminal.answers("Number format of training", DOWN, DOWN)
    terminal.accepts("Compiler for models (torch.compile)")
    written = terminal.written()
    assert (written["distributed_type"], written["num_processes"]) == ("NO", 1)
    assert (written["compute_environment"], written["mixed_precision"]) == ("LOCAL_MACHINE", "bf16")
    assert "dynamo_config" not in written
    script = tmp_path / "script.py"
    script.write_text("import os\nprint('precision', os.environ['ACCELERATE_MIXED_PRECISION'])\n")
    run = subprocess.run(
        [*COMMAND, "launch", "--config_file", str(terminal.path), str(script)],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, "precision bf16\n"), run.stderr


def test_two_machines_with_the_accelerators_that_were_found(tmp_path: Path, four_gpus: dict[str, str]) -> None:
    terminal = Terminal(tmp_path / "answers.yaml", four_gpus)
    terminal.sees("4 of type")
    # Several accelerators of the kind that was found are offered.
    terminal.accepts("Where the run is", "What the run is on")
    terminal.types("Number of machines", "2")
    terminal.accepts("Engine that shards the model")
    terminal.types("Number of this machine, from 0", "2")
    terminal.sees("from 0 to 1")
    terminal.child.send(CLEAR + "1" + ENTER)
    terminal.types("Address of the first machine", "10.0.0.1")
    terminal.accepts("Port of the first machine; 0 takes a free one")
    terminal.answers("How the machines meet", DOWN)
    # Eight are offered: four on each of two machines.
    terminal.accepts("Number of processes over all machines")
    terminal.accepts("Bind each process to the cores next to its accelerator")
    terminal.accepts("Check in every collective that all processes agree about its shapes; slower")
    terminal.accepts("Number format of training")
    terminal.accepts("Compiler for models (torch.compile)")
    written = terminal.written()
    assert (written["distributed_type"], written["num_processes"]) == ("MULTI_GPU", 8)
    assert (written["num_machines"], written["machine_rank"]) == (2, 1)
    assert (written["main_process_ip"], written["main_process_port"]) == ("10.0.0.1", 29500)
    assert (written["rdzv_backend"], written["use_cpu"]) == ("c10d", False)
    config = resolve(argparse.Namespace(config_file=str(terminal.path)), detect(four_gpus), environ=four_gpus)
    assert (config["multi_gpu"], config["num_processes"], config["machine_rank"]) == (True, 8, 1)
    assert config.origin("num_processes") == f"file {terminal.path}: num_processes"


def test_fsdp_asks_what_its_version_knows(tmp_path: Path, four_gpus: dict[str, str]) -> None:
    terminal = Terminal(tmp_path / "answers.yaml", four_gpus)
    terminal.accepts("Where the run is", "What the run is on", "Number of machines")
    terminal.answers("Engine that shards the model", DOWN)
    terminal.types("Accelerators of this machine to use, such as `0,2`, or `all`", "0,2")
    terminal.accepts("Number of processes over all machines", "Bind each process to the cores next to its accelerator")
    terminal.accepts("Check in every collective that all processes agree about its shapes; slower")
    terminal.accepts("Generation of FSDP", "Keep weights and gradients on the CPU while they rest")
    # The strategies of the first generation are not asked for.
    terminal.answers("Free weights between forward and backward", DOWN)
    terminal.answers("Which modules are sharded on their own", DOWN)
    terminal.types("Size of a module that is sharded on its own, under SIZE_BASED_WRAP", "1000")
    terminal.accepts(
        "Form of the weights in checkpoints", "Let the first process of a machine alone read the checkpoint"
    )
    terminal.answers("Compute activations again in backward instead of keeping them", DOWN)
    terminal.accepts("Keep the activations that remain on the CPU")
    terminal.accepts("Lay the processes out on several axes of parallelism", "Number format of training")
    terminal.accepts("Compiler for models (torch.compile)")
    written = terminal.written()
    assert (written["distributed_type"], written["num_processes"], written["gpu_ids"]) == ("FSDP", 2, "0,2")
    assert written["fsdp_config"] == {
        "fsdp_version": 2,
        "fsdp_offload_params": False,
        "fsdp_reshard_after_forward": False,
        "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
        "fsdp_min_num_params": 1000,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_activation_checkpointing": True,
        "fsdp_activation_checkpointing_offload": False,
    }
    config = resolve(argparse.Namespace(config_file=str(terminal.path)), detect(four_gpus), environ=four_gpus)
    assert (config["use_fsdp"], config["fsdp_version"], config["fsdp_reshard_after_forward"]) == (True, 2, "false")


def test_a_step_back_asks_again_and_the_summary_can_be_left(terminal: Terminal) -> None:
    terminal.accepts("Where the run is")
    terminal.answers("What the run is on", DOWN)
    terminal.types("Number of machines", "3")
    # From a text and from a choice, and past the first question of the place.
    terminal.goes_back("File of machines to start on with mpirun")
    terminal.goes_back("Number of machines")
    terminal.goes_back("What the run is on")
    terminal.accepts("Where the run is", "What the run is on", "Compute on the CPU alone")
    terminal.answers("Number format of training", DOWN)
    terminal.accepts("Compiler for models (torch.compile)")
    terminal.sees("will hold")
    terminal.answers("Write the file", DOWN)
    terminal.goes_back("Compiler for models (torch.compile)")
    terminal.answers("Number format of training", DOWN)
    terminal.accepts("Compiler for models (torch.compile)")
    written = terminal.written()
    # The answer from before was offered, one further down is bf16.
    assert written["mixed_precision"] == "bf16"
    assert (written["distributed_type"], written["num_machines"]) == ("NO", 1)


@pytest.mark.parametrize(
    ("devices", "told"),
    [("0", ("would refuse it", "gpu_ids='0'")), ("all", ("would say", "multi_gpu=True", "runs on the CPU"))],
)
def test_what_a_launch_here_would_say_is_foretold(terminal: Terminal, devices: str, told: tuple[str, ...]) -> None:
    terminal.accepts("Where the run is")
    terminal.answers("What the run is on", DOWN, DOWN)
    terminal.accepts("Number of machines", "Engine that shards the model")
    terminal.types("Accelerators of this machine to use, such as `0,2`, or `all`", devices)
    terminal.types("Number of processes over all machines", "0")
    terminal.sees("At least one")
    terminal.child.send(CLEAR + "8" + ENTER)
    terminal.accepts("Bind each process to the cores next to its accelerator")
    terminal.accepts("Check in every collective that all processes agree about its shapes; slower")
    terminal.accepts("Number format of training")
    terminal.accepts("Compiler for models (torch.compile)")
    assert terminal.written(*told)["num_processes"] == 8


def test_leaving_writes_nothing(tmp_path: Path, environ: dict[str, str]) -> None:
    path = tmp_path / "answers.yaml"
    path.write_text("distributed_type: NO\n")
    terminal = Terminal(path, environ)
    terminal.accepts("Where the run is")
    terminal.sees("What the run is on:")
    terminal.child.send(CTRL_C)
    terminal.sees("Nothing was written.")
    assert terminal.ends() == 130
    assert path.read_text() == "distributed_type: NO\n"


def test_cancelling_the_summary_writes_nothing(terminal: Terminal) -> None:
    terminal.accepts("Where the run is")
    terminal.accepts("What the run is on")
    terminal.accepts("Compute on the CPU alone", "Number format of training", "Compiler for models (torch.compile)")
    terminal.sees("will hold")
    terminal.answers("Write the file", DOWN, DOWN)
    terminal.sees("Nothing was written.")
    assert terminal.ends() == 1
    assert not terminal.path.exists()


def test_without_a_terminal_one_line_says_what_to_pass(tmp_path: Path, environ: dict[str, str]) -> None:
    path = tmp_path / "answers.yaml"
    run = subprocess.run(
        [*COMMAND, "config", "--config_file", str(path)],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert run.stdout == ""
    assert len(run.stderr.splitlines()) == 1
    assert "accelerate config default --config_file" in run.stderr
    assert not path.exists()


ONE_PROCESS = (
    "What the run is on",
    "Compute on the CPU alone",
    "Number format of training",
    "Compiler for models (torch.compile)",
)


@pytest.mark.parametrize("function", ["cluster.get_cluster_input", "config.get_user_input"])
def test_a_program_asks_and_goes_on_with_the_answers(function: str, tmp_path: Path, environ: dict[str, str]) -> None:
    module, _, name = function.partition(".")
    code = f"from accelerate.commands.config.{module} import {name} as ask; found = ask(); print('GOT', found.num_processes)"
    terminal = Terminal(tmp_path, environ, code)
    first = "Where the run is" if function.endswith("user_input") else ONE_PROCESS[0]
    terminal.goes_back(first)  # there is nothing before the first question
    if first not in ONE_PROCESS:
        terminal.accepts(first)
    terminal.accepts(*ONE_PROCESS)
    terminal.sees("GOT 1")
    assert terminal.ends() == 0


def test_answers_are_written_as_json_where_the_name_says_so(tmp_path: Path, environ: dict[str, str]) -> None:
    terminal = Terminal(tmp_path / "answers.json", environ)
    terminal.accepts("Where the run is", *ONE_PROCESS)
    terminal.written()
    assert terminal.path.read_text().startswith("{")
