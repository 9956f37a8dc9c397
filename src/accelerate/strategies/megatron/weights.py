"""The weights of a model of megatron-core under names and in shapes that do not depend on how many ranks share a layer.

Megatron fuses weights (queries, keys and values; gate and up projections) and pads the vocabulary before it cuts them, so
what a rank holds of a fused weight is no plain slice of the whole. A *piece* is: each fused weight is a few pieces, and
each piece is whole on all ranks or cut along one dimension in equal parts. Checkpoints, exports and imports work with
pieces alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from accelerate._base.errors import ConfigurationError

Pieces = dict[str, torch.Tensor]
_EXPERTS = ".local_experts."
_TE_NORMS = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


@dataclass(frozen=True)
class HeadSizes:
    """How queries, keys and values lie in a fused weight.

    Args:
        queries_per_group: Heads of queries that share a head of keys and values.
        size: Size of a head.
    """

    queries_per_group: int
    size: int

    def split(self, fused: torch.Tensor, *, has_queries: bool) -> list[torch.Tensor]:
        """Return queries (if there are any), keys and values of all heads."""
        widths = [self.queries_per_group, 1, 1] if has_queries else [1, 1]
        groups = fused.reshape(-1, sum(widths) * self.size, *fused.shape[1:])
        parts = groups.split([width * self.size for width in widths], dim=1)
        return [part.reshape(-1, *fused.shape[1:]) for part in parts]

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the fused weight."""
        widths = [self.queries_per_group, 1, 1] if len(parts) == 3 else [1, 1]
        rest = parts[0].shape[1:]
        groups = [part.reshape(-1, width * self.size, *rest) for part, width in zip(parts, widths, strict=True)]
        return torch.cat(groups, dim=1).reshape(-1, *rest)


