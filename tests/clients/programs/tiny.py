"""What the client programs share: tiny models, a tokenizer and texts, and the file that tells what a run gave."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

import accelerate

WORDS = [
    "the",
    "cat",
    "dog",
    "bird",
    "sat",
    "ran",
    "flew",
    "on",
    "under",
    "over",
    "mat",
    "tree",
    "house",
    "red",
    "green",
    "blue",
    "big",
    "small",
    "was",
    "is",
    "and",
]
SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "bos_token": "<s>"}
CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of a few words."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL.values(), *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT, **SPECIAL)


def make_llama(seed: int = 0, **options: Any) -> LlamaForCausalLM:
    """Return a language model of random weights."""
    set_seed(seed)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "vocab_size": len(SPECIAL) + len(WORDS),
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 3,
    }
    return LlamaForCausalLM(LlamaConfig(**(sizes | options)))


def sentences(count: int, seed: int = 3, length: int = 6) -> list[str]:
    """Return sentences, each with a rhythm that can be learned."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(WORDS), (count,), generator=generator).tolist()
    return [" ".join(WORDS[(start + 3 * step) % len(WORDS)] for step in range(length)) for start in starts]


def run(program: Callable[[Path], dict[str, Any]]) -> None:
    """Run a program with the folder that the command line names, and write what it gave, one file for each process."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    parts = program(folder)
    rank, processes = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    found = {"version": accelerate.__version__, "processes": processes, "parts": parts}
    (folder / f"result-{rank}.json").write_text(json.dumps(found, indent=1))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def history(trainer: Any, name: str = "loss") -> list[float]:
    """Return a number of each step that a trainer has logged."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def files(folder: Path) -> list[str]:
    """Return the names of the files in a folder and below it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
