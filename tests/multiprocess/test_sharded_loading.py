"""The first rank has the weights, the others get their shards of them and hold little else."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.processes import run_group
from tests.support.training import fresh_accelerator
from torch import nn

from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc"),
]

MB = 10**6
OTHER = 3 * MB
"""What is no weight: objects of Python, buffers of the group."""
WIDTH, LAYERS = 1024, 24
VARIANTS: dict[str, dict[str, Any]] = {
    "version 2": {"fsdp_version": 2},
    "version 1": {"fsdp_version": 1, "use_orig_params": True},
    "version 1, joined": {"fsdp_version": 1, "use_orig_params": False},
}


class Layer(nn.Module):
    """Three matrices: 12.6 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)


class Tower(nn.Module):
    """Equal layers, and a small rest."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 10)


class Odd(nn.Module):
    """All that needs care: tied and frozen weights, buffers, a module that is left alone, rows that do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.BatchNorm1d(7)
        self.alone = nn.Linear(3, 3)
        self.tied = nn.Linear(5, 7)
        self.tied.weight = self.first.weight
        self.one = nn.Parameter(torch.ones(1))
        self.alone.requires_grad_(False)


def numbered(model: nn.Module) -> nn.Module:
    """Give every tensor its own values, so that nothing can be taken for another."""
    with torch.no_grad():
        for place, tensor in enumerate([*model.parameters(), *model.buffers()]):
            values = torch.arange(tensor.numel(), dtype=torch.float64) % 1021 + 10_000 * place
            tensor.copy_(values.view(tensor.shape))
    return model


def accelerator_of(options: dict[str, Any], **more: Any) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        transformer_cls_names_to_wrap=["Layer"],
        cpu_ram_efficient_loading=True,
        **options,
        **more,
    )
    return fresh_accelerator(fsdp_plugin=plugin)


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def memory_of_prepare(options: dict[str, Any]) -> tuple[int, int]:
    """Return what `prepare` takes at its peak and what it keeps, on this rank."""
    accelerator = accelerator_of(options)
    for layers in (1, LAYERS):  # the first time libraries are loaded and threads made
        with torch.device("cpu" if accelerator.is_main_process else "meta"):
            model = Tower(layers)
        accelerator.wait_for_everyone()
        Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
        before = status("VmRSS")
        prepared = accelerator.prepare(model)
        taken = status("VmHWM") - before, status("VmRSS") - before
        assert not any(weight.is_meta for weight in prepared.parameters())
        del model, prepared
        accelerator.free_memory()
    return taken


def every_variant() -> dict[str, tuple[int, int]]:
    return {name: memory_of_prepare(options) for name, options in VARIANTS.items()}


def test_a_rank_without_weights_holds_its_shards_and_at_most_one_layer() -> None:
    with torch.device("meta"):
        model = Tower(LAYERS)
    layer = sum(weight.nbytes for weight in model.layers[0].parameters())
    shard = sum(weight.nbytes for weight in model.parameters()) // 2
    _, second = run_group(every_variant, 2)
    for name, (peak, kept) in second.items():
        assert peak > 0.9 * shard
        assert peak < shard + layer + OTHER, f"{name}: {peak / MB} MB at the peak, {shard / MB} MB are its shards"
        assert kept < shard + layer, f"{name}: {kept / MB} MB are kept"


def odd_of(accelerator: Accelerator) -> Any:
    """Return the model with its weights on the first rank, and without memory on the others."""
    model: Any = Odd()
    if accelerator.is_main_process:
        return numbered(model)
    model.to("meta")
    model.tied.weight = model.first.weight
    return model


def weights_after_prepare(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state dict and what lies outside of the shards on this rank."""
    accelerator = accelerator_of(options, ignored_modules="alone")
    model = odd_of(accelerator)
    model = accelerator.prepare(model)
    whole = accelerator.get_state_dict(model)
    inner = accelerator.unwrap_model(model)
    here = {"alone": inner.alone.weight.detach().clone(), "mean": inner.norm.running_mean.clone()}
    return whole, here


def every_weight() -> dict[str, Any]:
    return {name: weights_after_prepare(options) for name, options in VARIANTS.items()}


def test_every_tensor_arrives_whole() -> None:
    expected = numbered(Odd()).state_dict()
    first, second = run_group(every_weight, 2)
    for name in VARIANTS:
        whole, _ = first[name]
        assert sorted(whole) == sorted(expected), name
        for key, value in expected.items():
            torch.testing.assert_close(whole[key], value, rtol=0, atol=0, msg=f"{name}: {key}")
        for _, here in (first[name], second[name]):
            torch.testing.assert_close(here["alone"], expected["alone.weight"], rtol=0, atol=0)
            torch.testing.assert_close(here["mean"], expected["norm.running_mean"], rtol=0, atol=0)


def steps_from_meta(options: dict[str, Any], order: str) -> tuple[dict[str, Any], bool]:
    """Train a step with an optimizer that was made before the weights were sent; return the weights."""
    accelerator = accelerator_of(options, ignored_modules="alone")
    model = odd_of(accelerator)
    model.alone.requires_grad_(True)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Modules that FSDP ignores have parameters to train")
        if order == "optimizer first":
            optimizer, model = accelerator.prepare(optimizer, model)
        else:
            model, optimizer = accelerator.prepare(model, optimizer)
    with torch.no_grad():  # gradients as the engine would leave them, in every parameter that is trained
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = {id(entry) for group in optimizer.param_groups for entry in group["params"]}
    trains_all = all(id(parameter) in held for parameter in model.parameters() if parameter.requires_grad)
    inner = accelerator.unwrap_model(model)
    return {"alone": inner.alone.weight.detach().clone(), **accelerator.get_state_dict(model)}, trains_all


def every_step() -> dict[str, Any]:
    orders = ("model first", "optimizer first")
    return {f"{name}, {order}": steps_from_meta(VARIANTS[name], order) for name in VARIANTS for order in orders}


def test_an_optimizer_made_before_trains_what_every_rank_received() -> None:
    start = numbered(Odd()).state_dict()
    first, second = run_group(every_step, 2)
    for name in first:
        (whole, trains_all), (other, other_trains_all) = first[name], second[name]
        assert trains_all, name
        assert other_trains_all, name
        for weights in (whole, other):
            torch.testing.assert_close(weights["alone"], start["alone.weight"] - 1, msg=name)
        for key, value in start.items():
            if key.startswith("alone.") or not value.is_floating_point() or "running" in key:
                continue
            torch.testing.assert_close(whole[key], value - 1, rtol=0, atol=0, msg=f"{name}: {key}")
