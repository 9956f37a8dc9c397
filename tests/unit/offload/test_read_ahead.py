"""The engine that reads ahead: right weights in any order, within its budget, and errors that reach the caller."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from accelerate.offload.read_ahead import NUM_THREADS, CallOrder, MemoryBudget, ModuleWeights, ReadAhead, choose_budget
from accelerate.offload.store import OffloadedWeightsLoader, offload_state_dict
from accelerate.offload.stored import LoadedTensor, LoadState
from accelerate.runtime import current
from accelerate.runtime.memory import release_memory

CPU = torch.device("cpu")
META = torch.device("meta")
ROWS = 2**18  # a megabyte in float32: larger than what is copied for its alignment, and whole pages
COUNT = 8
SIZE = 4 * (ROWS + 8)
PENDING = (LoadState.REQUESTED, LoadState.LOADING)


def stored(path: Path, dtype: str = "float32") -> OffloadedWeightsLoader:
    save_file({f"w{i}": torch.full((ROWS + 8,), float(i)) for i in range(COUNT)}, path)
    entry = {"safetensors_file": str(path), "dtype": dtype}
    return OffloadedWeightsLoader(index={f"w{i}": {**entry, "weight_name": f"w{i}"} for i in range(COUNT)})


def engine(
    weights: OffloadedWeightsLoader, memory: int | str | None = None, dtype: torch.dtype = torch.float32
) -> tuple[ReadAhead, list[ModuleWeights]]:
    made = ReadAhead(weights, memory)
    return made, [made.register([(f"w{i}", dtype)], CPU) for i in range(COUNT)]


def run(made: ReadAhead, modules: list[ModuleWeights], order: list[int]) -> None:
    for number in order:
        (weight,) = made.acquire(modules[number])
        assert weight.min() == weight.max() == number
        made.release(modules[number])


def until(condition: Callable[[], bool]) -> None:
    """Wait for threads to get something done, which they do sooner or later."""
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


ORDERS = {
    "pass after pass": [*range(COUNT)] * 3,
    "backwards": [*reversed(range(COUNT))] * 2,
    "a branch": [0, 1, 2, 5, 6, 0, 1, 3, 4, 6, 0, 1, 2, 5, 6],
    "one used again and again": [0, 7, 1, 7, 2, 7, 3, 7] * 2,
    "skipped": [0, 4, 0, 4, 0, 1, 2, 3, 4, 5],
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
@pytest.mark.parametrize("memory", [None, 1, 3 * SIZE])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_any_order_gives_the_right_weights(order: list[int], memory: int | None, dtype: str, tmp_path: Path) -> None:
    kind = getattr(torch, dtype)
    made, modules = engine(stored(tmp_path / "w.safetensors", dtype), memory, kind)
    run(made, modules, order)
    limit = made.budget.mapped if dtype == "float32" else made.budget.copied
    until(lambda: max(made.used.mapped, made.used.copied) <= limit)


def test_weights_come_before_they_are_asked_for(tmp_path: Path) -> None:
    made, modules = engine(stored(tmp_path / "w.safetensors", "float64"), "1GB", torch.float64)
    run(made, modules, [0])
    until(lambda: made.used.copied == COUNT * 2 * SIZE)


def test_the_budget_holds_and_a_part_of_the_model_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unloaded: list[LoadedTensor] = []
    unload = LoadedTensor.unload
    monkeypatch.setattr(LoadedTensor, "unload", lambda weight: (unloaded.append(weight), unload(weight))[1])
    made, modules = engine(stored(tmp_path / "w.safetensors"), 4 * SIZE)
    for _ in range(3):
        unloaded.clear()
        for number in range(COUNT):
            made.acquire(modules[number])
            until(lambda: not any(weight.state in PENDING for module in modules for weight in module.tensors))
            assert made.used.mapped <= 4 * SIZE
            made.release(modules[number])
    assert made.budget == MemoryBudget(4 * SIZE, 4 * SIZE)
    assert 0 < len(unloaded) < COUNT  # giving up the oldest first would fetch every weight in every pass


def test_a_module_larger_than_the_budget_still_runs(tmp_path: Path) -> None:
    made = ReadAhead(stored(tmp_path / "w.safetensors"), 1)
    module = made.register([(f"w{i}", torch.float32) for i in range(COUNT)], CPU)
    assert [int(weight[0]) for weight in made.acquire(module)] == [*range(COUNT)]
    made.release(module)


def test_tied_weights_are_fetched_once(tmp_path: Path) -> None:
    weights = stored(tmp_path / "w.safetensors", "float64")
    weights.add_aliases([["w0", "twin"]])
    made = ReadAhead(weights)
    first, second = (made.register([(name, torch.float64)], CPU) for name in ("w0", "twin"))
    assert first.tensors == second.tensors
    assert made.acquire(first)[0] is made.acquire(second)[0]


def test_weights_in_memory_are_used_as_they_are() -> None:
    held = {"a": torch.ones(3)}
    made = ReadAhead(OffloadedWeightsLoader(held))
    module = made.register([("a", torch.float32)], CPU)
    assert made.acquire(module)[0] is held["a"]
    made.release(module)
    assert made.used == MemoryBudget(0, 0)
    assert module.is_current()
    held["a"] = torch.zeros(3)
    assert not module.is_current()


def test_a_device_gets_copies() -> None:
    """The meta device stands in for an accelerator: it has no streams, so the copies are made without a lane."""
    made = ReadAhead(OffloadedWeightsLoader({"a": torch.ones(3), "b": torch.ones(2)}))
    modules = [made.register([(name, torch.bfloat16)], META) for name in "ab"]
    (tensor,) = made.acquire(modules[0])
    assert (tensor.device, tensor.dtype) == (META, torch.bfloat16)
    made.release(modules[0])
    until(lambda: made.used.copied == 10)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_was_written_to_a_weight_stays(dtype: str, tmp_path: Path) -> None:
    made, modules = engine(stored(tmp_path / "w.safetensors", dtype), 1, getattr(torch, dtype))
    (weight,) = made.acquire(modules[0])
    weight.add_(5)
    made.release(modules[0])
    run(made, modules, [1, 2, 3, 4, 5, 6, 7])
    assert made.acquire(modules[0])[0][0] == 5
    made.release(modules[0])
    again, others = engine(stored(tmp_path / "v.safetensors", dtype))
    run(again, others, [0])


def test_a_changed_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    made, modules = engine(stored(tmp_path / "w.safetensors"), 1)
    run(made, modules, [0, 1, 2])
    with (tmp_path / "w.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(RuntimeError, match=r"w\.safetensors.*to 1000 bytes"):
        made.acquire(modules[3])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_goes_between_two_forwards_is_an_error_that_names_it(
    dtype: str, replaced: bool, tmp_path: Path
) -> None:
    file = tmp_path / "w.safetensors"
    made, modules = engine(stored(file, dtype), 1)
    run(made, modules, [0, 1, 2])
    if replaced:
        stored(tmp_path / "other.safetensors", dtype)
        (tmp_path / "other.safetensors").replace(file)
    else:
        file.unlink()
    with pytest.raises(RuntimeError, match=rf"w\.safetensors.*{'replaced' if replaced else 'not there'}"):
        made.acquire(modules[3])


def test_a_file_that_is_gone_is_an_error_when_the_model_is_dispatched(tmp_path: Path) -> None:
    weights = stored(tmp_path / "w.safetensors")
    (tmp_path / "w.safetensors").unlink()
    with pytest.raises(ValueError, match=r"w\.safetensors"):
        engine(weights)


def test_many_files_need_no_descriptors(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {f"w{i}": torch.full((3,), float(i)) for i in range(50)})
    before = len([*Path("/proc/self/fd").iterdir()])
    made = ReadAhead(OffloadedWeightsLoader(save_folder=tmp_path))
    modules = [made.register([(f"w{i}", torch.float32)], CPU) for i in range(50)]
    assert len([*Path("/proc/self/fd").iterdir()]) <= before + 2
    run(made, modules, [*range(50)])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_threads_share_an_engine(dtype: str, tmp_path: Path) -> None:
    made, modules = engine(stored(tmp_path / "w.safetensors", dtype), 3 * SIZE, getattr(torch, dtype))
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(seed)).tolist()
        try:
            run(made, modules, order * 4)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all(weight.users == 0 for module in modules for weight in module.tensors)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "accelerate-read-ahead"]


def test_an_engine_that_nobody_uses_ends_its_threads(tmp_path: Path) -> None:
    gc.collect()
    until(lambda: not readers())
    made, modules = engine(stored(tmp_path / "w.safetensors"))
    run(made, modules, [0])
    assert readers()
    gone = weakref.ref(made)
    del made, modules
    gc.collect()
    until(lambda: gone() is None and not readers())


def test_a_forked_process_starts_its_own_threads(tmp_path: Path) -> None:
    made, modules = engine(stored(tmp_path / "w.safetensors", "float64"), None, torch.float64)
    run(made, modules, [0, 1])
    until(lambda: made.used.copied == COUNT * 2 * SIZE)
    child = os.fork()
    if child == 0:
        try:
            run(made, modules, [0, 1, 2])
            os._exit(0 if readers() else 3)
        except BaseException:
            os._exit(4)
    assert os.waitpid(child, 0)[1] == 0


def test_a_budget_is_given_or_measured() -> None:
    given = choose_budget("2MB", CPU, largest=100)
    assert given.value == MemoryBudget(2_000_000, 2_000_000)
    assert "2MB" in given.reason
    assert choose_budget(10, CPU, largest=100).value == MemoryBudget(200, 200)  # two modules always have room
    measured = choose_budget(None, CPU, largest=100)
    assert measured.value.copied < measured.value.mapped
    assert "free" in measured.reason
    assert choose_budget(None, META, largest=0).value.copied > 0
    with pytest.raises(ValueError, match="lots"):
        choose_budget("lots", CPU, largest=0)


ENDS_WHILE_IT_READS = """
import sys
import torch
from accelerate.offload.read_ahead import ReadAhead
from accelerate.offload.store import OffloadedWeightsLoader
from safetensors.torch import save_file

