"""Transformers' Trainer on one XLA device, unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.xla_trainer import ShardingTrainer, losses, trainer

pytestmark = [
    # Of Transformers, about torch_xla: calls that it has newer names for, and the memory of CUDA.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but:UserWarning"),
]


def test_it_trains_saves_resumes_and_evaluates(tmp_path: Path) -> None:
    found = trainer(tmp_path)
    assert found.accelerator.device.type == "xla"
    found.train()
    assert next(found.model.parameters()).device.type == "xla"
    assert found.model.lm_head.weight is found.model.transformer.wte.weight
    curve = losses(found)
    assert curve[-1] < curve[0] - 0.2
    assert found.evaluate()["eval_loss"] < curve[-1]
    assert (tmp_path / "checkpoint-8" / "model.safetensors").is_file()
    again = trainer(tmp_path / "again")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert losses(again)[-2:] == pytest.approx(curve[-2:], abs=2e-6)


@pytest.mark.parametrize("options", [{"bf16": True}, {"gradient_accumulation_steps": 2}])
def test_with_options(tmp_path: Path, options: dict[str, Any]) -> None:
    found = trainer(tmp_path, save_strategy="no", **options)
    found.train()
    assert losses(found)[-1] < losses(found)[0] - 0.2


def test_the_fsdp_of_torch_xla_by_transformers(tmp_path: Path) -> None:
    """The Trainer wraps the model itself, and prepares the optimizer alone."""
    settings = {"xla": True, "xla_fsdp_settings": {"compute_dtype": "float32"}, "min_num_params": 0}
    config = {**settings, "transformer_layer_cls_to_wrap": ["GPT2Block"]}
    found = trainer(tmp_path, ShardingTrainer, fsdp="full_shard", fsdp_config=config, save_strategy="no")
    found.train()
    assert type(found.model_wrapped).__name__ == "XlaFullyShardedDataParallel"
    plain = trainer(tmp_path / "plain", save_strategy="no")
    plain.train()
    assert losses(found) == pytest.approx(losses(plain), abs=1e-5)
