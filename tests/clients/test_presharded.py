"""A model that Transformers shards while it reads it trains, saves and resumes as on one process."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.processes import ProcessGroupFailure, run_group
from tests.support.training import assert_same_weights, copy_weights, fresh_accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from accelerate import ParallelismConfig
from accelerate._base.errors import ConfigurationError
from accelerate.utils import GradScalerKwargs

pytestmark = [
    pytest.mark.clients,
    pytest.mark.multiprocess,
    # Of the embedding that Transformers shards.
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning"),
]

LENGTH, STEPS, BATCH = 8, 4, 8
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
DENSE, TIED, EXPERTS = "dense", "tied", "experts"
LAYOUTS: dict[str, tuple[str, dict[str, int]]] = {
    "shards": (DENSE, {"fsdp_size": 4}),
    "shards of tp": (DENSE, {"fsdp_size": 2, "tp_size": 2}),
    "replicas of shards": (DENSE, {"fsdp_size": 2, "dp_replicate_size": 2}),
    "shards, experts": (EXPERTS, {"fsdp_size": 4, "ep_size": 2}),
    "shards of tp, experts": (EXPERTS, {"fsdp_size": 2, "tp_size": 2, "ep_size": 2}),
    "shards of tp, experts over all": (EXPERTS, {"fsdp_size": 2, "tp_size": 2, "ep_size": 4}),
    "two shards": (DENSE, {"fsdp_size": 2}),
    "two shards, tied": (TIED, {"fsdp_size": 2}),
    "two shards, experts": (EXPERTS, {"fsdp_size": 2, "ep_size": 2}),
}
RESUMED = (
    "shards of tp",
    "shards, experts",
    "shards of tp, experts over all",
    "two shards",
    "two shards, tied",
    "two shards, experts",
)


def make(kind: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind != EXPERTS:
            return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=kind == TIED)).double()
        # In float64 torch divides the gradients of experts twice where one rank holds each (torch 2.13).
        return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))


def load(folder: str, kind: str, sizes: dict[str, int], dtype: torch.dtype | None = None) -> Any:
    from transformers.distributed import DistributedConfig

    whole = make(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return type(whole).from_pretrained(
            f"{folder}/{kind}", dtype=dtype or whole.dtype, distributed_config=DistributedConfig(**sizes)
        )


def layout_of(sizes: dict[str, int]) -> ParallelismConfig:
    """Return the layout that Transformers' Trainer asks for: all shares of the data are one axis."""
    shares = sizes.get("fsdp_size", 1) * sizes.get("dp_replicate_size", 1)
    return ParallelismConfig(tp_size=sizes.get("tp_size", 1), dp_shard_size=shares)


def tokens() -> torch.Tensor:
    return torch.randint(0, 32, (STEPS * BATCH, LENGTH), generator=torch.Generator().manual_seed(5))


