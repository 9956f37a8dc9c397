"""Fine-tune a tiny BERT with Transformers' Trainer: metrics, callbacks, length groups, resume, and ways to share batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from shared import (
    LENGTH,
    files_of,
    fingerprint,
    history,
    labelled_rows,
    run,
    tiny_bert,
    tokenizer,
)
from transformers import DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

TRAIN, EVALUATION = labelled_rows(90, seed=7), labelled_rows(21, seed=8)


class Events(TrainerCallback):
    """Note what the Trainer tells its callbacks."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_") or name in ("on_substep_end", "on_prediction_step"):
            return super().__getattribute__(name)
        return lambda args, state, control, **kwargs: self.seen.append(f"{name} {state.global_step}")


class OutOfMemoryOnce(TrainerCallback):
    """Fail as a device does whose memory is full, until the batch is small enough."""

    def __init__(self, fits: int) -> None:
        self.fits = fits
        self.tried: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.tried or self.tried[-1] != state.train_batch_size:
            self.tried.append(state.train_batch_size)
        if state.train_batch_size > self.fits:
            raise RuntimeError("CUDA out of memory.")


def accuracy(evaluated: Any) -> dict[str, float]:
    return {"accuracy": float((evaluated.predictions.argmax(-1) == evaluated.label_ids).mean())}


def make_trainer(
    folder: Path,
    *callbacks: TrainerCallback,
    seed: int = 0,
    equal_lengths: bool = False,
    dropout: float = 0.0,
    **more: Any,
) -> Trainer:
    padding: dict[str, Any] = {"padding": "max_length", "max_length": LENGTH} if equal_lengths else {}
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 2e-3,
        "logging_steps": 2,
        "disable_tqdm": True,
        "save_strategy": "no",
        "use_cpu": True,
        "seed": 0,
        **more,
    }
    return Trainer(
        model=tiny_bert(seed, dropout),
        args=TrainingArguments(output_dir=str(folder), **arguments),
        train_dataset=TRAIN,
        eval_dataset=EVALUATION,
        data_collator=DataCollatorWithPadding(tokenizer(), **padding),
        compute_metrics=accuracy,
        callbacks=list(callbacks),
    )


def outcome(trainer: Trainer, trained: Any, **more: Any) -> dict[str, Any]:
    return {
        **history(trainer, "loss", "learning_rate", "eval_loss", "eval_accuracy"),
        "steps": trained.global_step,
        "weights": fingerprint(trainer.accelerator.unwrap_model(trainer.model)),
        **more,
    }


def straight_and_resumed(folder: Path) -> dict[str, Any]:
    """Train with evaluation and length groups, then again from a checkpoint in the middle of an epoch."""
    options: dict[str, Any] = {
        "train_sampling_strategy": "group_by_length",
        "eval_strategy": "steps",
        "eval_steps": 8,
        "save_strategy": "steps",
        "save_steps": 8,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
    }
    events = Events()
    trainer = make_trainer(folder / "straight", events, **options)
    trained = trainer.train()
    predicted = trainer.predict(EVALUATION)
    parts = {
        "straight": outcome(
            trainer,
            trained,
            events=events.seen,
            predicted=predicted.label_ids.tolist(),
            logits=predicted.predictions.tolist(),
            metrics={name: predicted.metrics[name] for name in ("test_loss", "test_accuracy")},
        )
    }
    trainer.accelerator.wait_for_everyone()
    parts["straight files"] = {"files": files_of(folder / "straight")}
    # Other weights and another random state: everything must come from the checkpoint.
    resumed = make_trainer(folder / "straight", seed=1, **options)
    trained = resumed.train(resume_from_checkpoint=str(folder / "straight" / "checkpoint-8"))
    parts["resumed"] = outcome(resumed, trained)
    return parts


def batch_size_is_found(folder: Path) -> dict[str, Any]:
    pressure = OutOfMemoryOnce(fits=8)
    trainer = make_trainer(
        folder / "auto", pressure, per_device_train_batch_size=32, auto_find_batch_size=True, max_steps=6
    )
    trained = trainer.train()
    return outcome(trainer, trained, tried=pressure.tried)


def shared_batches(folder: Path, **config: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"accelerator_config": config, "max_steps": 8, "gradient_accumulation_steps": 2}
    trainer = make_trainer(folder / "shared", equal_lengths=True, **options)
    trained = trainer.train()
    return outcome(trainer, trained, evaluated=trainer.evaluate()["eval_loss"])


def with_dropout(folder: Path, order: str) -> dict[str, Any]:
    trainer = make_trainer(folder / "dropout", dropout=0.1, train_sampling_strategy=order)
    return outcome(trainer, trainer.train())


def compiled(folder: Path) -> dict[str, Any]:
    options: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 3}
    trainer = make_trainer(folder / "compiled", equal_lengths=True, **options)
    trained = trainer.train()
    return outcome(trainer, trained, compiled=isinstance(trainer.model_wrapped, torch._dynamo.OptimizedModule))


def main(folder: Path) -> dict[str, Any]:
    return {
        **straight_and_resumed(folder),
        "auto_find_batch_size": batch_size_is_found(folder),
        "split_batches": shared_batches(folder, split_batches=True),
        "dispatch_batches": shared_batches(folder, dispatch_batches=True),
        "seedable sampler": shared_batches(folder, use_seedable_sampler=True),
        "dropout": with_dropout(folder, "random"),
        "dropout and length groups": with_dropout(folder, "group_by_length"),
        "torch_compile": compiled(folder),
    }


if __name__ == "__main__":
    run(main)
