"""What the tests of Megatron's parts share."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from tests.support.processes import close_process_group


@pytest.fixture
def alone() -> Iterator[None]:
    """Take back what Megatron leaves: variables, and a group of this process; it warns of calls of its own."""
    with patch.dict(os.environ), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="megatron")
        yield
    close_process_group()
