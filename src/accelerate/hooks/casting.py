"""Weights stored in a small dtype and computed with in a larger one."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from accelerate._base import constants
from accelerate.hooks.base import Arguments, ModelHook, add_hook_to_module


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


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Store the weights of linear and convolution layers in a small dtype, and compute in a larger one.

    Args:
        skip_modules_pattern: Regular expressions; modules with a match in their dotted name keep their dtype.
        skip_modules_classes: Classes of modules that keep their dtype, with all below them.
    """
    patterns = (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    skipped = skip_modules_classes or ()

    def visit(current: nn.Module, name: str) -> None:
        if isinstance(current, skipped) or any(re.search(pattern, name) for pattern in patterns):
            return
        if isinstance(current, constants.SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
            hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
            add_hook_to_module(current, hook, append=True)
            return
        for key, child in current.named_children():
            visit(child, f"{name}.{key}" if name else key)

    visit(module, "")
