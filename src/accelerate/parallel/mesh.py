"""The mesh of ranks: its groups along each axis, and what each rank does in it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from accelerate._base.enums import MeshAxis
from accelerate.runtime.torch_private import flatten_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def build_mesh(device_type: str, sizes: Mapping[str, int], joined: Mapping[str, Sequence[str]]) -> DeviceMesh | None:
    """Make the mesh of all ranks; None if no axis is longer than 1.

    Args:
        sizes: Ranks along each axis, outermost first; axes of one rank are left out.
        joined: Further names, each for the axes that it joins into one; a name for no axis is left out.
    """
    from torch.distributed.device_mesh import init_device_mesh

    used = {axis: size for axis, size in sizes.items() if size > 1}
    if not used:
        return None
    mesh = init_device_mesh(device_type, tuple(used.values()), mesh_dim_names=tuple(used))
    for name, parts in joined.items():
        if parts:
            flatten_mesh(mesh[tuple(parts)], name)
    return mesh


def submesh(mesh: DeviceMesh, *names: str) -> DeviceMesh:
    """Return the part of a mesh along some axes, joined ones among them."""
    with warnings.catch_warnings():
        # torch 2.13 wants users to keep flattened meshes themselves; the names of ours are public, so they stay.
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        # torch 2.9 reminds of what is so here: every rank takes the same part.
        warnings.filterwarnings("ignore", message="You are attempting to slice a submesh from another submesh")
        return mesh[names if len(names) > 1 else names[0]]


def has_axis(mesh: DeviceMesh | None, axis: str) -> bool:
    """Return whether a mesh has an axis; one of a single rank has none."""
    return mesh is not None and axis in (mesh.mesh_dim_names or ())


def axis_rank(mesh: DeviceMesh | None, axis: str) -> int:
    """Return the place of this process along an axis, 0 where it is not in use."""
    return mesh.get_local_rank(axis) if mesh is not None and has_axis(mesh, axis) else 0


def axis_group(mesh: DeviceMesh | None, axis: str) -> dist.ProcessGroup | None:
    """Return the group of the ranks that differ from this one along an axis alone; None where it is not in use."""
    return mesh[axis].get_group() if mesh is not None and has_axis(mesh, axis) else None


def averaging_group(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the ranks over which gradients are averaged: replicas, and parts of a sequence; None for one rank."""
    averaged = (MeshAxis.DP_REPLICATE, MeshAxis.DP_SHARD, MeshAxis.CP)
    if mesh is None or not any(has_axis(mesh, axis) for axis in averaged):
        return None
    return submesh(mesh, "dp_cp").get_group()


@dataclass(frozen=True)
class GradientShare:
    """Which gradients a process sums up before they are exchanged.

    Args:
        index: Which share of the data they are of; processes that work on a layer together have the same.
        count: The shares that are averaged.
        stage: Which layers they are of.
        stages: The parts into which the layers are divided.
    """

    index: int
    count: int
    stage: int = 0
    stages: int = 1


def gradient_share(rank: int, world_size: int, sizes: Mapping[str, int]) -> GradientShare:
    """Return the share of a process; `sizes` are those of the axes of the mesh."""
    stages, tensor = sizes.get(MeshAxis.PP, 1), sizes.get(MeshAxis.TP, 1)
    # Outermost are the stages, innermost the ranks of one layer; what is between has data of its own.
    count = world_size // (stages * tensor)
    return GradientShare(rank // tensor % count, count, rank * stages // world_size, stages)
