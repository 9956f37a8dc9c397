"""Train a tiny T5 with Transformers' Seq2SeqTrainer, which generates while it evaluates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
from shared import VOCABULARY, Rows, counting_rows, fingerprint, history, run, tokenizer
from transformers import (
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)


def tiny_t5() -> T5ForConditionalGeneration:
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=16,
        d_ff=48,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return T5ForConditionalGeneration(config)


def reversed_rows(count: int, seed: int) -> Rows:
    """Make pairs of a sequence and its last three tokens, backwards."""
    inputs = counting_rows(count, seed).columns["input_ids"]
    return Rows(input_ids=inputs, labels=[[*row[:-4:-1], 1] for row in inputs])


def right_tokens(evaluated: Any) -> dict[str, float]:
    predicted, labels = (numpy.where(part < 0, 0, part) for part in (evaluated.predictions, evaluated.label_ids))
    width = min(predicted.shape[1] - 1, labels.shape[1])
    return {"right": float((predicted[:, 1 : width + 1] == labels[:, :width]).mean())}


def main(folder: Path) -> dict[str, Any]:
    set_seed(0)
    model = tiny_t5()
    evaluation = reversed_rows(21, seed=8)
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            output_dir=str(folder / "run"),
            per_device_train_batch_size=8,
            per_device_eval_batch_size=4,
            num_train_epochs=3,
            learning_rate=5e-3,
            label_smoothing_factor=0.1,
            predict_with_generate=True,
            generation_max_length=6,
            eval_strategy="epoch",
            logging_steps=4,
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            seed=0,
        ),
        train_dataset=reversed_rows(90, seed=7),
        eval_dataset=evaluation,
        data_collator=DataCollatorForSeq2Seq(tokenizer(), model=model),
        compute_metrics=right_tokens,
    )
    trained = trainer.train()
    predicted = trainer.predict(evaluation, num_beams=2)
    return {
        "training": {
            **history(trainer, "loss", "eval_loss", "eval_right"),
            "steps": trained.global_step,
            "weights": fingerprint(trainer.accelerator.unwrap_model(trainer.model)),
        },
        "generation": {
            "tokens": predicted.predictions.tolist(),
            "labels": predicted.label_ids.tolist(),
            "metrics": {name: predicted.metrics[name] for name in ("test_loss", "test_right")},
        },
    }


if __name__ == "__main__":
    run(main)
