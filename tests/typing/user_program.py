"""A program of a user, in the style of the documentation: it is type-checked, not run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import (
    Accelerator,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    PartialState,
    ProfileKwargs,
    debug_launcher,
    find_executable_batch_size,
    skip_first_batches,
    synchronize_rng_states,
)
from accelerate.local_sgd import LocalSGD
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchDynamoPlugin,
    broadcast_object_list,
    gather_object,
    release_memory,
    send_to_device,
    set_seed,
    tqdm,
)

logger = get_logger(__name__, log_level="INFO")


def main(folder: Path, epochs: int = 1) -> float:
    set_seed(42, device_specific=True)
    accelerator = Accelerator(
        mixed_precision="bf16",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, adjust_scheduler=False),
        dataloader_config=DataLoaderConfiguration(split_batches=False, even_batches=True),
        project_config=ProjectConfiguration(project_dir=str(folder)),
        dynamo_plugin=TorchDynamoPlugin(),
        kwargs_handlers=[
            DistributedDataParallelKwargs(find_unused_parameters=True),
            GradScalerKwargs(init_scale=1024.0),
            InitProcessGroupKwargs(),
            AutocastKwargs(cache_enabled=True),
        ],
    )
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    loader = DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    loss = torch.zeros(())
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for inputs, targets in tqdm(skip_first_batches(loader, 1)):
            with accelerator.accumulate(model):
                with accelerator.autocast():
                    loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm: torch.Tensor = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    logger.info("norm %s", norm, main_process_only=True)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    if accelerator.is_main_process:
        accelerator.save(accelerator.get_state_dict(model), folder / "model.safetensors", safe_serialization=True)
    accelerator.wait_for_everyone()
    unwrapped: torch.nn.Module = accelerator.unwrap_model(model)
    accelerator.print(type(unwrapped).__name__, accelerator.num_processes)
    model, optimizer = release_memory(model, optimizer)
    return float(accelerator.gather_for_metrics(loss).mean())


def parts_on_their_own(accelerator: Accelerator, base: torch.optim.Optimizer) -> None:
    optimizer: AcceleratedOptimizer = accelerator.prepare_optimizer(base)
    scheduler: AcceleratedScheduler = accelerator.prepare_scheduler(
        torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer)
    )
    model: torch.nn.Module = accelerator.prepare_model(torch.nn.Linear(1, 1))
    skipped: bool = optimizer.step_was_skipped
    clock: GradientState = accelerator.gradient_state
    steps: int = clock.num_steps
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4, enabled=True) as local_sgd:
        local_sgd.step()
    with accelerator.no_sync(model), accelerator.join_uneven_inputs([model], even_batches=False):
        pass
    with accelerator.profile(ProfileKwargs(activities=["cpu"])) as profiler:
        profiler.step()
    print(scheduler.get_last_lr(), skipped, steps)
    accelerator.breakpoint()
    accelerator.reset()


def states() -> tuple[int, str, bool]:
    partial = PartialState(cpu=True)
    with partial.split_between_processes(["a", "b"]) as mine:
        print(len(mine))
    with partial.main_process_first():
        pass
    objects: list[object] = [partial.process_index]
    broadcast_object_list(objects)
    gather_object(objects)
    send_to_device(torch.ones(1), partial.device)
    synchronize_rng_states(["torch"])
    kind: DistributedType = partial.distributed_type
    return partial.num_processes, AcceleratorState().mixed_precision, kind == DistributedType.NO


@find_executable_batch_size(starting_batch_size=64)
def train(batch_size: int) -> float:
    return main(Path(f"runs/{batch_size}"))


result: float = train()
again: Callable[..., float] = find_executable_batch_size(train, starting_batch_size=8, keep_update=True)

if __name__ == "__main__":
    debug_launcher(states, num_processes=2)
