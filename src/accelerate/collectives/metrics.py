"""Collect what a metric needs from all processes: every sample once, in the order of the dataset."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from accelerate._base.errors import UsageError, WrongTypeError
from accelerate._base.helpers import user_stacklevel, warn_once
from accelerate.collectives.base import communicator
from accelerate.collectives.checked import verify
from accelerate.collectives.nested import (
    children,
    find_device,
    is_namedtuple,
    leaves,
    rebuilt,
    recursively_apply,
    send_to_device,
)
from accelerate.collectives.packing import Spec, is_packable, pack, packed_size, spec_of, unpack
from accelerate.collectives.rows import Cuts, RoundRows, RowShare, named
from accelerate.runtime import current

# Together with the shapes this fits into the first exchange of a communicator.
_LARGEST_INLINE = 1024


def gather_for_metrics_rows(
    data: Any,
    share: RowShare | None,
    use_gather_object: bool = False,
    *,
    repeats: bool = False,
    others: Sequence[RowShare] = (),
) -> Any:
    """Gather `data` from all processes without the rows that pad a batch.

    Where the batches of a round differ in size, the rows that `pad_across_processes` put below a shorter one are left
    out too.

    Tensors are concatenated in rank order. Lists of plain values, lists of mappings without batched tensors, and tuples
    of plain values such as strings are lists of samples and are joined. Other containers are structure: they are merged
    entry by entry, and a plain value in one becomes the list of the values of all processes.

    Args:
        share: the rows of the current batch; with None nothing is cut.
        use_gather_object: treat every list, and a tensor that is not in a container, as a list of samples. Needed for
            one mapping per sample whose tensors happen to have as many rows as the batch.
        repeats: whether another process has the same batch, so that this one's rows are left out.
        others: the rows of loaders that are read in step with the current one.

    Raises:
        UsageError: if the rows of a value fit several loaders that would cut them differently.
    """
    runtime = current.runtime()
    cuts = Cuts.of_shares((share, *others))
    if not runtime.is_distributed and not cuts.is_needed:
        return data
    found = {} if use_gather_object else dict(_structured_lists(data, cuts))
    lists = _Lists(use_gather_object, frozenset(found))
    if not runtime.is_distributed:
        return _trimmed(data, cuts, lists)
    if runtime.checked:
        verify("gather_for_metrics")
    own_cuts = cuts.without_samples() if repeats else cuts
    own = _trimmed_or_error(data, own_cuts, lists)
    tensors = _only_tensors(own, lists)
    heads = _gather_unless_failed(own, _head(tensors, cuts, found))
    rows = RoundRows([list(of_loader) for of_loader in zip(*(head.rows for head in heads), strict=False)])
    if any(head.padded for head in heads):
        _warn_of_scalars(own)
    if tensors is None or any(head.signature != heads[0].signature for head in heads):
        # A list is structure only if it can be on every rank: one box per image may look like a batch on some of them.
        agreed = {path for path, length in found.items() if all(head.lists.get(path) == length for head in heads)}
        lists = _Lists(use_gather_object, frozenset(agreed))
        return _gather_as_objects(_trimmed_or_error(data, own_cuts, lists), lists, rows)
    gathered = iter(_gather_tensors(tensors, heads, rows))
    return recursively_apply(lambda _: next(gathered), own)


class _Head(NamedTuple):
    """What the ranks tell each other first, so that all of them take the same way."""

    rows: list[int]
    """The rows of each loader's batch, 0 if unknown."""
    padded: bool
    signature: int | None
    """The paths of the tensors in a structure that holds nothing else; None for any other structure."""
    lists: dict[str, int]
    """Paths and lengths of lists that are structure because they contain batched tensors."""
    specs: list[Spec]
    packed: bool
    content: bytes | None
    """The tensors themselves, if they are small enough to travel along."""


def _head(tensors: dict[str, Tensor] | None, cuts: Cuts, lists: dict[str, int]) -> _Head:
    rows, padded = cuts.rows, cuts.removes
    if tensors is None:
        return _Head(rows, padded, None, lists, [], False, None)
    listed = list(tensors.values())
    specs = [spec_of(tensor) for tensor in listed]
    packed = is_packable(listed)
    inline = packed and packed_size(specs) <= _LARGEST_INLINE and all(leaf.device.type == "cpu" for leaf in listed)
    content = pack(listed).numpy().tobytes() if inline else None
    return _Head(rows, padded, zlib.crc32(repr(list(tensors)).encode()), lists, specs, packed, content)


