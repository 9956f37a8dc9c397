"""The accumulation window that is open when a checkpoint is taken."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from accelerate.checkpointing import names
from accelerate.checkpointing.folder import StagedFolder
from accelerate.checkpointing.parts.base import LoadOptions, read_torch
from accelerate.checkpointing.parts.host_copy import host_copy
from accelerate.parallel.mesh import GradientShare
from accelerate.runtime.gradient_clock import GradientState


class Window(Protocol):
    """What is counted in an accumulation window."""

    def state_dict(self) -> dict[str, Any]:
        """Return the counts; empty if there is nothing to remember."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over counts; an empty dictionary begins anew."""

    def share_of(self, states: Sequence[dict[str, Any]], saved_ranks: int, ranks: int) -> tuple[dict[str, Any], float]:
        """Return the counts of one of `ranks` ranks, and what the sum of all saved gradients is divided by."""


class Gradients(Protocol):
    """A strategy, which knows where the gradients of an open window are."""

    def gradient_share(self) -> GradientShare:
        """Return which gradients this rank sums up."""

    def open_gradients(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Return what this rank has summed up, whole, by the names of the parameters."""

    def set_open_gradients(self, model: torch.nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Go on with what was summed up."""


class WindowPart:
    """The gradients summed so far, and what they will be divided by; nothing between two windows."""

    name = "accumulation window"
    everywhere = True

    def __init__(
        self, window: Window, clock: GradientState, models: Sequence[torch.nn.Module], rank: int, strategy: Gradients
    ) -> None:
        self.window = window
        self.clock = clock
        self.models = models
        self.rank = rank
        self.strategy = strategy

    def _open_gradients(self) -> dict[str, torch.Tensor]:
        return {
            f"{index}.{name}": gradient
            for index, model in enumerate(self.models)
            for name, gradient in self.strategy.open_gradients(model).items()
        }

    def snapshot(self, *, copy: bool) -> Any:
        is_open = not self.clock.sync_gradients
        gradients = self._open_gradients() if is_open else {}
        counts = self.window.state_dict()
        if not gradients and not counts:
            return None
        share = asdict(self.strategy.gradient_share())
        payload = {"window": counts, "is_open": is_open, "gradients": gradients, "share": share}
        return host_copy(payload) if copy else payload

    def write(self, payload: Any, folder: StagedFolder) -> None:
        if payload is not None:
            folder.write_torch(names.window_file(self.rank), payload)

    def read(self, folder: Path, options: LoadOptions) -> Any:
        share = self.strategy.gradient_share()
        own = folder / names.window_file(self.rank)
        if options.saved_world_size == options.world_size and own.is_file():
            payload = read_torch(own, options)
            if GradientShare(**payload["share"]) == share:
                return payload
        files = [folder / names.window_file(rank) for rank in range(options.saved_world_size)]
        saved = [read_torch(file, options) for file in files if file.is_file()]
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
