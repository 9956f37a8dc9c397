"""A task small enough to be trained in a test: a line through points."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class RegressionDataset:
    """Points near the line `y = a x + b`, as dictionaries of `x` and `y`.

    Args:
        seed: Makes the same points each time.
    """

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        generator = np.random.default_rng(seed)
        self.length = length
        self.x = generator.normal(size=(length,)).astype(np.float32)
        self.y = (a * self.x + b + generator.normal(scale=0.1, size=(length,))).astype(np.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": self.x[i], "y": self.y[i]}


class RegressionModel(torch.nn.Module):
    """A line with two parameters.

    Args:
        a: The slope to start from.
        b: The height at zero to start from.
        double_output: Accepted and not used.
    """

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(a).float())
        self.b = torch.nn.Parameter(torch.tensor(b).float())

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return the height of the line at each x."""
        return None if x is None else x * self.a + self.b
