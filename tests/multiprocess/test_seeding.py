"""Ranks that draw different numbers, and ranks that agree again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.processes import run_group

from accelerate import PartialState
from accelerate.collectives.rng import set_seed, synchronize_rng_state, synchronize_rng_states
from accelerate.runtime import current

pytestmark = pytest.mark.multiprocess


def draws() -> dict[str, Any]:
    found: dict[str, Any] = {}
    set_seed(7, device_specific=True)  # starts the process, to know its rank
    assert current.active() is not None
    found["specific"] = torch.rand(2).tolist()
    rank = PartialState().process_index
    generator = torch.Generator().manual_seed(100 + rank)
    synchronize_rng_state("generator", generator)
    found["generator"] = torch.rand(2, generator=generator).tolist()
    torch.manual_seed(rank)
    synchronize_rng_states(["torch"])
    found["torch"] = torch.rand(2).tolist()
    set_seed(7)
    found["same"] = torch.rand(2).tolist()
    return found


def test_draws_of_three_ranks() -> None:
    found = run_group(draws, 3)
    expected = [torch.rand(2, generator=torch.Generator().manual_seed(7 + rank)).tolist() for rank in range(3)]
    assert [result["specific"] for result in found] == expected
    for name, seed in (("generator", 100), ("torch", 0), ("same", 7)):
        first = torch.rand(2, generator=torch.Generator().manual_seed(seed)).tolist()
        assert [result[name] for result in found] == [first] * 3
