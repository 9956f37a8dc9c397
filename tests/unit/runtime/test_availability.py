"""Packages that the environment must ask for, and the switch of memory-saving loading."""

from __future__ import annotations

import pytest

from accelerate.config import env
from accelerate.runtime.availability import is_megatron_lm_available, is_rich_available
from accelerate.utils.fsdp_utils import disable_fsdp_ram_efficient_loading, enable_fsdp_ram_efficient_loading


def test_rich_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_ENABLE_RICH", raising=False)
    assert is_rich_available() is False
    monkeypatch.setenv("ACCELERATE_ENABLE_RICH", "1")
    assert is_rich_available() is True


def test_megatron_is_not_here_even_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "1")
    assert is_megatron_lm_available() is False


def test_memory_saving_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    for name in names:
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)
    enable_fsdp_ram_efficient_loading()
    assert [env.get(name) for name in names] == ["True", "True"]
    env.put("ACCELERATE_USE_FSDP", "false")
    enable_fsdp_ram_efficient_loading()
    assert env.get("ACCELERATE_USE_FSDP") == "false"
    disable_fsdp_ram_efficient_loading()
    assert [env.get(name) for name in names] == ["false", "False"]
    for name in names:
        env.drop(name)
