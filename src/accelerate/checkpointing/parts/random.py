"""The random generators of a rank."""

from __future__ import annotations

import hashlib
import logging
import random
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch

from accelerate._base.errors import CheckpointError
from accelerate.checkpointing import names
from accelerate.checkpointing.folder import StagedFolder
from accelerate.checkpointing.parts.base import LoadOptions, read_torch
from accelerate.collectives.rng import set_seed
from accelerate.devices.base import DeviceBackend

_LOG = logging.getLogger(__name__)
_PYTHON, _NUMPY, _TORCH, _STEP = "random_state", "numpy_random_seed", "torch_manual_seed", "step"


class HasStep(Protocol):
    """What counts micro-batches."""

    step: int


class RandomPart:
    """The states of python's, numpy's, torch's and the device's generators, and the number of the micro-batch."""

    name = "random states"
    everywhere = True

    def __init__(self, counter: HasStep, rank: int, backend: DeviceBackend) -> None:
        self.counter = counter
        self.rank = rank
        self.backend = backend

    def snapshot(self, *, copy: bool) -> dict[str, Any]:
        states: dict[str, Any] = {
            _STEP: self.counter.step,
            _PYTHON: random.getstate(),
            _NUMPY: numpy.random.get_state(),
            _TORCH: torch.get_rng_state(),
        }
        device = self.backend.get_rng_states()
        if device is not None:
            states[self.backend.rng_key] = device
        return states

    def write(self, payload: Any, folder: StagedFolder) -> None:
        folder.write_torch(names.random_file(self.rank), payload)

    def read(self, folder: Path, options: LoadOptions) -> dict[str, Any] | None:
        path = folder / names.random_file(self.rank)
        try:
            if path.is_file():
                states: dict[str, Any] = read_torch(path, options, map_location="cpu")
                return states
            return self._derive(folder, options)
        except CheckpointError as error:
            if options.manifest is not None:
                raise
            # Another library wrote it, perhaps with generators that are not known here.
            _LOG.warning("Random states are not restored: %s", error)
            return None

    def _derive(self, folder: Path, options: LoadOptions) -> dict[str, Any] | None:
        """Return the states of a rank that the saved run did not have."""
        saved = sorted(folder.glob(names.random_file(0).replace("0", "[0-9]*")))
        if not saved:
            _LOG.warning("Random states are not restored: %s has none.", folder)
            return None
        found = [read_torch(path, options, map_location="cpu") for path in saved]
        states: dict[str, Any] = found[self.rank % len(found)]
        if all(torch.equal(states[_TORCH], other[_TORCH]) for other in found):
            return states  # the ranks draw alike, and so does this one
        text = f"{self.rank}:".encode() + states[_TORCH].numpy().tobytes()
        seed = int.from_bytes(hashlib.sha256(text).digest()[:4], "little")
        _LOG.warning(
            "The checkpoint %s was saved by %d processes: rank %d has no random states in it, and starts with seed %d, "
            "made from them.",
            folder,
            len(found),
            self.rank,
            seed,
        )
        return {_STEP: states[_STEP], "seed": seed}

    def restore(self, payload: dict[str, Any] | None) -> None:
        if payload is None:
            return
        self.counter.step = payload.get(_STEP, self.counter.step)
        if "seed" in payload:
            set_seed(payload["seed"])
            return
        random.setstate(payload[_PYTHON])
        numpy.random.set_state(payload[_NUMPY])
        torch.set_rng_state(payload[_TORCH])
        if self.backend.rng_key in payload:
            self.backend.set_rng_states(payload[self.backend.rng_key])
