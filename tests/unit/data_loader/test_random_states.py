from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate._base.errors import CheckpointError
from accelerate.data_loader.random_states import check_random_states


def numpys(**changes: Any) -> tuple[Any, ...]:
    names = ("name", "words", "position", "has_gauss", "gauss")
    return tuple((dict(zip(names, numpy.random.get_state(), strict=True)) | changes).values())


def torchs(left: int, following: int) -> torch.Tensor:
    state = torch.get_rng_state().clone()
    state[8:12] = torch.tensor(list(left.to_bytes(4, "little", signed=True)), dtype=torch.uint8)
    state[16:24] = torch.tensor(list(following.to_bytes(8, "little", signed=True)), dtype=torch.uint8)
    return state


def of_algorithm(name: str, **changes: Any) -> dict[str, Any]:
    state = dict(getattr(numpy.random, name)(1).state)
    inner = {key: changes.pop(key) for key in list(changes) if key in state["state"]}
    return {**state, **changes, "state": {**state["state"], **inner}}


PYTHON = random.Random(1).getstate()
WRONG: list[tuple[str, Any]] = [
    ("numpy", numpys(position=2**31 - 2)),
    ("numpy", numpys(position=-5000)),
    ("numpy", numpys(position=625)),
    ("numpy", numpys(position=True)),
    ("numpy", numpys(words=numpy.zeros(624))),
    ("numpy", numpys(words=numpy.zeros(623, numpy.uint32))),
    ("numpy", numpys(words=[0] * 624)),
    ("numpy", numpys(has_gauss=2)),
    ("numpy", numpys(gauss="x")),
    ("numpy", numpys(name="PCG64")),
    ("numpy", numpys()[:3]),
    ("numpy", of_algorithm("MT19937", pos=-1)),
    ("numpy", None),
    ("0", numpys(position=-1)),
    ("0", list(numpys(position=-1))),
    ("0", of_algorithm("MT19937", pos=2**31 - 2)),
    ("0", {"bit_generator": "MT19937", "state": 5}),
    ("0", of_algorithm("Philox", buffer_pos=-9)),
    ("0", torchs(624, 624)),
    ("0", torch.zeros(16)),
    ("torch", torchs(624, 624)),
    ("torch", torchs(1, -1)),
    ("torch", torchs(0, 1)),
    ("torch", torch.zeros(8, dtype=torch.uint8)),
    ("torch", torch.get_rng_state().float()),
    ("torch", None),
    ("python", (3, (*PYTHON[1][:-1], -1), None)),
    ("python", (3, (-1, *PYTHON[1][1:]), None)),
    ("python", (3, PYTHON[1], "x")),
    ("python", (3, PYTHON[1])),
    ("python", 5),
]


@pytest.mark.parametrize(("name", "state"), WRONG)
def test_states_that_generators_must_not_have_are_refused(name: str, state: Any) -> None:
    with pytest.raises(CheckpointError, match=r"A file holds a random state .* that is none"):
        check_random_states({name: state}, "A file")


def test_what_generators_give_is_taken() -> None:
    for draws in range(0, 1300, 13):
        generator, other = torch.Generator().manual_seed(1), numpy.random.RandomState(1)
        torch.rand(draws, generator=generator)
        other.standard_normal(draws)
        own = random.Random(draws)
        own.gauss(0, 1)
        states = {"torch": generator.get_state(), "numpy": other.get_state(), "python": own.getstate()}
        check_random_states(states, "A file")
        check_random_states(dict(enumerate(states.values())), "A file")
    for name in ("MT19937", "Philox", "PCG64", "PCG64DXSM", "SFC64"):
        bits = numpy.random.Generator(getattr(numpy.random, name)(1))
        for _ in range(5):
            check_random_states({"0": bits.bit_generator.state}, "A file")
            bits.random()
    with pytest.raises(CheckpointError, match="where random states belong"):
        check_random_states([1], "A file")


class TestLoaderStates:
    @pytest.mark.parametrize(
        "change",
        [
            {"epoch": "x"},
            {"samples": -5},
            {"streams": 3},
            {"files": ["a"]},
            {"rounds": 1.5},
            {"base_seeds": 5},
            {"base_seeds": ["a"]},
            {"order": {"zz": 1}},
            {"order": 5},
            {"order": {"drawn": "x"}},
            {"order": {"entries": 5}},
            {"order": {"entries": [5]}},
            {"order": {"entries": [("a", {})]}},
            {"order": {"entries": [(3, {}), (1, {})]}},
            {"order": {"entries": [(-1, 5)]}},
            {"order": {"entries": [(-1, {"numpy": numpys(position=-5000)})]}},
            {"order": {"is_forked": True}},
            {"order": {"head": [1]}},
            {"generators": 5},
            {"generators": {"0": numpys(position=-5000)}},
        ],
    )
    def test_what_is_none_is_refused_before_anything_changes(self, change: dict[str, Any]) -> None:
        loader = Accelerator(cpu=True).prepare(DataLoader(torch.arange(8), batch_size=2, shuffle=True))
        next(iter(loader))
        state = loader.state_dict()
        with pytest.raises(CheckpointError, match="What load_state_dict was given holds"):
            loader.load_state_dict({**state, **change})
        with pytest.raises(CheckpointError, match="no state of a loader"):
            loader.load_state_dict({"_accelerate": [1, "epoch"]})
        loader.load_state_dict(state)
        assert len(list(loader)) == 3
