"""Fine-tune a tiny BERT with a loop of one's own, in the style of Transformers' no_trainer examples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import datasets
import torch
from shared import files_of, fingerprint, labelled_rows, run, tiny_bert, tokenizer
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding, get_scheduler

from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed

logger = get_logger(__name__)
EPOCHS, ACCUMULATION, BATCH = 2, 2, 4


def make_loaders(own_generator: bool) -> tuple[DataLoader[Any], DataLoader[Any]]:
    # With a generator both ranks and any release draw one order; without, it comes from the global random state.
    generator = torch.Generator().manual_seed(5) if own_generator else None
    collate = DataCollatorWithPadding(tokenizer())
    train, evaluation = (
        datasets.Dataset.from_dict(labelled_rows(count, seed).columns) for count, seed in ((90, 7), (21, 8))
    )
    return (
        DataLoader(train, shuffle=True, collate_fn=collate, batch_size=BATCH, generator=generator),
        DataLoader(evaluation, collate_fn=collate, batch_size=BATCH),
    )


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    no_decay = ("bias", "LayerNorm.weight")
    grouped = [
        {
            "params": [p for n, p in model.named_parameters() if not any(word in n for word in no_decay)],
            "weight_decay": 0.1,
        },
        {
            "params": [p for n, p in model.named_parameters() if any(word in n for word in no_decay)],
            "weight_decay": 0.0,
        },
    ]
    return torch.optim.AdamW(grouped, lr=2e-3)


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader[Any]) -> dict[str, Any]:
    model.eval()
    right, labels, losses = [], [], []
    for batch in loader:
        with torch.no_grad():
            outputs = model(**batch)
        guesses, references = accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
        losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(BATCH)))
        right.extend((guesses == references).tolist())
        labels.extend(references.tolist())
    return {"accuracy": sum(right) / len(right), "loss": torch.cat(losses).mean().item(), "labels": labels}


def train(folder: Path, resume: Path | None = None, seed: int = 0, own_generator: bool = True) -> dict[str, Any]:
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=ACCUMULATION, log_with="tensorboard", project_dir=str(folder)
    )
    logger.info(accelerator.state, main_process_only=False)
    set_seed(seed)
    accelerator.wait_for_everyone()
    model = tiny_bert(seed)
    train_loader, evaluation_loader = make_loaders(own_generator)
    optimizer = make_optimizer(model)
    steps_per_epoch = math.ceil(len(train_loader) / ACCUMULATION)
    scheduler = get_scheduler(
        "cosine",
        optimizer=optimizer,
        num_warmup_steps=2 * accelerator.num_processes,
        num_training_steps=EPOCHS * steps_per_epoch,
    )
    model, optimizer, train_loader, evaluation_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, evaluation_loader, scheduler
    )
    accelerator.init_trackers("no_trainer", {"learning_rate": 2e-3})
    found: dict[str, Any] = {"losses": [], "rates": [], "evaluations": []}
    starting_epoch = 0
    if resume:
        accelerator.load_state(str(resume))
        starting_epoch = int(resume.name.removeprefix("epoch_")) + 1
    for epoch in range(starting_epoch, EPOCHS):
        model.train()
        total = torch.zeros(())
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                total += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                found["losses"].append(accelerator.reduce(loss.detach(), "mean").item())
                found["rates"].append(scheduler.get_last_lr()[0])
        found["evaluations"].append(evaluate(accelerator, model, evaluation_loader))
        accelerator.log({"train_loss": total.item() / len(train_loader), "epoch": epoch}, step=epoch)
        accelerator.save_state(str(folder / f"epoch_{epoch}"))
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        folder / "final",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.wait_for_everyone()
    found["weights"] = fingerprint(unwrapped)
    found["loaded"] = fingerprint(AutoModelForSequenceClassification.from_pretrained(folder / "final"))
    found["files"] = [name for name in files_of(folder) if "tfevents" not in name and not name.endswith("hparams.yml")]
    accelerator.wait_for_everyone()
    return found


def main(folder: Path) -> dict[str, Any]:
    return {
        "straight": train(folder / "straight"),
        "resumed": train(folder / "resumed", folder / "straight" / "epoch_0", seed=1),
        "order from the global random state": train(folder / "global", own_generator=False),
    }


if __name__ == "__main__":
    run(main)
