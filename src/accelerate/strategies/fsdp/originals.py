"""The parameters of a model as the user knows them, below the wrappers of FSDP."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from accelerate.parallel.unwrap import extract_model_from_parallel, plain_name

ORIGINALS = "_original_parameters"
"""Where a model that version 1 wrapped keeps what it had."""


@dataclass(frozen=True)
class Originals:
    """Names and shapes of parameters.

    Args:
        shapes: Name -> shape as a whole, in the order of the model.
        tied: The names of each parameter that has several.
    """

    shapes: dict[str, tuple[int, ...]]
    tied: list[list[str]]

    @classmethod
    def of(cls, model: nn.Module) -> Originals:
        """Look at a model that is not wrapped by version 1."""
        inner = extract_model_from_parallel(model, keep_torch_compile=False)
        shapes: dict[str, tuple[int, ...]] = {}
        names: dict[int, list[str]] = {}
        for path, parameter in inner.named_parameters(remove_duplicate=False):
            name = plain_name(path)
            shapes[name] = tuple(parameter.shape)
            names.setdefault(id(parameter), []).append(name)
        return cls(shapes, [aliases for aliases in names.values() if len(aliases) > 1])
