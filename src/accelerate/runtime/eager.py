"""Code that the compiler must not look into."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def eager_only(function: F) -> F:
    """Keep torch.compile out of a function, for instance one that changes the parameters of a module.

    `torch.compiler.disable` as a decorator would import the compiler, which takes a second, for everybody.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