def train(
    model: Any, accelerator: Any = None, accumulation: int = 1, saved: str | None = None, resume: bool = False
) -> dict[str, Any]:
    """Train over all tokens; save inside an accumulation window, or continue from there."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    loader: Any = DataLoader(tokens(), batch_size=BATCH // accumulation)
    if accelerator is not None:
        shares = accelerator.strategy.data_shard()[1]
        loader = DataLoader(tokens(), batch_size=BATCH // accumulation // shares)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resume:
        accelerator.load_state(saved)
    losses, norms = [], []
    for index, batch in enumerate(loader):
        if accelerator is None:
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            continue
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if saved is not None and not resume and index == accumulation:
            accelerator.save_state(saved)
    weights = copy_weights(model) if accelerator is None else accelerator.get_state_dict(model)
    return {"losses": losses, "norms": norms, "weights": weights}


def trained(folder: str, name: str) -> dict[str, Any]:
    kind, sizes = LAYOUTS[name]
    accelerator = fresh_accelerator(parallelism_config=layout_of(sizes))
    found = train(load(folder, kind, sizes), accelerator)
    return {**found, "strategy": accelerator.strategy.name, "shard": accelerator.strategy.data_shard()}


def resumed(folder: str, name: str) -> dict[str, Any]:
    """Train with windows of two micro-batches, save inside the second window, and train again from there."""
    kind, sizes = LAYOUTS[name]
    runs = []
    for resume in (False, True):
        accelerator = fresh_accelerator(parallelism_config=layout_of(sizes), gradient_accumulation_steps=2)
        model = load(folder, kind, sizes)
        if resume:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        runs.append(train(model, accelerator, 2, f"{folder}/saved, {name}", resume))
    return {"straight": runs[0], "resumed": runs[1]}


def mixed(folder: str, precision: str) -> dict[str, Any]:
    sizes = LAYOUTS["shards of tp"][1]
    scaler = GradScalerKwargs(init_scale=1024.0)
    accelerator = fresh_accelerator(
        parallelism_config=layout_of(sizes), mixed_precision=precision, kwargs_handlers=[scaler]
    )
    model = load(folder, DENSE, sizes, torch.float32)
    seen: list[torch.dtype] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    return {**train(model, accelerator), "computed in": seen[0], "skipped": accelerator.optimizer_step_was_skipped}


def adapted(folder: str) -> float:
    """Return how far apart the ranks are in a parameter that was added after the model was sharded."""
    sizes = LAYOUTS["shards of tp"][1]
    accelerator = fresh_accelerator(parallelism_config=layout_of(sizes), gradient_accumulation_steps=2)
    model = load(folder, DENSE, sizes)
    model.lm_head.register_parameter("scale", torch.nn.Parameter(torch.full((), 1.0 + accelerator.process_index)))
    model.lm_head.register_forward_hook(lambda module, inputs, output: output * module.scale)
    train(model, accelerator, 2)
    scale = model.lm_head.scale.detach()
    assert scale.item() != 1.0
    return (accelerator.gather(scale[None]) - scale).abs().max().item()


def refusals(folder: str) -> None:
    accelerator = fresh_accelerator(parallelism_config=ParallelismConfig(dp_shard_size=4))
    with pytest.raises(ConfigurationError, match=r"dp_shard_size=4.*FullyShardedDataParallelPlugin"):
        accelerator.prepare(make(DENSE))
    with pytest.raises(ConfigurationError, match="tp_size=2"):
        accelerator.prepare(load(folder, DENSE, LAYOUTS["shards of tp"][1]))
    accelerator = fresh_accelerator()
    model = load(folder, DENSE, {"fsdp_size": 4})
    with pytest.raises(ConfigurationError, match="DTensor"):
        accelerator.prepare(model)
    evaluated = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    assert evaluated is model
    with pytest.raises(ConfigurationError, match="DTensor"):
        accelerator.prepare(evaluated)


def processes_of(name: str) -> int:
    sizes = LAYOUTS[name][1]
    return sizes["fsdp_size"] * sizes.get("tp_size", 1) * sizes.get("dp_replicate_size", 1)


def everything(folder: str, world_size: int) -> dict[str, Any]:
    found = {
        **{name: trained(folder, name) for name in LAYOUTS if processes_of(name) == world_size},
        **{f"resumed, {name}": resumed(folder, name) for name in RESUMED if processes_of(name) == world_size},
    }
    if world_size == 2:
        return found
    refusals(folder)
    return {
        **found,
        **{precision: mixed(folder, precision) for precision in ("bf16", "fp16")},
        "adapted": adapted(folder),
    }


@cache
def of_one_process(kind: str) -> dict[str, Any]:
    return train(make(kind))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models")
    for kind in (DENSE, TIED, EXPERTS):
        make(kind).save_pretrained(folder / kind)
    return folder


def results_of(folder: Path, world_size: int) -> list[dict[str, Any]]:
    try:
        return run_group(everything, world_size, str(folder), world_size)
    except ProcessGroupFailure as failure:
        pytest.fail(str(failure))


@pytest.fixture(scope="module")
def found_by_two(models: Path) -> list[dict[str, Any]]:
    return results_of(models, 2)


@pytest.fixture(scope="module")
def found(models: Path) -> list[dict[str, Any]]:
    return results_of(models, 4)


@pytest.fixture
def ranks(request: pytest.FixtureRequest, name: str) -> list[dict[str, Any]]:
    """Return the results of the processes that a layout needs."""
    found: list[dict[str, Any]] = request.getfixturevalue("found_by_two" if processes_of(name) == 2 else "found")
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_model_sharded_at_load_trains_as_on_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    kind, sizes = LAYOUTS[name]
    expected = of_one_process(kind)
    assert ranks[0][name]["strategy"] == "presharded"
    assert ranks[0][name]["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert ranks[0][name]["norms"] == pytest.approx(expected["norms"], abs=1e-5)
    assert_same_weights(ranks[0][name]["weights"], expected["weights"], 1e-5)
    peers, count = sizes.get("tp_size", 1), len(ranks)
    assert [rank[name]["shard"] for rank in ranks] == [(rank // peers, count // peers) for rank in range(count)]


@pytest.mark.parametrize("name", RESUMED)
def test_a_model_sharded_at_load_resumes_inside_a_window(ranks: list[dict[str, Any]], name: str) -> None:
    straight, resumed = (ranks[0][f"resumed, {name}"][run] for run in ("straight", "resumed"))
    assert straight["norms"] == pytest.approx(of_one_process(LAYOUTS[name][0])["norms"], abs=1e-5)
    assert resumed["losses"] == pytest.approx(straight["losses"][-len(resumed["losses"]) :], rel=1e-12)
    assert len(resumed["losses"]) == 2 * STEPS - 3
    assert_same_weights(resumed["weights"], straight["weights"], 1e-12)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_model_sharded_at_load_trains_in_mixed_precision(
    found: list[dict[str, Any]], precision: str, dtype: torch.dtype
) -> None:
    run, expected = found[0][precision], of_one_process(DENSE)
    assert run["computed in"] == dtype
    assert not run["skipped"]
    assert run["losses"] == pytest.approx(expected["losses"], abs=0.02)
    assert run["norms"] == pytest.approx(expected["norms"], rel=0.02)


def test_a_parameter_added_after_sharding_stays_equal(found: list[dict[str, Any]]) -> None:
    assert [rank["adapted"] for rank in found] == [0.0] * 4
