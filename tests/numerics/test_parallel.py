"""Every layout of processes trains the model of one process: the same losses, norms and weights."""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from tests.support.gpt import LENGTH, Plan, TinyGPT, make_tokens, train_gpt, train_plain_gpt
from tests.support.processes import ROOT, ProcessGroupFailure, run_group
from tests.support.training import Outcome, Stream, assert_near, assert_same_outcome, fresh_accelerator, make_data
from torch.utils.data import DataLoader

from accelerate import ParallelismConfig
from accelerate._base.errors import ConfigurationError, UsageError
from accelerate.parallel.mesh import submesh
from accelerate.utils import FullyShardedDataParallelPlugin, TorchPipelineParallelConfig

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

GPIPE = {"pp_handler": TorchPipelineParallelConfig(schedule="gpipe", num_microbatches=4)}
PLANS: dict[int, dict[str, Plan]] = {
    2: {
        "tp": Plan({"tp_size": 2}),
        "tp, tied": Plan({"tp_size": 2}, tied=True, accumulation=1),
        "tp, tokens": Plan({"tp_size": 2}, window=True),
        "tp, bf16": Plan({"tp_size": 2}, precision="bf16"),
        "tp, fp16": Plan({"tp_size": 2}, precision="fp16"),
        "tp, fp8": Plan({"tp_size": 2}, precision="fp8"),
        "tp, compiled": Plan({"tp_size": 2}, compiled=True),
        "cp": Plan({"cp_size": 2}),
        "cp, tokens": Plan({"cp_size": 2}, window=True, tied=True),
        "cp, bf16": Plan({"cp_size": 2}, precision="bf16", accumulation=1),
        "pipeline": Plan({"pp_size": 2}),
        "pipeline, gpipe": Plan({"pp_size": 2}, accumulation=1, handlers=GPIPE),
        "pipeline, bf16": Plan({"pp_size": 2}, precision="bf16"),
        "pipeline, fp8": Plan({"pp_size": 2}, precision="fp8"),
        "fsdp2": Plan({"dp_shard_size": 2}, fsdp=True, tied=True),
        "fsdp2, fp8": Plan({"dp_shard_size": 2}, fsdp=True, precision="fp8"),
    },
    4: {
        "tp": Plan({"tp_size": 4}, accumulation=1),
        "replicas of tp": Plan({"dp_replicate_size": 2, "tp_size": 2}),
        "replicas of cp": Plan({"dp_replicate_size": 2, "cp_size": 2}, accumulation=4),
        "cp of tp": Plan({"cp_size": 2, "tp_size": 2}, tied=True),
        "replicas of pipeline": Plan({"dp_replicate_size": 2, "pp_size": 2}),
        "pipeline": Plan({"pp_size": 4}, accumulation=1),
        "hsdp": Plan({"dp_replicate_size": 2, "dp_shard_size": 2}, fsdp=True),
        "fsdp2 of tp": Plan({"dp_shard_size": 2, "tp_size": 2}, fsdp=True),
        "fsdp2 of tp, tied": Plan({"dp_shard_size": 2, "tp_size": 2}, fsdp=True, tied=True, accumulation=1),
        "fsdp2 of tp, bf16": Plan({"dp_shard_size": 2, "tp_size": 2}, fsdp=True, precision="bf16"),
        "fsdp2 of tp, fp8": Plan({"dp_shard_size": 2, "tp_size": 2}, fsdp=True, precision="fp8"),
        "fsdp2 and cp": Plan({"dp_shard_size": 2, "cp_size": 2}, fsdp=True),
        "fsdp2 and cp, checkpointed": Plan({"dp_shard_size": 2, "cp_size": 2}, fsdp=True, checkpointed=True),
        "fsdp2 and cp, bf16": Plan({"dp_shard_size": 2, "cp_size": 2}, fsdp=True, precision="bf16"),
    },
    8: {"hsdp of tp": Plan({"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2}, fsdp=True, accumulation=1)},
}
CASES = [(world_size, name) for world_size, plans in PLANS.items() for name in plans]


def places(world_size: int) -> dict[str, Any]:
    """Say where this process stands, what it reads in two shuffled epochs, and what a metric sees of it."""
    accelerator = fresh_accelerator(parallelism_config=ParallelismConfig(tp_size=2, dp_replicate_size=world_size // 2))
    # Every process shuffles from its own random state, as a program without a seed does.
    torch.manual_seed(accelerator.process_index)
    loader = accelerator.prepare(DataLoader(torch.arange(11), batch_size=2, shuffle=True))
    batches = [[batch.tolist() for batch in loader] for _ in range(2)]
    rows = [accelerator.gather_for_metrics(batch).tolist() for batch in loader]
    stream = accelerator.prepare(DataLoader(Stream(make_data(11)), batch_size=2))
    names = [accelerator.gather_for_metrics([f"row {index}" for index in batch.tolist()]) for batch in loader]
    return {
        "ranks": (accelerator.data_parallel_rank, accelerator.tensor_parallel_rank, accelerator.pipeline_parallel_rank),
        "shard": accelerator.strategy.data_shard(),
        "batches": batches,
        "metric": sorted(row for batch in rows for row in batch),
        "stream": [inputs.tolist() for inputs, _ in stream],
        "objects": sorted(name for batch in names for name in batch),
    }


def joined_axes() -> dict[str, list[int]]:
    """Return the ranks that this one has beside it along the axes of a mesh, joined ones among them."""
    mesh = ParallelismConfig(dp_replicate_size=2, cp_size=2).get_device_mesh("cpu")
    assert mesh is not None
    assert mesh.mesh_dim_names == ("dp_replicate", "cp")
    return {name: submesh(mesh, name).mesh.tolist() for name in ("dp_replicate", "cp", "dp", "dp_shard_cp", "dp_cp")}


def schedules() -> list[int]:
    """Return how far a schedule moves at each step of two layouts."""
    moved = []
    for sizes in ({"tp_size": 2}, {"dp_replicate_size": 2}):
        accelerator = fresh_accelerator(parallelism_config=ParallelismConfig(**sizes))
        model = TinyGPT()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        loader = DataLoader(make_tokens(4), batch_size=2)
        model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
        optimizer.step()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This schedule advances")
            schedule.step()
        moved.append(schedule.state_dict()["last_epoch"])
    return moved


def uses_of_a_pipeline() -> dict[str, Any]:
    """Evaluate in a pipeline, with batches of two sizes, and see what it refuses."""
    accelerator = fresh_accelerator(parallelism_config=ParallelismConfig(pp_size=2))
    whole, tokens = TinyGPT(), make_tokens(8)
    model = accelerator.prepare(TinyGPT(seed=0))
    model.eval()
    with torch.no_grad():
        outputs = [model(batch[:, :-1]) for batch in (tokens[:4], tokens[4:6])]
        expected = [whole(batch[:, :-1]) for batch in (tokens[:4], tokens[4:6])]
        loss, expected_loss = (one(tokens[:, :-1], tokens[:, 1:]) for one in (model, whole))
    with pytest.raises(UsageError, match="3 rows cannot be cut into num_microbatches=2"):
        model(tokens[:3, :-1])
    with pytest.raises(ConfigurationError, match="pipeline_parts"):
        accelerator.prepare(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match=r"'weight' of TinyGPT is used by stages 0 and 1"):
        accelerator.prepare(TinyGPT(tied=True))
    return {
        "outputs": max((left - right).abs().max().item() for left, right in zip(outputs, expected, strict=True)),
        "loss": abs(loss.item() - expected_loss.item()),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "on meta": sum(parameter.is_meta for parameter in model.parameters()),
    }


def weights_of_the_first() -> float:
    """Return how far apart ranks are that began with different weights."""
    accelerator = fresh_accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    model = accelerator.prepare(TinyGPT(seed=accelerator.process_index))
    found, expected = accelerator.get_state_dict(model), TinyGPT(seed=0).state_dict()
    norm = model.blocks[0].norm.weight.detach()
    spread = (accelerator.gather(norm[None]) - norm).abs().max().item()
    return max([spread, *((found[name] - expected[name]).abs().max().item() for name in found)])


def refusals() -> None:
    """See what a layout refuses before anything is changed."""
    accelerator = fresh_accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    with pytest.raises(ConfigurationError, match="Linear has no tp_plan"):
        accelerator.prepare(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match=r"calls for 3 processes, but there are 2. These would fit: tp_size=2"):
        fresh_accelerator(parallelism_config=ParallelismConfig(tp_size=3))
    accelerator = fresh_accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2))
    with pytest.raises(ConfigurationError, match=r"dp_shard_size=2.*FullyShardedDataParallelPlugin"):
        accelerator.prepare(TinyGPT())
    with pytest.raises(ConfigurationError, match="fp8"):
        fresh_accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2), mixed_precision="fp8").prepare(
            TinyGPT()
        )
    for version, sizes, message in (
        (2, {"pp_size": 2}, "pp_size=2 was given with the engine 'fsdp'"),
        (1, {"tp_size": 2}, r"tp_size=2, cp_size=1 were given with version 1 of FSDP"),
    ):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
        with pytest.raises(ConfigurationError, match=message):
            fresh_accelerator(parallelism_config=ParallelismConfig(**sizes), fsdp_plugin=plugin)
    with pytest.raises(ConfigurationError, match="mixed_precision='fp16': a pipeline"):
        fresh_accelerator(parallelism_config=ParallelismConfig(pp_size=2), mixed_precision="fp16")
    accelerator = fresh_accelerator(parallelism_config=ParallelismConfig(cp_size=2))
    tokens = torch.arange(6).view(1, 6)
    with pytest.raises(ConfigurationError, match="5 positions along dimension 1"):
        accelerator.maybe_context_parallel([tokens[:, :5]], [1]).__enter__()
    with accelerator.maybe_context_parallel([tokens], [1]):
        assert tokens.tolist() == [[[0, 1, 2], [3, 4, 5]][accelerator.context_parallel_rank]]
    assert tokens.tolist() == [[0, 1, 2, 3, 4, 5]]


def everything(world_size: int) -> dict[str, Any]:
    """Run all checks for a number of processes."""
    found: dict[str, Any] = {name: train_gpt(plan) for name, plan in PLANS[world_size].items()}
    found["places"] = places(world_size)
    if world_size == 4:
        strategy = PLANS[4]["fsdp2 of tp"].accelerator().strategy
        found["joined axes"] = joined_axes()
        found["steps"] = [step.__name__ for step in strategy.steps(place=True, evaluation=False)]
    if world_size == 2:
        refusals()
        for check in (schedules, uses_of_a_pipeline, weights_of_the_first):
            found[check.__name__] = check()
    return found


@cache
def _started(world_size: int) -> list[dict[str, Any]] | ProcessGroupFailure:
    try:
        return run_group(everything, world_size, world_size)
    except ProcessGroupFailure as failure:
        return failure


def results(world_size: int) -> list[dict[str, Any]]:
    found = _started(world_size)
    if isinstance(found, ProcessGroupFailure):
        raise found
    return found


@pytest.mark.parametrize(("world_size", "name"), CASES)
def test_a_layout_trains_as_one_process(world_size: int, name: str) -> None:
    plan, found = PLANS[world_size][name], [result[name] for result in results(world_size)]
    expected = train_plain_gpt(plan.tied, plan.dtype)
    if plan.precision == "no":
        assert_same_outcome(found[0], expected, 1e-9)
    else:
        for curve in ("losses", "rates"):
            left, right = (torch.tensor(getattr(side, curve)) for side in (found[0], expected))
            assert_near(curve, left, right, 0.03)
    for other in found[1:]:
        assert other.losses == pytest.approx(found[0].losses)
        assert other.rates == pytest.approx(found[0].rates)
    if plan.tied:
        weights = found[0].weights
        assert weights["head.weight"].equal(weights["embedding.tokens.weight"])


@pytest.mark.parametrize("world_size", PLANS)
def test_ranks_of_a_model_read_the_same_and_others_the_rest(world_size: int) -> None:
    found = [result["places"] for result in results(world_size)]
    shares = world_size // 2
    assert [entry["ranks"] for entry in found] == [(rank // 2, rank % 2, 0) for rank in range(world_size)]
    assert [entry["shard"] for entry in found] == [(rank // 2, shares) for rank in range(world_size)]
    for first, peer in zip(found[::2], found[1::2], strict=True):
        assert first["batches"] == peer["batches"]
        assert first["stream"] == peer["stream"]
    for epoch in (0, 1):
        seen = {row for entry in found for batch in entry["batches"][epoch] for row in batch}
        assert seen == set(range(11))
    assert found[0]["batches"][0] != found[0]["batches"][1]
    assert all(entry["metric"] == list(range(11)) for entry in found)
    assert all(len(entry["objects"]) == 11 for entry in found)


def test_axes_are_joined_under_their_public_names() -> None:
    found = [result["joined axes"] for result in results(4)]
    for rank, axes in enumerate(found):
        assert axes["dp_replicate"] == axes["dp"] == [rank % 2, rank % 2 + 2]
        assert axes["cp"] == axes["dp_shard_cp"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert axes["dp_cp"] == [0, 1, 2, 3]


def test_a_schedule_counts_the_batches_that_differ() -> None:
    assert all(result["schedules"] == [1, 2] for result in results(2))


def test_a_pipeline_evaluates_and_holds_its_own_layers() -> None:
    found = [result["uses_of_a_pipeline"] for result in results(2)]
    assert max(entry["outputs"] for entry in found) < 1e-12
    assert max(entry["loss"] for entry in found) < 1e-12
    assert sum(entry["parameters"] for entry in found) == sum(weight.numel() for weight in TinyGPT().parameters())
    assert all(entry["on meta"] == 0 and entry["parameters"] > 0 for entry in found)


def test_ranks_that_began_differently_become_one_model() -> None:
    assert results(2)[0]["weights_of_the_first"] == 0.0


def test_steps_are_those_of_the_picture() -> None:
    spec = importlib.util.spec_from_file_location("draw_layouts", ROOT / "tools" / "draw_layouts.py")
    assert spec is not None
    assert spec.loader is not None
    drawn = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawn)
    # Not in the picture: all ranks take the weights of the first before anything is split.
    steps = [name for name in dict.fromkeys(results(4)[0]["steps"]) if name != "broadcast_weights"]
    assert steps == [name for name, _, _ in drawn.STEPS]


def test_the_task_can_tell_layouts_apart() -> None:
    """Positions and targets matter: a model that mixes them up gets another loss."""
    tokens = make_tokens(4)
    model = TinyGPT()
    right = model(tokens[:, :-1], tokens[:, 1:])
    moved = model(tokens[:, :-1], tokens[:, 1:], (torch.arange(LENGTH) + 1) % LENGTH)
    assert abs(right.item() - moved.item()) > 1e-3
    assert isinstance(train_plain_gpt(), Outcome)
