"""Train on scikit-learn's digits; kill it at any moment, start it again on any number of processes, and it goes on.

accelerate launch --num_processes 2 examples/resume.py --project runs/digits
(kill it)
accelerate launch --num_processes 3 examples/resume.py --project runs/digits
"""

import argparse
import json
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed, tqdm

EPOCHS = 12
SAMPLES_PER_STEP = 48


class Curve:
    """The loss of each optimizer step; registered, so that it is part of every checkpoint."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, list[float]]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self.losses = list(state["losses"])


def digits() -> tuple[TensorDataset, TensorDataset]:
    pixels, labels = load_digits(return_X_y=True)
    split = train_test_split(torch.tensor(pixels / 16).float(), torch.tensor(labels), test_size=0.2, random_state=0)
    return TensorDataset(split[0], split[2]), TensorDataset(split[1], split[3])


def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """Return the accuracy over every test image once."""
    model.eval()
    right = []
    for images, labels in loader:
        with torch.no_grad():
            predictions = model(images).argmax(dim=1)
        right.append(accelerator.gather_for_metrics(predictions == labels))
    model.train()
    return torch.cat(right).float().mean().item()


def main(project: Path, epochs: int, save_every: int, log: Path | None) -> None:
    # One optimizer step is 48 samples on any number of processes, so the curve does not depend on it.
    accelerator = Accelerator(
        global_batch_size=SAMPLES_PER_STEP,
        project_config=ProjectConfiguration(project_dir=str(project), automatic_checkpoint_naming=True, total_limit=2),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0),
    )
    set_seed(0)
    train, test = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * -(-len(train) // SAMPLES_PER_STEP))
    loader = DataLoader(train, batch_size=16, shuffle=True)
    held_out = DataLoader(test, batch_size=64)
    model, optimizer, schedule, loader, held_out = accelerator.prepare(model, optimizer, schedule, loader, held_out)
    curve = Curve()
    accelerator.register_for_checkpointing(curve)

    if accelerator.resume():
        accelerator.print(f"going on at step {accelerator.progress.step} on {accelerator.num_processes} process(es)")

    window: list[torch.Tensor] = []
    with tqdm(total=schedule.scheduler.T_max, initial=accelerator.progress.step, unit="step", leave=False) as bar:
        for _ in accelerator.epochs(epochs):
            for images, labels in loader:
                with accelerator.accumulate(model):
                    losses = nn.functional.cross_entropy(model(images), labels, reduction="none")
                    accelerator.backward(losses.mean())
                    window.append(accelerator.gather_for_metrics(losses.detach()))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if not accelerator.sync_gradients:
                    continue
                curve.losses.append(torch.cat(window).mean().item())
                window.clear()
                bar.update()
                if log is not None and accelerator.is_main_process:
                    with log.open("a") as lines:
                        entry = [accelerator.progress.step, curve.losses[-1], accelerator.num_processes]
                        lines.write(json.dumps(entry) + "\n")
                if accelerator.progress.step % save_every == 0:
                    accelerator.save_state(blocking=False)
                if accelerator.should_stop:  # SIGTERM: a spot instance is taken away, a Slurm job reaches its limit
                    accelerator.save_state()
                    accelerator.exit_for_restart()

    accuracy = evaluate(accelerator, model, held_out)
    accelerator.print(
        f"step {accelerator.progress.step}, {accelerator.progress.samples} samples, loss {curve.losses[-1]:.6f}, "
        f"mean loss {sum(curve.losses) / len(curve.losses):.6f}, accuracy {accuracy:.4f}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project", type=Path, default=Path("resume-output"), help="where the checkpoints are")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--save-every", type=int, default=20, help="optimizer steps between two checkpoints")
    parser.add_argument("--losses", type=Path, help="append step, loss and number of processes to this file")
    given = parser.parse_args()
    main(given.project, given.epochs, given.save_every, given.losses)
