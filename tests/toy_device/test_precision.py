"""Mixed precision on the toy device: autocast is on there, and overflows are skipped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.toy_device import on_toy
from tests.support.training import fresh_accelerator, make_data, make_model
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate._base.errors import ConfigurationError
from accelerate.big_modeling import attach_layerwise_casting_hooks
from accelerate.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
)

DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Watched(torch.nn.Linear):
    """A layer that notes in what dtype it computes, and whether autocast was on for the device."""

    seen: list[Any]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = super().forward(input)
        self.seen.append((output.dtype, torch.is_autocast_enabled("toy"), torch.is_autocast_enabled("cpu")))
        return output


def watched() -> Watched:
    torch.manual_seed(0)
    layer = Watched(5, 1)
    layer.seen = []
    return layer


@pytest.mark.parametrize("precision", DTYPES)
@on_toy()
def test_layers_compute_in_the_format(precision: str) -> None:
    accelerator, layer = Accelerator(mixed_precision=precision), watched()
    model = accelerator.prepare(layer)
    output = model(torch.ones(2, 5, device=accelerator.device))
    is_on = precision != "no"
    assert layer.seen == [(DTYPES[precision], is_on, False)]
    assert (output.dtype, layer.weight.dtype) == (torch.float32, torch.float32)
    with accelerator.autocast():
        assert torch.mm(torch.ones(2, 2, device="toy"), torch.ones(2, 2, device="toy")).dtype == DTYPES[precision]
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert torch.mm(torch.ones(2, 2, device="toy"), torch.ones(2, 2, device="toy")).dtype == torch.float32
    accelerator.backward(output.sum())
    assert layer.weight.grad is not None
    assert (layer.weight.grad.dtype, layer.weight.grad.device) == (torch.float32, torch.device("toy:0"))


@on_toy()
def test_a_format_that_the_device_lacks_is_refused() -> None:
    torch.toy.get_amp_supported_dtype = lambda: [torch.bfloat16]
    Accelerator(mixed_precision="bf16")
    with pytest.raises(ConfigurationError, match="'fp16' was asked for, but 'toy' devices here cannot compute"):
        fresh_accelerator(mixed_precision="fp16")


def train(accelerator: Accelerator, overflow_at: int | None = None) -> dict[str, Any]:
    model = make_model(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(make_data(40, torch.float32), batch_size=8)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    skipped, scales = [], []
    for number, (inputs, targets) in enumerate(loader):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        if number == overflow_at and accelerator.is_last_process:
            loss = loss * torch.inf
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
        scales.append(None if accelerator.scaler is None else accelerator.scaler.get_scale())
    state = accelerator.get_state_dict(model)
    return {
        "weights": {name: value.cpu() for name, value in state.items()},
        "skipped": skipped,
        "scales": scales,
        "rate": optimizer.param_groups[0]["lr"],
    }


def plain_weights(skip: int | None = None) -> dict[str, torch.Tensor]:
    """Train in full precision, without one of the batches."""
    model = make_model(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for number, (inputs, targets) in enumerate(DataLoader(make_data(40, torch.float32), batch_size=8)):
        if number == skip:
            continue
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.state_dict()


def check_skipped(found: dict[str, Any], is_main: bool = True) -> None:
    assert found["skipped"] == [False, False, True, False, False]
    assert found["scales"] == [1024.0, 1024.0, 512.0, 512.0, 512.0]
    assert found["rate"] == 0.05 * 0.5**4  # the schedule waits where the update was skipped
    if is_main:
        for name, value in plain_weights(skip=2).items():
            torch.testing.assert_close(found["weights"][name], value, rtol=0.02, atol=0.002)


SCALER = GradScalerKwargs(init_scale=1024.0)
SPLIT = DataLoaderConfiguration(split_batches=True)


@on_toy()
def test_an_update_that_overflows_is_skipped() -> None:
    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[SCALER])
    check_skipped(train(accelerator, overflow_at=2))
    assert accelerator.scaler is not None
    assert accelerator.scaler._scale.device == torch.device("toy:0")


@on_toy(processes=2)
def test_an_update_that_overflows_on_one_rank_is_skipped_on_all() -> None:
    for options in (
        {},
        {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP")},
    ):
        accelerator = fresh_accelerator(
            mixed_precision="fp16", kwargs_handlers=[SCALER], dataloader_config=SPLIT, **options
        )
        check_skipped(train(accelerator, overflow_at=2), accelerator.is_main_process)


@on_toy(processes=2)
def test_gradients_in_host_memory_are_not_scaled() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP", cpu_offload=True)
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision="fp16")
    with pytest.raises(ConfigurationError, match="'fp16' cannot be used with cpu_offload=True of FSDP 2"):
        train(accelerator)


@on_toy(processes=2)
def test_bf16_trains_on_two_devices() -> None:
    for options in ({}, {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP")}):
        accelerator = fresh_accelerator(mixed_precision="bf16", dataloader_config=SPLIT, **options)
        found = train(accelerator)
        assert found["skipped"] == [False] * 5
        if accelerator.is_main_process:
            for name, value in plain_weights().items():
                torch.testing.assert_close(found["weights"][name], value, rtol=0.05, atol=0.02)


@on_toy()
def test_layers_that_are_kept_small_compute_in_full() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).to("toy")
    attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32, non_blocking=True)
    assert model[0].weight.dtype == torch.bfloat16
    expected = model(torch.ones(1, 4, device="toy"))
    assert (expected.dtype, expected.device) == (torch.float32, torch.device("toy:0"))
    assert model[1].weight.dtype == torch.bfloat16
