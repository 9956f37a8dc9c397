"""The state objects of a single process: shared values, reset, and what contradicts."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from accelerate import Accelerator, PartialState
from accelerate._base.errors import ConfigurationError
from accelerate.config.env import patch_environment
from accelerate.config.plugins.training import GradientAccumulationPlugin
from accelerate.runtime import current
from accelerate.state import AcceleratorState, DistributedType, GradientState, ThreadLocalSharedDict, is_initialized


def test_a_single_process() -> None:
    state = PartialState()
    assert (state.process_index, state.local_process_index, state.num_processes) == (0, 0, 1)
    assert (state.device, state.default_device) == (torch.device("cpu"), torch.device("cpu"))
    assert (state.distributed_type, state.backend, state.debug) == (DistributedType.NO, None, False)
    assert state.is_main_process
    assert state.is_local_main_process
    assert state.is_last_process
    assert not state.use_distributed
    assert not state.fork_launched
    state.wait_for_everyone()
    state.set_device()
    state.destroy_process_group()
    assert "Num processes: 1" in repr(state)
    with state.main_process_first(), state.local_main_process_first():
        pass
    with state.split_between_processes([1, 2, 3]) as mine:
        assert mine == [1, 2, 3]


def test_instances_show_the_same_values() -> None:
    first, second = PartialState(), PartialState(cpu=True)
    assert first.__dict__ is second.__dict__
    first.note = "seen"
    assert second.note == PartialState().note == "seen"
    assert not hasattr(second, "other")


def test_attributes_of_an_accelerator_state_are_shared() -> None:
    state = Accelerator().state
    state.note = "seen"
    assert AcceleratorState().note == "seen"
    assert (AcceleratorState().device, AcceleratorState().num_processes) == (torch.device("cpu"), 1)
    assert "Mixed precision type: no" in repr(state)


def test_reset_empties_and_the_next_instance_starts_anew() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    partial = PartialState()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert PartialState._shared_state == AcceleratorState._shared_state == {}
    assert not partial.initialized
    assert not is_initialized()
    assert Accelerator(mixed_precision="no").mixed_precision == "no"
    assert accelerator.mixed_precision == "no"  # a view of what is in force, as every state is


def test_another_accelerator_with_other_settings_after_a_reset() -> None:
    first = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=4, cpu=True)
    first.prepare(torch.nn.Linear(1, 1))
    first.reset()
    assert PartialState._shared_state == AcceleratorState._shared_state == GradientState._shared_state == {}
    assert not first._models
    second = Accelerator()
    assert (second.mixed_precision, second.gradient_accumulation_steps, second._models) == ("no", 1, [])


OLD: list[Any] = [
    lambda old: old.device,
    lambda old: old.process_index,
    lambda old: old.num_processes,
    lambda old: old.is_main_process,
    lambda old: old.distributed_type,
    lambda old: old.mixed_precision,
    lambda old: old.sync_gradients,
    lambda old: old.gradient_accumulation_steps,
    lambda old: old.state.backend,
    lambda old: old.print("nobody"),
]


@pytest.mark.parametrize("use", OLD)
def test_an_accelerator_from_before_the_reset_says_so(use: Any) -> None:
    old = Accelerator()
    old.reset()
    with pytest.raises(AttributeError, match=r"the state was reset.*Make a new Accelerator\(\)"):
        use(old)


def test_a_partial_state_from_before_the_reset_says_so() -> None:
    old = PartialState()
    PartialState._reset_state()
    with pytest.raises(AttributeError, match="the state was reset"):
        _ = old.device
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = old.nonsense  # type: ignore[attr-defined]


def test_an_accelerator_state_needs_an_accelerator() -> None:
    PartialState()
    with pytest.raises(ConfigurationError, match="before any Accelerator"):
        AcceleratorState()
    assert AcceleratorState._shared_state == {}
    assert not is_initialized()
    Accelerator()
    assert is_initialized()
    assert AcceleratorState().initialized


def test_settings_that_contradict_what_is_in_force() -> None:
    Accelerator(mixed_precision="bf16")
    Accelerator(mixed_precision="bf16")
    Accelerator()
    with pytest.raises(ConfigurationError, match=r"mixed_precision='fp16'.*already uses 'bf16'"):
        Accelerator(mixed_precision="fp16")
    with pytest.raises(ConfigurationError, match="already uses 'bf16'"):
        AcceleratorState(mixed_precision="no")
    Accelerator(cpu=True)
    current.ACCELERATOR["device"] = torch.device("meta")
    with pytest.raises(ConfigurationError, match="cpu=True was given, but this process already runs on meta"):
        Accelerator(cpu=True)


def test_the_number_format_comes_from_the_environment() -> None:
    with patch_environment(accelerate_mixed_precision="BF16"):
        assert Accelerator().mixed_precision == "bf16"
    current.reset()
    with patch_environment(accelerate_mixed_precision="half"), pytest.raises(ConfigurationError, match="'half'"):
        Accelerator()
    assert not is_initialized()


@pytest.mark.parametrize(("variable", "value", "expected"), [("ACCELERATE_USE_CPU", "yes", "cpu"), ("X", "1", "cpu")])
def test_device_from_the_environment(variable: str, value: str, expected: str) -> None:
    with patch_environment(**{variable: value}):
        assert PartialState().device == torch.device(expected)


def test_checked_mode_from_the_environment() -> None:
    with patch_environment(accelerate_debug_mode="1"):
        assert PartialState().debug is True


def test_an_unknown_device_in_the_environment() -> None:
    with patch_environment(accelerate_torch_device="warp:1"), pytest.raises(ConfigurationError, match="'warp:1'"):
        PartialState()
    assert PartialState._shared_state == {}


def test_gradient_state_is_shared_and_takes_new_settings() -> None:
    first = GradientState()
    assert (first.sync_gradients, first.num_steps, first.in_dataloader, first.remainder) == (True, 1, False, -1)
    second = GradientState(GradientAccumulationPlugin(num_steps=4, adjust_scheduler=False))
    assert (first.num_steps, first.adjust_scheduler, first.sync_with_dataloader) == (4, False, True)
    second._set_sync_gradients(False)
    assert not GradientState().sync_gradients
    second.grow(3)
    assert first.num_steps == 12
    Accelerator(gradient_accumulation_steps=2)
    assert first.num_steps == 6  # what memory asked for stays when the program sets its steps up again
    first.set_num_steps(5)
    assert second.num_steps == 5
    GradientState._reset_state()
    assert not first.initialized
    assert GradientState().num_steps == 1


class Loader:
    end_of_dataloader = True
    remainder = 3


def test_gradient_state_follows_the_innermost_loader_and_keeps_none_alive() -> None:
    state, outer, inner = GradientState(), Loader(), Loader()
    inner.end_of_dataloader, inner.remainder = False, 1
    state._add_dataloader(outer)
    state._add_dataloader(inner)
    assert (state.active_dataloader, state.end_of_dataloader, state.remainder) == (inner, False, 1)
    assert state.dataloader_references == [None, outer, inner]
    del inner
    assert (state.active_dataloader, state.end_of_dataloader, state.remainder) == (outer, True, 3)
    state._remove_dataloader(outer)
    assert (state.active_dataloader, state.end_of_dataloader, state.remainder) == (None, False, -1)


@pytest.mark.parametrize("make", [PartialState, Accelerator])
def test_decorators_on_a_single_process(make: Any) -> None:
    control = make()
    for decorator in ("on_main_process", "on_local_main_process", "on_last_process"):
        assert getattr(control, decorator)(lambda: "ran")() == "ran"
    assert control.on_main_process()(lambda: "ran")() == "ran"
    assert control.on_process(process_index=0)(lambda: "ran")() == "ran"
    assert control.on_local_process(lambda: "ran", local_process_index=0)() == "ran"


def test_on_main_process_needs_a_started_process() -> None:
    state = PartialState()
    PartialState._reset_state()
    with pytest.raises(ConfigurationError, match="before this process was started"):
        state.on_main_process(print)


def test_a_dictionary_per_thread() -> None:
    class Shared:
        state = ThreadLocalSharedDict(thread_local=True)

    Shared().state["here"] = 1
    seen: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: seen.append(dict(Shared().state)))
    thread.start()
    thread.join()
    assert seen == [{}]
    assert Shared().state == {"here": 1}
    Shared().state = {"new": 2}
    assert Shared().state == {"new": 2}


def test_a_deepcopy_of_an_accelerator_is_itself() -> None:
    import copy

    accelerator = Accelerator()
    assert copy.deepcopy({"held": accelerator})["held"] is accelerator
    assert repr(accelerator) == "Accelerator(single, process 0 of 1, device=cpu, mixed_precision='no')"
