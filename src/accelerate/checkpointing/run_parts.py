"""The parts of a checkpoint that are the run itself: registered objects, progress, loaders, open window, random states."""

from __future__ import annotations

import hashlib
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch

from accelerate._base.constants import RNG_STATE_NAME
from accelerate._base.errors import CheckpointError, printable
from accelerate._base.untrusted import is_whole, number_in, parse_json, read_limited, shown
from accelerate.checkpointing.files import FolderWriter
from accelerate.checkpointing.manifest import CUSTOM, LOADER, PROGRESS, STATEFUL_LOADER, WINDOW
from accelerate.checkpointing.parts import LoadOptions, ObjectPart, Part, Stateful, as_mapping, indexed, read_torch
from accelerate.collectives.rng import set_seed
from accelerate.data_loader.progress import check_loader_state
from accelerate.data_loader.random_states import check_random_states
from accelerate.devices.base import DeviceBackend
from accelerate.parallel.mesh import GradientShare
from accelerate.runtime.gradient_clock import GradientState

_LOG = logging.getLogger(__name__)
_PYTHON, _NUMPY, _TORCH, _STEP = "random_state", "numpy_random_seed", "torch_manual_seed", "step"


class CustomPart(ObjectPart):
    """An object that the program registered."""

    def __init__(self, held: Stateful, index: int = 0) -> None:
        super().__init__(f"{type(held).__name__} (registered object {index})", f"{CUSTOM}_{index}.pkl", held)

    def read(self, folder: Path, options: LoadOptions) -> Any:
        return read_torch(folder / self.file, options, map_location="cpu")


def check_custom_count(folder: Path, parts: Sequence[Part]) -> None:
    """Refuse a checkpoint with another number of registered objects.

    Args:
        parts: The parts of this run.

    Raises:
        CheckpointError: (a RuntimeError) if the numbers differ.
    """
    found = len(list(folder.glob(f"{CUSTOM}_[0-9]*.pkl")))
    own = sum(isinstance(part, CustomPart) for part in parts)
    if found != own:
        raise CheckpointError(
            f"{str(folder)!r} holds {found} registered object(s), and this run has {own}: it is not known which "
            "belongs to which. Call register_for_checkpointing with the same objects as when it was saved."
        )


class ProgressPart(ObjectPart):
    """The counters of a run."""

    def __init__(self, progress: Stateful) -> None:
        super().__init__("progress", PROGRESS, progress)

    def write(self, payload: Any, folder: FolderWriter) -> None:
        folder.write_json(self.file, payload)

    def read(self, folder: Path, options: LoadOptions) -> Any:
        path = folder / self.file
        if not path.is_file():
            return None  # a checkpoint of another library
        try:
            found = parse_json(read_limited(path))
        except ValueError as error:
            raise CheckpointError(
                f"{str(path)!r} is not JSON ({error}): it is broken. Use another checkpoint."
            ) from error
        names = self.held.state_dict()
        if not isinstance(found, dict) or not all(is_whole(found.get(name)) for name in names):
            raise CheckpointError(
                f"{str(path)!r} holds {shown(found)}, and the counters of a run are whole numbers: {', '.join(names)}. Use "
                "another checkpoint."
            )
        return found


class LoaderPart:
    """A prepared loader.

    A position is counted in global samples, so one file serves all ranks. Where the state of a loader is another on each
    rank, each writes its own: torchdata's loaders, and data that was divided before it came here.

    In a run that trains, a loader that no optimizer steps with is for evaluation: it starts anew, because a metric over
    the rest of its samples would be a wrong number.

    Args:
        others: All loaders of the run.
    """

    def __init__(
        self, loader: Any, index: int = 0, *, rank: int = 0, restores: bool = True, others: Sequence[Any] = ()
    ) -> None:
        self.name = f"loader {index}"
        self.loader = loader
        self.index = index
        self.rank = rank
        self.restores = restores
        self.others = others
        self._is_stateful = hasattr(getattr(loader, "base_dataloader", None), "load_state_dict")

    @property
    def everywhere(self) -> bool:
        return self._is_stateful or getattr(self.loader, "differs_between_ranks", False)

    def snapshot(self) -> Any:
        if not hasattr(self.loader, "state_dict"):
            return None
        evaluates = (
            hasattr(self.loader, "beginning_state_dict")
            and not self.loader.trains
            and any(getattr(loader, "trains", False) for loader in self.others)
        )
        return self.loader.beginning_state_dict() if evaluates else self.loader.state_dict()

    def write(self, payload: Any, folder: FolderWriter) -> None:
        if payload is not None:
            file = self._file(self.rank if self.everywhere else 0, self._is_stateful)
            folder.write_torch(file, payload, self.name)

    def _file(self, rank: int, stateful: bool) -> str:
        # The state of torchdata's loader is known to other libraries under a name of its own.
        stem = STATEFUL_LOADER if stateful else LOADER
        return indexed(stem, self.index, f"_rank{rank}.bin" if rank else ".bin")

    def read(self, folder: Path, options: LoadOptions) -> Any:
        if not self.restores or not hasattr(self.loader, "load_state_dict"):
            return None
        own_rank = self.rank if options.saved_world_size == options.world_size else 0
        kind = self._is_stateful
        # A position means the same to both kinds of loader; the kind that saved it may have been the other one.
        files = [folder / self._file(rank, stateful) for stateful in (kind, not kind) for rank in (own_rank, 0)]
        file = next((file for file in files if file.is_file()), None)
        # Random states among it stay in host memory, where torch wants them.
        state = read_torch(file, options, map_location="cpu") if file is not None else None
        if state is None:
            return None
        origin = repr(str(file))
        own = as_mapping(state, origin).get("_accelerate", state)
        if "epoch" in as_mapping(own, origin):
            check_loader_state(own, origin)
        elif not kind:
            _LOG.warning(
                "%s was written by torchdata's loader alone: it says nothing to %s.", printable(file), self.name
            )
            return None
        return state

    def restore(self, payload: Any) -> None:
        if payload is not None:
            self.loader.load_state_dict(payload)


