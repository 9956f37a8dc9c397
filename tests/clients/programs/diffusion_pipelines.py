"""Make images with a tiny pipeline of Diffusers whose models are offloaded whole, layer by layer, in groups, or to the disk."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from diffusers.hooks import apply_group_offloading
from shared import attempt, run
from tiny_pipeline import MODELS, make_pipeline


def made_twice(pipeline: StableDiffusionPipeline) -> dict[str, Any]:
    """Return numbers of the images that a pipeline makes, the second after its hooks have run once."""
    images = [
        pipeline("a cat", num_inference_steps=2, output_type="np", generator=torch.Generator().manual_seed(0)).images
        for _ in range(2)
    ]
    on_meta = sum(value.is_meta for name in MODELS for value in getattr(pipeline, name).parameters())
    return {"images": [[float(image.sum()), float(image.std())] for image in images], "weights elsewhere": on_meta}


def model_offload(folder: Path) -> dict[str, Any]:
    pipeline = make_pipeline(folder)
    pipeline.enable_model_cpu_offload(device="cpu")
    return made_twice(pipeline)


def sequential_offload(folder: Path) -> dict[str, Any]:
    pipeline = make_pipeline(folder)
    pipeline.enable_sequential_cpu_offload(device="cpu")
    found = made_twice(pipeline)
    pipeline.remove_all_hooks()
    return {**found, "hooks removed": made_twice(pipeline)}


def group_offload(folder: Path, kind: str, **options: Any) -> dict[str, Any]:
    pipeline, device = make_pipeline(folder), torch.device("cpu")
    for name in MODELS:
        apply_group_offloading(getattr(pipeline, name), device, device, offload_type=kind, **options)
    return made_twice(pipeline)


def disk_offload(folder: Path) -> dict[str, Any]:
    make_pipeline(folder).save_pretrained(folder / "pipeline")
    unet = UNet2DConditionModel.from_pretrained(
        folder / "pipeline" / "unet", device_map="auto", max_memory={"cpu": "20KB"}, offload_folder=folder / "offload"
    )
    loaded = StableDiffusionPipeline.from_pretrained(folder / "pipeline", unet=unet, safety_checker=None)
    loaded.set_progress_bar_config(disable=True)
    return {**made_twice(loaded), "map": {name: str(place) for name, place in unet.hf_device_map.items()}}


def main(folder: Path) -> dict[str, Any]:
    return {
        "plain": made_twice(make_pipeline(folder)),
        "model offload": attempt(model_offload, folder),
        "sequential offload": attempt(sequential_offload, folder),
        "group offload by blocks": attempt(partial(group_offload, num_blocks_per_group=1), folder, "block_level"),
        "group offload by leaves": attempt(group_offload, folder, "leaf_level"),
        "UNet partly on the disk": attempt(disk_offload, folder),
    }


if __name__ == "__main__":
    run(main)
