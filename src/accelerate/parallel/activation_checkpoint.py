"""Compute activations of blocks again in the backward pass instead of keeping them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_INNER = "_checkpoint_wrapped_module"


def inner_block(module: torch.nn.Module) -> torch.nn.Module:
    """Return the block inside a checkpoint wrapper; another module comes back as it is."""
    # Children are read from the dictionary: the wrapper passes unknown names on to the block.
    while _INNER in module._modules:
        module = module.get_submodule(_INNER)
    return module


def checkpoint_blocks(model: torch.nn.Module, names: Iterable[str], *, offload: bool = False) -> torch.nn.Module:
    """Wrap blocks so that their activations are not kept; returns the same model.

    Names in state dicts do not change. A block that is wrapped already stays as it is.

    Args:
        names: Dotted names of the blocks.
        offload: Keep what enters a block on the CPU until the backward pass.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

    for name in names:
        block = model.get_submodule(name)
        if block is not inner_block(block):
            continue
        wrapped = checkpoint_wrapper(block)
        parent, _, child = name.rpartition(".")
        setattr(inner_block(model.get_submodule(parent)), child, offload_wrapper(wrapped) if offload else wrapped)
    return model
