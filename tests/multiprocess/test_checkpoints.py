"""Checkpoints that several processes write and read together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.processes import run_group
from tests.support.training import fresh_accelerator, group_once
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate._base.errors import CheckpointError
from accelerate.checkpointing.catalog import inspect
from accelerate.utils import GradientAccumulationPlugin, set_seed

pytestmark = pytest.mark.multiprocess
ROWS = 48


class Run:
    """A model in double precision whose batches are shared between processes."""

    def __init__(self, dropout: float = 0.0, items: bool = False, **options: Any) -> None:
        set_seed(0)
        self.accelerator: Accelerator = fresh_accelerator(**options)
        self.items = items
        layers = [torch.nn.Linear(3, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1)]
        model = torch.nn.Sequential(*layers).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        rows = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1)).double()
        loader: Any = DataLoader(rows, batch_size=2, shuffle=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        set_seed(7, device_specific=True)
        self.count = 0

    def train(self, epochs: int = 2, stop: int | None = None) -> None:
        for _ in self.accelerator.epochs(epochs):
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    losses = (self.model(batch) - batch.sum(1, keepdim=True)) ** 2
                    if self.items:
                        weights = 1 + (batch[:, :1] > 0)
                        self.accelerator.backward((losses * weights).sum(), num_items=weights.sum())
                    else:
                        self.accelerator.backward(losses.mean())
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                self.count += 1
                if self.count == stop:
                    return

    def weights(self) -> list[float]:
        return torch.cat([weight.detach().flatten() for weight in self.model.parameters()]).tolist()


def accumulating(steps: int) -> dict[str, Any]:
    return {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=steps)}


def exact_resume(folder: str) -> dict[str, Any]:
    """Stop inside a window, with dropout, and go on: on the same number of processes every bit is the same."""
    whole = Run(dropout=0.5, **accumulating(3))
    whole.train()
    expected = whole.weights(), torch.rand(1).item()
    stopped = Run(dropout=0.5, **accumulating(3))
    stopped.train(stop=5)
    stopped.accelerator.save_state(f"{folder}/state")
    found = sorted(entry.name for entry in Path(folder, "state").iterdir())
    resumed = Run(dropout=0.5, **accumulating(3))
    resumed.accelerator.load_state(f"{folder}/state")
    resumed.train()
    return {"is_equal": (resumed.weights(), torch.rand(1).item()) == expected, "files": found}


def background_save(folder: str) -> bool:
    """Train on, with collectives, while a checkpoint is written; it holds the moment of the call."""
    whole = Run(dropout=0.5)
    whole.train()
    expected = whole.weights()
    run = Run(dropout=0.5)
    run.train(stop=3)
    run.accelerator.save_state(f"{folder}/background", blocking=False)
    run.train()
    run.accelerator.wait_for_save()
    resumed = Run(dropout=0.5)
    resumed.accelerator.load_state(f"{folder}/background")
    resumed.train()
    return resumed.weights() == expected


def failures(folder: str) -> dict[str, Any]:
    """Let one rank fail while it saves or loads: all ranks raise the same, and nothing is left."""
    run = Run()
    rank = run.accelerator.process_index
    run.accelerator.save_state(f"{folder}/kept/good")
    found: dict[str, Any] = {}

    def hook(models: Any, weights: Any, output_dir: str) -> None:
        if rank == 1:
            raise OSError(28, "No space left on device", "some/file")

    handle = run.accelerator.register_save_state_pre_hook(hook)
    for blocking in (True, False):
        with pytest.raises(CheckpointError) as caught:
            run.accelerator.save_state(f"{folder}/kept/bad", blocking=blocking)
            run.accelerator.wait_for_save()
        found[f"save, blocking={blocking}"] = str(caught.value)
    handle.remove()
    run.accelerator.wait_for_everyone()
    found["left"] = sorted(entry.name for entry in Path(folder, "kept").iterdir() if ".accelerate-" not in entry.name)
    run.accelerator.wait_for_everyone()
    if rank == 0:
        Path(f"{folder}/kept/good/random_states_1.pkl").unlink()
    run.accelerator.wait_for_everyone()
    with pytest.raises(CheckpointError) as caught:
        run.accelerator.load_state(f"{folder}/kept/good")
    found["load"] = str(caught.value)
    run.accelerator.wait_for_everyone()
    if rank == 0:  # without a manifest the files that are read decide
        for name in ("manifest.json", "model.safetensors"):
            Path(f"{folder}/kept/good/{name}").unlink()
    run.accelerator.wait_for_everyone()
    with pytest.raises(CheckpointError) as without_manifest:
        run.accelerator.load_state(f"{folder}/kept/good")
    found["kinds"] = [isinstance(error.value, FileNotFoundError) for error in (caught, without_manifest)]
    return found


def all_on_two(folder: str) -> dict[str, Any]:
    return {check.__name__: check(folder) for check in (exact_resume, background_save, failures)}


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_group(all_on_two, 2, str(tmp_path_factory.mktemp("two")))


def test_a_resume_is_exact_on_every_rank(on_two: list[dict[str, Any]]) -> None:
    files = ["loader.bin", "manifest.json", "model.safetensors", "optimizer.bin", "progress.json"]
    files += ["random_states_0.pkl", "random_states_1.pkl", "window_0.bin", "window_1.bin"]
    assert [found["exact_resume"] for found in on_two] == [{"is_equal": True, "files": files}] * 2


def test_training_goes_on_while_a_checkpoint_is_written(on_two: list[dict[str, Any]]) -> None:
    assert [found["background_save"] for found in on_two] == [True, True]


def test_a_failure_on_one_rank_is_the_same_error_on_all_and_leaves_nothing(on_two: list[dict[str, Any]]) -> None:
    first, second = (found["failures"] for found in on_two)
    assert first == second
    for key in ("save, blocking=True", "save, blocking=False"):
        assert "Rank 1: OSError: [Errno 28] No space left on device: 'some/file'" in first[key]
    assert first["left"] == ["good"]
    assert "random_states_1.pkl: it is missing" in first["load"]
    assert first["kinds"] == [True, True]


def train_whole(items: bool) -> list[float]:
    run = Run(items=items, global_batch_size=12)
    run.train()
    return run.weights()


def stop_inside_a_window(folder: str, items: bool, stop: int) -> bool:
    run = Run(items=items, global_batch_size=12)
    run.train(stop=stop)
    run.accelerator.save_state(folder)
    return run.accelerator.sync_gradients


def go_on(folder: str, items: bool) -> list[float]:
    run = Run(items=items, global_batch_size=12)
    run.accelerator.load_state(folder)
    run.train()
    return run.weights()


@pytest.fixture(scope="module")
def window_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("window"))


@pytest.mark.parametrize("items", [False, True], ids=["means", "items"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (1, 2)])
def test_an_open_window_goes_on_on_another_number_of_processes(
    window_folder: str, before: int, after: int, items: bool
) -> None:
    state = f"{window_folder}/{before}-{items}"
    (expected,) = group_once(train_whole, 1, items)
    closed = group_once(stop_inside_a_window, before, state, items, 8 // before)
    assert closed == [False] * before
    assert inspect(Path(state)).world_size == before
    for weights in group_once(go_on, after, state, items):
        torch.testing.assert_close(torch.tensor(weights), torch.tensor(expected), rtol=1e-9, atol=1e-9)
