"""Small files in Megatron's indexed format, what reads them, and a tokenizer for their tokens."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from accelerate.config.plugins.megatron import MegatronLMPlugin
from accelerate.strategies.megatron.datasets import MegatronLMDummyDataLoader, build_loaders

with warnings.catch_warnings():
    # torch and megatron-core warn at their import of what is deprecated or not installed.
    warnings.simplefilter("ignore")
    for name in ("gpt", "bert", "t5"):
        pytest.importorskip(f"megatron.core.datasets.{name}_dataset")
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

EOD, VOCABULARY, LENGTH, SEED = 3, 60, 16, 7
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIAL, *(f"{'##' if number % 3 == 0 else ''}word{number}" for number in range(VOCABULARY - len(SPECIAL)))]


def write(prefix: Path, documents: list[list[list[int]]]) -> str:
    """Write documents, each a list of sentences, and return their prefix."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32)
    for document in documents:
        for sentence in document:
            builder.add_item(torch.tensor(sentence))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def texts(count: int, sentences: int = 1, seed: int = 0) -> list[list[list[int]]]:
    """Return documents of random tokens and lengths, which end with one token of their own."""
    random = numpy.random.RandomState(seed)

    def sentence() -> list[int]:
        return random.randint(len(SPECIAL), VOCABULARY, random.randint(4, 30)).tolist()

    made = [[sentence() for _ in range(sentences)] for _ in range(count)]
    return [[*document[:-1], [*document[-1], EOD]] for document in made]


def word_tokenizer(words: list[str] = WORDS, **special: str) -> PreTrainedTokenizerFast:
    model = models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    named = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "pad", "cls", "sep", "mask")}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **{**named, **special})


class Eod:
    """The part of Megatron's tokenizers that GPT asks for."""

    unique_identifiers = {"class": "Eod"}
    vocab_size = VOCABULARY
    eod = EOD


def plugin(**changes: Any) -> MegatronLMPlugin:
    return MegatronLMPlugin(**{"train_iters": 6, "eval_iters": 2, "eval_interval": 3, **changes})


def loaders(
    dataset: dict[str, Any], settings: MegatronLMPlugin | None = None, family: Any = "gpt", **changes: Any
) -> tuple[DataLoader[Any] | None, ...]:
    dummy = MegatronLMDummyDataLoader(**{"seq_length": LENGTH, "seed": SEED, "num_workers": 0, **dataset})
    options = {"micro_batch_size": 2, "num_replicas": 1, "family": family, **changes}
    return build_loaders(dummy, settings or plugin(), **options)


def rows(loader: Any, key: str = "tokens") -> list[list[int]]:
    return [row for batch in loader for row in batch[key].tolist()]
