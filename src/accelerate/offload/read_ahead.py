"""Offloaded weights fetched before the module that needs them runs, within a budget of memory."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import torch

from accelerate._base.errors import AccelerateError
from accelerate.devices.copy_lane import CopyLane
from accelerate.offload import advice
from accelerate.offload.budget import Budget, choose_budget
from accelerate.offload.mapped import MappedFile, OpenFiles
from accelerate.offload.route import Route
from accelerate.offload.store import OffloadedWeightsLoader
from accelerate.offload.travelling import TravellingWeight, Where
from accelerate.runtime.memory import trim_holes

logger = logging.getLogger(__name__)

NUM_THREADS = 2
WINDOW = 512 * 2**20
"""How many bytes are asked for ahead of the module that runs: enough for any disk to be busy."""
FEWEST_AHEAD = 16
"""How many modules are asked for ahead even if they are larger than the window."""
MOST_AHEAD = 512
HOLES = 64 * 2**20
"""How much host memory that activations left behind may lie idle."""
LOOK_AFTER = 32 * 2**20
"""How many bytes of weights pass between two looks at it, each of which takes as long as a small module."""
_BATCH = 16
_SECONDS_TO_LEAVE = 5.0


@dataclass(eq=False)
class Stop:
    """What one module needs while it runs."""

    number: int
    weights: tuple[TravellingWeight, ...]
    files: tuple[MappedFile, ...]
    nbytes: int
    origin: tuple[tuple[Mapping[str, Any], str, Any], ...]

    def is_current(self) -> bool:
        """Return whether the store still has what it had when the module was added."""
        return all(table.get(name) is entry for table, name, entry in self.origin)


@dataclass(eq=False)
class _Ledger:
    """The weights that take memory of one kind, and how much of it there may be."""

    limit: int = 0
    used: int = 0
    present: set[TravellingWeight] = field(default_factory=set)
    full_at: int = -1

    def add(self, weight: TravellingWeight) -> None:
        self.present.add(weight)
        self.used += weight.nbytes

    def remove(self, weight: TravellingWeight) -> None:
        self.present.discard(weight)
        self.used -= weight.nbytes


class ReadAhead:
    """Fetch the weights of the modules that come next while one runs.

    Threads read what the route foresees. When the budget is used up, the weights go whose next use is furthest away:
    of a model that is larger than the budget one part stays in memory, and the rest passes through. A module that
    was not foreseen fetches its weights itself, so a wrong guess costs time and nothing else.

    Args:
        weights: Where the weights are stored.
        offload_memory: The budget, in bytes or as text like `"2GB"`; measured if not given.
    """

    def __init__(self, weights: OffloadedWeightsLoader, offload_memory: int | str | None = None) -> None:
        self.source = weights
        self._wish = offload_memory
        self._files = OpenFiles()
        self._weights: dict[Any, TravellingWeight] = {}
        self._stops: list[Stop] = []
        self._route = Route()
        self._mapped, self._copied = _Ledger(), _Ledger()
        self._clock = 0
        self._passed = 0
        self._bytes_ahead = 0
        self._window, self._fewest = WINDOW, FEWEST_AHEAD
        self._lock = threading.RLock()
        self._arrival = threading.Condition(self._lock)
        self._queue: SimpleQueue[TravellingWeight | None] = SimpleQueue()
        self._process: int | None = None

    def register(self, wanted: Sequence[tuple[str, torch.dtype]], device: torch.device) -> Stop:
        """Add a module, in the order of the model, and return what it passes to `enter` and `leave`.

        Args:
            wanted: The names of its weights in the store, and what they are used as.

        Raises:
            ConfigurationError: If a weight's file is missing, cut off or another one.
        """
        weights = tuple(self._weight(name, dtype, device) for name, dtype in wanted)
        files = tuple({weight.found.file: None for weight in weights if weight.found.file is not None})
        nbytes = sum(weight.nbytes for weight in weights)
        origin = tuple(self.source.origin(name) for name, _ in wanted)
        stop = Stop(self._route.extend(), weights, files, nbytes, origin)
        self._stops.append(stop)
        return stop

    def _weight(self, name: str, dtype: torch.dtype, device: torch.device) -> TravellingWeight:
        # Tied weights are one weight under several names.
        identity = self.source.identity(name)
        key = (name if identity is None else identity, dtype, device)
        if key not in self._weights:
            self._weights[key] = TravellingWeight(self.source.find(name, self._files), device, dtype)
        return self._weights[key]

    @property
    def budget(self) -> Budget:
        """The memory that weights may take; what is measured is measured at the first call of the model."""
        return Budget(self._mapped.limit, self._copied.limit)

    @property
    def used(self) -> Budget:
        """The memory that weights take now."""
        return Budget(self._mapped.used, self._copied.used)

    def enter(self, stop: Stop) -> list[torch.Tensor]:
        """Return the weights of a module that is about to run, and ask for those of the modules after it.

        Raises:
            UsageError: If a file was changed since it was mapped.
        """
        for file in stop.files:
            file.check()
        with self._lock:
            if self._process != os.getpid():
                self._begin()
            self._clock += 1
            self._bytes_ahead = self._bytes_ahead - stop.nbytes if self._route.visit(stop.number) else 0
            for weight in stop.weights:
                weight.use(self._clock)
                if weight.where is Where.AWAY:  # it was not foreseen, and comes before what is
                    self._make_room(self._ledger(weight), weight.nbytes, needed_at=self._clock)
                    self._ledger(weight).add(weight)
                    weight.where = Where.ASKED
            self._route.look_ahead(self._ask)
        try:
            return [self._take(weight) for weight in stop.weights]
        except BaseException:
            self.leave(stop)
            raise

    def leave(self, stop: Stop) -> None:
        """Note that a module has run."""
        with self._lock:
            for weight in stop.weights:
                weight.users -= 1
            for ledger in (self._mapped, self._copied):
                if ledger.used > ledger.limit:
                    self._make_room(ledger, 0, needed_at=-1)
            self._passed += stop.nbytes
            looks = self._passed >= LOOK_AFTER and any(weight.device.type == "cpu" for weight in stop.weights)
            if looks:
                self._passed = 0
        if looks:
            trim_holes(HOLES)

    def keep(self, stop: Stop) -> None:
        """Never give the weights of a module up again, because it has them for good."""
        with self._lock:
            for weight in stop.weights:
                weight.kept = True

    def _begin(self) -> None:
        """Start the threads, in a forked process again."""
        largest: dict[torch.device, int] = {}
        for stop in self._stops:
            for device in {weight.device for weight in stop.weights}:
                largest[device] = max(largest.get(device, 0), stop.nbytes)
        choices = [choose_budget(self._wish, device, size) for device, size in largest.items()]
        self._mapped.limit = max((choice.value.mapped for choice in choices), default=0)
        self._copied.limit = max((choice.value.copied for choice in choices), default=0)
        logger.info("Offloaded weights: %s", "; ".join(map(str, choices)))
        self._set_window()
        lanes: dict[torch.device, CopyLane | None] = {}
        for weight in self._weights.values():
            weight.start_lane(lanes)
            if weight.where in (Where.ASKED, Where.COMING):
                self._ledger(weight).remove(weight)
                weight.where = Where.AWAY
        self._queue = SimpleQueue()
        self._process = os.getpid()
        # Threads take turns on a lane, so more than one would wait.
        num_threads = 1 if any(lane is not None for lane in lanes.values()) else NUM_THREADS
        if any(not weight.is_held for weight in self._weights.values()):
            for _ in range(num_threads):
                thread = threading.Thread(
                    target=_serve, args=(weakref.ref(self), self._queue), name="accelerate-read-ahead", daemon=True
                )
                _threads[thread] = self._queue
                thread.start()
            weakref.finalize(self, _stop, self._queue, num_threads)

    def _set_window(self) -> None:
        """Look far ahead where everything fits; where it does not, keep most of the budget for what can stay."""
        for ledger in (self._mapped, self._copied):
            wanted = sum(weight.nbytes for weight in self._weights.values() if self._ledger(weight) is ledger)
            if wanted > ledger.limit:
                self._window, self._fewest = min(self._window, ledger.limit // 4), 1

    def _ledger(self, weight: TravellingWeight) -> _Ledger:
        return self._mapped if weight.in_place else self._copied

    def _ask(self, number: int) -> bool:
        """Ask for the weights of a stop ahead, and return whether there was room for them."""
        ahead = self._route.ahead
        if ahead >= MOST_AHEAD or (self._bytes_ahead >= self._window and ahead >= self._fewest):
            return False
        stop, time = self._stops[number], self._clock + ahead + 1
        for weight in stop.weights:
            weight.expected_at = time
            if weight.where is Where.AWAY:
                ledger = self._ledger(weight)
                if not self._make_room(ledger, weight.nbytes, needed_at=time):
                    return False
                weight.where = Where.ASKED
                ledger.add(weight)
                self._queue.put(weight)
        self._bytes_ahead += stop.nbytes
        return True

    def _make_room(self, ledger: _Ledger, nbytes: int, needed_at: int) -> bool:
        """Give up weights that are used later than `needed_at`, and return whether `nbytes` fit now."""
        if ledger.used + nbytes <= ledger.limit:
            return True
        if needed_at > self._clock == ledger.full_at:
            return False  # looked through already for what comes later
        # More than is needed, so that the list is not made again for every weight.
        target = ledger.limit - nbytes - (ledger.limit // _BATCH if needed_at >= 0 else 0)
        slack = len(self._stops)
        given_up = [w for w in ledger.present if w.where is Where.HERE and not w.users and not w.kept]
        due = {weight: weight.next_use(self._clock, slack) for weight in given_up}
        for weight in sorted(given_up, key=due.__getitem__, reverse=True):
            if ledger.used <= target or due[weight] <= needed_at:
                break
            if weight.was_changed():
                weight.kept = True  # the file does not have what was written to it
                continue
            ledger.remove(weight)
            weight.give_up()
        fits = ledger.used + nbytes <= ledger.limit
        if not fits and needed_at > self._clock:
            ledger.full_at = self._clock
        return fits

    def _take(self, weight: TravellingWeight) -> torch.Tensor:
        if weight.is_held:
            return weight.take()
        if weight.in_place:
            self._announce(weight)
            return weight.take()
        with self._lock:
            while weight.where is Where.COMING:
                self._arrival.wait()
            if weight.where is Where.HERE:
                return weight.take()
            if weight.where is Where.AWAY:  # a thread could not fetch it
                self._copied.add(weight)
            weight.where = Where.COMING
        self._fetch(weight)
        return weight.take()

    def _announce(self, weight: TravellingWeight) -> None:
        """Let pages that no thread reads yet come while they are used."""
        with self._lock:
            if weight.where is not Where.ASKED:
                return
            weight.where = Where.HERE
        advice.announce(weight.found.tensor)

    def _fetch(self, weight: TravellingWeight) -> None:
        """Fetch a weight that is marked as coming."""
        arrived = False
        try:
            weight.fetch()
            arrived = True
        finally:
            with self._lock:
                if not arrived:
                    self._ledger(weight).remove(weight)
                weight.where = Where.HERE if arrived else Where.AWAY
                self._arrival.notify_all()

    def serve(self, weight: TravellingWeight) -> None:
        """Fetch a weight that was asked for, unless the module that needs it came first."""
        with self._lock:
            if weight.where is not Where.ASKED:
                return
            weight.where = Where.COMING
        try:
            self._fetch(weight)
        except (AccelerateError, RuntimeError, OSError) as error:
            # The module that needs it fetches it itself, and tells its caller.
            logger.debug("A weight could not be read ahead: %s", error)


_threads: weakref.WeakKeyDictionary[threading.Thread, SimpleQueue[TravellingWeight | None]] = (
    weakref.WeakKeyDictionary()
)


def _serve(engine: weakref.ref[ReadAhead], queue: SimpleQueue[TravellingWeight | None]) -> None:
    """Fetch what is asked for, for as long as the engine is in use."""
    while (weight := queue.get()) is not None:
        owner = engine()
        if owner is None:
            return
        owner.serve(weight)
        del owner, weight


def _stop(queue: SimpleQueue[TravellingWeight | None], num_threads: int) -> None:
    for _ in range(num_threads):
        queue.put(None)


@atexit.register
def _stop_all() -> None:
    """Wait for what is being fetched: a thread inside torch when the interpreter goes down aborts the process."""
    running = dict(_threads)
    for thread, queue in running.items():
        if thread.is_alive():
            with suppress(Empty):
                while True:
                    queue.get_nowait()
            _stop(queue, NUM_THREADS)
    for thread in running:
        thread.join(_SECONDS_TO_LEAVE)
