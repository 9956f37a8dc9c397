"""Train tiny random models with Transformers' Trainer and write what each rank saw to a JSON file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import accelerate

VOCABULARY = 32
LENGTH = 12
TRAIN_SAMPLES = 70
EVAL_SAMPLES = 21
SAVE_AT = 6
MAX_STEPS = 12


class Rows(Dataset[dict[str, torch.Tensor]]):
    """A table of equally long columns, one dict a row."""

    def __init__(self, **columns: torch.Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def classification_rows(count: int, generator: torch.Generator) -> Rows:
    """Label a sequence by its first token, which a classifier learns in a few steps."""
    tokens = torch.randint(2, VOCABULARY, (count, LENGTH), generator=generator)
    labels = torch.randint(0, 2, (count,), generator=generator)
    tokens[:, 0] = labels
    return Rows(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=labels)


def language_rows(count: int, generator: torch.Generator) -> Rows:
    """Make sequences in which each token is the one before plus three."""
    start = torch.randint(0, VOCABULARY, (count, 1), generator=generator)
    tokens = (start + 3 * torch.arange(LENGTH)) % VOCABULARY
    return Rows(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens)


def tiny_bert() -> PreTrainedModel:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def tiny_gpt2() -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


CLIENTS = {"bert": (tiny_bert, classification_rows), "gpt2": (tiny_gpt2, language_rows)}


class StepCounter(TrainerCallback):
    """Count the optimizer steps that this process really ran."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps += 1


def right_share(predictions: numpy.ndarray, labels: numpy.ndarray) -> float:
    """Return the share of right classes, or of right next tokens."""
    guesses = predictions.argmax(-1)
    if guesses.ndim == 2:
        guesses, labels = guesses[:, :-1], labels[:, 1:]
    return float((guesses == labels).mean())


def losses(logits: numpy.ndarray, labels: torch.Tensor) -> list[float]:
    """Return the loss of every sample."""
    return torch.nn.functional.cross_entropy(torch.from_numpy(logits), labels, reduction="none").tolist()


def objects_of(name: str, resume: bool) -> tuple[Any, Any, Any]:
    """Return a fresh model, the rows it trains on and those it is evaluated on."""
    build_model, build_rows = CLIENTS[name]
    generator = torch.Generator().manual_seed(7)
    train, evaluation = build_rows(TRAIN_SAMPLES, generator), build_rows(EVAL_SAMPLES, generator)
    if name == "bert":
        # A wrong answer is alone in the last batch of one process: its loss shows how much that batch weighs.
        evaluation.columns["labels"][-1] ^= 1
    # A resumed run may not lean on the seed: its weights must come from the checkpoint.
    set_seed(1 if resume else 0)
    return build_model(), train, evaluation


def arguments_of(name: str, output: Path, **more: Any) -> TrainingArguments:
    """Return how a client is trained."""
    return TrainingArguments(
        output_dir=str(output / name),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=MAX_STEPS,
        learning_rate=5e-3,
        logging_steps=1,
        save_steps=SAVE_AT,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
        **more,
    )


def run_client(name: str, output: Path, resume: bool) -> dict[str, Any]:
    """Train one client, from the start or from its checkpoint, and return what can be compared."""
    model, train, evaluation = objects_of(name, resume)
    arguments = arguments_of(name, output, bf16=True)
    counter = StepCounter()
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=evaluation,
        compute_metrics=lambda output: {"right": right_share(output.predictions, output.label_ids)},
        callbacks=[counter],
    )
    checkpoint = str(output / name / f"checkpoint-{SAVE_AT}")
    trained = trainer.train(resume_from_checkpoint=checkpoint if resume else None)
    predicted = trainer.predict(evaluation)
    plain_model = trainer.accelerator.unwrap_model(trainer.model)
    by_hand = predict_by_hand(plain_model, evaluation)
    return {
        "steps": trained.global_step,
        "steps_run": counter.steps,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "rates": [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry],
        "weights": {name: fingerprint(value) for name, value in plain_model.state_dict().items()},
        "labels": predicted.label_ids.tolist(),
        "wanted_labels": evaluation.columns["labels"].tolist(),
        "right": predicted.metrics["test_right"],
        "right_by_hand": right_share(by_hand, evaluation.columns["labels"].numpy()),
        "loss": predicted.metrics["test_loss"],
        "losses_by_hand": [] if name == "gpt2" else losses(by_hand, evaluation.columns["labels"]),
        "prediction_gap": float(numpy.abs(predicted.predictions - by_hand).max()),
    }


def fingerprint(tensor: torch.Tensor) -> list[float]:
    """Return two sums that change with any value of the tensor and with their order."""
    values = tensor.double().flatten()
    return [values.sum().item(), (values * torch.arange(1, len(values) + 1)).sum().item()]


def predict_by_hand(model: PreTrainedModel, rows: Rows) -> numpy.ndarray:
    """Return the logits of all rows at once, outside the Trainer, in its precision."""
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=rows.columns["input_ids"], attention_mask=rows.columns["attention_mask"]).logits
    return logits.float().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    results: dict[str, Any] = {name: run_client(name, options.output, options.resume) for name in CLIENTS}
    state = accelerate.PartialState()
    results["package"] = str(Path(accelerate.__file__).resolve())
    results["world_size"] = state.num_processes
    stage = "resumed" if options.resume else "straight"
    (options.output / f"{stage}-{state.process_index}.json").write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
