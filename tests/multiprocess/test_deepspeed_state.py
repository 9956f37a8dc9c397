"""Checkpoints of runs with DeepSpeed: exact, whole, and for any number of processes."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.training import assert_near, group_once
from tests.support.zero import Case, Prepared, Trained, make_samples, prepare, squared_error, train
from torch.utils.data import DataLoader

from accelerate import load_checkpoint_in_model
from accelerate._base.errors import CheckpointError, ConfigurationError
from accelerate.checkpointing import catalog
from accelerate.checkpointing.manifest import Manifest

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.multiprocess

EVERY = [(stage, precision) for stage in (0, 1, 2, 3) for precision in ("no", "bf16")]
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
CASES: dict[str, Case] = {f"{stage} {precision}": Case(stage, precision, epochs=2) for stage, precision in EVERY}
WINDOWS: dict[str, Case] = {f"{stage} no": Case(stage, accumulation=4) for stage in (0, 1, 2, 3)} | {
    f"{stage} bf16, sums in fp32": Case(stage, "bf16", accumulation=4, config=FP32_SUMS) for stage in (1, 2, 3)
}
SAVED_AFTER, SAVED_IN_WINDOW = 5, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("deepspeed"))


def resume_all(root: str) -> dict[str, Any]:
    """Train, save on the way, and go on from there in the same objects and in new ones."""
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        target = f"{root}/{name}"
        whole = train(prepare(case), case)
        run = prepare(case)
        head = train(run, case, stop=SAVED_AFTER, then=partial(run.accelerator.save_state, target))
        train(run, case, stop=2)
        run.accelerator.load_state(target)
        again = train(run, case)
        fresh = prepare(case)
        fresh.accelerator.load_state(target)
        rest = train(fresh, case)
        found[name] = {
            "whole": whole,
            "head": head,
            "again": again,
            "rest": rest,
            "step": fresh.accelerator.progress.step,
        }
    for name, case in WINDOWS.items():
        target = f"{root}/window {name}"
        whole = train(prepare(case), case)
        run = prepare(case)
        head = train(run, case, stop=SAVED_IN_WINDOW, then=partial(run.accelerator.save_state, target))
        fresh = prepare(case)
        fresh.accelerator.load_state(target)
        found[f"window {name}"] = {"whole": whole, "head": head, "rest": train(fresh, case)}
    return found


def saved(folder: str) -> list[dict[str, Any]]:
    return group_once(resume_all, 2, folder)


@pytest.mark.parametrize("name", CASES)
def test_the_curve_goes_on(name: str, folder: str) -> None:
    for rank in saved(folder):
        found = rank[name]
        whole: Trained = found["whole"]
        assert found["head"].losses == whole.losses[:SAVED_AFTER]
        assert found["rest"].losses == found["again"].losses == whole.losses[SAVED_AFTER:]
        assert found["rest"].rates == whole.rates[SAVED_AFTER:]
        assert found["step"] == len(whole.losses) == 16


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_goes_on_in_its_middle(name: str, folder: str) -> None:
    for rank in saved(folder):
        found = rank[f"window {name}"]
        assert found["head"].losses + found["rest"].losses == found["whole"].losses


@pytest.mark.parametrize("name", CASES)
def test_the_engine_files_are_in_the_transaction(name: str, folder: str) -> None:
    saved(folder)
    place = Path(folder, name)
    listed = {record.name for record in Manifest.read(place).files}  # type: ignore[union-attr]
    present = {file.relative_to(place).as_posix() for file in place.rglob("*") if file.is_file()} - {"manifest.json"}
    assert listed == present
    own = {file for file in listed if file.startswith("pytorch_model/")}
    stage = CASES[name].stage
    model_files = 2 if stage == 3 else 1
    optimizer_files = 2 if stage else 0
    assert len([file for file in own if file.endswith("model_states.pt")]) == model_files
    assert len([file for file in own if file.endswith("optim_states.pt")]) == optimizer_files
    assert (place / "pytorch_model" / "latest").read_text() == f"global_step{SAVED_AFTER}"
    assert not [entry for entry in Path(folder).iterdir() if entry.name.startswith(".")]  # nothing half-done is left


# --- another number of processes ---------------------------------------------------------------------------------------


def load_all(root: str) -> dict[str, Any]:
    """Go on with what two processes saved, or be told why not."""
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        run = prepare(case)
        run.accelerator.load_state(f"{root}/{name}")
        values = [(group["lr"], group["weight_decay"]) for group in run.optimizer.param_groups]
        weights = {weight: value.clone() for weight, value in run.accelerator.get_state_dict(run.model).items()}
        found[name] = {
            "rest": train(run, case),
            "values": values,
            "weights": weights,
            "step": run.accelerator.progress.step,
        }
    for name in ("2 no", "3 no"):
        run = prepare(WINDOWS[name])
        found[f"window {name}"] = refusal(run, f"{root}/window {name}")
    found["other stage"] = refusal(prepare(CASES["2 no"]), f"{root}/3 no")
    return found


def refusal(run: Prepared, place: str) -> str:
    try:
        run.accelerator.load_state(place)
    except (CheckpointError, ConfigurationError) as error:
        return str(error)
    return "nothing was refused"


def weights_of_two(root: str) -> dict[str, Any]:
    """Return the weights that two processes saved, as two processes load them."""
    found = {}
    for name, case in CASES.items():
        run = prepare(case)
        run.accelerator.load_state(f"{root}/{name}")
        found[name] = run.accelerator.get_state_dict(run.model)
    return found


@pytest.mark.parametrize("name", CASES)
def test_one_process_goes_on_with_what_two_saved(name: str, folder: str) -> None:
    saved(folder)
    one = group_once(load_all, 1, folder)[0][name]
    two = group_once(weights_of_two, 2, folder)[0][name]
    assert list(one["weights"]) == list(two)
    for weight in two:
        assert one["weights"][weight].equal(two[weight])
    # Each group keeps its own values: DeepSpeed's conversion gives those of the first to all.
    assert one["values"][0][1] == 0.1
    assert one["values"][1][1] == 0.0
    assert one["values"][1][0] < one["values"][0][0]
    # 16 batches an epoch; two processes had read five each of the first.
    assert len(one["rest"].losses) == 2 * 16 - 2 * SAVED_AFTER


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith(" no")])
def test_the_curve_does_not_depend_on_the_stage_that_was_converted(name: str, folder: str) -> None:
    saved(folder)
    found, expected = (group_once(load_all, 1, folder)[0][key]["rest"].losses for key in (name, "0 no"))
    assert_near(name, torch.tensor(found), torch.tensor(expected), 2e-6)


def test_two_processes_go_on_with_what_one_saved(folder: str) -> None:
    target = f"{folder}/one"
    group_once(save_alone, 1, target)
    for rank in group_once(load_what_one_saved, 2, target):
        for stage, (first, again) in rank.items():
            assert first.equal(again), stage


def save_alone(target: str) -> None:
    for stage in (1, 2, 3):
        case = Case(stage)
        run = prepare(case)
        train(run, case, stop=4, then=partial(run.accelerator.save_state, f"{target}{stage}"))
        torch.save(run.accelerator.get_state_dict(run.model), f"{target}{stage}.weights")


def load_what_one_saved(target: str) -> dict[int, Any]:
    found = {}
    for stage in (1, 2, 3):
        run = prepare(Case(stage))
        run.accelerator.load_state(f"{target}{stage}")
        weights = run.accelerator.get_state_dict(run.model)
        expected = torch.load(f"{target}{stage}.weights", weights_only=True)
        have = weights or expected  # ZeRO 3 gathers on the first rank
        found[stage] = (
            torch.cat([have[name].flatten() for name in expected]),
            torch.cat([w.flatten() for w in expected.values()]),
        )
    return found


def test_what_cannot_be_converted_is_refused(folder: str) -> None:
    saved(folder)
    found = group_once(load_all, 1, folder)[0]
    for name in ("2 no", "3 no"):
        assert "was saved by 2 processes in the middle of an accumulation window" in found[f"window {name}"]
        assert "Load it with 2 processes" in found[f"window {name}"]
    assert "was saved with ZeRO 3, and this run has zero_stage=2" in found["other stage"]


# --- saving otherwise --------------------------------------------------------------------------------------------------


def save_otherwise(root: str) -> dict[str, Any]:
    """Save behind training, with options of the engine, and models alone; break a file."""
    found: dict[str, Any] = {}
    for stage in (2, 3):
        case = Case(stage)
        run = prepare(case)
        accelerator, place = run.accelerator, f"{root}/behind {stage}"
        whole = train(run, case, stop=3, then=partial(accelerator.save_state, place, blocking=False), goes_on=True)
        accelerator.wait_for_save()
        fresh = prepare(case)
        fresh.accelerator.load_state(place)
        found[f"behind {stage}"] = (whole.losses[3:], train(fresh, case).losses)
        accelerator = fresh.accelerator
        accelerator.save_model(fresh.model, f"{root}/model {stage}")
        accelerator.save_state(f"{root}/options {stage}", tag="mine", exclude_frozen_parameters=True)
        full = accelerator.get_state_dict(fresh.model)
        found[f"full {stage}"] = {name: (tuple(weight.shape), str(weight.device)) for name, weight in full.items()}
        batch = next(iter(DataLoader(make_samples(), batch_size=4)))
        fresh.model.eval()
        found[f"error {stage}"] = squared_error(fresh.model, batch).mean().item()
        if dist.get_rank() == 0:
            file = next(Path(place).rglob("*optim_states.pt"))
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(bytes(content))
        dist.barrier()
        found[f"broken {stage}"] = refusal(fresh, place)
    forbidden = Case(3, config={"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": False}})
    run = prepare(forbidden)
    try:
        run.accelerator.get_state_dict(run.model)
    except ConfigurationError as error:
        found["not gathered"] = str(error)
    return found


def otherwise(folder: str) -> list[dict[str, Any]]:
    return group_once(save_otherwise, 2, folder)


@pytest.mark.parametrize("stage", [2, 3])
def test_saving_does_not_stop_training(stage: int, folder: str) -> None:
    for rank in otherwise(folder):
        expected, found = rank[f"behind {stage}"]
        assert found == expected


@pytest.mark.parametrize("stage", [2, 3])
def test_a_saved_model_has_the_trained_weights(stage: int, folder: str) -> None:
    ranks = otherwise(folder)
    from tests.support.zero import make_net

    model = make_net(seed=1)
    load_checkpoint_in_model(model, f"{folder}/model {stage}")
    batch = next(iter(DataLoader(make_samples(), batch_size=4)))
    assert squared_error(model, batch).mean().item() == pytest.approx(ranks[0][f"error {stage}"], abs=1e-6)
    shapes = {name: (tuple(weight.shape), "cpu") for name, weight in model.state_dict().items()}
    assert ranks[0][f"full {stage}"] == shapes
    assert ranks[1][f"full {stage}"] == ({} if stage == 3 else shapes)


@pytest.mark.parametrize("stage", [2, 3])
def test_options_reach_the_engine(stage: int, folder: str) -> None:
    otherwise(folder)
    place = Path(folder, f"options {stage}", "pytorch_model")
    assert (place / "latest").read_text() == "mine"
    assert list(place.glob("mine/*model_states.pt"))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_changed_byte_is_noticed(stage: int, folder: str) -> None:
    for rank in otherwise(folder):
        assert "its bytes have changed since it was written" in rank[f"broken {stage}"]


def test_weights_that_are_not_to_be_gathered_are_not(folder: str) -> None:
    for rank in otherwise(folder):
        assert "stage3_gather_16bit_weights_on_model_save=false" in rank["not gathered"]


def test_zero_to_fp32_reads_the_files(folder: str) -> None:
    """DeepSpeed's own tools find in the folder what they know."""
    saved(folder)
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    for name in ("2 no", "3 no"):
        weights = get_fp32_state_dict_from_zero_checkpoint(f"{folder}/{name}/pytorch_model")
        expected = group_once(weights_of_two, 2, folder)[0][name]
        assert all(weights[weight].equal(expected[weight]) for weight in expected)


def test_checkpoints_are_listed_as_valid(folder: str) -> None:
    saved(folder)
    info = catalog.inspect(Path(folder, "3 bf16"))
    assert info.is_valid
    assert json.loads(Path(folder, "3 bf16", "manifest.json").read_text())["world_size"] == 2
