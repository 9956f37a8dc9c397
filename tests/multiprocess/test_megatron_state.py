"""What Megatron trains is saved and comes back: exactly, with another tensor-parallel degree, and in Transformers' format."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.support.megatron import Case, Run, case, make_model, make_rows, prepare, train
from tests.support.processes import run_group
from tests.support.training import assert_near, group_once

from accelerate._base.errors import CheckpointError

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.multiprocess

SPLIT = {"tp_degree": 2}
SEQUENCES = {"tp_degree": 2, "sequence_parallelism": True}
KINDS = ("gpt2", "llama", "bert", "t5")
STEPS, SAVED_AFTER = 12, 5
SAVED: dict[str, Case] = {
    **{f"{kind}, split": case(kind, steps=STEPS, **SPLIT) for kind in KINDS},
    **{f"{kind}, replicas": case(kind, steps=STEPS) for kind in KINDS},
    "gpt2, dropout and shuffled": replace(case("gpt2", steps=STEPS, **SPLIT), dropout=0.1, shuffle=True),
    "llama, dropout in sequences": replace(case("llama", steps=STEPS, **SEQUENCES), dropout=0.1),
    "gpt2, sgd": replace(case("gpt2", steps=STEPS, **SPLIT), optimizer="sgd"),
    "llama, in a window": replace(case("llama", steps=STEPS), accumulation=2),
}
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("megatron"))


def train_and_save(root: str) -> dict[str, Any]:
    """Train each case to the end, and once more with a save on the way; go on in new objects."""
    found: dict[str, Any] = {}
    for name, entry in SAVED.items():
        target = f"{root}/{name}"
        whole = train(prepare(entry))
        run = prepare(entry)
        head = train(run, SAVED_AFTER, then=partial(run.accelerator.save_state, target))
        fresh = prepare(entry)
        fresh.accelerator.load_state(target)
        rest = train(fresh)
        found[name] = {"whole": whole, "head": head, "rest": rest, "weights": fresh.weights()}
    return found


def saved(root: str) -> list[dict[str, Any]]:
    return group_once(train_and_save, 2, root)


@pytest.mark.parametrize("name", SAVED)
def test_a_resumed_run_goes_on_exactly(name: str, folder: str) -> None:
    for rank in saved(folder):
        found = rank[name]
        assert found["head"] == found["whole"][:SAVED_AFTER]
        assert found["rest"] == found["whole"][SAVED_AFTER:]


def resume_elsewhere(root: str) -> dict[str, Any]:
    """Go on from checkpoints of the other degree."""
    found = {}
    for kind in KINDS:
        for name, options in {"split": {}, "replicas": SPLIT}.items():
            run = prepare(case(kind, steps=STEPS, **options))
            run.accelerator.load_state(f"{root}/{kind}, {name}")
            found[f"{kind}, {name}"] = train(run)
    return found


@pytest.mark.parametrize("name", [f"{kind}, {name}" for kind in KINDS for name in ("split", "replicas")])
def test_another_degree_continues_the_curve(name: str, folder: str) -> None:
    whole = saved(folder)[0][name]["whole"]
    for rank in group_once(resume_elsewhere, 2, folder):
        assert_near(name, torch.tensor(rank[name]), torch.tensor(whole[SAVED_AFTER:]), TOLERANCE)


def resume_alone(root: str) -> dict[str, Any]:
    run = prepare(case("llama", steps=STEPS))
    run.accelerator.load_state(f"{root}/llama, split")
    return {"losses": train(run), "step": run.accelerator.progress.step}


def test_one_process_continues_what_two_began(folder: str) -> None:
    whole = saved(folder)[0]["llama, split"]["whole"]
    found = run_group(resume_alone, 1, folder)[0]
    assert found["step"] == STEPS
    assert_near("alone", torch.tensor(found["losses"]), torch.tensor(whole[SAVED_AFTER:]), TOLERANCE)


# --- in the format of Transformers -------------------------------------------------------------------------------------


def export(root: str) -> dict[str, Any]:
    """Save the weights in each way that programs do."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        run = prepare(case(kind, steps=3, **SPLIT))
        train(run)
        accelerator, model = run.accelerator, accelerator_model(run)
        accelerator.save_model(model, f"{root}/{kind}/model")
        unwrapped = accelerator.unwrap_model(model)
        unwrapped.save_pretrained(
            f"{root}/{kind}/pretrained", is_main_process=accelerator.is_main_process, save_function=accelerator.save
        )
        unwrapped.save_pretrained(
            f"{root}/{kind}/given",
            is_main_process=accelerator.is_main_process,
            state_dict=accelerator.get_state_dict(model),
        )
        accelerator.wait_for_everyone()
        batch = {name: torch.stack([row[name] for row in make_rows(kind, 4)]) for name in make_rows(kind, 1)[0]}
        found[kind] = {
            "weights": run.weights(),
            "class": type(unwrapped).__name__,
            "loss": model.eval()(**batch).loss.item(),
        }
    return found