def _gather_tensors(tensors: dict[str, Tensor], heads: list[_Head], rows: RoundRows) -> list[Any]:
    """Gather tensors whose shapes on all ranks are known, in as few exchanges as their size allows."""
    group = communicator()
    listed = list(tensors.values())
    alike = all(head.specs == heads[0].specs for head in heads)
    if all(head.content is not None for head in heads):
        sent = [torch.frombuffer(bytearray(head.content or b"") or bytearray(1), dtype=torch.uint8) for head in heads]
    elif len(listed) > 1 and all(head.packed for head in heads):
        buffer = pack(listed)
        sent = list(group.gather(buffer).view(len(heads), -1)) if alike else group.gather_uneven(buffer)
    elif alike and not rows.differ:
        return [group.gather(tensor) for tensor in listed]
    else:
        return [_joined(rows.unfilled(group.gather_uneven(tensor), path), path) for path, tensor in tensors.items()]
    columns = zip(*[unpack(buffer, head.specs) for buffer, head in zip(sent, heads, strict=True)], strict=True)
    return [
        send_to_device(_joined(rows.unfilled(list(column), path), path), tensor.device)
        for column, (path, tensor) in zip(columns, tensors.items(), strict=True)
    ]


def weighted_mean(value: Any, weight: float | Tensor) -> Any:
    """Return the mean over processes of values that stand for different numbers of samples.

    A process whose weight is 0 does not count, whatever its value. With no weight at all the result is nan.

    Args:
        value: a tensor or number, such as the mean loss of this process, or a nested structure of these.
        weight: what this process's value stands for, such as its number of samples.
    """
    runtime = current.runtime()
    if runtime.is_distributed and runtime.checked:
        verify("weighted_mean", value)
    shapes: list[Tensor] = []

    def remember(leaf: Any) -> Any:
        shapes.append(torch.as_tensor(leaf).detach())
        return leaf

    recursively_apply(remember, value, test_type=_is_number, error_on_other_type=True)
    own_weight = float(weight)
    dtype = torch.float64 if all(leaf.device.type == "cpu" for leaf in shapes) else torch.float32
    device = next((leaf.device for leaf in shapes), None)
    parts = [leaf.to(device=device, dtype=dtype).reshape(-1) for leaf in shapes]
    # A mean over no samples is nan; times the weight 0 it would spoil the sum.
    weighted = [part * own_weight if own_weight else torch.zeros_like(part) for part in parts]
    packed = torch.cat([*weighted, torch.tensor([own_weight], device=device, dtype=dtype)])
    total = communicator().reduce(packed, "sum")
    means: Iterator[Tensor] = iter((total[:-1] / total[-1]).split([leaf.numel() for leaf in shapes]))
    templates = iter(shapes)

    def result(leaf: Any) -> Tensor:
        template, mean = next(templates), next(means)
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        kind = template.dtype if floating else torch.get_default_dtype()
        return mean.reshape(template.shape).to(device=template.device, dtype=kind)

    return recursively_apply(result, value, test_type=_is_number)


def _is_number(value: Any) -> bool:
    return isinstance(value, (Tensor, int, float, np.number))


@dataclass(frozen=True)
class _Lists:
    """Tell lists with one item per sample from lists that are structure.

    Args:
        always: whether every list has one item per sample.
        structured: paths of the lists that `_structured_lists` found.
    """

    always: bool
    structured: frozenset[str]

    def has_samples(self, data: Any, path: str) -> bool:
        if isinstance(data, list):
            return self.always or not data or (path not in self.structured and not _is_structure(data))
        # Torch collates the strings of a batch of tuples into a plain tuple.
        is_tuple = isinstance(data, tuple) and not is_namedtuple(data) and bool(data)
        return is_tuple and all(_is_plain(item) for item in data)


def _is_structure(data: list[Any]) -> bool:
    """Return whether the types of its entries alone show that a list does not have one item per sample."""
    if any(isinstance(item, Tensor) for item in data):
        return True
    if any(isinstance(item, Mapping) for item in data):
        return False
    return all(isinstance(leaf, Tensor) for _, leaf in leaves(data))


def _structured_lists(data: Any, cuts: Cuts, path: str = "") -> Iterator[tuple[str, int]]:
    """Yield path and length of the lists that are structure because their entries contain batched tensors."""
    if isinstance(data, list) and not _is_structure(data):
        if not _contains_batches(data, cuts):
            return
        yield path, len(data)
    for step, value in children(data) or ():
        yield from _structured_lists(value, cuts, path + step)


def _contains_batches(data: list[Any], cuts: Cuts) -> bool:
    sizes = [[array.shape[0] for array in _arrays(entry)] for entry in data]
    sizes = [of_entry for of_entry in sizes if of_entry]
    if not sizes:
        return False
    if not any(cuts.rows):
        is_even = len({size for of_entry in sizes for size in of_entry}) == 1
        return is_even and all(isinstance(leaf, Tensor) for _, leaf in leaves(data))
    # A list as long as the batch may have one mapping per sample, some of whose tensors have as many rows by chance.
    enough = all if cuts.may_list_samples(len(data)) else any
    return all(enough(map(cuts.is_batch, of_entry)) for of_entry in sizes)


def _arrays(data: Any) -> Iterator[Tensor | np.ndarray[Any, Any]]:
    """Yield the tensors and arrays that have rows."""
    if isinstance(data, (Tensor, np.ndarray)):
        if data.ndim:
            yield data
    elif isinstance(data, (list, tuple)):
        for entry in data:
            yield from _arrays(entry)
    elif not isinstance(data, (str, int, float)):  # the usual values of long lists of samples
        for child in children(data) or ():
            yield from _arrays(child.value)


