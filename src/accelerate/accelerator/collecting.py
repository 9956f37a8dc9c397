"""Values from all ranks: gather, reduce, and metrics over every sample once."""

from __future__ import annotations

from typing import Any

from accelerate.collectives import metrics, ops
from accelerate.parallel.mesh import axis_rank
from accelerate.runtime.gradient_clock import GradientState
from accelerate.state import AcceleratorState


class CollectingMixin:
    """What a loop calls to see values of all ranks."""

    gradient_state: GradientState
    state: AcceleratorState

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all ranks joined along the first dimension, in nested structures too."""
        return ops.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the values of every sample once, in the order of the dataset.

        Samples that were repeated to fill the last batch are dropped. Tensors may have different shapes on different
        ranks; values that are not tensors are gathered too.

        Args:
            input_data: Tensors, strings, lists of samples, or nested structures of them, with one row per sample.
            use_gather_object: Take every list as a list of samples.

        Example:
            ```python
            for inputs, targets in test_loader:
                predictions = model(inputs).argmax(dim=-1)
                predictions, targets = accelerator.gather_for_metrics((predictions, targets))
                correct += (predictions == targets).sum().item()
            ```
        """
        loader = self.gradient_state.active_dataloader
        share = loader.share if loader is not None else None
        # Ranks that split layers, or hold other ones, have the same rows as the first of them.
        mesh = self.state.device_mesh
        repeats = axis_rank(mesh, "tp") + axis_rank(mesh, "pp") > 0
        return metrics.gather_for_metrics_rows(input_data, share, use_gather_object, repeats=repeats)

    def weighted_mean(self, value: Any, weight: Any) -> Any:
        """Return the mean over ranks of values that stand for different numbers of samples.

        Args:
            value: This rank's mean: a number, a tensor, or a nested structure of them.
            weight: How many samples (or tokens) it is the mean of.
        """
        return metrics.weighted_mean(value, weight)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum, mean, max or min over ranks, in nested structures too."""
        return ops.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Return the tensors padded along `dim` to the largest size that any rank has."""
        return ops.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)
