"""What the programs share: tiny models, words and data of their own, and the file of what a run gave."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)

import accelerate

SPECIAL = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unknown>", "bos_token": "<begin>"}
# fmt: off
WORDS = [
    "the", "a", "cat", "dog", "bird", "fish", "sat", "ran", "flew", "swam", "on", "under", "over", "behind",
    "mat", "tree", "house", "lake", "red", "green", "blue", "big", "small", "was", "is", "and", "or", "not",
]
# fmt: on
VOCABULARY = len(SPECIAL) + len(WORDS)
FIRST_WORD = len(SPECIAL)
LENGTH = 12
CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def run(program: Callable[[Path], dict[str, Any]]) -> None:
    """Run a program with the folder that the command line names, and write what it gave, one file for each process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    parts = program(folder)
    state = accelerate.PartialState()
    found = {"version": accelerate.__version__, "processes": state.num_processes, "parts": parts}
    (folder / f"result-{state.process_index}.json").write_text(json.dumps(found, indent=1))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def attempt(part: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Return what a part of a program gave, or its error: what one release cannot do must not hide the rest."""
    try:
        return part(*arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        return {"error": type(error).__name__}


# --- what can be compared ---------------------------------------------------------------------------------------------


def files_of(folder: Path) -> list[str]:
    """Return the names of all files in a folder and below."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def fingerprint(model: torch.nn.Module) -> list[float]:
    """Return two sums that change with any weight and with their order."""
    return fingerprint_of(model.state_dict())


def fingerprint_of(weights: dict[str, torch.Tensor]) -> list[float]:
    """Return two sums that change with any of these weights and with their order."""
    values = torch.cat([value.detach().double().flatten() for _, value in sorted(weights.items())])
    return [values.sum().item(), (values * torch.linspace(1, 2, len(values), dtype=torch.float64)).sum().item()]


def history(trainer: Any, *names: str) -> dict[str, list[float]]:
    """Return the curves of these names that a Trainer logged."""
    log = trainer.state.log_history
    return {name: [entry[name] for entry in log if name in entry] for name in names}


# --- data -------------------------------------------------------------------------------------------------------------


class Rows(Dataset[dict[str, Any]]):
    """A table of equally long columns, one dictionary a row."""

    def __init__(self, **columns: Any) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self.columns.items()}


def labelled_rows(count: int, seed: int) -> Rows:
    """Make sequences of unequal length whose first token tells their class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (count,), generator=generator).tolist()
    lengths = torch.randint(4, LENGTH, (count,), generator=generator).tolist()
    tokens = [
        [FIRST_WORD + label, *torch.randint(FIRST_WORD + 2, VOCABULARY, (length,), generator=generator).tolist()]
        for label, length in zip(labels, lengths, strict=True)
    ]
    return Rows(input_ids=tokens, labels=labels)


def counting_rows(count: int, seed: int) -> Rows:
    """Make sequences of unequal length in which each token is the one before plus three."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for start, length in torch.randint(0, VOCABULARY, (count, 2), generator=generator).tolist():
        rows.append([FIRST_WORD + (start + 3 * place) % len(WORDS) for place in range(6 + length % 7)])
    return Rows(input_ids=rows)


def sentences(count: int, seed: int = 3, length: int = 6) -> list[str]:
    """Make sentences, each with a rhythm that can be learned."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(WORDS), (count,), generator=generator).tolist()
    return [" ".join(WORDS[(start + 3 * step) % len(WORDS)] for step in range(length)) for start in starts]


# --- models -----------------------------------------------------------------------------------------------------------


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of a few words."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL.values(), *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=CHAT, model_max_length=64, **SPECIAL)


def bert_config(dropout: float = 0.0) -> BertConfig:
    """Return the sizes of a tiny encoder."""
    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH + 4,
        num_labels=2,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )


def tiny_bert(seed: int = 0, dropout: float = 0.0) -> BertForSequenceClassification:
    """Return a classifier of two classes, with the random weights of a seed."""
    set_seed(seed)
    return BertForSequenceClassification(bert_config(dropout))


def llama_config(**options: Any) -> LlamaConfig:
    """Return the sizes of a tiny language model."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaConfig(**{**sizes, **tokens, **heads, **options})


def tiny_llama(seed: int = 0, **options: Any) -> LlamaForCausalLM:
    """Return a language model with the random weights of a seed."""
    set_seed(seed)
    return LlamaForCausalLM(llama_config(**options))
