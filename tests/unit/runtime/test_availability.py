"""Packages that the environment must ask for."""

from __future__ import annotations

import pytest

from accelerate._base.imports import is_package_available
from accelerate.runtime.availability import is_megatron_lm_available, is_rich_available


def test_rich_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_ENABLE_RICH", raising=False)
    assert is_rich_available() is False
    monkeypatch.setenv("ACCELERATE_ENABLE_RICH", "1")
    assert is_rich_available() is True


def test_megatron_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_USE_MEGATRON_LM", raising=False)
    assert is_megatron_lm_available() is False
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "1")
    assert is_megatron_lm_available() is is_package_available("megatron.core")
