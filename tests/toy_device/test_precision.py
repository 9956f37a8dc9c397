"""Mixed precision on the toy device: autocast is on there, and overflows are skipped."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.support.toy_device import on_the_cpu, on_toy
from tests.support.training import fresh_accelerator, make_data, make_model
from torch.utils.data import DataLoader

from accelerate import Accelerator, PartialState
from accelerate._base.errors import ConfigurationError
from accelerate.big_modeling import attach_layerwise_casting_hooks
from accelerate.utils import (
    AORecipeKwargs,
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


def assert_as_on_the_cpu(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare with the same run on the CPU, bit for bit; all weights have moved."""
    weights, wanted = found.pop("weights"), expected.pop("weights")
    assert found == expected
    assert weights.keys() == wanted.keys()
    first = make_model(dtype=torch.float32).state_dict()
    assert weights.keys() == first.keys() or PartialState().process_index > 0  # of shards the first rank has them
    for name, value in weights.items():
        assert torch.equal(value, wanted[name]), name
        assert (value - first[name]).abs().max() > 1e-3, name


def check_skipped(found: dict[str, Any], is_main: bool = True) -> None:
    assert found["skipped"] == [False, False, True, False, False]
    assert found["scales"] == [1024.0, 1024.0, 512.0, 512.0, 512.0]
    assert found["rate"] == 0.05 * 0.5**4  # the schedule waits where the update was skipped
    if is_main:
        for name, value in plain_weights(skip=2).items():
            torch.testing.assert_close(found["weights"][name], value, rtol=0.02, atol=0.002)


SCALER = GradScalerKwargs(init_scale=1024.0)
SPLIT = DataLoaderConfiguration(split_batches=True)


def sharded() -> dict[str, Any]:
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP")}


def in_format(precision: str, **options: Any) -> Accelerator:
    handlers = [SCALER] if precision == "fp16" else []
    return fresh_accelerator(mixed_precision=precision, kwargs_handlers=handlers, dataloader_config=SPLIT, **options)


@on_toy()
def test_an_update_that_overflows_is_skipped() -> None:
    accelerator = in_format("fp16")
    found = train(accelerator, overflow_at=2)
    check_skipped(found)
    assert accelerator.scaler is not None
    assert accelerator.scaler._scale.device == torch.device("toy:0")
    with on_the_cpu():
        assert_as_on_the_cpu(found, train(in_format("fp16"), overflow_at=2))


@on_toy(processes=2)
def test_an_update_that_overflows_on_one_rank_is_skipped_on_all() -> None:
    for options in (dict, sharded):
        accelerator = in_format("fp16", **options())
        found = train(accelerator, overflow_at=2)
        check_skipped(found, accelerator.is_main_process)
        with on_the_cpu():
            assert_as_on_the_cpu(found, train(in_format("fp16", **options()), overflow_at=2))


@pytest.mark.parametrize("processes", [1, 2])
@on_toy()
def test_half_precision_trains_bit_for_bit_as_on_the_cpu(processes: int) -> None:
    in_full = plain_weights()
    # The plugin of FSDP stays asked for in a process, so the runs without it come first.
    for options in (dict, sharded):
        for precision in ("bf16", "fp16"):
            accelerator = in_format(precision, **options())
            assert (accelerator.device.type, accelerator.num_processes) == ("toy", processes)
            found = train(accelerator)
            assert found["skipped"] == [False] * 5
            assert all(not torch.equal(value, in_full[name]) for name, value in found["weights"].items())
            with on_the_cpu():
                accelerator = in_format(precision, **options())
                assert (accelerator.device.type, accelerator.num_processes) == ("cpu", processes)
                assert_as_on_the_cpu(found, train(accelerator))


def train_in_8_bits() -> tuple[list[float], dict[str, torch.Tensor]]:
    accelerator = fresh_accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 32), torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16)]
    model = torch.nn.Sequential(*layers)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    own = accelerator.unwrap_model(model)
    assert type(own[1]).__name__ == "Float8Linear"
    inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(1 + accelerator.process_index))
    inputs, losses = inputs.to(accelerator.device), []
    for _ in range(3):
        loss = (model(inputs) - inputs).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    return losses, {name: value.cpu() for name, value in own.state_dict().items()}


@pytest.mark.parametrize("processes", [1, 2])
@on_toy()
def test_8_bit_floats_train_bit_for_bit_as_on_the_cpu(processes: int) -> None:
    pytest.importorskip("torchao.float8", reason="torchao is not installed")
    losses, weights = train_in_8_bits()
    assert (PartialState().device.type, PartialState().num_processes) == ("toy", processes)
    with on_the_cpu():
        expected, wanted = train_in_8_bits()
    assert losses == expected
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], value) for name, value in wanted.items())


@on_toy(processes=2)
def test_gradients_in_host_memory_are_not_scaled() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP", cpu_offload=True)
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision="fp16")
    with pytest.raises(ConfigurationError, match="'fp16' cannot be used with cpu_offload=True of FSDP 2"):
        train(accelerator)


@on_toy()
def test_layers_that_are_kept_small_compute_in_full() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    rounded = copy.deepcopy(model).bfloat16().float()
    model.to("toy")
    attach_layerwise_casting_hooks(model, torch.bfloat16, torch.float32, non_blocking=True)
    assert model[0].weight.dtype == torch.bfloat16
    found = model(torch.ones(1, 4, device="toy"))
    assert (found.dtype, found.device) == (torch.float32, torch.device("toy:0"))
    assert torch.equal(found.cpu(), rounded(torch.ones(1, 4)))
    assert model[1].weight.dtype == torch.bfloat16
