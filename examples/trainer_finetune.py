"""Fine-tune a small BERT to tell which of scikit-learn's datasets a piece of text describes, with Transformers' Trainer.

The texts are the descriptions that come with scikit-learn. Without --model, a model with random weights and a tokenizer of
these texts are written to a folder first, and loaded from there as one from the hub would be.

python examples/trainer_finetune.py
accelerate launch --config_file examples/two_processes.yaml examples/trainer_finetune.py
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_linnerud, load_wine
from tokenizers import BertWordPieceTokenizer
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from accelerate import PartialState

SOURCES = {
    "breast cancer": load_breast_cancer,
    "diabetes": load_diabetes,
    "digits": load_digits,
    "iris": load_iris,
    "linnerud": load_linnerud,
    "wine": load_wine,
}
WORDS, STRIDE = 24, 4


def passages() -> tuple[list[str], list[int]]:
    """Return pieces of the descriptions, each a few words on from the one before, and where each comes from."""
    texts, labels = [], []
    for label, load in enumerate(SOURCES.values()):
        words = load().DESCR.split()
        starts = range(0, max(1, len(words) - WORDS), STRIDE)
        texts += [" ".join(words[start : start + WORDS]) for start in starts]
        labels += [label] * len(starts)
    return texts, labels


def make_model(folder: Path, texts: list[str]) -> None:
    """Write a small BERT with random weights, and a tokenizer that knows the texts."""
    vocabulary = BertWordPieceTokenizer()
    vocabulary.train_from_iterator(texts, vocab_size=1000, show_progress=False)
    tokenizer = BertTokenizerFast(vocab=vocabulary.get_vocab(), model_max_length=64)
    tokenizer.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
        id2label=dict(enumerate(SOURCES)),
        label2id={name: label for label, name in enumerate(SOURCES)},
    )
    BertForSequenceClassification(config).save_pretrained(folder)


def rows(tokenizer: PreTrainedTokenizerBase, texts: list[str], labels: list[int]) -> list[dict]:
    encoded = tokenizer(texts, truncation=True)
    return [{"input_ids": ids, "labels": label} for ids, label in zip(encoded["input_ids"], labels, strict=True)]


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    right = prediction.predictions.argmax(axis=-1) == prediction.label_ids
    return {"accuracy": float(right.mean()), "passages": len(right)}


def main(epochs: int, model: Path | None, output: Path) -> dict[str, float]:
    set_seed(0)
    texts, labels = passages()
    if model is None:
        model = output / "model"
        # One process writes; the others wait until the folder is whole.
        with PartialState().main_process_first():
            if PartialState().is_main_process:
                make_model(model, texts)
    tokenizer = AutoTokenizer.from_pretrained(model)
    # Every fifth passage is kept for the test.
    samples = rows(tokenizer, texts, labels)
    test = samples[::5]
    train = [sample for index, sample in enumerate(samples) if index % 5]

    arguments = TrainingArguments(
        output_dir=str(output),
        num_train_epochs=epochs,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=32,
        learning_rate=1e-3,
        warmup_steps=20,
        # A passage has one label: there are no tokens to average over, and the loss is a mean as it is.
        average_tokens_across_devices=False,
        eval_strategy="epoch",
        save_strategy="no",
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=torch.accelerator.is_available(),
        disable_tqdm=True,
        report_to="none",
    )
    trainer = Trainer(
        AutoModelForSequenceClassification.from_pretrained(model),
        arguments,
        train_dataset=train,
        eval_dataset=test,
        data_collator=DataCollatorWithPadding(tokenizer),
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model(str(output / "tuned"))
    if trainer.is_world_process_zero():
        print(
            f"accuracy {metrics['eval_accuracy']:.4f} on {metrics['eval_passages']} passages "
            f"after {trainer.state.global_step} steps on {arguments.world_size} processes"
        )
    return metrics


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Fine-tune a small BERT on the descriptions of scikit-learn's datasets."
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--model", type=Path, help="folder of a model with its tokenizer")
    parser.add_argument("--output", type=Path, default=Path("finetune-output"))
    main(**vars(parser.parse_args()))
