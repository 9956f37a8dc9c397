"""Transformers' Trainer with its FSDP over two XLA devices of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.xla_trainer import ShardingTrainer, llama, losses, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but:UserWarning"),
    pytest.mark.filterwarnings("ignore:For backward hooks to be called:UserWarning"),  # of torch_xla's own wrapper
]


def test_the_sharding_of_transformers_spreads_the_batches_of_its_loader(tmp_path: Path) -> None:
    settings = {"xla": True, "xla_fsdp_v2": True, "xla_fsdp_settings": {}, "min_num_params": 0}
    config = {**settings, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    found = trainer(tmp_path, ShardingTrainer, llama, fsdp="full_shard", fsdp_config=config, save_strategy="no")
    assert found.accelerator.strategy.name == "xla-spmd"
    found.train()
    assert type(found.model_wrapped).__name__ == "SpmdFullyShardedDataParallel"
    plain = trainer(tmp_path / "plain", model=llama, save_strategy="no")
    plain.train()
    assert losses(found) == pytest.approx(losses(plain), abs=1e-5)
