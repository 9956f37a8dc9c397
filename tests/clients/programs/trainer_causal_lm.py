"""Train a tiny Llama with Transformers' Trainer: windows of accumulation weighed by tokens, and bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared import counting_rows, fingerprint, history, run, tiny_llama, tokenizer
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

TRAIN, EVALUATION = counting_rows(90, seed=7), counting_rows(21, seed=8)


def make_trainer(folder: Path, **more: Any) -> Trainer:
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "max_steps": 9,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "disable_tqdm": True,
        "save_strategy": "no",
        "use_cpu": True,
        "seed": 0,
        **more,
    }
    return Trainer(
        model=tiny_llama(),
        args=TrainingArguments(output_dir=str(folder), **arguments),
        train_dataset=TRAIN,
        eval_dataset=EVALUATION,
        data_collator=DataCollatorForLanguageModeling(tokenizer(), mlm=False),
    )


def outcome(trainer: Trainer) -> dict[str, Any]:
    trained = trainer.train()
    return {
        **history(trainer, "loss", "learning_rate", "grad_norm"),
        "steps": trained.global_step,
        "evaluated": trainer.evaluate()["eval_loss"],
        "tokens seen": trainer.state.num_input_tokens_seen,
        "type": trainer.accelerator.distributed_type.value,
        "weights": fingerprint(trainer.accelerator.unwrap_model(trainer.model)),
    }


def main(folder: Path) -> dict[str, Any]:
    counting = {"include_num_input_tokens_seen": "all"}
    return {
        "tokens over all processes": outcome(make_trainer(folder / "all", **counting)),
        "tokens of each process": outcome(
            make_trainer(folder / "each", average_tokens_across_devices=False, **counting)
        ),
        "bf16": outcome(make_trainer(folder / "bf16", bf16=True, gradient_checkpointing=True)),
    }


if __name__ == "__main__":
    run(main)
