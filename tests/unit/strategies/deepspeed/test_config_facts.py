"""What loaders, placeholders and models say about DeepSpeed's configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from accelerate.config.deepspeed import Fact, precision_of
from accelerate.strategies.deepspeed.config_facts import (
    batch_size_facts,
    hidden_size,
    optimizer_facts,
    scheduler_facts,
    tensor_parallel_size,
)
from accelerate.strategies.deepspeed.wrappers import DummyOptim, DummyScheduler

MICRO = "train_micro_batch_size_per_gpu"


def loader(batch_size: int | None, **options: Any) -> DataLoader[Any]:
    return DataLoader(range(8), batch_size=batch_size, **options)  # type: ignore[arg-type]


def test_the_smallest_or_the_largest_batch_of_the_loaders() -> None:
    loaders = [loader(4), loader(2), loader(None)]
    assert batch_size_facts(loaders, None, smallest=True, trains=True)[MICRO].value == 2
    assert batch_size_facts(loaders, None, smallest=False, trains=True)[MICRO].value == 4


def test_a_sampler_of_batches_tells_its_size() -> None:
    sampler = BatchSampler(SequentialSampler(range(8)), 3, drop_last=False)
    found = batch_size_facts([DataLoader(range(8), batch_sampler=sampler)], None, smallest=True, trains=True)  # type: ignore[arg-type]
    assert found == {MICRO: Fact(3, "the loader's batch size of 3", binding=False)}


@pytest.mark.parametrize(
    ("earlier", "trains", "value"), [({MICRO: 7}, True, 7), (None, False, 1), ({MICRO: 7}, False, 7)]
)
def test_without_a_loader(earlier: Any, trains: bool, value: int) -> None:
    assert batch_size_facts([], earlier, smallest=True, trains=trains)[MICRO].value == value


def test_nothing_is_made_up_for_training() -> None:
    assert batch_size_facts([], None, smallest=True, trains=True) == {}


def test_a_placeholder_speaks_for_the_optimizer() -> None:
    found = optimizer_facts(DummyOptim([torch.zeros(1)], lr=0.25, betas=(0.5, 0.6)))
    assert {name: (fact.value, fact.binding) for name, fact in found.items()} == {
        "optimizer.params.lr": (0.25, True),
        "optimizer.params.weight_decay": (0, False),
        "optimizer.params.betas": ((0.5, 0.6), True),
    }
    assert optimizer_facts(torch.optim.SGD([torch.zeros(1)], lr=0.1)) == {}


def test_a_value_that_nobody_gave_contradicts_nothing() -> None:
    assert not any(fact.binding for fact in optimizer_facts(DummyOptim([torch.zeros(1)])).values())


@pytest.mark.parametrize("optimizer", [DummyOptim([torch.zeros(1)], lr=0.5), torch.optim.SGD([torch.zeros(1)], lr=0.5)])
def test_a_placeholder_speaks_for_the_schedule(optimizer: Any) -> None:
    found = scheduler_facts(DummyScheduler(optimizer, total_num_steps=9, warmup_num_steps=0, power=2), optimizer)
    assert {name.rpartition(".")[2]: fact.value for name, fact in found.items()} == {
        "warmup_min_lr": 0,
        "warmup_max_lr": 0.5,
        "warmup_num_steps": 1,
        "total_num_steps": 9,
        "power": 2,
    }
    assert scheduler_facts(None, optimizer) == {}


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (SimpleNamespace(hidden_size=16), 16),
        (SimpleNamespace(hidden_sizes=[8, 32]), 32),
        (SimpleNamespace(text_config=SimpleNamespace(hidden_size=24)), 24),
        (None, None),
    ],
)
def test_the_width_of_a_model(config: Any, size: int | None) -> None:
    model = torch.nn.Linear(1, 1)
    if config is not None:
        model.config = config
    assert hidden_size(model) == size


def test_what_the_configuration_turns_on() -> None:
    assert precision_of({"bf16": {"enabled": True}, "fp16": {"enabled": False}}) == "bf16"
    assert precision_of({"fp16": {"enabled": True}}) == "fp16"
    assert precision_of({"fp16": None}) == "no"
    assert (tensor_parallel_size({"tensor_parallel": {"autotp_size": 4}}), tensor_parallel_size({})) == (4, 1)
