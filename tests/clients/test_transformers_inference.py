"""Transformers loads and runs models that this package places on the CPU and on the disk."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    pipeline,
)

pytestmark = pytest.mark.clients

WORDS = ["<end>", "the", "cat", "sat", "on", "mat", "and", "dog", "ran", "far"]
PROMPT = torch.tensor([[1, 2, 3, 4]])


def gpt2() -> Any:
    """A model whose output layer is its embedding."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4, n_embd=32, n_head=2, vocab_size=len(WORDS), n_positions=64, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config).eval()


def llama() -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=len(WORDS),
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


MODELS = {"gpt2": gpt2, "llama": llama}


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>", unk_token="<end>")


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model in memory, and the folder where it is saved in several shards."""
    folder = tmp_path_factory.mktemp(request.param)
    model = MODELS[request.param]()
    model.save_pretrained(folder, max_shard_size="40KB")
    tokenizer().save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return model, folder


@torch.no_grad()
def assert_same(found: Any, expected: Any) -> None:
    for _ in range(2):  # the first call, and one that knows the order of the layers
        assert torch.equal(found(PROMPT).logits, expected(PROMPT).logits)
    options: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(PROMPT)
    made = found.generate(PROMPT, attention_mask=mask, **options)
    assert torch.equal(made, expected.generate(PROMPT, attention_mask=mask, **options))


def blocks_of(model: Any) -> dict[str, str]:
    """Return a map with every second block on the disk."""
    parts = {"gpt2": ("transformer", "h", "ln_f"), "llama": ("model", "layers", "norm")}[model.config.model_type]
    base, blocks, norm = parts
    count = len(getattr(getattr(model, base), blocks))
    places = {f"{base}.{blocks}.{index}": "disk" if index % 2 else "cpu" for index in range(count)}
    places |= {f"{base}.{name}": "cpu" for name, _ in getattr(model, base).named_children() if name != blocks}
    return {**places, f"{base}.{norm}": "disk", "lm_head": "cpu"}


def test_text_generation_by_device_map_auto(saved: tuple[Any, Path]) -> None:
    model, folder = saved
    generate = pipeline("text-generation", model=str(folder), device_map="auto")
    options = {"max_new_tokens": 5, "do_sample": False, "return_full_text": False}
    found = generate("the cat sat", **options)[0]["generated_text"]
    plain = pipeline("text-generation", model=model, tokenizer=tokenizer(), device="cpu")
    assert found == plain("the cat sat", **options)[0]["generated_text"]


def test_some_blocks_on_the_disk(saved: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = saved
    places = blocks_of(model)
    loaded = AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=tmp_path / "offload")
    assert loaded.hf_device_map == places
    on_disk = [name for name, parameter in loaded.named_parameters() if parameter.device.type == "meta"]
    assert on_disk
    assert_same(loaded, model)
    assert [name for name, parameter in loaded.named_parameters() if parameter.device.type == "meta"] == on_disk


@pytest.mark.parametrize("as_text", [False, True], ids=["bytes", "text"])
def test_a_memory_limit_sends_the_rest_to_the_disk(saved: tuple[Any, Path], tmp_path: Path, as_text: bool) -> None:
    model, folder = saved
    limit = int(0.75 * sum(parameter.nbytes for parameter in model.parameters()))
    max_memory = {"cpu": f"{limit / 1000}KB" if as_text else limit}
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, device_map="auto", max_memory=max_memory, offload_folder=tmp_path / "offload"
    )
    assert max_memory == {"cpu": limit}  # which Transformers compares with the sizes of the layers
    assert set(loaded.hf_device_map.values()) == {"cpu", "disk"}
    assert_same(loaded, model)


def test_everything_on_the_disk(saved: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = saved
    loaded = AutoModelForCausalLM.from_pretrained(folder, device_map={"": "disk"}, offload_folder=tmp_path / "offload")
    assert all(parameter.device.type == "meta" for parameter in loaded.parameters())
    assert_same(loaded, model)


def test_an_offloaded_model_is_saved_whole(saved: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = saved
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, device_map=blocks_of(model), offload_folder=tmp_path / "offload"
    )
    with pytest.warns(UserWarning, match="save a model with offloaded modules"):
        loaded.save_pretrained(tmp_path / "again")
    del loaded
    gc.collect()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert_same(again, model)


def test_our_own_loading_of_a_saved_folder(saved: tuple[Any, Path], tmp_path: Path) -> None:
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    model, folder = saved
    with init_empty_weights():
        empty = type(model)(model.config).eval()
    empty.tie_weights()
    loaded = load_checkpoint_and_dispatch(
        empty, folder, device_map=blocks_of(model), offload_folder=tmp_path / "offload"
    )
    assert_same(loaded, model)
