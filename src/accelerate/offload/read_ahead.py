"""Read-ahead: stored weights loaded before the module that needs them runs, within a budget of memory."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import torch

from accelerate._base.errors import AccelerateError
from accelerate._base.helpers import Choice
from accelerate.devices.copy_lane import CopyLane
from accelerate.offload.memory import convert_file_size_to_int, free_memory_of
from accelerate.offload.places import HOST
from accelerate.offload.store import OffloadedWeightsLoader, OpenFiles
from accelerate.offload.stored import LoadedTensor, LoadState, MappedFile
from accelerate.runtime import current
from accelerate.runtime.memory import trim_holes

logger = logging.getLogger(__name__)

NUM_THREADS = 2
BYTES_AHEAD = 512 * 2**20
"""How many bytes are requested ahead of the module that runs: enough for any disk to be busy."""
FEWEST_AHEAD = 16
"""How many modules are requested ahead even if they are larger than that."""
MOST_AHEAD = 512
TRIM_ABOVE = 64 * 2**20
"""How much host memory that activations left behind may lie idle."""
TRIM_INTERVAL = 32 * 2**20
"""How many bytes of weights pass between two looks at it, each of which takes as long as a small module."""
MAPPED_SHARE = 2
"""One in so many bytes of the free memory may hold pages of weight files, which the system can always take back."""
COPIED_SHARE = 64
"""One in so many bytes of the free memory may hold copies of weights, which nobody else can use."""
DEVICE_SHARE = 8
"""The same on an accelerator, where nothing else of an offloaded model lies."""
Requests: TypeAlias = SimpleQueue[weakref.ref[LoadedTensor] | None]
"""The weights to prefetch, by weak references: a request that nobody waits for must not keep memory; None ends a thread."""
_BATCH = 16
_JOIN_SECONDS = 5.0
_MOST_THREADS = 64


@dataclass(frozen=True)
class MemoryBudget:
    """The bytes of weights that may be in memory at a time.

    Args:
        mapped: Pages of files; they count as cache of the system, not as memory of the process.
        copied: Copies: weights on an accelerator, or in another dtype than they are stored in.
    """

    mapped: int
    copied: int


def choose_budget(offload_memory: int | str | None, device: torch.device, largest: int) -> Choice[MemoryBudget]:
    """Return the memory that weights may take on their way to a device.

    Args:
        offload_memory: Bytes or text like `"2GB"`, as the user wants it; measured if not given.
        largest: The bytes of the largest module. A module that runs and the one that comes next always have room.
    """
    import psutil

    floor = 2 * largest
    if offload_memory is not None:
        limit = convert_file_size_to_int(offload_memory)
        return Choice(MemoryBudget(max(limit, floor), max(limit, floor)), f"offload_memory={offload_memory!r}")
    free: int = psutil.virtual_memory().available
    copied = free // COPIED_SHARE
    if device.type != HOST:
        copied = free_memory_of(device, free) // DEVICE_SHARE
    budget = MemoryBudget(mapped=max(free // MAPPED_SHARE, floor), copied=max(copied, floor))
    return Choice(budget, f"{free} bytes of memory are free")


class CallOrder:
    """Predict which module runs next: from the order in the model at first, then from the calls.

    Modules are numbered. What followed the same two modules the last time is expected again, then what followed the last
    one, then what follows it in the model: so a module that is used twice in a pass, each time before another one, is
    predicted rightly both times.
    """

    def __init__(self) -> None:
        self._after: dict[int, int] = {}
        self._after_two: dict[tuple[int | None, int], int] = {}
        self._last: dict[int, tuple[int | None, int]] = {}
        self._ahead: deque[int] = deque()
        self._end: tuple[int | None, int] | None = None
        self.length = 0

    def add(self) -> int:
        """Add a module behind the last one of the model, and return its number."""
        number = self.length
        if number:
            self._after[number - 1] = number
        self._after[number] = 0  # after a pass comes the next one
        self.length += 1
        return number

    def record(self, module: int) -> bool:
        """Note that this thread runs a module now, and return whether that was predicted."""
        thread = threading.get_ident()
        before = self._last.get(thread)
        if before is None and len(self._last) > _MOST_THREADS:
            self._last.clear()
        if before is not None:
            self._after[before[1]] = module
            self._after_two[before] = module
        now = (None if before is None else before[1], module)
        self._last[thread] = now
        predicted = bool(self._ahead) and self._ahead[0] == module
        if predicted:
            self._ahead.popleft()
        else:
            self._ahead.clear()
        if not self._ahead:
            self._end = now
        return predicted

    @property
    def num_ahead(self) -> int:
        """How many modules from here `predict` has accepted."""
        return len(self._ahead)

    def predict(self, accept: Callable[[int], bool]) -> None:
        """Go through the modules that come next and were not yet accepted, until `accept` says no to one."""
        while self._end is not None and len(self._ahead) < self.length:
            following = self._after_two.get(self._end, self._after.get(self._end[1]))
            if following is None or not accept(following):
                return
            self._ahead.append(following)
            self._end = (self._end[1], following)


@dataclass(eq=False)
class ModuleWeights:
    """What one module needs while it runs."""

    number: int
    tensors: tuple[LoadedTensor, ...]
    files: tuple[MappedFile, ...]
    nbytes: int
    origin: tuple[tuple[Mapping[str, Any], str, Any], ...]

    def is_current(self) -> bool:
        """Return whether the store still has what it had when the module was added."""
        return all(table.get(name) is entry for table, name, entry in self.origin)


@dataclass(eq=False)
class _MemoryPool:
    """The weights that take memory of one kind, and how much of it there may be."""

    limit: int = 0
    used: int = 0
    tensors: set[LoadedTensor] = field(default_factory=set)
    full_at: int = -1

    def add(self, weight: LoadedTensor) -> None:
        self.tensors.add(weight)
        self.used += weight.nbytes

    def remove(self, weight: LoadedTensor) -> None:
        self.tensors.discard(weight)
        self.used -= weight.nbytes


class ReadAhead:
    """Load the weights of the modules that come next while one runs.

    Threads load what the call order predicts. When the budget is used up, the weights go whose next use is furthest
    away: of a model that is larger than the budget one part stays in memory, and the rest passes through. A module that
    was not predicted loads its weights itself, so a wrong guess costs time and nothing else.

    Args:
        weights: Where the weights are stored.
        offload_memory: The budget, in bytes or as text like `"2GB"`; measured if not given.
    """

    def __init__(self, weights: OffloadedWeightsLoader, offload_memory: int | str | None = None) -> None:
        self.store = weights
        self._offload_memory = offload_memory
        self._version = weights.version
        self._successor: ReadAhead | None = None
        self._files: OpenFiles = {}
        self._tensors: dict[Any, LoadedTensor] = {}
        self._modules: list[ModuleWeights] = []
        self._call_order = CallOrder()
        self._mapped, self._copied = _MemoryPool(), _MemoryPool()
        self._clock = 0
        self._bytes_run = 0
        self._bytes_ahead = 0
        self._most_bytes_ahead, self._fewest_ahead = BYTES_AHEAD, FEWEST_AHEAD
        self._lock = threading.RLock()
        self._arrival = threading.Condition(self._lock)
        self._queue: Requests = SimpleQueue()
        self._process: int | None = None

    def register(self, wanted: Sequence[tuple[str, torch.dtype]], device: torch.device) -> ModuleWeights:
        """Add a module, in the order of the model, and return what it passes to `acquire` and `release`.

        Args:
            wanted: The names of its weights in the store, and what they are used as.

        Raises:
            ConfigurationError: If a weight's file is missing, cut off or another one.
        """
        tensors: list[LoadedTensor] = []
        for name, dtype in wanted:
            identity = self.store.identity(name)  # which tied weights have in common
            key = (name if identity is None else identity, dtype, device)
            if key not in self._tensors:
                self._tensors[key] = LoadedTensor(self.store.find(name, self._files), device, dtype)
            tensors.append(self._tensors[key])
        files = tuple({tensor.stored.file: None for tensor in tensors if tensor.stored.file is not None})
        nbytes = sum(tensor.nbytes for tensor in tensors)
        origin = tuple(self.store.origin(name) for name, _ in wanted)
        weights = ModuleWeights(self._call_order.add(), tuple(tensors), files, nbytes, origin)
        self._modules.append(weights)
        return weights

    def renew(self, module: ModuleWeights) -> tuple[ReadAhead, ModuleWeights]:
        """Return what reads ahead of the store as it is now, and what a module passes to it.

        All modules get the same one, in the order of the model. What was read of the store as it was goes away with the
        last module that asks.
        """
        if self._version == self.store.version:
            return self, module
        with self._lock:
            if self._successor is None:
                following = ReadAhead(self.store, self._offload_memory)
                for known in self._modules:
                    # What is loaded anew may be of another dtype.
                    wanted = [(name, self.store.find(name, following._files).dtype) for _, name, _ in known.origin]
                    following.register(wanted, known.tensors[0].device)
                self._successor = following
        return self._successor.renew(self._successor._modules[module.number])

    @property
    def budget(self) -> MemoryBudget:
        """The memory that weights may take; what is measured is measured at the first call of the model."""
        return MemoryBudget(self._mapped.limit, self._copied.limit)

    @property
    def used(self) -> MemoryBudget:
        """The memory that weights take now."""
        return MemoryBudget(self._mapped.used, self._copied.used)

    def acquire(self, module: ModuleWeights) -> list[torch.Tensor]:
        """Return the weights of a module that is about to run, and request those of the modules after it.

        Raises:
            UsageError: If a file was changed since it was mapped.
        """
        for file in module.files:
            file.check()
        with self._lock:
            if self._process != os.getpid():
                self._start()
            self._clock += 1
            self._bytes_ahead = self._bytes_ahead - module.nbytes if self._call_order.record(module.number) else 0
            for tensor in module.tensors:
                tensor.use(self._clock)
                if tensor.state is LoadState.UNLOADED:  # it was not predicted, and comes before what is
                    pool = self._pool(tensor)
                    self._make_room(pool, tensor.nbytes, needed_at=self._clock)
                    pool.add(tensor)
                    tensor.state = LoadState.REQUESTED
            self._call_order.predict(self._request)
        try:
            return [self._loaded(tensor) for tensor in module.tensors]
        except BaseException:
            self.release(module)
            raise

    def release(self, module: ModuleWeights) -> None:
        """Note that a module has run."""
        with self._lock:
            for tensor in module.tensors:
                tensor.users -= 1
            for pool in (self._mapped, self._copied):
                if pool.used > pool.limit:
                    self._make_room(pool, 0, needed_at=-1)
            self._bytes_run += module.nbytes
            trims = self._bytes_run >= TRIM_INTERVAL and any(tensor.device.type == HOST for tensor in module.tensors)
            if trims:
                self._bytes_run = 0
        if trims:
            trim_holes(TRIM_ABOVE)

    def pin(self, module: ModuleWeights) -> None:
        """Never unload the weights of a module again, because it has them for good."""
        with self._lock:
            for tensor in module.tensors:
                tensor.pinned = True

    def _start(self) -> None:
        """Choose the budget and start the threads, in a forked process again."""
        largest: dict[torch.device, int] = {}
        for module in self._modules:
            for device in {tensor.device for tensor in module.tensors}:
                largest[device] = max(largest.get(device, 0), module.nbytes)
        choices = [choose_budget(self._offload_memory, device, size) for device, size in largest.items()]
        self._mapped.limit = max((choice.value.mapped for choice in choices), default=0)
        self._copied.limit = max((choice.value.copied for choice in choices), default=0)
        for choice in choices:
            logger.info("Offloaded weights: %s", choice)
        lanes: dict[torch.device, CopyLane | None] = {}
        wanted = {id(self._mapped): 0, id(self._copied): 0}
        for tensor in self._tensors.values():
            pool = self._pool(tensor)
            wanted[id(pool)] += tensor.nbytes
            tensor.use_lane(lanes)
            if tensor.state in (LoadState.REQUESTED, LoadState.LOADING):
                pool.remove(tensor)
                tensor.state = LoadState.UNLOADED
        for pool in (self._mapped, self._copied):
            if wanted[id(pool)] > pool.limit:  # not everything fits: most of the budget is for what can stay
                self._most_bytes_ahead = min(self._most_bytes_ahead, pool.limit // 4)
                self._fewest_ahead = 1
        self._queue = SimpleQueue()
        self._process = os.getpid()
        if all(tensor.is_held for tensor in self._tensors.values()):
            return
        # Threads take turns on a lane, so more than one would wait.
        num_threads = 1 if any(lane is not None for lane in lanes.values()) else NUM_THREADS
        for _ in range(num_threads):
            thread = PrefetchThread(weakref.ref(self), self._queue)
            current.PREFETCH_THREADS.add(thread)
            thread.start()
        weakref.finalize(self, _stop, self._queue, num_threads)

    def _pool(self, tensor: LoadedTensor) -> _MemoryPool:
        return self._mapped if tensor.in_place else self._copied

    def _request(self, number: int) -> bool:
        """Request the weights of a module ahead, and return whether there was room for them."""
        ahead = self._call_order.num_ahead
        if ahead >= MOST_AHEAD or (self._bytes_ahead >= self._most_bytes_ahead and ahead >= self._fewest_ahead):
            return False
        module, time = self._modules[number], self._clock + ahead + 1
        for tensor in module.tensors:
            tensor.expected_at = time
            if tensor.state is LoadState.UNLOADED:
                pool = self._pool(tensor)
                if not self._make_room(pool, tensor.nbytes, needed_at=time):
                    return False
                tensor.state = LoadState.REQUESTED
                pool.add(tensor)
                self._queue.put(weakref.ref(tensor))
        self._bytes_ahead += module.nbytes
        return True

    def _make_room(self, pool: _MemoryPool, nbytes: int, needed_at: int) -> bool:
        """Unload what is used later than `needed_at`, and return whether `nbytes` fit now."""
        if pool.used + nbytes <= pool.limit:
            return True
        if needed_at > self._clock == pool.full_at:
            return False  # looked through already for what comes later
        # More than is needed, so that the list is not made again for every tensor.
        target = pool.limit - nbytes - (pool.limit // _BATCH if needed_at >= 0 else 0)
        slack = len(self._modules)
        idle = [each for each in pool.tensors if each.state is LoadState.LOADED and not each.users and not each.pinned]
        due = {tensor: tensor.next_use(self._clock, slack) for tensor in idle}
        for tensor in sorted(idle, key=due.__getitem__, reverse=True):
            if pool.used <= target or due[tensor] <= needed_at:
                break
            if tensor.was_changed():
                tensor.pinned = True  # the file does not have what was written to it
                continue
            pool.remove(tensor)
            tensor.unload()
        fits = pool.used + nbytes <= pool.limit
        if not fits and needed_at > self._clock:
            pool.full_at = self._clock
        return fits

    def _loaded(self, tensor: LoadedTensor) -> torch.Tensor:
        """Return a requested tensor; load it here if no thread has begun to."""
        if tensor.is_held:
            return tensor.value()
        with self._lock:
            while tensor.state is LoadState.LOADING and not tensor.in_place:
                self._arrival.wait()
            before = tensor.state
            if before is LoadState.LOADED or (tensor.in_place and before is not LoadState.REQUESTED):
                return tensor.value()
            if tensor.in_place:
                tensor.state = LoadState.LOADED
            else:
                tensor.state = LoadState.LOADING
                if before is LoadState.UNLOADED:  # a thread could not load it
                    self._copied.add(tensor)
        if tensor.in_place:
            tensor.stored.prefetch()  # the pages come while they are used
        else:
            self._load(tensor)
        return tensor.value()

    def _load(self, tensor: LoadedTensor) -> None:
        """Load a tensor that is marked so."""
        arrived = False
        try:
            tensor.load()
            arrived = True
        finally:
            with self._lock:
                if not arrived:
                    self._pool(tensor).remove(tensor)
                tensor.state = LoadState.LOADED if arrived else LoadState.UNLOADED
                self._arrival.notify_all()

    def load_requested(self, tensor: LoadedTensor) -> None:
        """Load a tensor that was requested, unless the module that needs it came first."""
        with self._lock:
            if tensor.state is not LoadState.REQUESTED:
                return
            tensor.state = LoadState.LOADING
        try:
            self._load(tensor)
        except (AccelerateError, RuntimeError, OSError) as error:
            # The module that needs it loads it itself, and tells its caller.
            logger.debug("A weight could not be read ahead: %s", error)


class PrefetchThread(threading.Thread):
    """Load what is requested, for as long as the model is in use.

    It holds references to weights only while it holds `busy`, so that whoever has acquired the lock once after the last
    other reference to a model is gone finds the memory of its weights free.
    """

    def __init__(self, engine: weakref.ref[ReadAhead], requests: Requests) -> None:
        super().__init__(name="accelerate-read-ahead", daemon=True)
        self.busy = threading.Lock()
        self.requests = requests
        self._engine = engine

    def run(self) -> None:
        while (request := self.requests.get()) is not None:
            with self.busy:
                self._load(request)

    def _load(self, request: weakref.ref[LoadedTensor]) -> None:
        owner, tensor = self._engine(), request()
        if owner is not None and tensor is not None:
            owner.load_requested(tensor)


def _stop(requests: Requests, num_threads: int) -> None:
    for _ in range(num_threads):
        requests.put(None)


@atexit.register
def _stop_all() -> None:
    """Wait for what is being loaded: a thread inside torch when the interpreter goes down aborts the process."""
    running = [thread for thread in current.PREFETCH_THREADS if thread.is_alive()]
    for thread in running:
        with suppress(Empty):
            while True:
                thread.requests.get_nowait()
        _stop(thread.requests, NUM_THREADS)
    for thread in running:
        thread.join(_JOIN_SECONDS)
