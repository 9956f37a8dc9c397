"""Weights stored in a small dtype and computed with in a larger one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .base import Arguments, ModelHook


class LayerwiseCastingHook(ModelHook):
    """Keep the weights of a module in `storage_dtype`, and in `compute_dtype` while its forward runs."""

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Cast the weights to the dtype of storage."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Cast the weights to the dtype of computing."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Cast the weights back."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output
