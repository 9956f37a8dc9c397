"""The value of an automatic decision together with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Choice(Generic[T]):
    """Hold what was decided and why, so that the decision can be logged and tested."""

    value: T
    reason: str

    def __str__(self) -> str:
        return f"{self.value} ({self.reason})"
