"""A sharded run that was saved in the middle of an accumulation window goes on as if it had never stopped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.processes import run_group
from tests.support.sharding import BY_CLASS, Sharded, loss_of, make_text, make_words, near
from torch.utils.data import DataLoader

pytestmark = pytest.mark.multiprocess

WINDOW = 4
STOPS_AFTER = 6
"""Micro-batches: one window has closed, and half of the next is summed up."""
CASES = {
    "2": Sharded(2, BY_CLASS, accumulation=WINDOW),
    "2, kept after forward": Sharded(2, {**BY_CLASS, "reshard_after_forward": False}, accumulation=WINDOW),
    "2, one unit": Sharded(2, accumulation=WINDOW),
    "2, bf16": Sharded(2, BY_CLASS, accumulation=WINDOW, precision="bf16"),
    "2, replicas": Sharded(2, BY_CLASS, accumulation=WINDOW, sizes={"dp_replicate_size": 2, "dp_shard_size": 1}),
    "2, activations again": Sharded(2, {**BY_CLASS, "activation_checkpointing": True}, accumulation=WINDOW),
    "1": Sharded(1, {**BY_CLASS, "use_orig_params": True}, accumulation=WINDOW),
    "1, joined": Sharded(1, {**BY_CLASS, "use_orig_params": False}, accumulation=WINDOW),
    "1, bf16": Sharded(1, {**BY_CLASS, "use_orig_params": True}, accumulation=WINDOW, precision="bf16"),
    "1, activations again": Sharded(1, {**BY_CLASS, "activation_checkpointing": True}, accumulation=WINDOW),
    "1, gradients only": Sharded(1, {**BY_CLASS, "sharding_strategy": "SHARD_GRAD_OP"}, accumulation=WINDOW),
}


def prepared(case: Sharded) -> tuple[Any, Any, Any, Any]:
    accelerator = case.accelerator()
    model = make_words(case.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader: Any = DataLoader(make_text(), batch_size=4 // accelerator.num_processes)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def train(case: Sharded, folder: str | None, *, resumes: bool = False, blocking: bool = True) -> dict[str, Any]:
    """Train for three windows; save in the second, or go on from there, where a folder is given."""
    accelerator, model, optimizer, loader = prepared(case)
    done = 0
    if resumes:
        assert folder is not None
        accelerator.load_state(folder)
        assert not accelerator.sync_gradients
        done = STOPS_AFTER
    for words, following in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, words, following))
            optimizer.step()
            optimizer.zero_grad()
        done += 1
        if folder is not None and not resumes and done == STOPS_AFTER:
            assert not accelerator.sync_gradients
            with torch.set_grad_enabled(case.version == 2):  # no backward pass follows in either case
                loss_of(model, words, following)
            accelerator.save_state(folder, blocking=blocking)
    accelerator.wait_for_save()
    assert done == 3 * WINDOW
    return accelerator.get_state_dict(model)


def save_every(folder: str) -> dict[str, Any]:
    return {name: train(case, f"{folder}/{name}", blocking=name != "2, bf16") for name, case in CASES.items()}


def finish_every(folder: str) -> dict[str, Any]:
    return {name: train(case, f"{folder}/{name}", resumes=True) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("windows"))
    return folder, run_group(save_every, 2, folder)[0]


@pytest.fixture(scope="module")
def finished(saved: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return run_group(finish_every, 2, saved[0])[0]


@pytest.mark.parametrize("name", CASES)
def test_the_window_goes_on(saved: tuple[str, dict[str, Any]], finished: dict[str, Any], name: str) -> None:
    never_stopped = saved[1][name]
    assert list(finished[name]) == list(never_stopped)
    for key, value in never_stopped.items():
        assert torch.equal(finished[name][key], value), key


def finish_alone(folder: str) -> dict[str, Any]:
    return {name: train(CASES[name], f"{folder}/{name}", resumes=True) for name in ("2", "1, joined")}


def test_the_window_goes_on_in_one_process(saved: tuple[str, dict[str, Any]]) -> None:
    folder, never_stopped = saved
    (alone,) = run_group(finish_alone, 1, folder)
    for name, weights in alone.items():
        near(weights, never_stopped[name], 1e-9)


def save_again_and_load_twice(folder: str) -> dict[str, Any]:
    """Save what was just loaded; load that into a fresh model, and again into the same model after it has trained."""
    found: dict[str, Any] = {}
    for name in ("2", "2, bf16", "1", "1, joined"):
        accelerator, *_ = prepared(CASES[name])
        accelerator.load_state(f"{folder}/{name}")
        accelerator.save_state(f"{folder}/again, {name}")
        accelerator, model, optimizer, loader = prepared(CASES[name])
        for _ in range(2):
            accelerator.load_state(f"{folder}/again, {name}")
            for words, following in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, words, following))
                    optimizer.step()
                    optimizer.zero_grad()
            found.setdefault(name, []).append(accelerator.get_state_dict(model))
    return found


def test_a_loaded_window_can_be_saved_again_and_loaded_into_a_trained_model(
    saved: tuple[str, dict[str, Any]],
) -> None:
    folder, never_stopped = saved
    for name, results in run_group(save_again_and_load_twice, 2, folder)[0].items():
        assert len(results) == 2
        for weights in results:
            assert all(torch.equal(weights[key], value) for key, value in never_stopped[name].items())
