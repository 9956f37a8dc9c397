"""A model of Transformers is laid out over ranks and trains as on one process."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.processes import ProcessGroupFailure, run_group
from tests.support.training import assert_same_weights, copy_weights, fresh_accelerator
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate import ParallelismConfig

pytestmark = [pytest.mark.clients, pytest.mark.multiprocess]

LENGTH, STEPS = 12, 3


def llama(tied: bool = False) -> LlamaForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            tie_word_embeddings=tied,
            attn_implementation="sdpa",
        )
        return LlamaForCausalLM(config).double()


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(STEPS):
        tokens = torch.randint(0, 32, (4, LENGTH), generator=generator)
        shifted = torch.nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:].contiguous()
        # The last position foretells nothing: an earlier one is left out too, so that parts have equal numbers.
        shifted[:, LENGTH // 2 - 1] = -100
        positions = torch.arange(LENGTH).repeat(4, 1)
        found.append({"input_ids": tokens, "shift_labels": shifted, "position_ids": positions})
    return found


def train(model: Any, accelerator: Any = None, cuts: bool = False) -> dict[str, list[float]]:
    """Train with gradients clipped, and return the loss of each step and the norm before clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    clip = torch.nn.utils.clip_grad_norm_ if accelerator is None else accelerator.clip_grad_norm_
    losses, norms = [], []
    for batch in batches():
        buffers = list(batch.values())
        if cuts:
            with accelerator.maybe_context_parallel(buffers, [1, 1, 1], set(buffers)):
                loss = model(**batch, labels=batch["shift_labels"], use_cache=False).loss
                accelerator.backward(loss)
        else:
            loss = model(**batch, labels=batch["shift_labels"], use_cache=False).loss
            loss.backward() if accelerator is None else accelerator.backward(loss)
        losses.append(loss.item() if accelerator is None else accelerator.reduce(loss.detach(), "mean").item())
        norms.append(clip(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms}


def split(tied: bool) -> dict[str, Any]:
    accelerator = fresh_accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    model = llama(tied)
    curves = train(model, accelerator)
    return {
        **curves,
        "weights": accelerator.get_state_dict(model),
        "split": sorted(name for name, value in model.named_parameters() if isinstance(value, DTensor)),
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
    }


def cut() -> dict[str, Any]:
    accelerator = fresh_accelerator(parallelism_config=ParallelismConfig(cp_size=2))
    model = llama()
    return {**train(model, accelerator, cuts=True), "weights": accelerator.get_state_dict(model)}


def loaded(folder: str) -> dict[str, Any]:
    """Train a model that Transformers has split while it read it."""
    from transformers.distributed import DistributedConfig

    accelerator = fresh_accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = LlamaForCausalLM.from_pretrained(
            folder, dtype=torch.float64, distributed_config=DistributedConfig(tp_size=2, tp_plan="auto")
        )
    before = sum(isinstance(value, DTensor) for value in model.parameters())
    return {**train(model, accelerator), "weights": accelerator.get_state_dict(model), "split": before}


def everything(folder: str) -> dict[str, Any]:
    return {"split": split(False), "split, tied": split(True), "cut": cut(), "loaded": loaded(folder)}


@cache
def of_one_process(tied: bool) -> dict[str, Any]:
    model = llama(tied)
    return {**train(model), "weights": copy_weights(model)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("llama")
    llama().save_pretrained(folder)
    try:
        return run_group(everything, 2, str(folder))[0]
    except ProcessGroupFailure as failure:
        pytest.fail(str(failure))


@pytest.mark.parametrize("name", ["split", "split, tied", "cut", "loaded"])
def test_a_layout_trains_as_one_process(found: dict[str, Any], name: str) -> None:
    expected = of_one_process("tied" in name)
    # Transformers computes the loss in float32, whatever the weights are.
    assert found[name]["losses"] == pytest.approx(expected["losses"], abs=2e-6)
    assert found[name]["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert_same_weights(found[name]["weights"], expected["weights"], 1e-5)


def test_the_plan_of_the_model_is_followed(found: dict[str, Any]) -> None:
    assert {"model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"} <= set(
        found["split"]["split"]
    )
    assert "model.norm.weight" not in found["split"]["split"]
    assert found["split, tied"]["tied"]
    assert found["loaded"]["split"] > 0
