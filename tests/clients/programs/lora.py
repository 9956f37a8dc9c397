"""Tune a language model with adapters of PEFT, save them, and load them on a base whose weights stay on the disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from shared import files_of, run, sentences, tiny_llama, tokenizer
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, set_seed

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

PLACES: dict[str, Any] = {
    "model.embed_tokens": "cpu",
    "model.layers": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}


def main(folder: Path) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    # Each process has a copy of its own: PEFT writes into the files of a base whose weights stay on the disk.
    if accelerator.is_main_process:
        tiny_llama().save_pretrained(folder / "base")
    accelerator.wait_for_everyone()
    base = folder / f"base-{accelerator.process_index}"
    shutil.copytree(folder / "base", base)
    set_seed(0)
    model = get_peft_model(tiny_llama(), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "lm_head"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    texts = tokenizer()(sentences(40), return_tensors="pt", padding=True)["input_ids"]
    loader = DataLoader(texts, batch_size=4, shuffle=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for _ in range(2):
        for tokens in loader:
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    tuned = accelerator.unwrap_model(model)
    tuned.save_pretrained(folder / "adapter", is_main_process=accelerator.is_main_process)
    accelerator.wait_for_everyone()
    offload = str(folder / f"offload-{accelerator.process_index}")
    whole = AutoModelForCausalLM.from_pretrained(base, device_map=PLACES, offload_folder=offload)
    inside = {f"base_model.model.{name}": place for name, place in PLACES.items()}
    loaded = PeftModel.from_pretrained(whole, folder / "adapter", device_map=inside, offload_folder=offload).eval()
    prompt = texts[:2, :3]
    with torch.no_grad():
        expected, found = tuned.eval()(prompt).logits, loaded(prompt).logits
    tokens = loaded.generate(input_ids=prompt, max_new_tokens=6, do_sample=False).tolist()
    return {
        "losses": losses,
        "difference": (expected - found).abs().max().item(),
        "tokens": tokens,
        "files": files_of(folder / "adapter"),
    }


if __name__ == "__main__":
    run(main)
