"""Train an embedding model of sentence-transformers on pairs, evaluate it, save it and load it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from shared import bert_config, files_of, history, run, sentences, tokenizer
from transformers import BertModel, set_seed

from accelerate import PartialState


def make_model(folder: Path) -> SentenceTransformer:
    """Return a tiny encoder with pooling, from a local folder."""
    with PartialState(cpu=True).main_process_first():
        if not folder.exists():
            set_seed(0)
            BertModel(bert_config(dropout=0.1)).save_pretrained(folder)
            tokenizer().save_pretrained(folder)
    encoder = Transformer(str(folder), max_seq_length=12)
    return SentenceTransformer(modules=[encoder, Pooling(32)], device="cpu")


def main(folder: Path) -> dict[str, Any]:
    count = 40
    first, second = sentences(count, seed=1), sentences(count, seed=2)
    scores = [float(one.split()[0] == other.split()[0]) for one, other in zip(first, second, strict=True)]
    rows = Dataset.from_dict({"first": first, "second": second, "score": scores})
    set_seed(0)
    model = make_model(folder / "base")
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder / "run"),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        seed=1,
    )
    trainer = SentenceTransformerTrainer(
        model, arguments, train_dataset=rows, loss=CosineSimilarityLoss(model), processing_class=model.tokenizer
    )
    trainer.train()
    evaluated = EmbeddingSimilarityEvaluator(first, second, scores)(model)
    found: dict[str, Any] = {**history(trainer, "loss"), "evaluated": evaluated}
    if PartialState().is_main_process:
        model.save(str(folder / "saved"))
        again = SentenceTransformer(str(folder / "saved"), device="cpu")
        found["same"] = bool((model.encode(first) == again.encode(first)).all())
        found["files"] = files_of(folder / "saved")
    return found


if __name__ == "__main__":
    run(main)
