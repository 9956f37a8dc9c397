"""Models of Transformers whose plans need more than row- and column-wise layers train as on one process."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from tests.support.processes import ProcessGroupFailure, run_group
from tests.support.training import assert_same_weights, copy_weights, fresh_accelerator

from accelerate import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin

pytestmark = [pytest.mark.clients, pytest.mark.multiprocess]

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "attn_implementation": "sdpa",
    "experts_implementation": "eager",  # the fused ones have no double precision
    "pad_token_id": 0,
}
EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # replicated_with_grad_allreduce: norms of the heads of one rank
    "Qwen3": ("Qwen3", {"head_dim": 4}),
    # packed_colwise, moe_tp_experts; the second layer has no experts
    "Qwen2-MoE": (
        "Qwen2Moe",
        {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16, "mlp_only_layers": [1]},
    ),
    # mla_kv_a_proj, moe_identity_expert
    "LongCat-Flash": (
        "LongcatFlash",
        {**LATENT, "num_key_value_heads": 4, "num_hidden_layers": 4, "ffn_hidden_size": 16, "n_routed_experts": 4}
        | {"zero_expert_num": 2, "expert_ffn_hidden_size": 8, "moe_topk": 3, "head_dim": 4},
    ),
    # packed_rowwise
    "Aria": ("AriaText", {"intermediate_size": 8, "moe_num_experts": 4, "moe_num_shared_experts": 1}),
    # local_params: attention sinks
    "Granite-SWA": ("GraniteSWA", {"attn_implementation": "eager"}),
}
LAYOUTS: dict[str, dict[str, int]] = {
    "tp": {"tp_size": 2, "dp_replicate_size": 2},
    "fsdp2 of tp": {"tp_size": 2, "dp_shard_size": 2},
}
CASES = [(name, layout) for name in MODELS for layout in LAYOUTS]


def make(name: str) -> Any:
    family, options = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).double()


def batches(rank: int, ranks: int) -> list[list[torch.Tensor]]:
    """Return the rows of one rank: three steps of two micro-batches each."""
    tokens = torch.randint(1, 32, (3, 2, 4, 12), generator=torch.Generator().manual_seed(5))
    return [[micro[rank::ranks] for micro in step] for step in tokens]


def train(model: Any, optimizer: Any, accelerator: Any = None, begin: int = 0, end: int = 3) -> dict[str, list[float]]:
    rank, ranks = (0, 1) if accelerator is None else accelerator.strategy.data_shard()
    clip = torch.nn.utils.clip_grad_norm_ if accelerator is None else accelerator.clip_grad_norm_
    found: dict[str, list[float]] = {"losses": [], "norms": []}
    for step in batches(rank, ranks)[begin:end]:
        for micro in step:
            loss = model(input_ids=micro, labels=micro, use_cache=False).loss / len(step)
            loss.backward() if accelerator is None else accelerator.backward(loss)
            found["losses"].append(
                loss.item() if accelerator is None else accelerator.reduce(loss.detach(), "mean").item()
            )
        found["norms"].append(clip(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def prepared(name: str, layout: str) -> tuple[Any, Any, Any]:
    sizes = LAYOUTS[layout]
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if "dp_shard_size" in sizes else None
    accelerator = fresh_accelerator(parallelism_config=ParallelismConfig(**sizes), fsdp_plugin=plugin)
    model = make(name)
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def everything(folder: str) -> dict[Any, Any]:
    """Train each model in each layout; the last step continues from the checkpoint of the other layout."""
    # A gathered output is a view of a DTensor's memory; nothing changes it in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    found: dict[Any, Any] = {}
    for name, layout in CASES:
        accelerator, model, optimizer = prepared(name, layout)
        found[name, layout] = train(model, optimizer, accelerator, 0, 2)
        accelerator.save_state(f"{folder}/{name}-{layout}")
    for name, layout in CASES:
        accelerator, model, optimizer = prepared(name, layout)
        other = next(entry for entry in LAYOUTS if entry != layout)
        accelerator.load_state(f"{folder}/{name}-{other}")
        curves = train(model, optimizer, accelerator, 2, 3)
        for kind, values in curves.items():
            found[name, layout][kind] += values
        found[name, layout]["weights"] = accelerator.get_state_dict(model)
    return found


@cache
def of_one_process(name: str) -> dict[str, Any]:
    model = make(name)
    curves = train(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return {**curves, "weights": copy_weights(model)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    try:
        return run_group(everything, 4, str(tmp_path_factory.mktemp("styles")))[0]
    except ProcessGroupFailure as failure:
        pytest.fail(str(failure))


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_model_trains_and_resumes_as_on_one_process(found: dict[Any, Any], name: str, layout: str) -> None:
    expected = of_one_process(name)
    # Transformers computes some values in float32, whatever the weights are.
    assert found[name, layout]["losses"] == pytest.approx(expected["losses"], abs=2e-6)
    assert found[name, layout]["norms"] == pytest.approx(expected["norms"], rel=2e-5)
    assert_same_weights(found[name, layout]["weights"], expected["weights"], 2e-5)
