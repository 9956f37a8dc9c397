"""Train a small CNN on scikit-learn's digits and plot loss and accuracy: the demo.

torchrun --nproc_per_node 2 examples/digits_cnn.py --output demo-output
"""

import argparse
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed, tqdm


@dataclass
class History:
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)


def digits() -> tuple[TensorDataset, TensorDataset]:
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    split = train_test_split(images, torch.tensor(labels), test_size=0.2, random_state=0)
    train_images, test_images, train_labels, test_labels = split
    return TensorDataset(train_images, train_labels), TensorDataset(test_images, test_labels)


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> tuple[float, int]:
    """Return the accuracy over every test image once, and how many images that was."""
    model.eval()
    right = []
    for images, labels in loader:
        with torch.no_grad():
            predictions = model(images).argmax(dim=1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        right.append(predictions == labels)
    seen = torch.cat(right)
    return seen.float().mean().item(), len(seen)


def plot(history: History, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(history.losses, color="tab:blue")
    left.set(title="training loss", xlabel="optimizer step", yscale="log")
    right.plot(range(1, len(history.accuracies) + 1), history.accuracies, color="tab:green", marker="o")
    right.axhline(0.97, color="tab:gray", linestyle="--", label="97%")
    right.set(title="test accuracy", xlabel="epoch")
    right.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(epochs: int, batch_size: int, output: Path) -> float:
    started = time.perf_counter()
    accelerator = Accelerator()
    # torchrun gives each process one thread; the demo is to use every core.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // accelerator.num_processes))
    set_seed(0)

    train, test = digits()
    train_loader = DataLoader(train, batch_size=batch_size // accelerator.num_processes, shuffle=True)
    test_loader = DataLoader(test, batch_size=128)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * len(train_loader))
    model, optimizer, scheduler, train_loader, test_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, test_loader
    )
    steps = epochs * len(train_loader)

    history = History()
    with tqdm(total=steps, desc="digits", unit="step", leave=False) as bar:
        for _ in range(epochs):
            model.train()
            for images, labels in train_loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                history.losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
                bar.update()
            accuracy, images_seen = evaluate(accelerator, model, test_loader)
            history.accuracies.append(accuracy)
            bar.set_postfix(loss=f"{history.losses[-1]:.4f}", accuracy=f"{accuracy:.2%}")

    if accelerator.is_main_process:
        plot(history, output / "digits.png")
    accelerator.print(
        f"accuracy {accuracy:.4f} on {images_seen} test images, final loss {history.losses[-1]:.4f}\n"
        f"{accelerator.num_processes} processes, {steps} steps, {time.perf_counter() - started:.1f} s, "
        f"plot in {output / 'digits.png'}"
    )
    accelerator.end_training()
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small CNN on scikit-learn's digits.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per optimizer step, over all processes")
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    main(**vars(parser.parse_args()))
