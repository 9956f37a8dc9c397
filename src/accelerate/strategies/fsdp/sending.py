"""Send a tensor from the first rank to ranks that each keep a part of it."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ...collectives import Communicator
from ...parallel.gradients import local
from ...runtime.torch_private import Piece

# Long enough to use the network well, and little beside the shards of a model that is worth sharding.
STRETCH_BYTES = 2**25


def send_to_parts(
    ranks: Communicator, source: torch.Tensor | None, here: torch.Tensor, device: torch.device | None = None
) -> None:
    """Fill this rank's part of a tensor, which is spread in some way or not at all, from the first rank.

    Args:
        source: The whole tensor, on the first rank.
        here: The tensor of this rank.
        device: Where the group sends from; by default where the tensor lies.
    """
    source = None if source is None else source.to(here.dtype)
    piece = _piece_of(here)
    if piece is not None:
        send_to_pieces(ranks, source, piece, device)
        return
    target = local(here)
    if source is not None:
        whole = source.detach().to(device or target.device).contiguous()
    else:
        whole = torch.empty(here.shape, dtype=here.dtype, device=device or target.device)
    ranks.broadcast(whole)
    if isinstance(here, DTensor):
        whole = distribute_tensor(whole, here.device_mesh, here.placements, src_data_rank=None).to_local()
    with torch.no_grad():
        target.copy_(whole)


def send_to_pieces(
    ranks: Communicator, source: torch.Tensor | None, piece: Piece, device: torch.device | None = None
) -> None:
    """Send a tensor in stretches, of which each rank copies what falls into its piece."""
    flat = None if source is None else source.detach().reshape(-1)
    step = max(1, STRETCH_BYTES // piece.held.element_size())
    for begin in range(0, piece.whole, step):
        count = min(step, piece.whole - begin)
        if flat is not None:
            stretch = flat[begin : begin + count].to(device or piece.held.device)
        else:
            stretch = torch.empty(count, dtype=piece.held.dtype, device=device or piece.held.device)
        ranks.broadcast(stretch)
        piece.take(stretch, begin)


def _piece_of(here: torch.Tensor) -> Piece | None:
    """Return what this rank has of a tensor as one run of its numbers; None where it is not one run."""
    held = local(here.detach())
    if not held.is_contiguous():
        return None
    begin = 0
    if isinstance(here, DTensor):
        mesh = here.device_mesh
        cuts = [(axis, item) for axis, item in enumerate(here.placements) if not item.is_replicate()]
        if len(cuts) > 1 or not all(type(item) is Shard and item.dim == 0 for _, item in cuts):
            return None
        for axis, _ in cuts:
            rows = -(-here.shape[0] // mesh.size(axis))
            begin = mesh.get_local_rank(axis) * rows * (here.numel() // max(1, here.shape[0]))
    return Piece(held.view(-1), 0, begin, held.numel(), here.numel())
