"""One denoising step of the UNet of Stable Diffusion v1, 860 M parameters, from the disk in little memory.

    python benchmarks/headline_unet.py --folder weights --keep

The weights are random, made on the spot, and removed afterwards unless --keep is given. The budget holds for everything
that the process has for itself: the interpreter, torch, Diffusers and the activations included. Exits with 1 if it does
not hold, or if the result differs from that of the model in memory.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from headline import MB, in_new_process, report, watch, write_random_checkpoint

from accelerate import init_empty_weights, load_checkpoint_and_dispatch

BUDGET = 800 * MB
# What Stable Diffusion v1.4 and v1.5 give to Diffusers' UNet2DConditionModel; the rest are its defaults.
CONFIG: dict[str, Any] = {
    "sample_size": 64,
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
    "block_out_channels": (320, 640, 1280, 1280),
    "layers_per_block": 2,
}


def empty_unet() -> torch.nn.Module:
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    with init_empty_weights():
        unet: torch.nn.Module = UNet2DConditionModel(**CONFIG)
    return unet.eval()


def write(folder: str) -> tuple[int, int]:
    """Write the checkpoint; return its bytes and its number of parameters."""
    unet = empty_unet()
    return write_random_checkpoint(unet, Path(folder)), sum(p.numel() for p in unet.parameters())


def denoise(unet: torch.nn.Module) -> torch.Tensor:
    """Predict the noise of a latent image once, and take the step of the scheduler."""
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler

    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 4, 64, 64, generator=generator)
    text = torch.randn(1, 77, 768, generator=generator)
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(50)
    step = scheduler.timesteps[0]
    with torch.inference_mode():
        noise = unet(latents, step, encoder_hidden_states=text).sample
        result: torch.Tensor = scheduler.step(noise, step, latents).prev_sample
    return result.clone()


def from_disk(folder: str, threads: int, again: bool) -> dict[str, Any]:
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as offload, watch() as whole:
        unet = empty_unet()
        with watch() as loading:
            load_checkpoint_and_dispatch(unet, folder, device_map={"": "disk"}, offload_folder=offload)
        figures, result = measured(unet, again)
    figures |= {"peak": whole.peak, "before_loading": loading.before, "loading_seconds": loading.seconds}
    return {"figures": figures, "result": result.numpy()}


def in_memory(folder: str, threads: int, again: bool) -> dict[str, Any]:
    torch.set_num_threads(threads)
    unet = empty_unet()
    load_checkpoint_and_dispatch(unet, folder, device_map={"": "cpu"})
    figures, result = measured(unet, again)
    return {"figures": figures, "result": result.numpy()}


def measured(unet: torch.nn.Module, again: bool) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the seconds of a step, of a second one if it is asked for, and the result."""
    figures = {}
    with watch() as first:
        result = denoise(unet)
    figures["first_seconds"] = first.seconds
    if again:
        with watch() as second:
            denoise(unet)
        figures["second_seconds"] = second.seconds
    return figures, result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="headline-unet", help="where the weights are written")
    parser.add_argument("--keep", action="store_true", help="leave the weights there, and use those that are there")
    parser.add_argument("--again", action="store_true", help="time a second step as well")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    folder = Path(args.folder)
    rows: dict[str, object] = {}
    try:
        if not (args.keep and folder.exists()):
            size, parameters = in_new_process(write, str(folder))
            rows |= {"parameters": parameters, "bytes of weights": size}
        ours = in_new_process(from_disk, str(folder), args.threads, args.again)
        plain = in_new_process(in_memory, str(folder), args.threads, args.again)
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    equal = bool((ours["result"] == plain["result"]).all())
    peak = ours["figures"]["peak"]
    rows |= {f"from disk, {name}": value for name, value in ours["figures"].items()}
    rows |= {f"in memory, {name}": value for name, value in plain["figures"].items()}
    rows |= {"equal to the model in memory": equal, "budget": BUDGET, "budget holds": peak < BUDGET}
    report(rows, args.json)
    return 0 if equal and peak < BUDGET else 1


if __name__ == "__main__":
    sys.exit(main())
