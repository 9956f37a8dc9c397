"""Random generators of a single process."""

from __future__ import annotations

import random

import numpy
import pytest
import torch

from accelerate import PartialState
from accelerate._base.errors import ConfigurationError
from accelerate.collectives.rng import set_seed, synchronize_rng_state, synchronize_rng_states


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


@pytest.mark.parametrize("seed", [0, 42, 2**32 + 7])
def test_a_seed_repeats_all_generators(seed: int) -> None:
    set_seed(seed)
    first = draw()
    assert draw() != first
    set_seed(seed)
    assert draw() == first
    set_seed(seed + 1)
    assert draw() != first


def test_device_specific_adds_the_rank() -> None:
    set_seed(5)
    plain = draw()
    set_seed(5, device_specific=True)
    assert draw() == plain  # rank 0


def test_deterministic() -> None:
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        set_seed(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_alone_a_synchronised_state_stays() -> None:
    PartialState()
    generator = torch.Generator().manual_seed(3)
    expected = torch.Generator().manual_seed(3)
    state = torch.get_rng_state()
    synchronize_rng_states(["torch", "generator"], generator)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(generator.get_state(), expected.get_state())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nonsense", "rng_type='nonsense' is not a random generator. Write one of torch"),
        (None, "rng_type=None is not"),
        ("generator", "without a generator"),
        ("cuda", "this process has no such device"),
        ("meta", "rng_type='meta' was given, but this process has no such device"),  # torch knows it, RNGType does not
        ("cpu", "rng_type='cpu' is not a random generator"),
        ("xla", "rng_type='xla'"),
    ],
)
def test_a_generator_that_is_not_here(kind: str | None, message: str) -> None:
    PartialState()
    with pytest.raises(ConfigurationError, match=message):
        synchronize_rng_state(kind)
