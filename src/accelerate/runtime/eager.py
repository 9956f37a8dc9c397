"""Code that the compiler must not look into."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def eager_only(function: Callable[P, R]) -> Callable[P, R]:
    """Keep torch.compile out of a function, for instance one that changes the parameters of a module.

    `torch.compiler.disable` as a decorator would import the compiler, which takes a second, for everybody.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        runs = torch.compiler.disable(function) if torch.compiler.is_compiling() else function
        return runs(*args, **kwargs)

    return call
