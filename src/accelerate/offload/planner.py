"""The plan that gives every module of a model a device, in the order of the model and within the memory of each device."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import nn

from accelerate._base.helpers import Choice, convert_bytes
from accelerate.offload.device_map import check_tied_parameters_on_same_device, clean_device_map
from accelerate.offload.memory import get_max_memory
from accelerate.offload.places import DISK, HOST, Place, is_offload, prefixes
from accelerate.offload.reserve import Reserve
from accelerate.offload.sizes import Dtype, as_class_names, convert_file_size_to_int, is_splittable, parts_of, sizes_in
from accelerate.offload.ties import find_tied_parameters, ties_in
from accelerate.offload.tree import Tree, has_children

Part: TypeAlias = tuple[str, nn.Module | torch.Tensor]


def get_module_size_with_ties(
    tied_params: Iterable[str], module_size: int, module_sizes: Mapping[str, int], modules_to_treat: Sequence[Part]
) -> tuple[int, list[str], list[nn.Module | torch.Tensor]]:
    """Return the bytes of a module with the waiting modules that it is tied to, and those modules.

    Args:
        tied_params: Parameters of other modules that are tied to one of this module.
        module_sizes: As `compute_module_sizes` gives them, where a tied parameter counts once.
        modules_to_treat: The modules that have no device yet.
    """
    return _with_ties(tied_params, module_size, module_sizes, dict(modules_to_treat))


def _with_ties(
    tied_params: Iterable[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    waiting: Mapping[str, nn.Module | torch.Tensor],
) -> tuple[int, list[str], list[nn.Module | torch.Tensor]]:
    found: dict[str, nn.Module | torch.Tensor] = {}
    for parameter in tied_params:
        holder = next((prefix for prefix in prefixes(parameter) if prefix in waiting), None)
        if holder is not None:
            found[holder] = waiting[holder]
    return module_size + sum(module_sizes.get(name, 0) for name in found), list(found), list(found.values())


def _under(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _tied_elsewhere(name: str, ties: Mapping[str, Sequence[Sequence[str]]]) -> list[str]:
    """Return the parameters outside a module that are tied to one inside it."""
    groups = ties.get(name, ())
    return [other for group in groups for other in group if not _under(other, name)]


def _ties_by_module(tied_parameters: Iterable[Sequence[str]]) -> dict[str, list[Sequence[str]]]:
    """Return the groups that touch each module, so that looking them up does not depend on their number."""
    table: dict[str, list[Sequence[str]]] = {}
    for group in tied_parameters:
        for module in {prefix for name in group for prefix in prefixes(name)}:
            table.setdefault(module, []).append(group)
    return table


def fallback_allocate(
    modules: list[Part],
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: str | Iterable[str] | None = None,
    tied_parameters: Iterable[Sequence[str]] | None = None,
) -> tuple[str | None, nn.Module | torch.Tensor | None, list[Part]]:
    """Find any module, or part of one, that fits a limit together with what it is tied to.

    Returns:
        Its name, the module, and the modules that remain once it is taken out; None, None and all of them if none fits.
    """
    limit = convert_file_size_to_int(size_limit)
    no_split = as_class_names(no_split_module_classes)
    ties = _ties_by_module(tied_parameters or ())
    waiting = dict(modules)
    for index, (top, part) in enumerate(modules):
        split = _first_fit((top, part), limit, module_sizes, no_split, ties, waiting)
        if split is not None:
            (name, found), rest = split
            return name, found, [*modules[:index], *rest, *modules[index + 1 :]]
    return None, None, modules


def _first_fit(
    part: Part,
    limit: int,
    sizes: Mapping[str, int],
    no_split: set[str],
    ties: Mapping[str, Sequence[Sequence[str]]],
    waiting: Mapping[str, nn.Module | torch.Tensor],
) -> tuple[Part, list[Part]] | None:
    """Return the first part at or below `part` that fits, and what remains of `part` without it."""
    name, module = part
    if _with_ties(_tied_elsewhere(name, ties), sizes.get(name, 0), sizes, waiting)[0] <= limit:
        return part, []
    if not is_splittable(module, no_split):
        return None
    children = parts_of(module, name)
    for index, child in enumerate(children):
        found = _first_fit(child, limit, sizes, no_split, ties, waiting)
        if found is not None:
            return found[0], [*children[:index], *found[1], *children[index + 1 :]]
    return None


@dataclass
class Plan:
    """The device of each module with the reason for it, and what the plan leaves free."""

    choices: dict[str, Choice[int | str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    used: dict[int | str, int] = field(default_factory=dict)

    @property
    def device_map(self) -> dict[str, Place]:
        """Return the device of each module."""
        return {name: choice.value for name, choice in self.choices.items()}


class Planner:
    """Fill the devices one after the other with the modules in their order.

    The devices that run offloaded modules keep room for the largest layer still to come, since its weights visit them.
    """

    def __init__(
        self,
        model: nn.Module,
        limits: Mapping[int | str, int],
        sizes: Mapping[str, int],
        no_split: set[str],
        fallback: bool = False,
        ties: list[list[str]] | None = None,
    ) -> None:
        accelerators = [device for device in limits if not is_offload(device)]
        self.limits: dict[int | str, int | None] = {**limits, DISK: None}
        self.devices = [device for device in self.limits if device != DISK] + [DISK]
        self.reserving = {accelerators[0], HOST} if accelerators else {HOST}
        if accelerators and isinstance(accelerators[0], str):
            self.reserving = {accelerators[0]}  # one unindexed accelerator works in the host's own memory
        self.sizes, self.no_split, self.fallback = sizes, no_split, fallback
        self.tied_parameters = find_tied_parameters(model) if ties is None else ties
        self.ties = _ties_by_module(self.tied_parameters)
        self.queue: list[Part] = list(reversed(parts_of(model)))  # the next one is at the end
        self.waiting: dict[str, nn.Module | torch.Tensor] = dict(self.queue)
        self.opened: set[str] = set()
        self.reserve = Reserve(model, sizes, no_split)
        self.plan = Plan(used=dict.fromkeys(self.devices, 0))
        self.current = 0

    def run(self) -> Plan:
        """Place every module."""
        while self.queue:
            name, module = self.queue.pop()
            if name in self.opened:
                self.queue += reversed(parts_of(module, name))
                continue
            if name not in self.waiting:
                continue  # placed already, with the module that it is tied to
            if not self._place(name, module):
                self.queue.append((name, module))
        return self.plan

    def _room(self, name: str) -> int | None:
        """Return the bytes that the current device has for a module, or None for no limit."""
        device = self.devices[self.current]
        limit = self.limits[device]
        if limit is None:
            return None
        return limit - self._kept(name) - self.plan.used[device]

    def _place(self, name: str, module: nn.Module | torch.Tensor) -> bool:
        """Return whether the module is placed; it has another turn if not: on the next device, or as its parts."""
        size, room = self.sizes.get(name, 0), self._room(name)
        total, tied = size, list[str]()
        if name in self.ties:
            total, tied, _ = _with_ties(_tied_elsewhere(name, self.ties), size, self.sizes, self.waiting)
        if room is None or total <= room:
            self._assign(name, f"{size} bytes fit" + ("" if room is None else f" in {room}"))
            for other in tied:
                self._assign(other, f"tied to {name}", before_its_turn=True)
            return True
        if size <= room:
            if not self._split_one_of(tied):
                self._next_device(name, f"{total} bytes with {', '.join(tied)}, tied to it, do not fit in {room}")
            return False
        if is_splittable(module, self.no_split):
            self._note(f"{name}: split, {size} bytes do not fit in {room} on {self.devices[self.current]}")
            self._open(name, module)
            return False
        if not isinstance(module, torch.Tensor) and has_children(module):
            self._note(f"{name}: stays whole, {type(module).__name__} is one of no_split_module_classes")
        if not self._fill_with_another(name, module, room):
            self._next_device(name, f"{size} bytes do not fit in {room}")
        return False

    def _assign(self, name: str, reason: str, before_its_turn: bool = False) -> None:
        device = self.devices[self.current]
        self.plan.choices[name] = Choice(device, reason)
        self.plan.used[device] += self.sizes.get(name, 0)
        self._note(f"{name}: on {device}, {reason}")
        del self.waiting[name]
        if before_its_turn:
            self.reserve.take_out(name)

    def _note(self, note: str) -> None:
        self.plan.notes.append(note)

    def _next_device(self, name: str, reason: str) -> None:
        device = self.devices[self.current]
        self._note(f"{name}: not on {device}, {reason}")
        kept = self._kept(name)
        if kept:
            self._note(f"{device}: {kept} bytes are kept for the largest layer that comes later, which may visit it")
        self.current += 1

    def _kept(self, name: str) -> int:
        """Return the bytes of the current device that stay free for layers after a module."""
        return self.reserve.largest_after(name) if self.devices[self.current] in self.reserving else 0

    def _open(self, name: str, module: nn.Module | torch.Tensor) -> None:
        """Let the parts of a module take its turn."""
        del self.waiting[name]
        self.waiting.update(parts_of(module, name))
        self.opened.add(name)

    def _split_one_of(self, names: list[str]) -> bool:
        """Split the first module of `names` that may be split, so that only its tied part has to come along."""
        for name in names:
            module = self.waiting[name]
            if is_splittable(module, self.no_split):
                self._open(name, module)
                self._note(f"{name}: split, a part of it is tied to a module before it")
                return True
        return False

    def _in_order(self) -> list[Part]:
        """Return the modules that wait, in the order of their turns."""
        found: list[Part] = []
        pending = list(self.queue)
        while pending:
            name, part = pending.pop()
            if name in self.opened:
                pending += reversed(parts_of(part, name))
            elif name in self.waiting:
                found.append((name, part))
        return found

    def _fill_with_another(self, name: str, module: nn.Module | torch.Tensor, room: int) -> bool:
        """Put a later module on a device that would stay empty, if the caller asked for it."""
        device = self.devices[self.current]
        if not self.fallback or self.plan.used[device]:
            return False
        parts = [(name, module), *self._in_order()]
        chosen, found, rest = fallback_allocate(parts, self.sizes, room, self.no_split, self.tied_parameters)
        if chosen is None or found is None:
            return False
        self.queue = list(reversed(rest[1:]))  # without the module itself, which does not fit and comes back
        self.waiting = dict(rest)
        _, tied, _ = _with_ties(_tied_elsewhere(chosen, self.ties), 0, self.sizes, self.waiting)
        self.waiting[chosen] = found
        for placed in (chosen, *tied):
            self._assign(placed, f"fills {device}, where {name} does not fit", before_its_turn=True)
        return True


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split_module_classes: str | Iterable[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Place]:
    """Return a device for every module: the accelerators in order, then the CPU, then the disk.

    Args:
        max_memory: Bytes, or text like `"10GB"`, by device; without it, the memory that is free now.
        no_split_module_classes: Class names of the blocks that stay whole, such as those with a residual connection.
        dtype: The dtype that the weights will have once loaded.
        special_dtypes: The dtype of single tensors by name.
        verbose: Print every decision and its reason.
        clean_result: Give one entry for a sub-tree that lies on one device.
        offload_buffers: Buffers of offloaded modules are offloaded too, so no accelerator needs room for them.
        fallback_allocation: Where the next module fits no more on a device that is still empty, try a later one.
    """
    limits = get_max_memory(max_memory)
    tree = Tree(model)  # walked once for all that is asked of it
    sizes, no_split = sizes_in(tree, dtype, special_dtypes), as_class_names(no_split_module_classes)
    planner = Planner(model, limits, sizes, no_split, fallback_allocation, ties_in(tree))
    plan = planner.run()
    device_map = plan.device_map
    if any(not is_offload(device) for device in limits) and (verbose or not offload_buffers):
        buffers = _offloaded_buffers(plan, sizes_in(tree, dtype, special_dtypes, buffers_only=True))
        way = "go there too, by offload_buffers" if offload_buffers else "stay on the device that runs it"
        plan.notes += [f"{name}: {size} bytes of buffers {way}" for name, size in buffers.items()]
        if not offload_buffers:
            _warn_about_buffers(plan, limits, sum(buffers.values()))
    if verbose:
        print("\n".join(map(readable, plan.notes)))  # noqa: T201 - the user asked to see it
    check_tied_parameters_on_same_device(planner.tied_parameters, device_map)
    return clean_device_map(device_map) if clean_result else device_map


def readable(note: str) -> str:
    """Return a reason or note with its numbers of bytes in units."""
    return re.sub(r"(\d+) bytes|(?<=in )\d+", lambda found: convert_bytes(int(found[1] or found[0])), note)


def _offloaded_buffers(plan: Plan, buffer_sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of the buffers of each offloaded module that has some."""
    names = [name for name, choice in plan.choices.items() if is_offload(choice.value)]
    return {name: buffer_sizes[name] for name in names if buffer_sizes.get(name)}


def _warn_about_buffers(plan: Plan, limits: Mapping[int | str, int], needed: int) -> None:
    """Warn if the buffers of offloaded modules, which stay on an accelerator, fit on none."""
    accelerators = [device for device in limits if not is_offload(device)]
    if needed and all(needed > limits[device] - plan.used[device] for device in accelerators):
        warnings.warn(
            f"The buffers of offloaded modules take {needed} bytes, more than any accelerator has left. "
            "Pass offload_buffers=True to offload them with their modules.",
            stacklevel=3,
        )
