"""The plan that gives every module of a model a place, in the order of the model and within the memory of each device."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import Choice, convert_bytes
from accelerate.offload.memory import (
    Dtype,
    compute_module_sizes,
    convert_file_size_to_int,
    get_balanced_memory,
    get_max_memory,
)
from accelerate.offload.places import (
    DISK,
    HOST,
    Place,
    check_tied_parameters_on_same_device,
    clean_device_map,
    is_offload,
    prefixes,
)
from accelerate.offload.tensors import (
    ModuleTree,
    TreeNode,
    as_class_names,
    find_tied_parameters,
    has_children,
    is_splittable,
    parts_of,
)

logger = logging.getLogger("accelerate.utils.modeling")  # programs filter this name

_STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass
class Plan:
    """The place of each module with the reason for it, and what the plan leaves free.

    Args:
        kept: What devices that run offloaded modules keep free for the largest of them.
        missing: The limit that a device without modules would have needed for the first one.
    """

    choices: dict[str, Choice[int | str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    used: dict[int | str, int] = field(default_factory=dict)
    kept: dict[int | str, int] = field(default_factory=dict)
    missing: dict[int | str, int] = field(default_factory=dict)

    @property
    def device_map(self) -> dict[str, Place]:
        """Return the place of each module."""
        return {name: choice.value for name, choice in self.choices.items()}

    @property
    def offloaded(self) -> list[str]:
        """Return the modules that are not on an accelerator."""
        return [name for name, choice in self.choices.items() if is_offload(choice.value)]


def auto_device_map(
    model: nn.Module,
    strategy: str,
    max_memory: Mapping[int | str, int | str] | None = None,
    no_split: str | Iterable[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    offload_buffers: bool = False,
) -> dict[str, Place]:
    """Return a place for each module.

    Args:
        strategy: `"auto"` or `"balanced"` for an even spread, `"balanced_low_0"` for a light first accelerator,
            `"sequential"` to fill one device after the other.

    Raises:
        ConfigurationError: If it is another word.
    """
    if strategy not in _STRATEGIES:
        raise ConfigurationError(
            f"The device map {strategy!r} is not known. Write one of {', '.join(map(repr, _STRATEGIES))}, "
            "or a dictionary."
        )
    limits = max_memory
    if strategy != "sequential":
        low_zero = strategy == "balanced_low_0"
        limits = get_balanced_memory(model, max_memory, no_split, dtype, special_dtypes, low_zero=low_zero)
    return infer_auto_device_map(model, limits, no_split, dtype, special_dtypes, offload_buffers=offload_buffers)


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
    tree = ModuleTree(model)  # walked once for all that is asked of it
    tied = tree.tied_parameters()
    sizes, no_split = compute_module_sizes(tree, dtype, special_dtypes), as_class_names(no_split_module_classes)
    plan = Planner(model, limits, sizes, no_split, fallback_allocation, tied).run()
    accelerators = [device for device in limits if not is_offload(device)]
    if accelerators and (verbose or not offload_buffers):
        sizes = compute_module_sizes(tree, dtype, special_dtypes, buffers_only=True)
        buffers = {name: sizes[name] for name in plan.offloaded if sizes.get(name)}
        way = "go there too, by offload_buffers" if offload_buffers else "stay on the device that runs it"
        plan.notes += [f"{name}: {size} bytes of buffers {way}" for name, size in buffers.items()]
        needed = sum(buffers.values())
        free = {device: limits[device] - plan.used[device] - plan.kept.get(device, 0) for device in accelerators}
        full = all(needed > free[device] for device in accelerators)
        if needed and full and not offload_buffers:
            warnings.warn(
                f"The buffers of offloaded modules take {needed} bytes, more than any accelerator has left. "
                "Pass offload_buffers=True to offload them with their modules.",
                stacklevel=2,
            )
    if plan.missing:
        needs = ", ".join(
            f"{device} (at least {size} bytes for the next module)" for device, size in plan.missing.items()
        )
        logger.info("No module was placed on these devices, because of insufficient memory: %s.", needs)
    if verbose:
        print("\n".join(map(with_units, plan.notes)))  # noqa: T201 - the user asked to see it
    check_tied_parameters_on_same_device(tied, plan.device_map)
    return clean_device_map(plan.device_map) if clean_result else plan.device_map


def with_units(note: str) -> str:
    """Return a reason or note with its numbers of bytes in units."""
    return re.sub(r"(\d+) bytes|(?<=in )\d+", lambda found: convert_bytes(int(found[1] or found[0])), note)


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
        tied_parameters: list[list[str]] | None = None,
    ) -> None:
        accelerators = [device for device in limits if not is_offload(device)]
        self.limits: dict[int | str, int | None] = {**limits, DISK: None}
        self.devices = [device for device in self.limits if device != DISK] + [DISK]
        self.reserving = {accelerators[0], HOST} if accelerators else {HOST}
        if accelerators and isinstance(accelerators[0], str):
            self.reserving = {accelerators[0]}  # one unindexed accelerator works in the host's own memory
        self.sizes, self.no_split, self.fallback = sizes, no_split, fallback
        self.tied_parameters = find_tied_parameters(model) if tied_parameters is None else tied_parameters
        self.ties = _ties_by_module(self.tied_parameters)
        self.queue: list[TreeNode] = list(reversed(parts_of(model)))  # the next one is at the end
        self.waiting: dict[str, nn.Module | torch.Tensor] = dict(self.queue)
        self.opened: set[str] = set()
        self.remaining = RemainingLayers(model, sizes, no_split)
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

    def _place(self, name: str, module: nn.Module | torch.Tensor) -> bool:
        """Return whether the module is placed; it has another turn if not: on the next device, or as its parts."""
        device = self.devices[self.current]
        size, limit = self.sizes.get(name, 0), self.limits[device]
        total, tied = size, list[str]()
        if name in self.ties:
            total, tied, _ = _with_ties(_tied_elsewhere(name, self.ties), size, self.sizes, self.waiting)
        room = None if limit is None else limit - self._reserved(name) - self.plan.used[device]
        if room is None or total <= room:
            self._assign(name, f"{size} bytes fit" + ("" if room is None else f" in {room}"))
            for other in tied:
                self._assign(other, f"tied to {name}", before_its_turn=True)
            return True
        if size <= room:
            if not self._split_one_of(tied):
                together = f"{total} bytes with {', '.join(tied)}, tied to it,"
                self._next_device(name, total, f"{together} do not fit in {room}")
            return False
        if is_splittable(module, self.no_split):
            self._open(name, module, f"{size} bytes do not fit in {room} on {device}")
            return False
        if not isinstance(module, torch.Tensor) and has_children(module):
            self.plan.notes.append(f"{name}: stays whole, {type(module).__name__} is one of no_split_module_classes")
        if not self._fill_with_another(name, module, size):
            self._next_device(name, total, f"{size} bytes do not fit in {room}")
        return False

    def _reserved(self, name: str) -> int:
        """Return the bytes of the current device that stay free for layers after a module."""
        return self.remaining.largest_after(name) if self.devices[self.current] in self.reserving else 0

    def _assign(self, name: str, reason: str, before_its_turn: bool = False) -> None:
        device = self.devices[self.current]
        self.plan.choices[name] = Choice(device, reason)
        self.plan.used[device] += self.sizes.get(name, 0)
        self.plan.notes.append(f"{name}: on {device}, {reason}")
        del self.waiting[name]
        if before_its_turn:
            self.remaining.remove(name)

    def _next_device(self, name: str, size: int, reason: str) -> None:
        device = self.devices[self.current]
        self.plan.notes.append(f"{name}: not on {device}, {reason}")
        reserved = self.plan.kept[device] = self._reserved(name)
        if not self.plan.used[device]:
            self.plan.missing[device] = size + reserved
        if reserved:
            self.plan.notes.append(
                f"{device}: {reserved} bytes are kept for the largest layer that comes later, which may visit it"
            )
        self.current += 1

    def _open(self, name: str, module: nn.Module | torch.Tensor, reason: str) -> None:
        """Let the parts of a module take its turn."""
        del self.waiting[name]
        self.waiting.update(parts_of(module, name))
        self.opened.add(name)
        self.plan.notes.append(f"{name}: split, {reason}")

    def _split_one_of(self, names: list[str]) -> bool:
        """Split the first module of `names` that may be split, so that only its tied part has to come along."""
        for name in names:
            if is_splittable(self.waiting[name], self.no_split):
                self._open(name, self.waiting[name], "a part of it is tied to a module before it")
                return True
        return False

    def _fill_with_another(self, name: str, module: nn.Module | torch.Tensor, size: int) -> bool:
        """Put a later module on a device that would stay empty, if the caller asked for it."""
        device = self.devices[self.current]
        limit = self.limits[device]
        if not self.fallback or limit is None or self.plan.used[device]:
            return False
        # The module that does not fit, or a larger one behind it, may have to visit the device.
        visitor = max(size, self.remaining.largest_after(name)) if device in self.reserving else 0
        in_order: list[TreeNode] = []
        pending = list(self.queue)
        while pending:
            later, part = pending.pop()
            if later in self.opened:
                pending += reversed(parts_of(part, later))
            elif later in self.waiting:
                in_order.append((later, part))
        chosen, found, rest = fallback_allocate(
            [(name, module), *in_order], self.sizes, max(limit - visitor, 0), self.no_split, self.tied_parameters
        )
        if chosen is None or found is None:
            return False
        self.queue = list(reversed(rest[1:]))  # without the module itself, which does not fit and comes back
        self.waiting = dict(rest)
        _, tied, _ = _with_ties(_tied_elsewhere(chosen, self.ties), 0, self.sizes, self.waiting)
        self.waiting[chosen] = found
        for placed in (chosen, *tied):
            self._assign(placed, f"fills {device}, where {name} does not fit", before_its_turn=True)
        return True


class RemainingLayers:
    """Tell the size of the largest layer behind a module, without going through the layers again.

    The layers are listed once in the order of the model, so that a module covers a range of them. Over the list stands a
    tree of maxima, each over two below it: an answer, and a layer taken out, cost the height of that tree.
    """

    def __init__(self, model: nn.Module, sizes: Mapping[str, int], no_split: set[str]) -> None:
        self._layers: list[int] = []
        self._starts: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        self._add_parts("", model, sizes, no_split)
        self._count = len(self._layers)
        self._maxima = [0] * self._count + self._layers
        for node in range(self._count - 1, 0, -1):
            self._maxima[node] = max(self._maxima[2 * node], self._maxima[2 * node + 1])

    def _add_parts(self, above: str, module: nn.Module, sizes: Mapping[str, int], no_split: set[str]) -> None:
        for name, part in parts_of(module, above):
            if isinstance(part, nn.Module) and is_splittable(part, no_split):
                self._starts[name] = len(self._layers)
                self._add_parts(name, part, sizes, no_split)
            else:
                self._layers.append(sizes.get(name, 0))
            self._ends[name] = len(self._layers)

    def largest_after(self, name: str) -> int:
        """Return the size of the largest layer that comes after a module and was not taken out."""
        largest, low, high = 0, self._ends[name] + self._count, 2 * self._count
        while low < high:
            if low % 2:
                largest = max(largest, self._maxima[low])
                low += 1
            if high % 2:
                high -= 1
                largest = max(largest, self._maxima[high])
            low, high = low // 2, high // 2
        return largest

    def remove(self, name: str) -> None:
        """Forget the layers of a module that was placed before its turn."""
        end = self._ends.get(name, 0)
        for layer in range(self._starts.get(name, end - 1), end):
            node = layer + self._count
            self._maxima[node] = 0
            while node > 1:
                node //= 2
                self._maxima[node] = max(self._maxima[2 * node], self._maxima[2 * node + 1])


def get_module_size_with_ties(
    tied_params: Iterable[str], module_size: int, module_sizes: Mapping[str, int], modules_to_treat: Sequence[TreeNode]
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


def _tied_elsewhere(name: str, ties: Mapping[str, Sequence[Sequence[str]]]) -> list[str]:
    """Return the parameters outside a module that are tied to one inside it."""
    return [other for group in ties.get(name, ()) for other in group if not f"{other}.".startswith(f"{name}.")]


def _ties_by_module(tied_parameters: Iterable[Sequence[str]]) -> dict[str, list[Sequence[str]]]:
    """Return the groups that touch each module, so that looking them up does not depend on their number."""
    table: dict[str, list[Sequence[str]]] = {}
    for group in tied_parameters:
        for module in {prefix for name in group for prefix in prefixes(name)}:
            table.setdefault(module, []).append(group)
    return table


def fallback_allocate(
    modules: list[TreeNode],
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: str | Iterable[str] | None = None,
    tied_parameters: Iterable[Sequence[str]] | None = None,
) -> tuple[str | None, nn.Module | torch.Tensor | None, list[TreeNode]]:
    """Find any module, or part of one, that fits a limit together with what it is tied to.

    Returns:
        Its name, the module, and the modules that remain once it is taken out; None, None and all of them if none fits.
    """
    limit = convert_file_size_to_int(size_limit)
    no_split = as_class_names(no_split_module_classes)
    ties = _ties_by_module(tied_parameters or ())
    waiting = dict(modules)

    def first_fit(part: TreeNode) -> tuple[TreeNode, list[TreeNode]] | None:
        """Return the first part at or below `part` that fits, and what remains of `part` without it."""
        name, module = part
        if _with_ties(_tied_elsewhere(name, ties), module_sizes.get(name, 0), module_sizes, waiting)[0] <= limit:
            return part, []
        children = parts_of(module, name) if is_splittable(module, no_split) else []
        for index, child in enumerate(children):
            found = first_fit(child)
            if found is not None:
                return found[0], [*children[:index], *found[1], *children[index + 1 :]]
        return None

    for index, part in enumerate(modules):
        split = first_fit(part)
        if split is not None:
            (name, found), rest = split
            return name, found, [*modules[:index], *rest, *modules[index + 1 :]]
    return None, None, modules
