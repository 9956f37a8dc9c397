"""Transformers reads what `save_model` wrote, tied weights among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator, disk_offload, init_empty_weights, load_checkpoint_in_model

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("ignore:These tensors share memory:UserWarning"),
]


def gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=200, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=200,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    return transformers.BertForMaskedLM(config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=200, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, tie_word_embeddings=True
    )
    return transformers.T5ForConditionalGeneration(config)


MODELS = {"gpt2": gpt2, "bert": bert, "t5": t5}
FILES = [(True, "10GB"), (True, "30KB"), (False, "10GB"), (False, "30KB")]


def output(model: Any) -> torch.Tensor:
    inputs: dict[str, torch.Tensor] = {"input_ids": torch.arange(12).reshape(2, 6)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.no_grad():
        found: torch.Tensor = model.eval()(**inputs).logits
    return found


def is_tied(model: Any) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("safe", "size"), FILES)
def test_from_pretrained_reads_it(tmp_path: Path, name: str, safe: bool, size: str) -> None:
    torch.manual_seed(1)
    model = MODELS[name]()
    assert is_tied(model)
    accelerator = Accelerator()
    accelerator.save_model(accelerator.prepare(model), tmp_path, max_shard_size=size, safe_serialization=safe)
    model.config.save_pretrained(tmp_path)
    assert (len(list(tmp_path.glob("*.index.json"))) == 1) == (size != "10GB")

    torch.manual_seed(2)
    read, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert is_tied(read)
    assert torch.equal(output(read), output(model))

    with init_empty_weights():
        empty = MODELS[name]()
    empty.tie_weights()
    load_checkpoint_in_model(empty, tmp_path, strict=True)
    assert is_tied(empty)
    for key, value in model.state_dict().items():
        assert torch.equal(empty.state_dict()[key], value)


@pytest.mark.parametrize("name", MODELS)
def test_from_pretrained_reads_what_was_offloaded(tmp_path: Path, name: str) -> None:
    model = MODELS[name]()
    wanted = output(model)
    disk_offload(model, tmp_path / "offload", execution_device="cpu")
    Accelerator().save_model(model, tmp_path / "saved", max_shard_size="30KB")
    model.config.save_pretrained(tmp_path / "saved")
    read = type(model).from_pretrained(tmp_path / "saved")
    assert is_tied(read)
    assert torch.equal(output(read), wanted)


def test_from_pretrained_reads_a_folder_whose_save_was_interrupted(tmp_path: Path) -> None:
    """The index points into a hidden folder between two steps of a save: readers follow it."""
    model = gpt2()
    Accelerator().save_model(model, tmp_path, max_shard_size="30KB")
    model.config.save_pretrained(tmp_path)
    stage = tmp_path / ".accelerate-save-host-1-aa"
    stage.mkdir()
    for shard in tmp_path.glob("*.safetensors"):
        shard.rename(stage / shard.name)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = {name: f"{stage.name}/{file}" for name, file in index["weight_map"].items()}
    path.write_text(json.dumps(index))
    assert torch.equal(output(type(model).from_pretrained(tmp_path)), output(model))


def test_transformers_writes_what_load_checkpoint_reads(tmp_path: Path) -> None:
    model = bert()
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    other = bert()
    load_checkpoint_in_model(other, tmp_path, strict=True)
    assert is_tied(other)
    assert torch.equal(output(other), output(model))
