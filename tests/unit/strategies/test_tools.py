"""Tensors and gradients of which each rank holds a part, on one process: clipped, scaled, averaged and sent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tests.support.gpt import TinyGPT, make_tokens
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from accelerate.collectives.torch_dist import TorchDistCommunicator
from accelerate.parallel.tensor import split_layers
from accelerate.strategies.broadcast_weights import equal_weights_step
from accelerate.strategies.parallel import GradientAverager
from accelerate.strategies.tools import clip_grad_norm, scale_gradients

CPU = torch.device("cpu")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of one rank, which takes every way that a mesh of many takes."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def test_without_a_mesh_no_weights_are_sent() -> None:
    assert equal_weights_step(None) is None


def gradients() -> nn.Module:
    model = TinyGPT()
    tokens = make_tokens(2)
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    return model


@pytest.mark.parametrize("kind", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("limit", [0.01, 1e6])
def test_clipping_split_and_whole_gradients_is_torchs(mesh: DeviceMesh, kind: float, limit: float) -> None:
    plain, split = gradients(), split_layers(TinyGPT(), mesh)
    tokens = make_tokens(2)
    split(tokens[:, :-1], tokens[:, 1:]).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), limit, kind)
    norm = clip_grad_norm(split.parameters(), limit, kind, CPU, stages=mesh.get_group())
    torch.testing.assert_close(norm, expected)
    for left, right in zip(split.parameters(), plain.parameters(), strict=True):
        assert left.grad is not None
        whole = left.grad.full_tensor() if isinstance(left.grad, DTensor) else left.grad
        torch.testing.assert_close(whole, right.grad)


def test_nothing_to_clip() -> None:
    assert clip_grad_norm([nn.Parameter(torch.ones(2))], 1.0, 2.0, CPU).item() == 0.0
    assert clip_grad_norm(nn.Parameter(torch.ones(2)), 1.0, 2.0, CPU).item() == 0.0


def test_scaling() -> None:
    model = gradients()
    before = model.head.weight.grad.clone()  # type: ignore[union-attr]
    scale_gradients(model.parameters(), torch.tensor(0.5))
    torch.testing.assert_close(model.head.weight.grad, before / 2)  # type: ignore[union-attr]


def test_a_mean_is_exchanged_once_a_pass_and_not_while_held(mesh: DeviceMesh) -> None:
    model = nn.Linear(2, 1)
    mean = GradientAverager(model.parameters(), TorchDistCommunicator(mesh.get_group()).average)
    exchanges = []
    exchange = mean._exchange
    mean._exchange = lambda: (exchanges.append(1), exchange())[1]  # type: ignore[method-assign]
    with mean.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    assert exchanges == []
    model(torch.ones(1, 2)).sum().backward()
    assert exchanges == [1]
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[2.0, 2.0]]