path, count = sys.argv[1], 4
save_file({f"w{i}": torch.zeros(2**24, dtype=torch.float16) for i in range(count)}, path)
entry = {"safetensors_file": path, "dtype": "float64"}
made = ReadAhead(OffloadedWeightsLoader(index={f"w{i}": {**entry, "weight_name": f"w{i}"} for i in range(count)}), "4GB")
modules = [made.register([(f"w{i}", torch.float64)], torch.device("cpu")) for i in range(count)]
made.acquire(modules[0])
made.release(modules[0])
"""


def test_a_program_that_ends_while_weights_come_ends_well(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS_WHILE_IT_READS, str(tmp_path / "w.safetensors")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def call_order(length: int) -> CallOrder:
    order = CallOrder()
    for number in range(length):
        assert order.add() == number
    return order


def ahead(order: CallOrder, most: int = 100) -> list[int]:
    """Return the modules that are newly predicted."""
    asked: list[int] = []

    def wanted(module: int) -> bool:
        if len(asked) == most:
            return False
        asked.append(module)
        return True

    order.predict(wanted)
    return asked


def test_the_tree_gives_the_first_order_and_a_pass_follows_a_pass() -> None:
    order = call_order(4)
    assert ahead(order) == []  # nothing runs yet
    order.record(0)
    assert ahead(order) == [1, 2, 3, 0]
    assert order.record(1)
    assert ahead(order) == [1]


def test_another_order_is_learned() -> None:
    order = call_order(4)
    for module in (2, 0, 3, 1, 2):
        order.record(module)
    assert ahead(order) == [0, 3, 1, 2]


def test_a_module_that_is_used_twice_is_foreseen_both_times() -> None:
    order = call_order(4)
    for module in (0, 1, 2, 1, 3, 0):
        order.record(module)
    assert ahead(order, 5)[:4] == [1, 2, 1, 3]


def test_what_was_asked_for_is_not_asked_for_again_until_the_guess_was_wrong() -> None:
    order = call_order(5)
    order.record(0)
    assert ahead(order, 2) == [1, 2]
    assert order.num_ahead == 2
    assert order.record(1)
    assert ahead(order, 1) == [3]
    assert not order.record(4)
    assert order.num_ahead == 0
    assert ahead(order, 2) == [0, 1]


def test_threads_do_not_mix_their_orders() -> None:
    order = call_order(6)
    order.record(0)
    other = threading.Thread(target=lambda: [order.record(module) for module in (3, 5)])
    other.start()
    other.join()
    order.record(1)
    assert ahead(order, 1) == [2]
    order.record(3)
    assert ahead(order, 1) == [5]


def test_a_weight_that_cannot_be_loaded_is_an_error_and_the_next_try_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, modules = engine(stored(tmp_path / "w.safetensors", "float64"), 1, torch.float64)
    run(made, modules, [0])
    until(lambda: not any(tensor.state in PENDING for module in modules for tensor in module.tensors))
    before, waits = made.used, threading.Event()
    load = LoadedTensor.load

    def fail(tensor: LoadedTensor) -> None:
        waits.set()
        raise RuntimeError("no memory")

    monkeypatch.setattr(LoadedTensor, "load", fail)
    with pytest.raises(RuntimeError, match="no memory"):
        made.acquire(modules[5])
    until(lambda: not any(tensor.state in PENDING for module in modules for tensor in module.tensors))
    assert waits.is_set()
    assert made.used.copied <= before.copied
    assert not any(tensor.users for module in modules for tensor in module.tensors)
    monkeypatch.setattr(LoadedTensor, "load", load)
    run(made, modules, [5, 6, 7, 0, 1])


def test_a_weight_that_could_not_be_read_ahead_is_loaded_when_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, modules = engine(stored(tmp_path / "w.safetensors", "float64"), "1GB", torch.float64)
    load = LoadedTensor.load
    failed: list[LoadedTensor] = []

    def fail_ahead(tensor: LoadedTensor) -> None:
        if threading.current_thread() is not threading.main_thread():
            failed.append(tensor)
            raise OSError("the disk does not answer")
        load(tensor)

    monkeypatch.setattr(LoadedTensor, "load", fail_ahead)
    run(made, modules, [0])
    until(lambda: len(failed) >= COUNT - 1)
    run(made, modules, [*range(1, COUNT)])
    until(lambda: not any(tensor.state in PENDING for module in modules for tensor in module.tensors))
    assert made.used.copied == COUNT * 2 * SIZE


def test_many_threads_that_came_and_went_are_forgotten() -> None:
    order = CallOrder()
    for _ in range(3):
        order.add()
    count = 80
    together = threading.Barrier(count)

    def call() -> None:
        order.record(0)
        together.wait(60)  # a thread that has ended would give its number to the next

    threads = [threading.Thread(target=call) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(order._last) < count


def test_memory_of_a_model_is_free_once_it_is_released_while_weights_are_being_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, modules = engine(stored(tmp_path / "w.safetensors", "float64"), "1GB", torch.float64)
    permits: dict[threading.Thread, threading.Semaphore] = {}
    load = LoadedTensor.load

    def load_if_permitted(tensor: LoadedTensor) -> None:
        thread = threading.current_thread()
        if thread is not threading.main_thread():
            permits.setdefault(thread, threading.Semaphore(0)).acquire()
        load(tensor)

    monkeypatch.setattr(LoadedTensor, "load", load_if_permitted)
    run(made, modules, [0])
    until(lambda: len(permits) == NUM_THREADS)
    tensors = [weakref.ref(tensor) for module in modules for tensor in module.tensors]
    del made, modules
    still_there: list[bool] = []

    def release() -> None:
        release_memory()
        still_there.append(any(tensor() is not None for tensor in tensors))

    releasing = threading.Thread(target=release)
    releasing.start()
    # One thread ends its load and may begin another one while the release waits for the other thread.
    first, second = (thread for thread in current.PREFETCH_THREADS if thread in permits)
    permits[first].release()
    time.sleep(0.1)
    permits[second].release(COUNT)
    releasing.join(0.2)
    permits[first].release(COUNT)
    releasing.join()
    assert still_there == [False]
