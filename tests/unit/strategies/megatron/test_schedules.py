"""Optimizers and schedules of a program, as megatron-core takes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate._base.errors import ConfigurationError
from accelerate._base.imports import is_package_available
from accelerate.config.plugins.megatron import MegatronLMPlugin
from accelerate.strategies.megatron.configs import translate
from accelerate.strategies.megatron.options import core

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not is_package_available("megatron.core"), reason="needs megatron-core")


def gpt2() -> Any:
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 11, "bos_token_id": 1, "eos_token_id": 2}
    return SimpleNamespace(config=transformers.GPT2Config(**sizes))


def adam() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.1, weight_decay=0.2)


def schedule(**options: Any) -> dict[str, Any]:
    steps = options.pop("steps", 100)
    stand_in = SimpleNamespace(total_num_steps=steps, warmup_num_steps=options.pop("warmup", 0))
    made = translate(
        MegatronLMPlugin(**options), gpt2(), micro_batch_size=2, optimizer=adam(), scheduler=stand_in, world_size=1
    )
    assert made.schedule is not None
    return made.schedule


@pytest.mark.parametrize(("kind", "decoupled"), [("AdamW", True), ("Adam", False)])
def test_adam(kind: str, decoupled: bool) -> None:
    numbers = {"lr": 0.3, "betas": (0.7, 0.8), "eps": 1e-3, "weight_decay": 0.4}
    optimizer = getattr(torch.optim, kind)([torch.nn.Parameter(torch.ones(1))], **numbers)
    made = translate(MegatronLMPlugin(), gpt2(), optimizer=optimizer).optimizer
    assert made is not None
    assert (made.optimizer, made.decoupled_weight_decay) == ("adam", decoupled)
    assert (made.lr, made.adam_beta1, made.adam_beta2, made.adam_eps, made.weight_decay) == (0.3, 0.7, 0.8, 1e-3, 0.4)


def test_sgd_and_none() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.3, momentum=0.6)
    made = translate(MegatronLMPlugin(), gpt2(), optimizer=optimizer)
    assert made.optimizer is not None
    assert (made.optimizer.optimizer, made.optimizer.sgd_momentum, made.optimizer.weight_decay) == ("sgd", 0.6, 0)
    assert made.schedule is None
    assert translate(MegatronLMPlugin(), gpt2()).optimizer is None


def test_a_schedule_comes_from_the_stand_in() -> None:
    assert schedule(warmup=10) == {
        "init_lr": 0.0,
        "max_lr": 0.1,
        "min_lr": 0,
        "lr_warmup_steps": 10,
        "lr_decay_steps": 100,
        "lr_decay_style": "linear",
        "start_wd": 0.2,
        "end_wd": 0.2,
        "wd_incr_steps": 100,
        "wd_incr_style": "constant",
        "use_checkpoint_opt_param_scheduler": True,
        "override_opt_param_scheduler": False,
    }


@pytest.mark.parametrize(
    "options",
    [
        {"warmup": 10},
        {"lr_decay_style": "WSD", "other_megatron_args": {"lr_wsd_decay_iters": 20}},
        {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0},
        {"other_megatron_args": {"override_opt_param_scheduler": True}},
    ],
)
def test_megatron_takes_the_schedule(options: dict[str, Any]) -> None:
    arguments = schedule(**options)
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.1, "weight_decay": 0.2}])
    made = core("optimizer_param_scheduler").OptimizerParamScheduler(optimizer, **arguments)
    start = optimizer.param_groups[0]["lr"]
    made.step(100)
    assert start == (0.0 if arguments["lr_warmup_steps"] else 0.1)
    assert optimizer.param_groups[0] == {"lr": pytest.approx(0.0), "weight_decay": pytest.approx(0.2)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": None}, r"A schedule of no steps.*total_num_steps=.*train_iters="),
        ({"warmup": 100}, r"have no warmup of 100 steps within 100. Write a warmup of at most 99"),
        ({"min_lr": 0.5}, r"min_lr=0.5. Write one from 0 to 0.1"),
        ({"start_weight_decay": 0.1}, r"constant weight decay from 0.1 to 0.2"),
        ({"start_weight_decay": 0.3, "weight_decay_incr_style": "linear"}, r"weight decay from 0.3 to 0.2"),
        ({"lr_decay_style": "WSD"}, r"lr_decay_style='WSD'\).*lr_wsd_decay_iters"),
    ],
)
def test_schedules_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        schedule(**options)


def test_samples_need_a_batch() -> None:
    with pytest.raises(ConfigurationError, match=r"train_samples=40\) counts samples.*train_iters"):
        translate(MegatronLMPlugin(train_samples=40), gpt2(), optimizer=adam())


def test_steps_are_shared_among_replicas() -> None:
    stand_in = SimpleNamespace(total_num_steps=100, warmup_num_steps=10)
    made = translate(
        MegatronLMPlugin(), gpt2(), micro_batch_size=2, world_size=2, optimizer=adam(), scheduler=stand_in
    ).schedule
    assert made is not None
    assert (made["lr_decay_steps"], made["lr_warmup_steps"]) == (50, 5)
