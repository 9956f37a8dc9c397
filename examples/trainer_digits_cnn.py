"""Train a CNN of one's own on scikit-learn's digits with the Trainer of Transformers.

python examples/trainer_digits_cnn.py
accelerate launch --config_file examples/two_processes.yaml examples/trainer_digits_cnn.py
"""

import argparse
import tempfile

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import Dataset
from transformers import EvalPrediction, Trainer, TrainingArguments


class Digits(Dataset):
    """Images with their labels, under the names that the model's `forward` has for them."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"images": self.images[index], "labels": self.labels[index]}


class DigitsCNN(nn.Module):
    """A small CNN that returns its loss beside its scores, as Trainer asks of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(32 * 4 * 4, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.classifier(self.features(images))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def digits() -> tuple[Digits, Digits]:
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    train, test, train_labels, test_labels = train_test_split(
        images, torch.tensor(labels), test_size=0.2, random_state=0
    )
    return Digits(train, train_labels), Digits(test, test_labels)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    right = prediction.predictions.argmax(axis=-1) == prediction.label_ids
    return {"accuracy": float(right.mean()), "images": len(right)}


def main(epochs: int = 5) -> dict[str, float]:
    torch.manual_seed(0)
    train, test = digits()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=16,
            per_device_eval_batch_size=64,
            learning_rate=3e-3,
            eval_strategy="epoch",
            save_strategy="no",
            ddp_find_unused_parameters=False,
            dataloader_pin_memory=torch.accelerator.is_available(),
            disable_tqdm=True,
            report_to="none",
        )
        trainer = Trainer(DigitsCNN(), arguments, train_dataset=train, eval_dataset=test, compute_metrics=accuracy)
        trainer.train()
        metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(
            f"accuracy {metrics['eval_accuracy']:.4f} on {metrics['eval_images']} images "
            f"after {trainer.state.global_step} steps on {arguments.world_size} processes"
        )
    return metrics


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a CNN of one's own on scikit-learn's digits with Trainer.")
    parser.add_argument("--epochs", type=int, default=5)
    main(**vars(parser.parse_args()))
