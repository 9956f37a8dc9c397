"""One training step on two processes: a hand-written loop over `deepspeed.initialize` against accelerate."""

from __future__ import annotations

import argparse
import os
import warnings
from typing import Any

import torch
from rounds import Loop, alternate, report
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import accelerate
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin

BATCH = 32
# Many, so that the start of a pass over the loader, which is no part of a step, counts for little.
STEPS = 48
WIDTH = 256
LAYERS = 4


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def make_config(stage: int) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage},
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 1.0,
        "steps_per_print": float("inf"),
        "zero_allow_untested_optimizer": True,
    }


def make_rows(world_size: int) -> TensorDataset:
    count = BATCH * STEPS * world_size
    return TensorDataset(torch.randn(count, WIDTH), torch.randint(0, 10, (count,)))


def by_hand(rows: TensorDataset, config: dict[str, Any]) -> Loop:
    import deepspeed

    loader = DataLoader(rows, batch_size=BATCH, sampler=DistributedSampler(rows))
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def loop() -> None:
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
        torch.distributed.barrier()

    return loop


def accelerated(accelerator: Accelerator, rows: TensorDataset, *, clips: bool) -> Loop:
    plain_model = make_model()
    plain_optimizer = torch.optim.AdamW(plain_model.parameters(), lr=1e-4)
    plain_loader = DataLoader(rows, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(plain_model, plain_optimizer, plain_loader)

    def loop() -> None:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if clips:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        torch.distributed.barrier()

    return loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--clip", action="store_true", help="call clip_grad_norm_ too, which returns the norm before the step"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    # DeepSpeed 0.19 calls torch.distributed by names that torch 2.13 warns about.
    warnings.filterwarnings("ignore", message="`torch.distributed.* is deprecated", category=FutureWarning)
    config = make_config(options.stage)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    rows = make_rows(accelerator.num_processes)
    pair = {"plain": by_hand(rows, config), "accelerate": accelerated(accelerator, rows, clips=options.clip)}
    seconds = alternate(pair, options.rounds, warmup=4)
    micros = {name: [1e6 * value / STEPS for value in values] for name, values in seconds.items()}
    if accelerator.is_main_process:
        report(micros, unit="µs per step", version=accelerate.__version__, processes=accelerator.num_processes)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    main()
