"""Send a tensor from the first rank to ranks that each keep a part of it."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from accelerate.collectives import Communicator
from accelerate.parallel.gradients import local
from accelerate.runtime.torch_private import Piece

# Long enough to use the network well, and little beside the shards of a model that is worth sharding.
STRETCH_BYTES = 2**22


class Sender:
    """Fill the parts that ranks have of tensors from the whole ones of the first rank.

    Args:
        ranks: Who takes part.
        device: Where the group sends from; by default where a tensor lies.
    """

    def __init__(self, ranks: Communicator, device: torch.device | None = None) -> None:
        self.ranks = ranks
        self._device = device
        self._room: torch.Tensor | None = None

    def send_to_part(self, source: torch.Tensor | None, here: torch.Tensor) -> None:
        """Fill this rank's part of a tensor, which is spread in some way or not at all.

        Args:
            source: The whole tensor, on the first rank.
            here: The tensor of this rank.
        """
        source = None if source is None else source.to(here.dtype)
        piece = _piece_of(here)
        if piece is not None:
            self.send_to_piece(source, piece)
            return
        target = local(here)
        device = self._device or target.device
        if source is not None:
            whole = source.detach().to(device).contiguous()
        else:
            whole = torch.empty(here.shape, dtype=here.dtype, device=device)
        self.ranks.broadcast(whole)
        if isinstance(here, DTensor):
            whole = distribute_tensor(whole, here.device_mesh, here.placements, src_data_rank=None).to_local()
        with torch.no_grad():
            target.copy_(whole)

    def send_to_piece(self, source: torch.Tensor | None, piece: Piece) -> None:
        """Send a tensor in stretches, of which each rank copies what falls into its piece."""
        flat = None if source is None else source.detach().reshape(-1)
        device = self._device or piece.held.device
        step = max(1, STRETCH_BYTES // piece.held.element_size())
        for begin in range(0, piece.whole, step):
            count = min(step, piece.whole - begin)
            if flat is not None:
                stretch = flat[begin : begin + count].to(device)
            else:
                stretch = self._lend(count, piece.held.dtype, device)
            self.ranks.broadcast(stretch)
            piece.take(stretch, begin)

    def release(self) -> None:
        """Let go of the memory that was received into."""
        self._room = None

    def _lend(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory to receive into, the same one every time: memory of its own for each would add up."""
        needed = count * dtype.itemsize
        if self._room is None or self._room.nbytes < needed or self._room.device != device:
            self.release()  # before there is another
            self._room = torch.empty(needed, dtype=torch.uint8, device=device)
        return self._room[:needed].view(dtype)


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