def accelerator_model(run: Run) -> Any:
    return run.model


@pytest.mark.parametrize("kind", KINDS)
def test_weights_come_out_in_the_format_of_transformers(kind: str, folder: str) -> None:
    found = group_once(export, 2, folder)
    weights = found[1][kind]["weights"]
    assert found[1][kind]["class"] == type(make_model(kind)).__name__
    batch = {name: torch.stack([row[name] for row in make_rows(kind, 4)]) for name in make_rows(kind, 1)[0]}
    for way in ("pretrained", "given"):
        loaded = type(make_model(kind)).from_pretrained(f"{folder}/{kind}/{way}").eval()
        for name, value in loaded.state_dict().items():
            assert torch.equal(value, weights[name]), name
        with torch.no_grad():
            assert abs(loaded(**batch).loss.item() - found[0][kind]["loss"]) < 1e-4
    written = load_file(f"{folder}/{kind}/model/model.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in written.items())


# --- what does not fit --------------------------------------------------------------------------------------------------


def refusals(root: str) -> dict[str, str]:
    def message_of(run: Run, target: str) -> str:
        try:
            run.accelerator.load_state(target)
        except CheckpointError as error:
            return str(error)
        return "nothing was refused"

    found = {"other model": message_of(prepare(case("gpt2", steps=2)), f"{root}/llama, split")}
    run = prepare(case("gpt2", steps=2, no_save_optim=True))
    train(run, then=partial(run.accelerator.save_state, f"{root}/bare"))
    found["no optimizer"] = message_of(prepare(case("gpt2", steps=2)), f"{root}/bare")
    lenient = prepare(case("gpt2", steps=4, no_load_optim=True))
    lenient.accelerator.load_state(f"{root}/bare")
    found["without it"] = str(len(train(lenient)))
    plain = prepare(replace(Case("gpt2"), steps=2))
    train(plain, then=partial(plain.accelerator.save_state, f"{root}/plain"))
    weights = plain.weights()
    taken = prepare(case("gpt2", steps=4, no_load_optim=True, **SPLIT))
    taken.accelerator.load_state(f"{root}/plain")
    found["weights of a plain run"] = str(
        all(torch.equal(value, weights[name]) for name, value in taken.weights().items())
    )
    engine = prepare(case("llama", steps=2, **SPLIT))
    train(engine)
    engine.model.save_checkpoint(f"{root}/engine")
    other = prepare(case("llama", steps=2, **SPLIT))
    other.model.load_checkpoint(f"{root}/engine")
    same = engine.weights()
    found["engine"] = str(all(torch.equal(value, same[name]) for name, value in other.weights().items()))
    return found


def test_what_does_not_fit_is_refused_and_what_fits_is_taken(folder: str) -> None:
    saved(folder)
    for rank in group_once(refusals, 2, folder):
        assert "are not those of this model" in rank["other model"]
        assert "no_load_optim=True" in rank["no optimizer"]
        assert rank["without it"] == "2"
        assert rank["weights of a plain run"] == "True"
        assert rank["engine"] == "True"


def test_a_transformers_model_reads_what_was_saved(folder: str) -> None:
    group_once(export, 2, folder)
    files = {path.name for path in Path(f"{folder}/gpt2/pretrained").iterdir()}
    assert {"config.json", "model.safetensors"} <= files
    assert transformers.AutoConfig.from_pretrained(f"{folder}/gpt2/pretrained").model_type == "gpt2"
