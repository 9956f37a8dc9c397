"""The estimate for sharded training is what torch allocates on the first rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.support.processes import run_group
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from accelerate.offload.estimate import Model, per_rank
from accelerate.offload.inventory import tensors_of_model

pytestmark = pytest.mark.multiprocess


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def local_bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.nbytes


def train_one_step() -> tuple[int, int, int]:
    """Return the bytes of weights with buffers, gradients and moments that this rank holds after a step."""
    dist.init_process_group("gloo")
    try:
        model = network()
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        model(torch.ones(4, 5)).sum().backward()
        optimizer.step()
        moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        return (
            sum(local_bytes(tensor) for tensor in [*model.parameters(), *model.buffers()]),
            sum(local_bytes(parameter.grad) for parameter in model.parameters() if parameter.grad is not None),
            sum(local_bytes(moment) for moment in moments),
        )
    finally:
        dist.destroy_process_group()


def test_fsdp_holds_what_the_estimate_says() -> None:
    expected = per_rank(Model(tuple(tensors_of_model(network()))), "float32", 2)["FSDP"]
    first, second = run_group(train_one_step, 2)
    assert first == (expected.weights, expected.gradients, expected.optimizer)
    assert second < first