@dataclass(frozen=True)
class Layout:
    """How one parameter is cut.

    Args:
        name: The name of the parameter, the same on every device.
        dim: Along which dimension ranks cut its pieces; None where all hold it whole.
        pieces: The ends of the pieces' names; one empty end for a parameter that is not fused.
        heads: How heads lie in a fused projection of attention.
        rows: The rows of a vocabulary without what pads it.
        is_expert: The ranks that split experts cut it, which may be others than those that split layers.
    """

    name: str
    dim: int | None = None
    pieces: tuple[str, ...] = ("",)
    heads: HeadSizes | None = None
    rows: int | None = None
    is_expert: bool = False

    @property
    def piece_names(self) -> list[str]:
        """Return the names of the pieces."""
        return [f"{self.name}{end}" for end in self.pieces]

    def split(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
        """Return this rank's part of each piece of a tensor that lies as the parameter does."""
        if self.heads is not None:
            return self.heads.split(tensor, has_queries=len(self.pieces) == 3)
        if len(self.pieces) > 1:
            return list(tensor.chunk(len(self.pieces), dim=0))
        if self.rows is not None:
            return [tensor[: _own_rows(self.rows, tensor.shape[0], group.rank())]]
        return [tensor]

    def join(self, parts: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """Return what `split` was given; rows that pad a vocabulary are zero."""
        if self.heads is not None:
            return self.heads.join(parts)
        if len(parts) > 1:
            return torch.cat(parts, dim=0)
        if self.rows is None or parts[0].shape == like.shape:
            return parts[0]
        padded = torch.zeros_like(like, dtype=parts[0].dtype, device=parts[0].device)
        padded[: parts[0].shape[0]] = parts[0]
        return padded

    def cut(self, pieces: list[torch.Tensor], like: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Return this rank's parameter of whole pieces."""
        if self.dim is None:
            return self.join(pieces, like)
        parts = []
        for piece in pieces:
            chunks = piece.chunk(group.size(), dim=self.dim)
            # A small vocabulary may leave nothing for the last ranks.
            parts.append(chunks[group.rank()] if group.rank() < len(chunks) else piece.narrow(self.dim, 0, 0))
        return self.join(parts, like)


def _own_rows(rows: int, per_rank: int, rank: int) -> int:
    return max(0, min(per_rank, rows - rank * per_rank))


def padded_rows(rows: int, ranks: int) -> int:
    """Return the size of a vocabulary that so many ranks can share."""
    return -(-rows // ranks) * ranks


def layouts(model: torch.nn.Module, config: Any, vocab_size: int | None, first_expert: int = 0) -> dict[str, Layout]:
    """Return how each parameter of a model is cut, by its name in the model.

    Args:
        model: What Megatron built, without wrappers.
        config: Its `TransformerConfig`.
        vocab_size: The words of the vocabulary without what pads it.
        first_expert: The number of the first expert that this rank has.
    """
    heads = HeadSizes(
        config.num_attention_heads // (config.num_query_groups or config.num_attention_heads), _head_size(config)
    )
    found: dict[str, Layout] = {}
    offsets = layer_offsets(model)
    for name, parameter in named_weights(model):
        dim: int | None = getattr(parameter, "partition_dim", -1)
        if not getattr(parameter, "tensor_model_parallel", False):
            dim = None
        layout = _layout(global_name(name, offsets, first_expert), dim, config, heads, vocab_size)
        found[name] = replace(layout, is_expert=_EXPERTS in name)
    return found


def _head_size(config: Any) -> int:
    return int(config.kv_channels or config.hidden_size // config.num_attention_heads)


def _layout(name: str, dim: int | None, config: Any, heads: HeadSizes, vocab_size: int | None) -> Layout:
    owner, _, kind = name.rpartition(".")
    if dim is not None and owner.endswith("linear_qkv"):
        return Layout(name, dim, tuple(f":{part}" for part in "qkv"), heads)
    if dim is not None and owner.endswith("linear_kv"):
        return Layout(name, dim, (":k", ":v"), heads)
    if dim is not None and owner.endswith("linear_fc1") and config.gated_linear_unit:
        return Layout(name, dim, (":gate", ":up"))
    if owner.endswith(("word_embeddings", "output_layer")) and kind in ("weight", "bias"):
        return Layout(name, dim, rows=vocab_size)
    return Layout(name, dim)


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, and buffers that are saved, each once and by its first name."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen and not name.endswith("_extra_state"):
            seen.add(id(tensor))
            yield name, tensor


def layer_offsets(model: torch.nn.Module) -> dict[str, int]:
    """Return the number of the first layer of each stack on this stage of a pipeline."""
    return {
        f"{name}.layers": module.layers[0].layer_number - 1
        for name, module in model.named_modules()
        if hasattr(module, "layers") and len(module.layers) and hasattr(module.layers[0], "layer_number")
    }


def global_name(name: str, offsets: Mapping[str, int], first_expert: int = 0) -> str:
    """Return the name of a parameter in the whole model, the same whichever kernels compute it."""
    before, found, after = name.partition(_EXPERTS)
    if found:
        index, _, rest = after.partition(".")
        name = f"{before}{_EXPERTS}{int(index) + first_expert}.{rest}"
    for stack, offset in offsets.items():
        if offset and name.startswith(f"{stack}."):
            index, _, rest = name.removeprefix(f"{stack}.").partition(".")
            name = f"{stack}.{int(index) + offset}.{rest}"
    for fused, plain in _TE_NORMS:
        name = name.replace(fused, plain)
    return name


@dataclass(frozen=True)
class CutWeights:
    """The weights of a model with how they are cut over a group of ranks.

    Args:
        model: What Megatron built, without wrappers.
        layer_group: The ranks that split each layer.
        expert_group: The ranks that split each expert.
    """

    model: torch.nn.Module
    layouts: Mapping[str, Layout]
    layer_group: dist.ProcessGroup
    expert_group: dist.ProcessGroup | None = None

    def group_of(self, layout: Layout) -> dist.ProcessGroup:
        """Return the ranks that cut a weight."""
        return self.expert_group if layout.is_expert and self.expert_group is not None else self.layer_group

    def __iter__(self) -> Iterator[tuple[Layout, torch.Tensor]]:
        for name, tensor in named_weights(self.model):
            yield self.layouts[name], tensor

    def spread(self, layout: Layout, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the pieces of a tensor that lies as its parameter does, each spread over the ranks.

        Args:
            tensor: The parameter, or a state of it with its shape.
        """
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        group = self.group_of(layout)
        parts = layout.split(tensor.detach(), group)
        if group.size() == 1:
            return dict(zip(layout.piece_names, parts, strict=True))
        mesh = DeviceMesh.from_group(group, tensor.device.type)
        found: dict[str, torch.Tensor] = {}
        for name, part in zip(layout.piece_names, parts, strict=True):
            shape = list(part.shape)
            if layout.dim is not None:
                shape[layout.dim] = layout.rows if layout.rows is not None else shape[layout.dim] * group.size()
            placement = Replicate() if layout.dim is None else Shard(layout.dim)
            size = torch.Size(shape)
            stride = torch.empty(size, device="meta").stride()
            found[name] = DTensor.from_local(
                part.contiguous(), mesh, [placement], run_check=False, shape=size, stride=stride
            )
        return found

    def state(self) -> dict[str, torch.Tensor]:
        """Return all pieces of this rank's parameters."""
        found: dict[str, torch.Tensor] = {}
        for layout, parameter in self:
            found |= self.spread(layout, parameter)
        return found

    def whole(self, layout: Layout, parameter: torch.Tensor) -> Pieces:
        """Return the whole pieces of a parameter; all ranks of the group call it."""
        from accelerate.strategies.tools import full

        return {name: full(piece) for name, piece in self.spread(layout, parameter).items()}

    @torch.no_grad()
    def load_whole(self, read: Callable[[str], torch.Tensor | None]) -> None:
        """Fill the parameters from whole pieces; a bias that has none is zero.

        Args:
            read: Returns the piece of a name, None where there is none.

        Raises:
            ConfigurationError: If another weight has none.
        """
        for layout, parameter in self:
            pieces = [piece for name in layout.piece_names if (piece := read(name)) is not None]
            if len(pieces) == len(layout.pieces):
                own = layout.cut(pieces, parameter, self.group_of(layout))
                if own.shape != parameter.shape:
                    raise ConfigurationError(
                        f"The weights that are to become {layout.name!r} give a part of shape {tuple(own.shape)}, and Megatron's "
                        f"has {tuple(parameter.shape)}: the model has another head or other sizes than its configuration says."
                    )
                parameter.copy_(own)
            elif layout.name.endswith(".bias") and not pieces:
                parameter.zero_()
            else:
                missing = [name for name in layout.piece_names if read(name) is None]
                raise ConfigurationError(
                    f"No weight of the model is mapped to {', '.join(missing)}, which Megatron's model has. Add it to the "
                    "'weight_map' of the parser that is registered for this type of model."
                )

    @torch.no_grad()
    def load_parts(self, pieces: Mapping[str, torch.Tensor]) -> None:
        """Fill the parameters from pieces that are spread over the ranks as `state` spreads them."""
        from accelerate.strategies.tools import local

        for layout, parameter in self:
            parts = [local(pieces[name]) for name in layout.piece_names]
            parameter.copy_(layout.join(parts, parameter))
