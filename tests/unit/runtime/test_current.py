"""The home of global state: it starts on demand and forgets on reset."""

from __future__ import annotations

from accelerate.runtime import current
from accelerate.runtime.gradient_clock import GradientState
from accelerate.runtime.start import start
from accelerate.state import AcceleratorState, PartialState


def test_a_runtime_starts_on_demand_and_once() -> None:
    assert current.active() is None
    found = current.runtime()
    assert current.runtime() is current.active() is start(cpu=True) is found
    assert (found.rank, found.world_size, found.is_distributed, found.group_backend) == (0, 1, False, None)


def test_remembered_objects_live_until_the_reset() -> None:
    made: list[object] = []

    def make() -> object:
        made.append(object())
        return made[-1]

    assert current.remember("key", make) is current.remember("key", make)
    current.forget("key")
    assert current.remember("key", make) is made[1]
    current.forget_all()
    assert current.remember("key", make) is made[2]
    current.reset()
    assert current.remember("key", make) is made[3]
    assert len(made) == 4


def test_reset_empties_the_very_dictionaries() -> None:
    partial = PartialState()
    GradientState()
    current.ACCELERATOR["made"] = True
    assert PartialState._shared_state is partial.__dict__ is current.PARTIAL
    current.reset()
    assert PartialState._shared_state == AcceleratorState._shared_state == GradientState._shared_state == {}
    assert PartialState._shared_state is current.PARTIAL
    assert current.active() is None


def test_a_number_drawn_before_the_start_does_not_look_like_a_start() -> None:
    assert [current.next_number("a"), current.next_number("a"), current.next_number("b")] == [1, 2, 1]
    assert PartialState().num_processes == 1
