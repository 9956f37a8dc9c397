"""Every example runs on one process and on two, and says the same where the API promises the same.

The twins are started by python and by torchrun as a user does it. The others run in processes that are forked from this
one, which has loaded what they import.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import sklearn.datasets
import sklearn.model_selection  # noqa: F401 - loaded for the examples
from tests.support.processes import ROOT, run_script, run_warm_script, script_environment

EXAMPLES = ROOT / "examples"
LAUNCHES = [1, 2]


def run_example(name: str, world_size: int, *arguments: str) -> str:
    """Run an example in processes that start at once and return its only lines of output."""
    return run_warm_script(EXAMPLES / f"{name}.py", world_size, arguments)


def start_example(name: str, world_size: int, *arguments: str) -> str:
    """Run an example by python or by torchrun and return its only lines of output."""
    script = EXAMPLES / f"{name}.py"
    finished = (
        launch_python([str(script), *arguments]) if world_size == 1 else run_script(script, world_size, arguments)
    )
    assert finished.returncode == 0, finished.stderr[-6000:]
    return finished.stdout


def launch_python(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=script_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def numbers(pattern: str, output: str) -> list[float]:
    """Return the numbers that the pattern's groups catch; the output must have exactly one such line."""
    found = re.findall(pattern, output)
    assert len(found) == 1, output
    groups = found[0] if isinstance(found[0], tuple) else (found[0],)
    return [float(group) for group in groups]


def test_the_twins_differ_by_a_few_lines() -> None:
    plain = (EXAMPLES / "plain.py").read_text().splitlines()
    accelerated = (EXAMPLES / "accelerated.py").read_text().splitlines()
    assert len(set(accelerated) - set(plain)) <= 12
    assert len(set(plain) - set(accelerated)) <= 10


def test_the_twins_agree_on_one_process_and_both_learn_on_two() -> None:
    pattern = r"accuracy ([\d.]+) on (\d+) images"
    plain = numbers(pattern, start_example("plain", 1, "--epochs", "3"))
    one = numbers(pattern, start_example("accelerated", 1, "--epochs", "3"))
    two = numbers(pattern, start_example("accelerated", 2, "--epochs", "3"))
    assert one[1] == two[1] == plain[1] == 360
    # Converting changes no number.
    assert one == plain
    assert min(one[0], two[0]) > 0.9


def test_the_converted_twin_runs_through_debug_launcher() -> None:
    source = (
        "import sys\n"
        f"sys.path.insert(0, {str(EXAMPLES)!r})\n"
        "import accelerated\n"
        "from accelerate import debug_launcher\n"
        "if __name__ == '__main__':\n"
        "    debug_launcher(accelerated.main, args=(1,), num_processes=2)\n"
    )
    finished = launch_python(["-c", source])
    assert finished.returncode == 0, finished.stderr[-6000:]
    assert numbers(r"accuracy [\d.]+ on (\d+) images", finished.stdout) == [360]


@pytest.mark.parametrize("world_size", LAUNCHES)
def test_the_demo_learns_and_draws(world_size: int, tmp_path: Path) -> None:
    output = run_example("digits_cnn", world_size, "--epochs", "6", "--output", str(tmp_path))
    accuracy, images = numbers(r"accuracy ([\d.]+) on (\d+) test images", output)
    assert accuracy > 0.95
    assert images == 360
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")


def test_accumulation_gives_the_same_update_however_it_is_cut() -> None:
    pattern = r"updates (\d+), loss ([\d.]+)"
    whole = numbers(pattern, run_example("gradient_accumulation", 1, "--accumulation", "1"))
    for world_size in LAUNCHES:
        cut = numbers(pattern, run_example("gradient_accumulation", world_size, "--accumulation", "4"))
        assert cut[0] == whole[0] == 80
        assert cut[1] == pytest.approx(whole[1], abs=2e-5)
    assert whole[1] < 1.0


def test_tokens_of_a_window_weigh_the_same_however_it_is_cut() -> None:
    pattern = r"loss per token ([\d.]+)"
    whole = numbers(pattern, run_example("tokens_per_window", 1, "--accumulation", "1"))
    for world_size in LAUNCHES:
        cut = numbers(pattern, run_example("tokens_per_window", world_size, "--accumulation", "4"))
        assert cut == pytest.approx(whole, abs=2e-5)
    assert whole[0] < 2.9


@pytest.mark.parametrize("world_size", LAUNCHES)
def test_metrics_hold_every_sample_once(world_size: int) -> None:
    output = run_example("metrics", world_size)
    assert "each once and in order: True" in output
    assert numbers(r"samples (\d+),.* mean ([\d.]+)", output) == [43, 21]


def test_a_global_batch_size_gives_one_loss_curve() -> None:
    curves = [run_example("global_batch_size", world_size) for world_size in LAUNCHES]
    pattern = r"losses ([\d.]+) ([\d.]+) ([\d.]+) ([\d.]+), learning rate ([\d.]+)"
    one, two = (numbers(pattern, curve) for curve in curves)
    assert two == pytest.approx(one, abs=5e-5)
    assert one[3] < one[0]
    assert one[4] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("world_size", LAUNCHES)
def test_all_processes_stop_at_the_same_step(world_size: int) -> None:
    output = run_example("early_stop_trigger", world_size)
    assert "stopped early: True" in output
    steps = re.findall(r"\d+", output.rpartition(":")[2])
    assert len(steps) == world_size
    assert len(set(steps)) == 1
    assert 0 < int(steps[0]) < 20 * 16 // world_size


@pytest.mark.parametrize("world_size", LAUNCHES)
def test_local_sgd_ends_with_the_same_weights_everywhere(world_size: int) -> None:
    loss, spread = numbers(
        r"loss ([\d.]+), spread of the weights over the processes ([\d.e+-]+)", run_example("local_sgd", world_size)
    )
    assert loss < 0.1
    assert spread < 1e-6


@pytest.mark.parametrize("world_size", LAUNCHES)
def test_one_process_out_of_memory_shrinks_the_batch_of_all(world_size: int) -> None:
    output = run_example("memory", world_size, "--largest", "64", "--fits", "16")
    sizes = re.findall(r"\d+", output.partition("[")[2].partition("]")[0])
    assert len(sizes) == world_size
    assert len(set(sizes)) == 1
    assert 8 <= int(sizes[0]) <= 16
