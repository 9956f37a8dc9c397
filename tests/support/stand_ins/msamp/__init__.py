"""A stand-in for MS-AMP: `initialize` replaces linear layers and the optimizer, as that of the package does."""

from __future__ import annotations

import torch
from torch import nn


class FP8Linear(nn.Linear):
    """A linear layer whose weights are rounded to 8 bits."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rounded = self.weight.detach().to(torch.float8_e4m3fn).to(self.weight.dtype)
        return nn.functional.linear(inputs, self.weight + (rounded - self.weight).detach(), self.bias)


class LBAdamW(torch.optim.AdamW):
    """An optimizer with states of few bits."""

    opt_level = ""


def initialize(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, opt_level: str = "O1"
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Return a model and an optimizer that train in 8 bits."""
    for module in list(model.modules()):
        for child_name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                layer = FP8Linear(child.in_features, child.out_features, bias=child.bias is not None)
                layer.load_state_dict(child.state_dict())
                setattr(module, child_name, layer)
    if optimizer is None:
        return model, None
    made = LBAdamW(model.parameters(), lr=optimizer.param_groups[0]["lr"])
    made.opt_level = opt_level
    return model, made
