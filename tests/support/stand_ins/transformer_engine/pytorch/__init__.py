"""Layers and contexts for PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

_recipes: list[Any] = []
"""The recipes of the regions that are entered, the innermost last; None for one that is switched off."""


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    if not _recipes or _recipes[-1] is None:
        return tensor
    rounded = tensor.detach().to(torch.float8_e4m3fn).to(tensor.dtype)
    return tensor + (rounded - tensor).detach()  # gradients pass


class Linear(nn.Module):
    """`torch.nn.Linear` that computes in 8 bits where it is asked to; it is no subclass of that."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.weight = nn.Parameter(torch.zeros(out_features, in_features, dtype=params_dtype, device=device))
        empty = torch.zeros(out_features if bias else 0, dtype=params_dtype, device=device)
        if bias:
            self.bias = nn.Parameter(empty)
        else:
            self.bias = empty  # as in the original: no parameter, and not None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(_rounded(inputs), _rounded(self.weight), self.bias if self.use_bias else None)


class LayerNorm(nn.Module):
    """`torch.nn.LayerNorm`; it is no subclass of that."""

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...],
        eps: float = 1e-5,
        *,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__()
        self.shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(self.shape, dtype=params_dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(self.shape, dtype=params_dtype, device=device))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(inputs, self.shape, self.weight, self.bias, self.eps)


class TransformerLayer(nn.Module):
    """A block of the package's own."""

    def __init__(self, hidden_size: int, device: torch.device | str = "cuda") -> None:
        super().__init__()
        self.norm, self.linear = LayerNorm(hidden_size, device=device), Linear(hidden_size, hidden_size, device=device)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.linear(self.norm(inputs))


@contextmanager
def autocast(
    enabled: bool = True, calibrating: bool = False, recipe: Any = None, amax_reduction_group: Any = None
) -> Iterator[None]:
    """Compute in 8 bits."""
    _recipes.append(recipe if enabled else None)
    try:
        yield
    finally:
        _recipes.pop()


def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Any = None, fp8_group: Any = None
) -> AbstractContextManager[None]:
    """Compute in 8 bits: the older name."""
    warnings.warn("fp8_autocast is deprecated. Use autocast.", DeprecationWarning, stacklevel=2)
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Say whether the device scales in blocks."""
    return (True, "") if return_reason else True
