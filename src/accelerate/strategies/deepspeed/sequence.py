"""DeepSpeed's sequence parallelism (Ulysses): the ranks of a group work on one batch, each on its part of the sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from accelerate._base.errors import ConfigurationError
from accelerate._base.imports import require
from accelerate.parallelism_config import ParallelismConfig
from accelerate.runtime import current

_WHY = "ParallelismConfig(sp_size=...)"
_MODULE = "deepspeed.runtime.sequence_parallel"
_IGNORED = -100


@dataclass(frozen=True)
class SplitAttention:
    """An attention function of Transformers, and what DeepSpeed puts in its place for all models of the process.

    Args:
        groups: The ranks that split sequences, in the form in which DeepSpeed asks for them.
        name: Its name among the attention functions.
    """

    groups: Any
    name: str
    original: Any
    replacement: Any

    def put_in(self) -> None:
        """Split the sequences."""
        _attention_functions()[self.name] = self.replacement

    def take_out(self) -> None:
        """Leave other models alone."""
        _attention_functions()[self.name] = self.original


def _attention_functions() -> Any:
    return require("transformers.modeling_utils", why=_WHY).ALL_ATTENTION_FUNCTIONS


def split_attention(model: torch.nn.Module, layout: ParallelismConfig, micro_batch_size: int) -> SplitAttention:
    """Let the attention of a Transformers model exchange heads for sequences.

    Raises:
        ConfigurationError: If it is no model of Transformers, or its attention cannot be split.
        MissingPackageError: If DeepSpeed is not installed.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "_attn_implementation"):
        raise ConfigurationError(
            f"sp_size={layout.sp_size} was given, but {type(model).__name__} has no attention of Transformers that could be "
            "split along the sequence. Use a model of Transformers, or sp_size=1."
        )
    handler = layout.sp_handler
    attention = handler.sp_attn_implementation or config._attn_implementation

    def register() -> SplitAttention:
        functions = _attention_functions()
        original = functions.get(attention)
        ulysses = require(f"{_MODULE}.ulysses_sp", why=_WHY, extra="deepspeed").UlyssesSPAttentionHF
        try:
            groups = ulysses.register_with_transformers(
                model_name_or_path=model,
                core_attn_implementation=attention,
                sequence_parallel_size=layout.sp_size,
                micro_batch_size=micro_batch_size,
                seq_length=handler.sp_seq_length,
                seq_length_is_variable=handler.sp_seq_length_is_variable,
            )
        except ValueError as error:
            raise ConfigurationError(
                f"sp_size={layout.sp_size} was given, and DeepSpeed cannot split the attention {attention!r} of "
                f"{type(model).__name__}: {error} Load the model with attn_implementation='sdpa', and write the same for "
                "sp_attn_implementation."
            ) from error
        return SplitAttention(groups, attention, original, functions[attention])

    split = current.remember("sequence parallelism", register)
    split.put_in()
    return split


class SequenceLoader:
    """A loader whose batches the ranks of a group work on together, one rank's batch after another's.

    Each rank gets its part of the sequences. `labels` are shifted by one and called `shift_labels`, because the last token
    of a part is followed by the first of the next one; positions are added where they are missing.

    Args:
        loader: A prepared loader; each rank reads a share of the data of its own.
        group: The ranks that split sequences.
        device: Where batches are put.
    """

    def __init__(self, loader: Any, group: dist.ProcessGroup, device: torch.device) -> None:
        self.loader = loader
        self.group = group
        self.device = device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._before: dict[str, Any] | None = None
        """The state of the loader before the batches at hand."""
        self._done = 0
        """How many ranks' batches are done of those at hand."""
        self._skipped = 0

    def __len__(self) -> int:
        return len(self.loader) * self.size

    def __iter__(self) -> Iterator[Any]:
        begin, self._skipped = self._skipped, 0
        batches = iter(self.loader)
        while True:
            self._before = self.loader.state_dict() if hasattr(self.loader, "state_dict") else None
            batch = next(batches, None)
            if batch is None:
                break
            # The last batch of the loader is the last one of each rank in turn: a window closes with the very last.
            is_last = getattr(self.loader, "end_of_dataloader", False)
            for owner in range(self.size):
                part = self._cut(self._receive(batch, owner))
                if owner < begin:
                    continue
                self._done = (owner + 1) % self.size
                if is_last:
                    self.loader.end_of_dataloader = owner == self.size - 1
                yield part
            begin = 0

    def _receive(self, batch: Any, owner: int) -> dict[str, Any]:
        """Return the batch of one of the ranks on all of them."""
        source = dist.get_global_rank(self.group, owner)
        is_own = owner == self.rank
        described: list[Any] = [
            {name: (value.shape, value.dtype) if torch.is_tensor(value) else value for name, value in batch.items()}
        ]
        dist.broadcast_object_list(described, src=source, group=self.group)
        found: dict[str, Any] = {}
        for name, value in described[0].items():
            if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.dtype):
                shape, dtype = value
                tensor = (
                    batch[name].to(self.device).contiguous()
                    if is_own
                    else torch.empty(shape, dtype=dtype, device=self.device)
                )
                dist.broadcast(tensor, src=source, group=self.group)
                value = tensor
            found[name] = value
        return found

    def _cut(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of the sequences of a batch."""
        tokens = batch.get("input_ids")
        if tokens is None:
            raise ConfigurationError(
                f"A batch with the entries {', '.join(map(repr, batch))} was read under sequence parallelism, which splits "
                "'input_ids' and what has its length. Let the collate function name them so."
            )
        length = tokens.shape[1]
        if length % self.size:
            raise ConfigurationError(
                f"Sequences of {length} tokens cannot be split over sp_size={self.size} ranks evenly. Pad them to a multiple "
                f"of {self.size}, for example with pad_to_multiple_of={self.size} of the collator."
            )
        batch.setdefault("position_ids", torch.arange(length, device=tokens.device).expand(tokens.shape[0], -1))
        labels = batch.pop("labels", None)
        if labels is not None:
            batch["shift_labels"] = torch.nn.functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:]
        part = length // self.size
        begin = self.rank * part
        return {
            name: value[:, begin : begin + part].contiguous()
            if torch.is_tensor(value) and value.dim() > 1 and value.shape[1] == length
            else value
            for name, value in batch.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return where the run stands: before the batches at hand, and how many ranks' of them are done."""
        if self._done and self._before is not None:
            return {**self._before, "_sequence_parts": {"done": self._done, "ranks": self.size}}
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a run stood."""
        state = dict(state_dict)
        parts = state.pop("_sequence_parts", None) or {"done": 0, "ranks": self.size}
        self.loader.load_state_dict(state)
        # On another number of ranks the batches at hand are other ones: they begin anew.
        self._skipped = parts["done"] if parts["ranks"] == self.size else 0

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)
