"""Seed the random generators, and make ranks agree on their states."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy
import torch

from accelerate._base.enums import RNGType
from accelerate._base.errors import ConfigurationError
from accelerate.collectives.base import communicator
from accelerate.devices import registry
from accelerate.runtime import current


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed python, numpy, torch and the device.

    Args:
        seed: The seed.
        device_specific: Add the rank, so that processes draw different numbers.
        deterministic: Make torch use only deterministic algorithms.
    """
    if device_specific:
        seed += current.runtime().rank
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    active = current.active()
    backend = active.backend if active is not None else registry.default().value
    backend.manual_seed_all(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(rng_type: RNGType | str | None = None, generator: torch.Generator | None = None) -> None:
    """Give every rank the state that rank 0 has of one random generator.

    Args:
        rng_type: "torch", "generator" or the name of a device type.
        generator: The generator, where `rng_type` is "generator".

    Raises:
        ConfigurationError: If there is no such generator here.
    """
    kind = rng_name(rng_type)
    if kind == RNGType.GENERATOR.value:
        if generator is None:
            raise ConfigurationError(
                "rng_type='generator' was given without a generator, so there is nothing to synchronise. "
                "Pass the generator as the second argument."
            )
        generator.set_state(_from_first(generator.get_state()))
    elif kind == RNGType.TORCH.value:
        torch.set_rng_state(_from_first(torch.get_rng_state()))
    else:
        backend = registry.get(kind)
        state = backend.get_rng_state() if backend.is_available() else None
        if state is None:
            raise ConfigurationError(
                f"rng_type={kind!r} was given, but this process has no such device. Leave it out of rng_types."
            )
        backend.set_rng_state(_from_first(state))


def _from_first(state: torch.Tensor) -> torch.Tensor:
    comm = communicator()
    if comm.world_size == 1:
        return state
    device = current.runtime().device
    return comm.broadcast(state.to(device), source=0).cpu()


def rng_name(rng_type: RNGType | str | None) -> str:
    """Return the name of a random generator: one of `RNGType`, or a device type that a package has taught torch.

    Raises:
        ConfigurationError: If there is no such generator.
    """
    name = rng_type.value if isinstance(rng_type, RNGType) else str(rng_type)
    if name not in RNGType.list():
        try:
            known = name != registry.CPU.type and registry.get(name).type == name
        except ConfigurationError:
            known = False
        if not known:
            raise ConfigurationError(
                f"rng_type={rng_type!r} is not a random generator. Write one of {', '.join(RNGType.list())}."
            )
    return name


def synchronize_rng_states(rng_types: Iterable[RNGType | str], generator: torch.Generator | None = None) -> None:
    """Give every rank the states that rank 0 has of several random generators."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)
