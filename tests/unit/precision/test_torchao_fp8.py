"""Linear layers in 8-bit floats, by torchao itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accelerate.utils.ao import (
    convert_model_to_fp8_ao,
    filter_first_and_last_linear_layers,
    filter_linear_layers,
    find_first_last_linear_layers,
    has_ao_layers,
)

float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 24), nn.Linear(24, 16))


def converted(found: nn.Module) -> list[str]:
    return [name for name, module in found.named_modules() if type(module).__name__ == "Float8Linear"]


def test_all_but_the_first_and_last_layers_that_fit_are_converted() -> None:
    found = model()
    assert find_first_last_linear_layers(found) == ("0", "4")
    assert not has_ao_layers(found)
    convert_model_to_fp8_ao(found, config=float8.Float8LinearConfig(emulate=True))
    assert has_ao_layers(found)
    assert converted(found) == ["2"]  # 24 is no multiple of 16


def test_a_converted_model_trains() -> None:
    found, plain = model(), model()
    convert_model_to_fp8_ao(found, config=float8.Float8LinearConfig(emulate=True))
    x = torch.randn(16, 16)
    expected = plain(x)
    result = found(x)
    assert 0 < (result - expected).abs().max() < 0.1
    result.sum().backward()
    assert found[2].weight.grad is not None


def test_a_filter_of_ones_own_decides() -> None:
    found = model()
    convert_model_to_fp8_ao(
        found, config=float8.Float8LinearConfig(emulate=True), module_filter_func=lambda _, name: name == "0"
    )
    assert converted(found) == ["0"]


def test_filters() -> None:
    found = model()
    assert not filter_linear_layers(found[2], "2", ["2"])
    assert filter_linear_layers(found[2], "2", ["0"])
    assert not filter_linear_layers(found[3], "3", [])
    assert filter_linear_layers(found[1], "1", [])
    assert filter_first_and_last_linear_layers(found, "2")
    assert find_first_last_linear_layers(nn.ReLU()) == (None, None)
