"""The single steps that programs call by name do what `prepare` does with them."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
from tests.support.indexed_data import write
from tests.support.megatron import make_model, make_rows
from tests.support.training import fresh_accelerator
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate._base.errors import ConfigurationError, UsageError
from accelerate.state import AcceleratorState
from accelerate.utils import (
    MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler,
    MegatronLMPlugin,
    megatron_lm_initialize,
    megatron_lm_prepare_data_loader,
    megatron_lm_prepare_model_optimizer_scheduler,
    megatron_lm_prepare_optimizer,
    megatron_lm_prepare_scheduler,
)
from accelerate.utils.megatron_lm import finish_mpu_init, model_provider_func

pytestmark = pytest.mark.usefixtures("alone")


def make(**options: Any) -> tuple[Accelerator, MegatronLMPlugin]:
    plugin = MegatronLMPlugin(**options)
    accelerator = fresh_accelerator(cpu=True, megatron_lm_plugin=plugin)
    plugin.set_network_size_args(make_model("gpt2"))
    return accelerator, plugin


def test_arguments_join_those_of_the_plugin() -> None:
    accelerator, plugin = make()

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--init_method_std", default=0.5)

    megatron_lm_initialize(accelerator, more, {"hidden_dropout": 0.25})
    assert plugin.megatron_lm_default_args["init_method_std"] == 0.5
    assert plugin.megatron_lm_default_args["hidden_dropout"] == 0.25
    assert torch.distributed.is_initialized()


def test_a_model_is_built_as_the_arguments_say() -> None:
    make()
    model = model_provider_func()
    assert len(model.decoder.layers) == 2
    with pytest.raises(ConfigurationError, match="add_decoder=False"):
        model_provider_func(add_decoder=False)


def test_model_optimizer_and_schedule_come_together() -> None:
    accelerator, plugin = make(train_iters=10)
    model = make_model("gpt2")
    plugin.set_optimizer_type(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.2, betas=(0.5, 0.6)))
    made, optimizer, schedule = megatron_lm_prepare_model_optimizer_scheduler(accelerator)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["betas"] == (0.5, 0.6)
    assert {id(entry) for entry in made.parameters()} == {id(entry) for entry in optimizer.param_groups[0]["params"]}
    assert schedule.get_last_lr() == pytest.approx([0.1])


def test_an_optimizer_is_made_as_the_arguments_say() -> None:
    accelerator, plugin = make()
    layer = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match="optimizer=None"):
        megatron_lm_prepare_optimizer(accelerator, layer)
    plugin.set_optimizer_type(torch.optim.SGD(layer.parameters(), lr=0.5, momentum=0.9))
    optimizer = megatron_lm_prepare_optimizer(accelerator, layer)
    assert isinstance(optimizer, torch.optim.SGD)
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.5, 0.9)
    with pytest.raises(ConfigurationError, match="how many steps"):
        megatron_lm_prepare_scheduler(accelerator, optimizer, None)
    schedule = megatron_lm_prepare_scheduler(accelerator, optimizer, MegatronLMDummyScheduler(optimizer, 8, 2))
    assert schedule.get_last_lr() == [0.0]


def test_a_loader_is_prepared_and_megatrons_data_are_three(tmp_path: Any) -> None:
    accelerator, plugin = make(train_iters=2, eval_iters=1, eval_interval=2)
    loader = megatron_lm_prepare_data_loader(accelerator, DataLoader(make_rows("gpt2"), batch_size=4))
    assert len(list(loader)) == 4
    prefix = write(tmp_path / "text", [[list(range(3, 40))] for _ in range(20)])
    plugin.set_training_args(2, 1)
    dummy = MegatronLMDummyDataLoader(
        data_path=prefix, split="80,10,10", seq_length=8, micro_batch_size=2, num_workers=0
    )
    train, *_ = megatron_lm_prepare_data_loader(accelerator, dummy)
    assert next(train)["tokens"].shape == (2, 8)


def test_without_the_plugin_there_is_nothing_to_do() -> None:
    accelerator = fresh_accelerator(cpu=True)
    with pytest.raises(UsageError, match="without Megatron-LM"):
        megatron_lm_initialize(accelerator)
    with pytest.raises(ConfigurationError, match="no settings of Megatron-LM"):
        finish_mpu_init()
    AcceleratorState._reset_state()
