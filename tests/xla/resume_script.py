"""Train two epochs on the CPU, on one XLA device, on two of them, or in two processes; save, or go on, in the first.

python resume_script.py cpu|xla|spmd save|load FOLDER
"""

from __future__ import annotations

import json
import sys

import torch
from tests.support.xla import Task

from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import set_seed

SAVED_AFTER = 7


def main(mode: str, action: str, folder: str) -> None:
    layout = ParallelismConfig(dp_shard_size=2) if mode == "spmd" else None
    accelerator = Accelerator(cpu=mode == "cpu", parallelism_config=layout, gradient_accumulation_steps=2)
    set_seed(3 if action == "save" else 4)
    task = Task()
    model = task.model()
    optimizer = task.optimizer(model)
    model, optimizer, scheduler, loader = accelerator.prepare(
        model, optimizer, task.scheduler(optimizer), task.loader(shuffle=True)
    )
    if action == "load":
        accelerator.load_state(folder)
    losses: list[torch.Tensor] = []
    while loader.iteration < 2:
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean"))
            if action == "save" and len(losses) == SAVED_AFTER:
                accelerator.save_state(folder)
    seen = losses[SAVED_AFTER:] if action == "save" else losses
    if accelerator.is_main_process:
        facts = {"strategy": accelerator.strategy.name, "processes": accelerator.num_processes}
        sys.stdout.write(json.dumps({**facts, "losses": [float(loss) for loss in seen]}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
