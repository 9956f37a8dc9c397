"""Where the parts of a model would go, worked out from the list of its tensors alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from accelerate._base.helpers import Choice
from accelerate.offload.estimate import Model, size_in
from accelerate.offload.inventory import TensorEntry
from accelerate.offload.places import DISK, META, prefixes
from accelerate.offload.planner import Plan, Planner, readable


@dataclass(frozen=True)
class Part:
    """A part of a model: its modules as one text, its bytes, its place and why it goes there."""

    modules: str
    bytes: int
    place: int | str
    reason: str


class WholeLayer(nn.Module):
    """A layer of a skeleton that stays whole on a device."""


def plan_parts(model: Model, limits: Mapping[int | str, int], dtype: str | None = None) -> list[Part]:
    """Return the parts of a model in their order, each with its place.

    Args:
        limits: The bytes that each device may take, as `get_max_memory` gives them.
        dtype: The dtype that the weights are loaded in; as they are stored if not given.
    """
    sizes = _sizes(model.tensors, dtype)
    plan = Planner(_skeleton(model.tensors), limits, sizes, {WholeLayer.__name__}).run()
    parts = [
        Part(name, sizes.get(name, 0), choice.value, readable(_reason(name, choice, plan)))
        for name, choice in plan.choices.items()
    ]
    return _joined(parts)


def _reason(name: str, choice: Choice[int | str], plan: Plan) -> str:
    """Return why a module has its place; for the disk, which has room for everything, why it has no other one."""
    left = [note for note in plan.notes if ": not on " in note]
    if choice.value != DISK or not left:
        return choice.reason
    full, _, rest = left[-1].partition(": not on ")
    place, _, reason = rest.partition(", ")
    return f"{reason} on {place}" if full == name else f"{place} is full since {full}"


def _sizes(tensors: Iterable[TensorEntry], dtype: str | None) -> dict[str, int]:
    sizes: defaultdict[str, int] = defaultdict(int)
    for entry in tensors:
        size = entry.stored_bytes if dtype is None else size_in(entry, dtype)
        for name in prefixes(entry.name):
            sizes[name] += size
    return sizes


def _skeleton(tensors: Iterable[TensorEntry]) -> nn.Module:
    """Return modules and empty parameters of these names; written into the tables, for a file may use any name."""
    entries = list(tensors)
    layers = {entry.layer for entry in entries}
    modules: dict[str, nn.Module] = {"": nn.Module()}
    for entry in entries:
        path, _, key = entry.name.rpartition(".")
        for name in reversed(prefixes(path)):
            if name not in modules:
                above, _, own = name.rpartition(".")
                modules[name] = WholeLayer() if name in layers else nn.Module()
                modules[above]._modules[own] = modules[name]
        # One element stands for the tensor: its size is looked up.
        modules[path]._parameters[key] = nn.Parameter(torch.empty(1, device=META), requires_grad=False)
    return modules[""]


def _joined(parts: Iterable[Part]) -> list[Part]:
    """Return the parts with numbered neighbours, such as the blocks of a model, written as one."""
    joined: list[Part] = []
    for part in parts:
        above, number = part.modules.rpartition(".")[::2]
        before = joined[-1] if joined else None
        if before is not None and before.place == part.place and number.isdecimal():
            first, _, last = before.modules.removeprefix(f"{above}.").partition("-")
            follows = (last or first).isdecimal() and int(last or first) + 1 == int(number)
            if before.modules.startswith(f"{above}.") and follows:
                fits = part.place != DISK and part.reason not in before.reason
                reason = f"the last one: {part.reason}" if fits else before.reason
                joined[-1] = Part(f"{above}.{first}-{number}", before.bytes + part.bytes, part.place, reason)
                continue
        joined.append(part)
    return joined
