"""What is common to the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import serialization


@pytest.fixture(autouse=True)
def nothing_is_allowed() -> Iterator[None]:
    """Forget the classes that programs have let torch read: Megatron does so for the whole process once it is imported."""
    allowed = serialization.get_safe_globals()
    serialization.clear_safe_globals()
    yield
    serialization.add_safe_globals(allowed)