class WindowCounts(Protocol):
    """What is counted in an accumulation window."""

    def state_dict(self) -> dict[str, Any]:
        """Return the counts; empty if there is nothing to remember."""

    def accepts(self, state_dict: object) -> bool:
        """Return whether something that was read are counts."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over counts; an empty dictionary begins anew."""

    def share_of(self, states: Sequence[dict[str, Any]], saved_ranks: int, ranks: int) -> tuple[dict[str, Any], float]:
        """Return the counts of one of `ranks` ranks, and what the sum of all saved gradients is divided by."""


class HoldsGradients(Protocol):
    """A strategy, which knows where the gradients of an open window are."""

    def gradient_share(self) -> GradientShare:
        """Return which gradients this rank sums up."""

    def open_gradients(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return what this rank has summed up, whole, by the names of the parameters."""

    def set_open_gradients(self, model: torch.nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Go on with what was summed up."""


def _window_files(folder: Path, world_size: int) -> list[Path]:
    """Return the files of open windows in a checkpoint that so many ranks saved, in their order."""
    ranks = ((number_in(file.stem.removeprefix(f"{WINDOW}_")), file) for file in folder.glob(f"{WINDOW}_[0-9]*.bin"))
    return [file for _, file in sorted((rank, file) for rank, file in ranks if rank is not None and rank < world_size)]


def read_window(
    path: Path, options: LoadOptions, are_counts: Callable[[Any], bool] = lambda counts: True, **overrides: Any
) -> dict[str, Any]:
    """Return what a rank saved of an open window.

    Args:
        are_counts: Says whether a window can have these counts.

    Raises:
        CheckpointError: If it cannot be read, or is no window.
    """
    found = read_torch(path, options, **overrides)
    checks = {**_OF_WINDOWS, "window": are_counts}
    if wrong := next((name for name, is_right in checks.items() if not is_right(_entry(found, name))), None):
        raise CheckpointError(
            f"{str(path)!r} holds {wrong}={shown(_entry(found, wrong))}, which no accumulation window has: it is broken. Use "
            "another checkpoint."
        )
    payload: dict[str, Any] = found
    return payload


def _entry(found: Any, name: str) -> Any:
    return found.get(name) if isinstance(found, dict) else None


def _is_share(value: Any) -> bool:
    names = [entry.name for entry in fields(GradientShare)]
    return (
        isinstance(value, dict)
        and {"index", "count"} <= value.keys() <= set(names)
        and all(map(is_whole, value.values()))
        and value["count"] > 0
    )


def _are_gradients(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(gradient, torch.Tensor) for name, gradient in value.items()
    )


_OF_WINDOWS: dict[str, Callable[[Any], bool]] = {
    "is_open": lambda value: isinstance(value, bool),
    "gradients": _are_gradients,
    "share": _is_share,
}


class WindowPart:
    """The gradients summed so far, and what they will be divided by; nothing between two windows."""

    name = "accumulation window"
    everywhere = True

    def __init__(
        self,
        window: WindowCounts,
        clock: GradientState,
        models: Sequence[torch.nn.Module],
        rank: int,
        strategy: HoldsGradients,
    ) -> None:
        self.window = window
        self.clock = clock
        self.models = models
        self.rank = rank
        self.strategy = strategy

    def snapshot(self) -> Any:
        is_open = not self.clock.sync_gradients
        gradients = {
            f"{index}.{name}": gradient
            for index, model in enumerate(self.models if is_open else ())
            for name, gradient in self.strategy.open_gradients(model).items()
        }
        counts = self.window.state_dict()
        if not gradients and not counts:
            return None
        share = asdict(self.strategy.gradient_share())
        return {"window": counts, "is_open": is_open, "gradients": gradients, "share": share}

    def write(self, payload: Any, folder: FolderWriter) -> None:
        if payload is not None:
            folder.write_torch(f"{WINDOW}_{self.rank}.bin", payload)

    def read(self, folder: Path, options: LoadOptions) -> Any:
        share = self.strategy.gradient_share()
        own = folder / f"{WINDOW}_{self.rank}.bin"
        if options.saved_world_size == options.world_size and own.is_file():
            payload = read_window(own, options, self.window.accepts)
            if GradientShare(**payload["share"]) == share:
                return payload
        files = _window_files(folder, options.saved_world_size)
        saved = [read_window(file, options, self.window.accepts) for file in files]
        return self._part_of(saved, share) if saved else None

    def _part_of(self, saved: list[Any], share: GradientShare) -> Any:
        """Return this rank's part of a window that was opened in another layout."""
        shares: defaultdict[int, list[Any]] = defaultdict(list)
        for payload in saved:
            shares[payload["share"]["index"]].append(payload)
        counts, divisor = self.window.share_of(
            [alike[0]["window"] for alike in shares.values()], saved[0]["share"]["count"], share.count
        )
        gradients: dict[str, torch.Tensor] = {}
        for alike in shares.values():
            # Of the same data: other layers, or the same gradients again.
            one = {name: gradient for payload in alike for name, gradient in payload["gradients"].items()}
            for name, gradient in one.items():
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        return {
            "window": counts,
            "is_open": saved[0]["is_open"],
            "gradients": {name: total / divisor for name, total in gradients.items()},
        }

    def restore(self, payload: Any) -> None:
        found = payload or {"window": {}, "is_open": False, "gradients": {}}
        self.window.load_state_dict(found["window"])
        self.clock._set_sync_gradients(not found["is_open"])
        for index, model in enumerate(self.models):
            prefix = f"{index}."
            own = {
                name.removeprefix(prefix): value
                for name, value in found["gradients"].items()
                if name.startswith(prefix)
            }
            self.strategy.set_open_gradients(model, own)


class CountsSteps(Protocol):
    """What counts micro-batches."""

    step: int


class RandomPart:
    """The states of python's, numpy's, torch's and the device's generators, and the number of the micro-batch."""

    name = "random states"
    everywhere = True

    def __init__(self, counter: CountsSteps, rank: int, backend: DeviceBackend) -> None:
        self.counter = counter
        self.rank = rank
        self.backend = backend

    def snapshot(self) -> dict[str, Any]:
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

    def write(self, payload: Any, folder: FolderWriter) -> None:
        folder.write_torch(f"{RNG_STATE_NAME}_{self.rank}.pkl", payload)

    def read(self, folder: Path, options: LoadOptions) -> dict[str, Any] | None:
        path = folder / f"{RNG_STATE_NAME}_{self.rank}.pkl"
        try:
            if path.is_file():
                return _read_states(path, options)
            return self._derive(folder, options)
        except CheckpointError as error:
            if options.manifest is not None:
                raise
            # Another library wrote it, perhaps with generators that are not known here.
            _LOG.warning("Random states are not restored: %s", error)
            return None

    def _derive(self, folder: Path, options: LoadOptions) -> dict[str, Any] | None:
        """Return the states of a rank that the saved run did not have."""
        saved = sorted(folder.glob(f"{RNG_STATE_NAME}_[0-9]*.pkl"))
        if not saved:
            _LOG.warning("Random states are not restored: %s has none.", printable(folder))
            return None
        found = [_read_states(path, options) for path in saved]
        states = found[self.rank % len(found)]
        if all(torch.equal(states[_TORCH], other[_TORCH]) for other in found):
            return states  # the ranks draw alike, and so does this one
        text = f"{self.rank}:".encode() + states[_TORCH].numpy().tobytes()
        seed = int.from_bytes(hashlib.sha256(text).digest()[:4], "little")
        _LOG.warning(
            "The checkpoint %s was saved by %d processes: rank %d has no random states in it, and starts with seed %d, "
            "made from them.",
            printable(folder),
            len(found),
            self.rank,
            seed,
        )
        return {_STEP: states.get(_STEP, self.counter.step), "seed": seed}

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


def _read_states(path: Path, options: LoadOptions) -> dict[str, Any]:
    """Return the random states in a file.

    Raises:
        CheckpointError: If it cannot be read, or a generator would not take one of them.
    """
    found = read_torch(path, options, map_location="cpu")
    names = {"python": _PYTHON, "numpy": _NUMPY, "torch": _TORCH}
    if not isinstance(found, dict) or not found.keys() >= set(names.values()) or not is_whole(found.get(_STEP, 0)):
        raise CheckpointError(
            f"{str(path)!r} holds {shown(found)} and not the states of python's, numpy's and torch's generators. Use another "
            "checkpoint."
        )
    check_random_states({name: found[key] for name, key in names.items()}, repr(str(path)))
    return found
