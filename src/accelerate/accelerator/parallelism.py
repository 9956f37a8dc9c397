"""What a loop sees of the axes of parallelism: ranks along them, and sequences cut over them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accelerate._base.errors import UsageError
from accelerate._base.helpers import warn_once
from accelerate.parallel.mesh import axis_rank
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState


class ParallelismMixin:
    """The place of this process in the mesh, and context parallelism."""

    state: AcceleratorState

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """Return the sizes of the axes of parallelism, None if none were given."""
        config: ParallelismConfig | None = self.state.parallelism_config
        return config

    @property
    def torch_device_mesh(self) -> Any:
        """Return the mesh of devices, None without one."""
        return self.state.device_mesh

    def _axis_rank(self, axis: str) -> int:
        if self.parallelism_config is None:
            raise UsageError(
                f"The rank along {axis!r} was asked for, but this Accelerator has no parallelism_config, so there are no "
                "axes. Pass parallelism_config=ParallelismConfig(...)."
            )
        return axis_rank(self.torch_device_mesh, axis)

    @property
    def tensor_parallel_rank(self) -> int:
        """Return the rank along the axis of tensor parallelism, 0 where it is not in use."""
        return self._axis_rank("tp")

    @property
    def context_parallel_rank(self) -> int:
        """Return the rank along the axis of context parallelism, 0 where it is not in use."""
        return self._axis_rank("cp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """Return the stage of this process in a pipeline, 0 where there is none."""
        return self._axis_rank("pp")

    @property
    def data_parallel_rank(self) -> int:
        """Return the rank along the axis of replicas, 0 where it is not in use."""
        return self._axis_rank("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """Return the rank along the axis of sharding, 0 where it is not in use."""
        return self._axis_rank("dp_shard")

    def maybe_context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Return a context in which each rank works on its part of the sequences, where cp_size is above 1.

        The buffers are cut in place, and attention sees the keys and values of all parts. Labels must be shifted
        before, and positions must be among the buffers, because a part does not know what comes before and after it.
        Keep the backward pass inside.

        Args:
            buffers: Tensors that have a dimension for the sequence.
            buffer_seq_dims: That dimension, for each buffer.
            no_restore_buffers: Buffers that may stay cut afterwards, which saves a copy.

        Raises:
            ConfigurationError: On entering, if the buffers and dimensions do not go together.

        Example:
            ```python
            buffers = [batch["tokens"], batch["targets"], batch["positions"]]
            with accelerator.maybe_context_parallel(buffers, [1, 1, 1], no_restore_buffers=set(buffers)):
                loss = model(**batch)
                accelerator.backward(loss)
            ```
        """
        config = self.parallelism_config
        if config is None or not config.cp_enabled:
            warn_once("maybe_context_parallel does nothing, because cp_size is 1: every rank has whole sequences.")
            return nullcontext()
        from accelerate.parallel.context import split_sequences

        return split_sequences(
            self.torch_device_mesh["cp"],
            buffers or (),
            buffer_seq_dims or (),
            no_restore_buffers or (),
            exchange=config.cp_handler.cp_comm_strategy,
        )
