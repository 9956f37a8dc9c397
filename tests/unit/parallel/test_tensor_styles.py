"""Styles of Transformers' plans on a mesh of one rank, and the plans that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from accelerate._base.errors import ConfigurationError
from accelerate.parallel.tensor import split_layers
from accelerate.parallel.tensor_styles import MODULE_STYLES, PARAMETER_STYLES

# Styles of Transformers 5.23 that belong to expert parallelism, and one that needs a layer of the model's own.
REFUSED = {"ep_dispatch_experts", "grouped_gemm", "all_reduce"}


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.arange(2 * 8 * 3.0).view(2, 8, 3))
        self.down_proj = nn.Parameter(torch.ones(2, 3, 4))

    def forward(self, states: torch.Tensor, fails: bool = False) -> torch.Tensor:
        assert not isinstance(self.gate_up_proj, DTensor)
        if fails:
            raise ValueError("the forward pass failed")
        gate, up = nn.functional.linear(states, self.gate_up_proj[0]).chunk(2, dim=-1)
        return nn.functional.linear(gate * up, self.down_proj[0])


class Model(nn.Module):
    _tp_plan = {
        "experts": "moe_tp_experts",
        "experts.gate_up_proj": "packed_colwise",
        "experts.down_proj": "rowwise",
        "norm": "replicated_with_grad_allreduce",
        "layers.*.missing": "colwise",
    }

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.experts = Experts()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.experts(self.norm(states))
        return out


def test_parameters_are_split_and_modules_compute_with_shards(mesh: DeviceMesh) -> None:
    model, plain, states = split_layers(Model(), mesh), Model(), torch.tensor([[1.0, 2.0, 4.0]])
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    model(states).sum().backward()
    plain(states).sum().backward()
    for left, right in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(left.grad, DTensor)
        torch.testing.assert_close(left.grad.full_tensor(), right.grad)
    assert model.norm.weight.grad.placements == (Partial(),)  # type: ignore[union-attr]


def test_split_parameters_are_put_back_after_an_error(mesh: DeviceMesh) -> None:
    model = split_layers(Model(), mesh)
    with pytest.raises(ValueError, match="the forward pass failed"):
        model.experts(torch.ones(1, 3), fails=True)
    assert isinstance(model.experts.gate_up_proj, DTensor)


@pytest.mark.parametrize(
    ("plan", "match"),
    [
        ({"experts.gate_up_proj": "moe_tp_experts"}, "'experts.gate_up_proj'.*'moe_tp_experts'.*parameter"),
        ({"norm": "all_reduce"}, "'norm'.*'all_reduce'.*module"),
        ({"norm": "mla_kv_a_proj"}, "qk_rope_head_dim"),
        ({"experts.down_projection": "rowwise"}, "'experts.down_projection'"),
    ],
)
def test_a_plan_that_cannot_be_applied_is_refused(mesh: DeviceMesh, plan: dict[str, Any], match: str) -> None:
    model = Model()
    with pytest.raises(ConfigurationError, match=match):
        split_layers(model, mesh, plan)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_a_parameter_that_cannot_be_split_evenly_is_refused() -> None:
    three: Any = type("Mesh", (), {"size": lambda self: 3})()
    with pytest.raises(ConfigurationError, match=r"'experts.gate_up_proj'.*\(2, 8, 3\)"):
        split_layers(Model(), three, {"experts.gate_up_proj": "packed_colwise"})


def test_every_style_of_transformers_is_supported_or_known_to_be_refused() -> None:
    styles = pytest.importorskip("transformers.distributed.parallel_utils").ALL_PARALLEL_STYLES
    pytest.importorskip("transformers.distributed.tensor_parallel")
    pytest.importorskip("transformers.distributed.expert_parallel")
    assert set(styles) - {*MODULE_STYLES, *PARAMETER_STYLES, "replicate"} <= REFUSED
