"""Train a tiny UNet of Diffusers as its own scripts do: accumulation, an averaged model, hooks on save and load, a tracker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from shared import files_of, fingerprint, run
from sklearn.datasets import load_digits

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed


def make_unet() -> UNet2DModel:
    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
    )


def register_hooks(accelerator: Accelerator, average: EMAModel) -> None:
    """Let checkpoints hold the models as Diffusers saves them, the averaged one too."""

    def save_hook(models: list[Any], weights: list[Any], output: str) -> None:
        if accelerator.is_main_process:
            average.save_pretrained(str(Path(output) / "unet_ema"))
            for entry in models:
                accelerator.unwrap_model(entry).save_pretrained(str(Path(output) / "unet"))
                weights.pop()

    def load_hook(models: list[Any], source: str) -> None:
        average.load_state_dict(EMAModel.from_pretrained(str(Path(source) / "unet_ema"), UNet2DModel).state_dict())
        while models:
            saved = UNet2DModel.from_pretrained(source, subfolder="unet")
            models.pop().load_state_dict(saved.state_dict())

    accelerator.register_save_state_pre_hook(save_hook)
    accelerator.register_load_state_pre_hook(load_hook)


def train(folder: Path, steps: int, resume: bool) -> dict[str, Any]:
    """Train some steps, from the newest checkpoint if asked to."""
    project = ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / "logs"))
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        log_with="tensorboard",
        project_config=project,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=4),
    )
    set_seed(1 if resume else 0, device_specific=True)
    model, noise_scheduler = make_unet(), DDPMScheduler(num_train_timesteps=50)
    average = EMAModel(model.parameters(), model_cls=UNet2DModel, model_config=model.config)

    register_hooks(accelerator, average)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = torch.tensor(load_digits().images[:64], dtype=torch.float32).unsqueeze(1) / 8 - 1
    loader = torch.utils.data.DataLoader(images, batch_size=4, shuffle=True)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=12)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    accelerator.init_trackers("diffusion", {"steps": steps})
    if resume:
        accelerator.load_state(str(folder / "checkpoint"))
    losses: list[float] = []
    done = 3 if resume else 0
    while done < steps:
        for clean in loader:
            with accelerator.accumulate(model):
                noise = torch.randn(clean.shape)
                times = torch.randint(0, 50, (len(clean),))
                predicted = model(noise_scheduler.add_noise(clean, noise, times), times).sample
                loss = torch.nn.functional.mse_loss(predicted, noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.step(model.parameters())
                done += 1
                losses.append(accelerator.gather(loss.detach().repeat(4)).mean().item())
                accelerator.log({"loss": losses[-1], "rate": schedule.get_last_lr()[0]}, step=done)
                if done == 3 and not resume:
                    accelerator.save_state(str(folder / "checkpoint"))
            if done == steps:
                break
    if resume:
        accelerator.end_training()
    trained = accelerator.unwrap_model(model)
    return {"losses": losses, "weights": fingerprint(trained), "model": trained}


def main(folder: Path) -> dict[str, Any]:
    straight = train(folder, 6, resume=False)
    resumed = train(folder, 6, resume=True)
    pipeline = DDPMPipeline(straight.pop("model"), DDPMScheduler(num_train_timesteps=50))
    pipeline.set_progress_bar_config(disable=True)
    image = pipeline(generator=torch.Generator().manual_seed(0), num_inference_steps=3, output_type="np").images
    resumed.pop("model")
    return {
        "straight": straight,
        "resumed": resumed,
        "image": float(image.sum()),
        "files": files_of(folder / "checkpoint"),
        "logs": len(files_of(folder / "logs")) > 0,
    }


if __name__ == "__main__":
    run(main)
