"""Write an object to a file once per run, and read one without running code from it."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from os import PathLike, fspath
from typing import IO, Any

import numpy
import torch
from safetensors.torch import save_file
from torch.serialization import safe_globals

from accelerate._base.errors import WrongTypeError
from accelerate.offload.safetensors_format import clean_state_dict_for_safetensors
from accelerate.runtime import current

TORCH_SAFE_GLOBALS: list[Any] = [
    # What a pickled numpy random state is made of.
    numpy.zeros(0).__reduce__()[0],
    numpy.ndarray,
    codecs.encode,
    numpy.dtype,
    type(numpy.dtype(numpy.uint32)),
]
"""The types beyond tensors that `load` accepts in a file."""


def save(
    obj: Any, f: str | PathLike[str] | IO[bytes], save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Write an object to a file, on the main process only.

    Args:
        obj: What to save; a flat mapping of names to tensors with `safe_serialization`.
        f: Path or open file.
        save_on_each_node: Write on the first process of every machine.
        safe_serialization: Write safetensors instead of a torch file.

    Raises:
        WrongTypeError: If `safe_serialization` is asked for something that is not a mapping of tensors.
    """
    runtime = current.runtime()
    if (runtime.local_rank if save_on_each_node else runtime.rank) != 0:
        return
    if not safe_serialization:
        torch.save(obj, f)
        return
    if not isinstance(obj, Mapping) or not all(isinstance(value, torch.Tensor) for value in obj.values()):
        raise WrongTypeError(
            f"save(safe_serialization=True) was given a {type(obj).__name__}, but safetensors holds only a flat mapping "
            "of names to tensors. Pass a state dict, or write safe_serialization=False."
        )
    if not isinstance(f, str | PathLike):
        raise WrongTypeError(
            f"save(safe_serialization=True) was given {f!r}, but safetensors are written to a path. Pass a path."
        )
    save_file(clean_state_dict_for_safetensors(dict(obj)), fspath(f), metadata={"format": "pt"})


def load(f: str | PathLike[str] | IO[bytes], map_location: Any = None, **kwargs: Any) -> Any:
    """Read a torch file without running code from it.

    `weights_only` is True unless the caller says otherwise; numpy arrays, as in a saved random state, are accepted.
    """
    kwargs.setdefault("weights_only", True)
    with safe_globals(TORCH_SAFE_GLOBALS):
        return torch.load(f, map_location=map_location, **kwargs)
