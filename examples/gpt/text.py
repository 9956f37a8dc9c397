"""Text to learn from: the sources of Python's own standard library, byte by byte."""

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import TensorDataset


def standard_library(megabytes: float = 1.0) -> torch.Tensor:
    """Return the first bytes of the library's modules, in alphabetical order."""
    wanted = int(megabytes * 2**20)
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= wanted:
            break
    return torch.frombuffer(bytearray(text[:wanted]), dtype=torch.uint8).long()


def sequences(text: torch.Tensor, length: int) -> TensorDataset:
    """Return the text in pieces: what the model sees, and the same one byte on, which it is to foretell."""
    count = (len(text) - 1) // length
    return TensorDataset(
        text[: count * length].view(count, length).clone(), text[1 : count * length + 1].view(count, length).clone()
    )
