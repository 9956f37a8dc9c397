"""Training in 8-bit floats gives the losses of one process on several, whatever their layout."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import pytest
import torch
from tests.support.training import assert_near, fresh_accelerator, group_once
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from accelerate import ParallelismConfig
from accelerate.utils import AORecipeKwargs, FullyShardedDataParallelPlugin, TorchTensorParallelConfig

pytestmark = pytest.mark.multiprocess
pytest.importorskip("torchao.float8", reason="torchao is not installed")

INPUTS = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """Two layers that can be split over two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = states + self.down(self.up(states).relu())
        return result


def make_model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), Block(), Block(), nn.Linear(32, 16))


def sharded(version: int) -> dict[str, Any]:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    return {"fsdp_plugin": plugin}


def split() -> dict[str, Any]:
    plan = {
        f"{index}.{name}": style
        for index in (1, 2)
        for name, style in (("up", ColwiseParallel()), ("down", RowwiseParallel()))
    }
    handler = TorchTensorParallelConfig(plan=plan)
    return {"parallelism_config": ParallelismConfig(tp_size=2, tp_handler=handler)}


# The layout -> how far losses may be from those of one process. Replicas that see the same batch are the same.
LAYOUTS: dict[str, tuple[Any, float]] = {
    "replicas": (dict, 0.0),
    "fsdp2": (lambda: sharded(2), 0.0),
    "fsdp1": (lambda: sharded(1), 0.005),  # weights are gathered in bfloat16, and rounded to 8 bits after that
    "split layers": (split, 0.005),  # a part has a scale of its own
}


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Train on the same batch on every rank, save, go on, and go on again from what was saved."""
    accelerator = fresh_accelerator(
        mixed_precision="fp8", cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[AORecipeKwargs()], **options
    )
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    before = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}

    def steps() -> list[float]:
        losses = []
        for _ in range(6):
            with accelerator.accumulate(model):
                loss = (model(INPUTS) - INPUTS).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return losses

    losses = steps()
    after = accelerator.get_state_dict(model)
    folders: list[Any] = [tempfile.mkdtemp() if accelerator.is_main_process else None]
    if accelerator.num_processes > 1:
        torch.distributed.broadcast_object_list(folders)
    accelerator.save_state(f"{folders[0]}/state")
    later = steps()
    accelerator.load_state(f"{folders[0]}/state")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(folders[0])
    local = {type(getattr(value, "_local_tensor", value)).__name__ for value in model.parameters()}
    return {
        "losses": losses,
        "resumed": later == steps(),
        "converted": sum(type(module).__name__ == "Float8Linear" for module in model.modules()),
        "still": [name for name in after if after[name].equal(before[name])],
        "types": {type(value) for value in after.values()},
        "sent in 8 bits": any("Float8" in name for name in local),
    }


def train_all() -> dict[str, Any]:
    return {name: train(options()) for name, (options, _) in LAYOUTS.items()}


def test_one_process_trains_every_layer() -> None:
    found = train({})
    assert found["losses"][-1] < found["losses"][0]
    assert (found["converted"], found["still"], found["resumed"]) == (4, [], True)


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_processes_train_as_one(name: str) -> None:
    expected = train({})["losses"]
    tolerance = LAYOUTS[name][1]
    for rank, results in enumerate(group_once(train_all, 2)):
        found = results[name]
        assert_near(name, torch.tensor(found["losses"]), torch.tensor(expected), tolerance)
        assert (found["converted"], found["still"], found["resumed"]) == (4, [], True)
        assert found["types"] <= {torch.Tensor}
        assert found["types"] or rank > 0
        assert found["sent in 8 bits"] == (name == "fsdp2")
