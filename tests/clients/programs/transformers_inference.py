"""Load tiny models with Transformers on a device map, within limits of memory and from the disk, and generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from shared import WORDS, run, tiny_llama, tokenizer
from transformers import AutoModelForCausalLM, pipeline

from accelerate import cpu_offload, disk_offload, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.utils import get_balanced_memory, get_max_memory, infer_auto_device_map

PROMPT = torch.tensor([[4, 7, 10, 13]])


def generated(model: Any) -> dict[str, Any]:
    """Return tokens chosen greedily, by beams and by chance, and the logits of the prompt."""
    options: dict[str, Any] = {"max_new_tokens": 8, "attention_mask": torch.ones_like(PROMPT), "pad_token_id": 0}
    torch.manual_seed(0)
    with torch.no_grad():
        return {
            "greedy": model.generate(PROMPT, do_sample=False, **options).tolist(),
            "beams": model.generate(PROMPT, do_sample=False, num_beams=3, **options).tolist(),
            "sampled": model.generate(PROMPT, do_sample=True, top_k=5, **options).tolist(),
            "logits": model(PROMPT).logits[0, -1].tolist(),
            "map": {name: str(place) for name, place in (getattr(model, "hf_device_map", None) or {}).items()},
            "meta": sum(parameter.is_meta for parameter in model.parameters()),
        }


def pipelines(folder: Path) -> dict[str, Any]:
    generate = pipeline("text-generation", model=str(folder), device_map="auto")
    options = {"max_new_tokens": 6, "do_sample": False}
    texts = generate([" ".join(WORDS[1:10:3]), " ".join(WORDS[2:8:3])], **options)
    return {"texts": [text[0]["generated_text"] for text in texts]}


def placed(folder: Path, output: Path) -> dict[str, Any]:
    load = AutoModelForCausalLM.from_pretrained
    blocks = {f"model.layers.{number}": "disk" if number % 2 else "cpu" for number in range(4)}
    rest = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    limit = {"cpu": "40KB"}
    found = {
        "auto": generated(load(folder, device_map="auto")),
        "memory as text": generated(
            load(folder, device_map="auto", max_memory=limit, offload_folder=output / "text", offload_state_dict=True)
        ),
        "memory as number": generated(
            load(folder, device_map="auto", max_memory={"cpu": 40_000}, offload_folder=output / "number")
        ),
        "blocks on the disk": generated(load(folder, device_map={**blocks, **rest}, offload_folder=output / "blocks")),
        "everything on the disk": generated(load(folder, device_map={"": "disk"}, offload_folder=output / "all")),
        "bf16": generated(load(folder, device_map="auto", dtype=torch.bfloat16)),
    }
    return {f"from_pretrained: {name}": values for name, values in found.items()}


def by_hand(folder: Path, output: Path) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(model.config).eval()
    places = infer_auto_device_map(
        empty, max_memory={"cpu": 40_000, "disk": 10**9}, no_split_module_classes=["LlamaDecoderLayer"]
    )
    loaded = load_checkpoint_and_dispatch(empty, folder, device_map=places, offload_folder=output / "by hand")
    return {
        "load_checkpoint_and_dispatch": generated(loaded),
        "cpu_offload": generated(cpu_offload(AutoModelForCausalLM.from_pretrained(folder))),
        "disk_offload": generated(disk_offload(AutoModelForCausalLM.from_pretrained(folder), output / "offload")),
        "memory": {
            "given": get_max_memory({"cpu": "1GB", "disk": "2GiB"}),
            "balanced": get_balanced_memory(model, {"cpu": 10**6}),
        },
    }


def saved_again(folder: Path, output: Path) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(
        folder, device_map="auto", max_memory={"cpu": 40_000}, offload_folder=output / "again"
    )
    model.save_pretrained(output / "saved again", max_shard_size="30KB")
    again = AutoModelForCausalLM.from_pretrained(output / "saved again")
    return {**generated(again), "files": sorted(path.name for path in (output / "saved again").iterdir())}


def main(folder: Path) -> dict[str, Any]:
    model = folder / "model"
    tiny_llama(num_hidden_layers=4).save_pretrained(model, max_shard_size="30KB")
    tokenizer().save_pretrained(model)
    return {
        "pipeline": pipelines(model),
        **placed(model, folder),
        **by_hand(model, folder),
        "saved again": saved_again(model, folder),
    }


if __name__ == "__main__":
    run(main)
