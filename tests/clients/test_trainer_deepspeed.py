"""Transformers' Trainer, PEFT and TRL under DeepSpeed: the numbers of replicas, shards, checkpoint, resume, the saved model."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.launching import launch_warm
from tests.support.processes import run_warm_script

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("trl")
pytestmark = [pytest.mark.clients, pytest.mark.multiprocess]

SCRIPT = Path(__file__).with_name("trainer_deepspeed_script.py")
STEPS, SAVE_AT = 6, 3
TRAINER = [
    *(f"trainer:zero{stage}:trainer:{accumulation}:fp32" for stage in (2, 3) for accumulation in (1, 2)),
    "trainer:zero2:json:1:fp32",
    "trainer:zero3:json:2:fp32",
    "trainer:zero3:trainer:1:bf16",
]
ADAPTERS = ["lora:zero3:trainer:1:fp32", "loop:zero3:trainer:1:fp32"]
TUNED = ["sft:zero2:trainer:2:fp32"]
STRAIGHT = [*TRAINER, *ADAPTERS, *TUNED]
RESUMED = ["trainer:zero2:trainer:2:fp32", "trainer:zero3:json:2:fp32", "lora:zero3:trainer:1:fp32"]
LAUNCHED = "trainer:launcher:trainer:2:fp32"
CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 2
  zero_stage: 3
  zero3_init_flag: true
  zero3_save_16bit_model: true
num_machines: 1
num_processes: 2
"""


@dataclass(frozen=True)
class Runs:
    """What every rank wrote of the runs that were never stopped, of those resumed, and of the one set up by its launch."""

    folder: Path
    straight: list[dict[str, Any]]
    resumed: list[dict[str, Any]]
    launched: list[dict[str, Any]]


def beside(name: str) -> str:
    """Return the name of the same run without DeepSpeed."""
    program, _, *others = name.split(":")
    return ":".join((program, "ddp", *others))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    # These, and the last two of the others, are loaded for the processes that are forked next.
    pytest.importorskip("deepspeed")
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer  # noqa: F401
    from trl import SFTTrainer  # noqa: F401

    folder = tmp_path_factory.mktemp("trainer")
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=12,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    for seed, name in enumerate(("base", "other")):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder / name)
    replicas = list(dict.fromkeys(map(beside, STRAIGHT)))
    run_warm_script(SCRIPT, 2, [str(folder), "straight", *replicas, *STRAIGHT])
    for path in folder.glob(f"*/checkpoint-{STEPS}"):
        shutil.rmtree(path)  # as if the run had been stopped before
    launch_warm(["--use_deepspeed", "--num_processes", "2"], SCRIPT, [str(folder), "resumed", *RESUMED])
    (folder / "launch.yaml").write_text(CONFIG)
    launch_warm(["--config_file", folder / "launch.yaml"], SCRIPT, [str(folder), "launched", LAUNCHED])

    def read(stage: str) -> list[dict[str, Any]]:
        return [json.loads((folder / f"{stage}-{rank}.json").read_text()) for rank in range(2)]

    return Runs(folder, read("straight"), read("resumed"), read("launched"))


def assert_same(runs: Runs, name: str, found: dict[str, Any]) -> None:
    """Losses, norms of gradients and weights that were saved are those of replicas but for rounding."""
    expected = runs.straight[0][beside(name)]
    # In bf16 DeepSpeed's weights are bf16, and those of replicas fp32 under autocast.
    relative, absolute = (2e-2, 1e-2) if name.endswith("bf16") else (2e-6, 2e-6)
    for part in {"loss", "grad_norm", "eval_loss"} & found.keys():
        assert found[part] == pytest.approx(expected[part], rel=relative), part
    weights, replica = (saved_weights(runs.folder, run) for run in (name, beside(name)))
    assert weights.keys() == replica.keys()
    for part, value in weights.items():
        torch.testing.assert_close(value.float(), replica[part], rtol=0, atol=absolute, msg=part)


def saved_weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    (path,) = (folder / name.replace(":", "-") / "final").glob("*model.safetensors")
    return load_file(path)


@pytest.mark.parametrize("name", STRAIGHT)
def test_it_trains_like_replicas(runs: Runs, name: str) -> None:
    import accelerate

    for result in runs.straight:
        assert Path(result["package"]) == Path(str(accelerate.__file__)).resolve()
        types = (result[name]["type"], result[beside(name)]["type"])
        assert types == ("DistributedType.DEEPSPEED", "DistributedType.MULTI_CPU")
        assert len(result[name]["loss"]) == len(result[name]["grad_norm"]) == STEPS
        assert_same(runs, name, result[name])


@pytest.mark.parametrize("name", [*TRAINER, *TUNED])
def test_losses_fall(runs: Runs, name: str) -> None:
    losses = runs.straight[0][name]["loss"]
    assert sum(losses[-2:]) < 0.95 * sum(losses[:2])


@pytest.mark.parametrize("name", TRAINER)
def test_optimizer_and_schedule_are_the_engines_or_the_trainers(runs: Runs, name: str) -> None:
    found = runs.straight[0][name]
    assert found["optimizer"] == "DeepSpeedOptimizerWrapper"
    assert found["schedule"] == ("DeepSpeedSchedulerWrapper" if ":json:" in name else "LambdaLR")
    assert len(found["eval_loss"]) == STEPS // SAVE_AT
    if ":json:" not in name:
        assert found["learning_rate"] == runs.straight[0][beside(name)]["learning_rate"]


@pytest.mark.parametrize("name", [*TRAINER, *ADAPTERS])
def test_zero_3_builds_models_in_shards(runs: Runs, name: str) -> None:
    for result in runs.straight:
        assert result[name]["built in shards"] is (":zero3:" in name)


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_the_one_never_stopped(runs: Runs, name: str) -> None:
    for straight, resumed in zip(runs.straight, runs.resumed, strict=True):
        assert (straight[name]["steps"], resumed[name]["steps"]) == (STEPS, STEPS - SAVE_AT)
        for part in ("loss", "grad_norm", "learning_rate", "eval_loss", "weights"):
            assert resumed[name][part] == straight[name][part], part


@pytest.mark.parametrize("name", [*TRAINER, *ADAPTERS])
def test_the_saved_model_is_the_trained_one(runs: Runs, name: str) -> None:
    for result in runs.straight:
        assert result[name]["saved is trained"]


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_are_trained_and_nothing_else(runs: Runs, name: str) -> None:
    for result in runs.straight:
        assert result[name]["adapters are trained"]
        assert result[name]["base is unchanged"]


def test_a_launch_alone_sets_deepspeed_up(runs: Runs) -> None:
    for result in runs.launched:
        found = result[LAUNCHED]
        assert found["type"] == "DistributedType.DEEPSPEED"
        assert found["built in shards"]
        assert found["saved is trained"]
        assert_same(runs, LAUNCHED, found)
