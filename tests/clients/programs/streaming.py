"""Train on data of the `datasets` package: map-style with transforms, streamed, shuffled in a buffer, in several files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from shared import run
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed


def rows(files: list[int]) -> Any:
    digits = load_digits()
    for number in files:
        for index in range(number, 90, 3):
            yield {"image": digits.data[index].tolist(), "label": int(digits.target[index])}


def datasets() -> dict[str, Any]:
    digits = load_digits()
    table = Dataset.from_dict({"image": digits.data[:90].tolist(), "label": digits.target[:90].tolist()})
    streamed = IterableDataset.from_generator(rows, gen_kwargs={"files": [0, 1, 2]})
    return {
        "map-style": table.map(lambda row: {"image": [value / 16 for value in row["image"]]}).with_format("torch"),
        "streamed": table.to_iterable_dataset(num_shards=2).with_format("torch"),
        "buffer": streamed.shuffle(seed=1, buffer_size=20)
        .map(lambda row: {"label": row["label"] % 5})
        .with_format("torch"),
        "filtered": streamed.filter(lambda row: row["label"] < 8).with_format("torch"),
    }


def train(data: Any, dispatch: bool | None) -> dict[str, Any]:
    """Train two epochs and return losses, and the labels that metrics see."""
    config = DataLoaderConfiguration(dispatch_batches=dispatch, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    set_seed(0)
    model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(data, batch_size=8, shuffle=isinstance(data, Dataset))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, labels = [], []
    for epoch in range(2):
        loader.set_epoch(epoch)
        for batch in loader:
            loss = nn.functional.cross_entropy(model(batch["image"].float() / 16), batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            labels += accelerator.gather_for_metrics(batch["label"]).tolist()
    return {"losses": losses, "labels": labels}


def main(folder: Path) -> dict[str, Any]:
    found = {}
    for name, data in datasets().items():
        found[name] = train(data, None)
        if name == "streamed":
            found["streamed by each"] = train(data, dispatch=False)
    return found


if __name__ == "__main__":
    run(main)
