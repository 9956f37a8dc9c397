"""Linear layers that torchao trains in 8-bit floats, and which layers of a model become such ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import nn

from accelerate._base.imports import require, torchao_required

if TYPE_CHECKING:
    from torchao.float8.config import Float8LinearConfig

_TILE = 16
"""The matrix units that multiply 8-bit floats take sizes that are multiples of this."""


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of the first and the last linear layer of a model, in the order of its modules."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: Sequence[str | None]) -> bool:
    """Return whether a layer may become one in 8-bit floats: it is not listed, and its sizes are multiples of 16.

    Args:
        fqn: Its name in the model.
        layers_to_filter: The names of layers that stay as they are.
    """
    if not isinstance(module, nn.Linear):
        return True
    return fqn not in layers_to_filter and module.in_features % _TILE == 0 and module.out_features % _TILE == 0


@torchao_required
def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Return whether a layer may become one in 8-bit floats: it is not the first or last linear layer of `module`."""
    return filter_linear_layers(module, fqn, find_first_last_linear_layers(module))


@torchao_required
def has_ao_layers(model: nn.Module) -> bool:
    """Return whether a model has layers that torchao trains in 8-bit floats."""
    float8 = require("torchao.float8.float8_linear", why="Finding layers in 8-bit floats")
    return any(isinstance(module, float8.Float8Linear) for module in model.modules())


@torchao_required
def convert_model_to_fp8_ao(
    model: nn.Module,
    config: Float8LinearConfig | None = None,
    module_filter_func: Callable[[nn.Module, str], bool] | None = None,
) -> None:
    """Replace linear layers, in place, by ones that compute in 8-bit floats.

    Args:
        config: How torchao scales; its own default if not given.
        module_filter_func: Called with a layer and its name: whether it is replaced. Without it, all but the first and
            the last one are, if their sizes allow.
    """
    float8 = require("torchao.float8", why="Training in 8-bit floats", extra="quantization")
    chosen = module_filter_func or functools.partial(
        filter_linear_layers, layers_to_filter=find_first_last_linear_layers(model)
    )
    float8.convert_to_float8_training(model, module_filter_fn=chosen, config=config)
