"""What the programs share: tiny models and data of their own, and the file of what can be compared."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import accelerate

WORDS = ["<pad>", "<end>", "<unknown>", *(f"w{number}" for number in range(29))]
VOCABULARY = len(WORDS)
LENGTH = 12


def output_folder(**flags: str) -> argparse.Namespace:
    """Read the command line: the folder to write to, and flags with their help."""
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    for flag, text in flags.items():
        parser.add_argument(f"--{flag}", action="store_true", help=text)
    return parser.parse_args()


def write_results(output: Path, parts: dict[str, Any], name: str = "result") -> None:
    """Write what a program found, one file for each process, and leave the group of processes."""
    state = accelerate.PartialState()
    found = {"version": accelerate.__version__, "processes": state.num_processes, "parts": parts}
    output.mkdir(parents=True, exist_ok=True)
    (output / f"{name}-{state.process_index}.json").write_text(json.dumps(found, indent=1))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def files_of(folder: Path) -> list[str]:
    """Return the names of all files in a folder and below."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def fingerprint(model: torch.nn.Module) -> list[float]:
    """Return two sums that change with any weight and with their order."""
    values = torch.cat([value.detach().double().flatten() for _, value in sorted(model.state_dict().items())])
    return [values.sum().item(), (values * torch.linspace(1, 2, len(values), dtype=torch.float64)).sum().item()]


def history(trainer: Any, *names: str) -> dict[str, list[float]]:
    """Return the curves of these names that a Trainer logged."""
    log = trainer.state.log_history
    return {name: [entry[name] for entry in log if name in entry] for name in names}


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
        [3 + label, *torch.randint(5, VOCABULARY, (length,), generator=generator).tolist()]
        for label, length in zip(labels, lengths, strict=True)
    ]
    return Rows(input_ids=tokens, labels=labels)


def counting_rows(count: int, seed: int) -> Rows:
    """Make sequences of unequal length in which each token is the one before plus three."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for start, length in torch.randint(0, VOCABULARY, (count, 2), generator=generator).tolist():
        rows.append([3 + (start + 3 * place) % (VOCABULARY - 3) for place in range(6 + length % 7)])
    return Rows(input_ids=rows)


def tokenizer() -> Any:
    """Return a tokenizer whose words are w0 to w28."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>", model_max_length=64
    )


def tiny_bert(dropout: float = 0.0) -> Any:
    """Return a classifier of two classes."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
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
    return BertForSequenceClassification(config)


def tiny_llama(**options: Any) -> Any:
    """Return a language model of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64}
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **tokens, **heads, **options}))