def _is_plain(item: Any) -> bool:
    return not isinstance(item, (Tensor, np.ndarray)) and children(item) is None


def _is_empty_tuple(data: Any) -> bool:
    return isinstance(data, tuple) and not data


def _trimmed_or_error(data: Any, cuts: Cuts, lists: _Lists) -> Any:
    try:
        return _trimmed(data, cuts, lists)
    except UsageError as error:  # to be raised on all ranks
        return error


def _gather_unless_failed(own: Any, value: Any) -> list[Any]:
    """Gather a value, or raise the error that `_trimmed_or_error` returned on any rank."""
    values = communicator().gather_object(own if isinstance(own, UsageError) else value)
    for gathered in values:
        if isinstance(gathered, UsageError):
            raise gathered
    return values


def _trimmed(data: Any, cuts: Cuts, lists: _Lists, path: str = "") -> Any:
    """Return the structure with each leaf and each list of samples cut to the real samples."""
    if isinstance(data, (Tensor, np.ndarray)):
        return cuts(data, data.shape[0], path) if data.ndim and cuts.is_needed else data
    if lists.has_samples(data, path):
        return cuts(data, len(data), path) if cuts.is_needed else data
    entries = children(data)
    if entries is None:
        return data
    return rebuilt(data, [_trimmed(value, cuts, lists, path + step) for step, value in entries])


def _only_tensors(data: Any, lists: _Lists, path: str = "") -> dict[str, Tensor] | None:
    """Return the tensors of a structure that holds nothing else, by path, or None."""
    if isinstance(data, Tensor):
        return None if lists.always else {path: data}
    if data is None:  # an output that the model did not give
        return {}
    entries = None if lists.has_samples(data, path) else children(data)
    if entries is None:
        return None
    found: dict[str, Tensor] = {}
    for step, value in entries:
        below = _only_tensors(value, lists, path + step)
        if below is None:
            return None
        found |= below
    return found


def _warn_of_scalars(data: Any) -> None:
    for path, leaf in leaves(data):
        if isinstance(leaf, Tensor) and leaf.dim() == 0:
            warn_once(
                f"gather_for_metrics was given a tensor without dimensions, {named(path)}, on a batch that is padded "
                "on some process, so a mean of the gathered values counts padded samples; use "
                "`accelerator.weighted_mean(value, weight)` for the mean over all samples.",
                stacklevel=user_stacklevel(),
            )


def _joined(parts: list[Tensor], path: str) -> Any:
    """Concatenate tensors, or list their rows where the other dimensions differ."""
    parts = [part.reshape(1) if part.dim() == 0 else part for part in parts]
    filled = [part for part in parts if part.shape[0]] or parts[:1]
    if len({part.shape[1:] for part in filled}) == 1:
        return torch.cat(filled)
    warn_once(
        f"gather_for_metrics was given {named(path)} with rows of different shapes, so it returns a list with one "
        "tensor per sample; call `accelerator.pad_across_processes(value, dim=...)` first to get one tensor.",
        stacklevel=user_stacklevel(),
    )
    return [row for part in parts for row in part.unbind()]


def _gather_as_objects(data: Any, lists: _Lists, rows: RoundRows) -> Any:
    device = find_device(data)
    # A pickled tensor would come back on the device of the process it is from.
    values = _gather_unless_failed(data, send_to_device(data, "cpu"))
    merged = _merged(values, lists, "", rows)
    return merged if device is None else send_to_device(merged, device)


def _merged(values: list[Any], lists: _Lists, path: str, rows: RoundRows) -> Any:
    first = values[0]
    if all(isinstance(value, Tensor) for value in values):
        joined = _joined(rows.unfilled(values, path), path)
        return list(joined) if lists.always and not path else joined
    if all(isinstance(value, np.ndarray) for value in values):
        return np.concatenate([np.atleast_1d(value) for value in values])
    # Of a tuple of strings that was all padding, nothing is left to tell what it was: the other ranks know.
    if all(lists.has_samples(value, path) or _is_empty_tuple(value) for value in values) and any(values):
        return [item for value in values for item in value]
    entries = [children(value) for value in values]
    steps = [None if entry is None else [child.step for child in entry] for entry in entries]
    if all(step is None for step in steps):
        return values if any(value is not None for value in values) else None
    if any(step != steps[0] for step in steps):
        described = ", ".join(
            f"rank {rank}: {type(v).__name__} {s}" for rank, (v, s) in enumerate(zip(values, steps, strict=True))
        )
        raise WrongTypeError(
            f"gather_for_metrics was given {named(path)} with another structure on each process ({described}), which "
            "cannot be merged; pass the same keys everywhere, or a list with one item per sample"
        )
    columns = zip(*[entry or [] for entry in entries], strict=True)
    return rebuilt(
        first, [_merged([c.value for c in column], lists, path + column[0].step, rows) for column in columns]
    )
