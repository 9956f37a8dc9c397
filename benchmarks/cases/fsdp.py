"""One training step on two processes: hand-written FSDP2 with a DistributedSampler against accelerate."""

from __future__ import annotations

import argparse

import torch
from rounds import Loop, alternate, report
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import accelerate
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin

BATCH = 32
STEPS = 4
WIDTH = 512
LAYERS = 4


class Block(nn.Module):
    """One layer that is sharded on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(inputs))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, 10))


def make_rows(world_size: int) -> TensorDataset:
    count = BATCH * STEPS * world_size
    return TensorDataset(torch.randn(count, WIDTH), torch.randint(0, 10, (count,)))


def by_hand(rows: TensorDataset, world_size: int) -> Loop:
    loader = DataLoader(rows, batch_size=BATCH, sampler=DistributedSampler(rows))
    model = make_model()
    mesh = init_device_mesh("cpu", (world_size,))
    for module in model.children():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def loop() -> None:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norm.full_tensor()  # the norm of the whole model, which accelerate returns too
            optimizer.step()
        torch.distributed.barrier()

    return loop


def accelerated(accelerator: Accelerator, rows: TensorDataset) -> Loop:
    plain_model = make_model()
    plain_optimizer = torch.optim.AdamW(plain_model.parameters(), lr=1e-4)
    plain_loader = DataLoader(rows, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(plain_model, plain_optimizer, plain_loader)

    def loop() -> None:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        torch.distributed.barrier()

    return loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    rows = make_rows(accelerator.num_processes)
    pair = {"plain": by_hand(rows, accelerator.num_processes), "accelerate": accelerated(accelerator, rows)}
    seconds = alternate(pair, options.rounds)
    micros = {name: [1e6 * value / STEPS for value in values] for name, values in seconds.items()}
    if accelerator.is_main_process:
        report(micros, unit="µs per step", version=accelerate.__version__, processes=accelerator.num_processes)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
