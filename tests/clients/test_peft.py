"""PEFT puts adapters on a model whose weights this package holds on the CPU and on the disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

peft = pytest.importorskip("peft", reason="PEFT is not installed")
pytest.importorskip("transformers", reason="Transformers is not installed")

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from accelerate.utils import is_peft_model, load_fsdp_model, save_fsdp_model

pytestmark = pytest.mark.clients

PROMPT = torch.tensor([[1, 2, 3, 4]])
PLACES = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=12,
        max_position_embeddings=32,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def adapted(model: Any) -> Any:
    """Return a model with an adapter that changes its output."""
    torch.manual_seed(1)
    made = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"]))
    generator = torch.Generator().manual_seed(2)
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator)
    return made.eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=PROMPT).logits
    return found


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The folders of a saved model, and of its adapter."""
    llama().save_pretrained(tmp_path / "model")
    adapted(llama()).save_pretrained(tmp_path / "adapter")
    return tmp_path / "model", tmp_path / "adapter"


def test_an_adapter_on_a_dispatched_model(folders: tuple[Path, Path], tmp_path: Path) -> None:
    whole = adapted(llama())
    loaded = AutoModelForCausalLM.from_pretrained(
        folders[0], device_map={**PLACES, "model.layers.1": "cpu"}, offload_folder=tmp_path / "offload"
    )
    dispatched = adapted(loaded)
    assert is_peft_model(dispatched)
    assert torch.equal(logits(dispatched), logits(whole))
    with whole.disable_adapter(), dispatched.disable_adapter():
        assert torch.equal(logits(dispatched), logits(whole))
    assert not torch.equal(logits(dispatched), logits(llama()))


# PEFT makes the adapters of a layer on the meta device there, and gives them their weights when it dispatches.
@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter:UserWarning")
def test_a_saved_adapter_is_loaded_onto_a_model_with_layers_on_the_disk(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(folders[0], device_map=PLACES, offload_folder=tmp_path / "offload")
    assert loaded.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    together = PeftModel.from_pretrained(
        loaded,
        folders[1],
        device_map={f"base_model.model.{name}": place for name, place in PLACES.items()},
        offload_folder=tmp_path / "adapter-offload",
    ).eval()
    assert together.base_model.model.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    assert torch.equal(logits(together), logits(adapted(llama())))


def test_the_adapter_of_a_dispatched_model_trains(folders: tuple[Path, Path], tmp_path: Path) -> None:
    gradients = []
    for base in (llama(), AutoModelForCausalLM.from_pretrained(folders[0], device_map={"": "cpu"})):
        model = adapted(base).train()
        model(input_ids=PROMPT, labels=PROMPT).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all("lora_" in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name])


@pytest.mark.parametrize("use_dcp", [True, False])
def test_the_adapter_of_a_sharded_model_is_saved_alone(tmp_path: Path, use_dcp: bool) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import StateDictType, fully_shard

    def adapted(seed: int) -> Any:
        model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora" in name:
                    parameter.normal_()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        return model

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        plugin = SimpleNamespace(state_dict_type=StateDictType.SHARDED_STATE_DICT)
        accelerator = SimpleNamespace(wait_for_everyone=dist.barrier)
        source, target = adapted(1), adapted(2)
        save_fsdp_model(plugin, accelerator, source, tmp_path, adapter_only=True, use_dcp=use_dcp)
        whole = sum(parameter.numel() * 4 for parameter in source.parameters())
        base = target.get_parameter("base_model.model.lm_head.weight").full_tensor().clone()
        load_fsdp_model(plugin, accelerator, target, tmp_path, adapter_only=True, use_dcp=use_dcp)
        expected = dict(source.named_parameters())
        for name, parameter in target.named_parameters():
            assert torch.equal(parameter.full_tensor(), expected[name].full_tensor())
        assert torch.equal(target.get_parameter("base_model.model.lm_head.weight").full_tensor(), base)
        if not use_dcp:
            names = torch.load(tmp_path / "pytorch_model_fsdp_0_rank0.bin", weights_only=True)
            assert names
            assert all("lora" in name and "default" not in name for name in names)
            assert sum(value.numel() * 4 for value in names.values()) < whole
    finally:
        dist.destroy_process_group()
