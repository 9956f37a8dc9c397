"""Every strategy in every number format trains, unwraps, saves and lets go in the same way."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from tests.support.training import copy_weights, fresh_accelerator, group_once, make_data, make_model
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from accelerate import ParallelismConfig
from accelerate._base.enums import DistributedType
from accelerate._base.helpers import Choice
from accelerate.config.plugins.training import TorchDynamoPlugin
from accelerate.precision import formats as precisions
from accelerate.precision.formats import Precision
from accelerate.runtime import current
from accelerate.strategies import registry as strategies
from accelerate.strategies.base import Capabilities, EngineRequest, Strategy, StrategyContext
from accelerate.utils import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    TorchTensorParallelConfig,
)

pytestmark = [
    pytest.mark.multiprocess,
    # DeepSpeed 0.19 uses what torch 2.13 warns about.
    pytest.mark.filterwarnings("ignore:.*torch.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning"),
]

STRATEGIES = {strategy.name: strategy for strategy in strategies.all_strategies()}
# Those of XLA devices live by the same contract where torch_xla is: tests/xla.
OF_XLA = ("xla", "xla-spmd")
# Trains Transformers models alone: tests/multiprocess/test_megatron.py.
OF_TRANSFORMERS = ("megatron",)


def fsdp(version: int) -> dict[str, Any]:
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=version)}


def split() -> dict[str, Any]:
    options = TorchTensorParallelConfig(plan={"0": "colwise", "3": "rowwise"})
    return {"parallelism_config": ParallelismConfig(tp_size=2, tp_handler=options)}


RUNS: dict[str, tuple[int, Callable[[], dict[str, Any]]]] = {
    "single": (1, dict),
    "ddp": (2, dict),
    "fsdp1": (2, lambda: fsdp(1)),
    "fsdp2": (2, lambda: fsdp(2)),
    "parallel": (2, split),
    "presharded": (2, lambda: {"parallelism_config": ParallelismConfig(dp_shard_size=2)}),
    "deepspeed": (2, lambda: {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2)}),
}
"""Strategy -> on how many processes any model runs under it, and the arguments that select it."""
REFUSED = {
    ("deepspeed", "fp16"): "DeepSpeed takes fp16 on accelerators only",
    ("presharded", "fp8"): "layers that are sharded already cannot be replaced",
}
"""Number formats that an engine refuses on the CPU, and why."""
HALVES = {("deepspeed", "bf16"), ("deepspeed", "fp8")}
"""Where weights, and so outputs, are in half precision."""
GATHERING = ("fsdp1", "fsdp2", "parallel", "presharded")
"""The strategies that bring full weights together on the main process alone."""


def life_of_a_model(name: str, precision: str) -> dict[str, Any]:
    """Prepare, train two steps, unwrap, read the weights and let go; return what was seen."""
    # The scale that float16 starts with by default would overflow at the first steps.
    options = [GradScalerKwargs(init_scale=1024.0)]
    accelerator = fresh_accelerator(mixed_precision=precision, kwargs_handlers=options, **RUNS[name][1]())
    assert accelerator.strategy.name == name
    user = make_model(dtype=torch.float32)
    start, keys = copy_weights(user), list(user.state_dict())
    if name == "presharded":
        fully_shard(user)
    optimizer = torch.optim.SGD(user.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(
        user, optimizer, DataLoader(make_data(4 * accelerator.strategy.data_shard()[1], torch.float32), batch_size=2)
    )
    losses = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            outputs = model(inputs)
            loss = (outputs - targets).square().mean()
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    inner = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    weights = accelerator.get_state_dict(model)
    shards = name in GATHERING
    has_weights = not shards or accelerator.is_main_process
    shares = accelerator.strategy.data_shard()[1]
    peers = accelerator.num_processes // shares
    gone = weakref.ref(model)
    found = {
        "steps": len(losses),
        "finite": bool(torch.isfinite(torch.tensor(losses)).all() and torch.isfinite(norm)),
        "output": outputs.dtype,
        "unwraps": inner is user,
        "forward": "forward" not in vars(inner),
        "keys": list(weights) == (keys if has_weights else []) and (shards or list(inner.state_dict()) == keys),
        "moved": all(not value.equal(start[key]) for key, value in weights.items()),
        "spread": 0.0 if shards else widest(accelerator, weights),
        "shard": accelerator.strategy.data_shard() == (accelerator.process_index // peers, shares),
    }
    model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    del user, inner, weights, outputs, loss
    gc.collect()
    return {**found, "freed": (model, optimizer, loader) == (None, None, None) and gone() is None}


def widest(accelerator: Any, weights: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between the weights of two ranks."""
    return max((accelerator.gather(value[None]) - value).abs().max().item() for value in weights.values())


def every_life(world_size: int) -> dict[str, Any]:
    return {
        f"{name}/{precision}": life_of_a_model(name, precision)
        for name, (size, _) in RUNS.items()
        if size == world_size
        for precision in precisions.FORMATS
        if (name, precision) not in REFUSED and (name != "deepspeed" or find_spec("deepspeed"))
    }


@pytest.mark.parametrize("precision", precisions.FORMATS)
@pytest.mark.parametrize("name", RUNS)
def test_a_model_lives_the_same_life_everywhere(name: str, precision: str) -> None:
    if name == "deepspeed" and find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    if (name, precision) in REFUSED:
        pytest.skip(REFUSED[name, precision])
    size = RUNS[name][0]
    for found in group_once(every_life, size, size):
        assert found[f"{name}/{precision}"] == {
            "steps": 2,
            "finite": True,
            "output": torch.bfloat16 if (name, precision) in HALVES else torch.float32,
            "unwraps": True,
            "forward": True,
            "keys": True,
            "moved": True,
            "spread": 0.0,
            "shard": True,
            "freed": True,
        }


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_names_itself(name: str) -> None:
    strategy = STRATEGIES[name]
    assert {*RUNS, *OF_XLA, *OF_TRANSFORMERS} == set(STRATEGIES), "every strategy lives by the contract"
    assert len(STRATEGIES) == len(strategies.all_strategies())
    assert isinstance(strategy.caps, Capabilities)
    assert strategy.label(current.runtime()) in DistributedType
    answer = strategy.selected(EngineRequest.from_plugins(), current.runtime())
    assert isinstance(answer, Choice)
    assert answer.reason


class Doubling(Strategy):
    """A strategy from outside: it doubles every gradient."""

    name = "doubling"

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        super().backward(loss * 2, **kwargs)


def test_a_registered_strategy_is_asked_first_and_runs() -> None:
    strategies.register(Doubling)
    try:
        accelerator = fresh_accelerator()
        assert accelerator.strategy.name == "doubling"
        model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
        accelerator.backward(model(torch.ones(1, 1)).sum())
        assert model.weight.grad.item() == 2.0
    finally:
        strategies.unregister(Doubling)
    assert Doubling not in strategies.all_strategies()
    assert fresh_accelerator().strategy.name == "single"


def test_steps_are_done_in_order() -> None:
    """Autocast is innermost, the wrapper comes before a compiler of the whole model, evaluation leaves it out."""
    context = StrategyContext(current.runtime(), Precision(), TorchDynamoPlugin(backend="no"))
    strategy = Strategy(context)

    def names(**options: bool) -> list[str]:
        return [step.__name__ for step in strategy.steps(**options)]

    wrapped = ["wrap_forward", "place", "compile_blocks", "wrap", "compile_whole"]
    assert names(place=True, evaluation=False) == ["convert", *wrapped]
    assert names(place=False, evaluation=True) == ["wrap_forward", "compile_blocks", "compile_whole"]
