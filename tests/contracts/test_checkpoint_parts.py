"""Every part of every strategy's checkpoint passes the same checks: what is written is read back, and nothing else."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.contracts.test_strategies import REFUSED, RUNS
from tests.support.training import fresh_accelerator, group_once, make_data, make_model
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from accelerate._base.errors import CheckpointError
from accelerate.checkpointing.files import FolderWriter
from accelerate.checkpointing.parts import LoadOptions, Part
from accelerate.checkpointing.snapshot import Snapshot
from accelerate.checkpointing.state import Checkpointer, RunState
from accelerate.utils import GradScalerKwargs, broadcast_object_list

pytestmark = [
    pytest.mark.multiprocess,
    # DeepSpeed 0.19 uses what torch 2.13 warns about.
    pytest.mark.filterwarnings("ignore:.*torch.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning"),
]


class Counter:
    """An object of the user's."""

    def __init__(self) -> None:
        self.count = 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


class Run:
    """A run in the middle of an epoch and of an accumulation window, and the parts of which its checkpoint is."""

    def __init__(self, name: str, folder: Path) -> None:
        self.accelerator = accelerator = fresh_accelerator(
            mixed_precision="bf16" if (name, "fp16") in REFUSED else "fp16",
            gradient_accumulation_steps=2,
            kwargs_handlers=[GradScalerKwargs(init_scale=1024.0, growth_interval=1)],
            project_dir=str(folder),
            step_scheduler_with_optimizer=False,
            **RUNS[name][1](),
        )
        model = make_model(dtype=torch.float32)
        if name == "presharded":
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        samples = make_data(24 * accelerator.strategy.data_shard()[1], torch.float32)
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            model, optimizer, DataLoader(samples, batch_size=2, shuffle=True), scheduler
        )
        self.counter = Counter()
        accelerator.register_for_checkpointing(self.counter)
        self.batches = iter(self.loader)
        self.train(3)

    def train(self, batches: int) -> None:
        for _ in range(batches):
            inputs, targets = next(self.batches)
            with self.accelerator.accumulate(self.model):
                loss = (self.model(inputs) - targets).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                if self.accelerator.sync_gradients:
                    self.scheduler.step()
                self.optimizer.zero_grad()
            self.counter.count += 1
            self.accelerator.progress.step += 1
            torch.rand(1)  # a draw of the program's own

    def parts(self) -> list[Part]:
        """Return the parts of which a save of this run would be."""
        states: list[RunState] = []
        with patch.object(Checkpointer, "save", lambda _, target, state, *args, **options: states.append(state)):
            self.accelerator.save_state(str(Path(self.accelerator.project_dir or "", "never")))
        return [*states[0].strategy.checkpoint_parts(states[0].prepared), *states[0].run_parts]


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Return what a state holds, flat, by copies that can be compared."""
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        return {path: (str(local.dtype), local.detach().cpu().tolist())}
    if isinstance(value, Mapping):
        return {name: leaf for key in value for name, leaf in leaves(value[key], f"{path}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return {name: leaf for i, entry in enumerate(value) for name, leaf in leaves(entry, f"{path}.{i}").items()}
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return leaves(vars(value), path)
    return {path: copy.deepcopy(value) if not hasattr(value, "tolist") else value.tolist()}


def life_of_the_parts(name: str) -> dict[str, dict[str, bool]]:
    """Save the parts one by one, train on, and bring them back; return what held for each."""
    fresh_accelerator()  # a group, so that all ranks write to one folder
    folder = Path(broadcast_object_list([tempfile.mkdtemp()])[0])
    run = Run(name, folder)
    rank, world = run.accelerator.process_index, run.accelerator.num_processes
    options = LoadOptions(rank=rank, world_size=world)
    parts = run.parts()
    assert len({part.name for part in parts}) == len(parts), [part.name for part in parts]
    saved: dict[str, dict[str, Any]] = {}
    found: dict[str, dict[str, bool]] = {}
    for part in parts:
        snapshot = Snapshot([part])
        snapshot.resolve()
        [(_, payload)] = snapshot
        saved[part.name] = leaves(payload)
        found[part.name] = {"snapshot changes nothing": leaves(part.snapshot()) == saved[part.name]}
        if part.everywhere or rank == 0:
            with closing(FolderWriter(folder)) as writer:
                part.write(payload, writer)
                records = writer.finish()
            sizes = [(folder / record.name).stat().st_size == record.size for record in records]
            found[part.name]["files are recorded"] = all(sizes) and (bool(sizes) or rank > 0 or not payload)
        run.accelerator.wait_for_everyone()
    run.train(3)
    moved = {part.name: leaves(part.snapshot()) for part in run.parts()}
    payloads = {part.name: part.read(folder, options) for part in run.parts()}
    for part in run.parts():
        found[part.name]["reading changes nothing"] = leaves(part.snapshot()) == moved[part.name]
    for part in run.parts():
        part.restore(payloads[part.name])
    for part in run.parts():
        # A rank may have nothing of a part.
        found[part.name]["moved on"] = moved[part.name] != saved[part.name] or not saved[part.name]
        found[part.name]["brought back"] = leaves(part.snapshot()) == saved[part.name]
    empty = folder / "empty"
    empty.mkdir(exist_ok=True)
    for part in run.parts():
        before = leaves(part.snapshot())
        found[part.name]["missing files are named or left alone"] = refuses(part, empty, options)
        found[part.name]["a refusal changes nothing"] = leaves(part.snapshot()) == before
    return found


def refuses(part: Part, empty: Path, options: LoadOptions) -> bool:
    """Whether a part that is not in a checkpoint raises an error that names it, or has nothing to restore."""
    try:
        payload = part.read(empty, options)
    except CheckpointError as error:
        return str(empty) in str(error) or part.name in str(error)
    return not payload


def every_life(world_size: int) -> dict[str, dict[str, dict[str, bool]]]:
    return {
        name: life_of_the_parts(name)
        for name, (size, _) in RUNS.items()
        if size == world_size and (name != "deepspeed" or find_spec("deepspeed"))
    }


@pytest.mark.parametrize("name", RUNS)
def test_parts_are_saved_and_brought_back_one_by_one(name: str) -> None:
    if name == "deepspeed" and find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    size = RUNS[name][0]
    for rank, found in enumerate(group_once(every_life, size, size)):
        broken = [
            f"rank {rank}, {part}: not {check}"
            for part, checks in found[name].items()
            for check, held in checks.items()
            if not held
        ]
        assert broken == []
        assert len(found[name]) >= 6
