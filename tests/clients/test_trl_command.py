"""TRL's `trl` command trains through this launcher: by flags, by files of options, and by the configurations it ships."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from tests.support.launching import forked_launches, launch_environment

pytest.importorskip("trl", reason="TRL is not installed")

pytestmark = [pytest.mark.clients, pytest.mark.multiprocess]

STEPS, ROWS, BATCH = 4, 40, 2
TWO_ON_CPU = {"distributed_type": "MULTI_CPU", "num_processes": 2, "use_cpu": True, "mixed_precision": "bf16"}


@dataclass(frozen=True)
class Run:
    """What a command left behind: the losses of its steps, and how far in the data each step came."""

    folder: Path
    losses: list[float]
    epochs: list[float]
    files: set[str]
    states: set[str]

    @property
    def processes(self) -> int:
        """Return how many processes shared the data: each saves its random state, and takes a batch a step."""
        count = round(self.epochs[0] * ROWS / BATCH)
        assert self.states == ({"rng_state.pth"} if count == 1 else {f"rng_state_{rank}.pth" for rank in range(count)})
        return count


def read_run(folder: Path) -> Run:
    checkpoint = folder / f"checkpoint-{STEPS}"
    steps = [
        entry
        for entry in json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
        if "grad_norm" in entry
    ]
    assert [entry["step"] for entry in steps] == list(range(1, STEPS + 1))
    return Run(
        folder,
        [entry["loss"] for entry in steps],
        [entry["epoch"] for entry in steps],
        {path.name for path in folder.iterdir() if path.is_file()},
        {path.name for path in checkpoint.glob("rng_state*")},
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and its tokenizer in `model`, and texts in `data`."""
    from tests.clients.programs.shared import sentences, tiny_llama, tokenizer

    folder = tmp_path_factory.mktemp("trl")
    tiny_llama().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    rows = [" ".join(text.split()[: 5 + row % 3]) for row, text in enumerate(sentences(ROWS, length=8))]
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return folder


def training_options(files: Path, output: Path) -> dict[str, Any]:
    return {
        "model_name_or_path": str(files / "model"),
        "dataset_name": str(files / "data"),
        "output_dir": str(output),
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "save_steps": STEPS,
        "max_length": 16,
        "report_to": "none",
        "use_cpu": True,
    }


def as_words(options: Mapping[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def by_command(files: Path, *words: str) -> Run:
    """Run `trl sft` as a user does."""
    output = files / "-".join(("command", *words))
    command = [sys.executable, "-m", "trl.cli.main", "sft", *as_words(training_options(files, output)), *words]
    environment = launch_environment({"HF_HOME": str(files / "cache")})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.count("Training completed.") == 1
    return read_run(output)


@pytest.fixture(scope="module")
def one(files: Path) -> Run:
    return by_command(files)


@pytest.fixture(scope="module")
def two(files: Path) -> Run:
    return by_command(files, "--num_processes", "2")


@pytest.fixture
def trl(files: Path) -> Iterator[Callable[..., str]]:
    """The command in this process; what it launches is forked from it, and need not load TRL again."""
    import datasets.config
    import trl.trainer.sft_trainer  # noqa: F401 - loaded for the processes that are forked next
    from trl.cli.main import main

    with patch.object(datasets.config, "HF_DATASETS_CACHE", files / "cache"), forked_launches() as outputs:

        def run(*words: str) -> str:
            assert main(["sft", *words]) == 0
            return outputs[-1]

        yield run


# --- by flags ---------------------------------------------------------------------------------------------------------


def test_one_process_learns_and_saves(one: Run) -> None:
    assert one.processes == 1
    assert one.losses[-1] < one.losses[0] < 4
    assert one.files >= {"config.json", "model.safetensors", "tokenizer.json", "training_args.bin"}


def test_two_processes_share_the_data(one: Run, two: Run) -> None:
    assert two.processes == 2
    assert two.losses[-1] < two.losses[0] < 4
    assert two.losses != one.losses
    assert two.files == one.files


def test_a_flag_of_the_launcher_that_is_misspelt_is_named(
    files: Path, trl: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        trl(*as_words(training_options(files, files / "never")), "--num_proceses", "2")
    assert ended.value.code == 2
    assert "did you mean --num_processes?" in capsys.readouterr().err
    assert not (files / "never").exists()


# --- by files ---------------------------------------------------------------------------------------------------------


def test_a_file_of_the_launcher(files: Path, trl: Callable[..., str], two: Run) -> None:
    path = files / "two.yaml"
    path.write_text(yaml.safe_dump(TWO_ON_CPU))
    trl(*as_words(training_options(files, files / "launcher")), "--accelerate_config", str(path))
    run = read_run(files / "launcher")
    assert (run.processes, run.losses, run.files) == (2, two.losses, two.files)


def test_a_file_of_the_trainer_that_holds_options_of_the_launcher_too(
    files: Path, trl: Callable[..., str], two: Run
) -> None:
    path = files / "recipe.yaml"
    path.write_text(yaml.safe_dump(training_options(files, files / "recipe") | {"num_processes": 2}))
    trl("--config", str(path))
    run = read_run(files / "recipe")
    assert (run.processes, run.losses, run.files) == (2, two.losses, two.files)


# --- by the configurations that TRL ships -----------------------------------------------------------------------------


def test_a_configuration_for_one_gpu(files: Path, trl: Callable[..., str], one: Run) -> None:
    # It says `num_processes: 8` beside `distributed_type: "NO"`.
    trl(*as_words(training_options(files, files / "single")), "--accelerate_config", "single_gpu")
    run = read_run(files / "single")
    assert (run.processes, run.losses) == (1, one.losses)


@pytest.mark.parametrize(("name", "tolerance"), [("multi_gpu", 0), ("fsdp1", 0.005), ("fsdp2", 0.005)])
def test_a_configuration_for_several_gpus_computes_on_the_cpu(
    name: str,
    tolerance: float,
    files: Path,
    trl: Callable[..., str],
    two: Run,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = as_words(training_options(files, files / name))
    output = trl(*words, "--accelerate_config", name, "--num_processes", "2")
    assert output.count("Training completed.") == 1
    assert "runs on the CPU: this machine has no accelerator" in capsys.readouterr().err
    run = read_run(files / name)
    assert run.processes == 2
    # Shards are rounded to bfloat16 where replicas are not.
    assert run.losses == pytest.approx(two.losses, rel=tolerance)
    assert run.files == two.files
