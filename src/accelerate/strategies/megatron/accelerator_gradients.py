"""The gradients of a loop in the buffers that Megatron computes them in.

A schedule goes forward and back in one call, so gradients are there before the loop asks for them. The loss that the loop
is given hands them over: they count once `backward` is called, times what the loss was multiplied with.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from accelerate._base.errors import UsageError


class PassGradients:
    """The gradients of one pass: in the buffers, or in tensors of their own where another pass needed the buffers."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] | None = None


class GradientBuffers:
    """Megatron's buffers of gradients, with the meaning that a loop gives to gradients.

    What backward passes have added since `zero` are the gradients of the loop. A pass whose backward is still to come
    may lie in the buffers meanwhile; if its loss is let go, it has never been.

    Args:
        chunks: Modules in Megatron's wrapper that exchanges gradients.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        self._chunks = chunks
        self._waiting: Callable[[], PassGradients | None] | None = None
        """Whose gradients the buffers hold; None for those of the loop."""
        self._aside: list[torch.Tensor] | None = None
        """Those of the loop, while the buffers hold others."""
        self._is_clean = False
        self.are_there = False
        """Whether the loop has gradients."""
        self.version = 0
        """Another number after each change."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the buffers."""
        return [
            buffer.grad_data for chunk in self._chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]

    def begin_pass(self) -> None:
        """Empty the buffers for a pass."""
        if not self._clear_waiting() and self.are_there:
            self._aside = [tensor.clone() for tensor in self.tensors]
        self._empty()
        self._is_clean = False
        self._waiting = _nobody  # a pass that fails on its way leaves nothing

    def end_pass(self) -> PassGradients:
        """Return what stands for the gradients that the pass has left in the buffers."""
        made = PassGradients()
        self._waiting = weakref.ref(made)
        return made

    def add(self, passed: PassGradients, scale: torch.Tensor) -> None:
        """Add the gradients of a pass to those of the loop.

        Raises:
            UsageError: They were added before.
        """
        if self._waiting is not None and self._waiting() is passed:
            self._waiting = None
            for tensor in self.tensors:
                tensor.mul_(scale)
            self._add_aside()
        elif passed.tensors is not None:
            self.settle()
            for tensor, gradient in zip(self.tensors, passed.tensors, strict=True):
                tensor.add_(gradient.mul_(scale))
            passed.tensors = None
        else:
            raise UsageError(
                "backward() was called twice for one loss, but Megatron keeps the gradients of a batch once. Call it once, on "
                "the sum of what depends on this loss."
            )
        self.are_there, self._is_clean = True, False
        self._changed()

    def settle(self) -> None:
        """Let the buffers hold the gradients of the loop."""
        if self._clear_waiting():
            self._empty()
            self._add_aside()
            self._changed()

    def scale(self, factor: torch.Tensor | float) -> None:
        """Multiply the gradients of the loop."""
        self.settle()
        for tensor in self.tensors:
            tensor.mul_(factor)
        self._changed()

    def zero(self) -> None:
        """Forget the gradients of the loop."""
        self._aside, self.are_there = None, False
        self.version += 1
        if self._waiting is None or self._waiting() is None:
            self._waiting = None
            self._empty()

    def state(self) -> dict[str, torch.Tensor]:
        """Return the gradients of the loop as this rank has them, for a run of the same layout."""
        self.settle()
        return {f"buffer {index}": tensor for index, tensor in enumerate(self.tensors)} if self.are_there else {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on with gradients that `state` returned."""
        self._waiting = None
        self.zero()
        for index, tensor in enumerate(self.tensors if state else ()):
            tensor.copy_(state[f"buffer {index}"])
        self.are_there, self._is_clean = bool(state), not state
        self._changed()

    def _clear_waiting(self) -> bool:
        """Take a pass that waits for its backward out of the buffers; say whether there was one."""
        if self._waiting is None:
            return False
        passed = self._waiting()
        if passed is not None:
            passed.tensors = [tensor.clone() for tensor in self.tensors]
        self._waiting = None
        return True

    def _add_aside(self) -> None:
        if self._aside is not None:
            for tensor, gradient in zip(self.tensors, self._aside, strict=True):
                tensor.add_(gradient)
            self._aside, self._is_clean = None, False

    def _empty(self) -> None:
        if not self._is_clean:
            for chunk in self._chunks:
                chunk.zero_grad_buffer()
        self._is_clean = True

    def _changed(self) -> None:
        self.version += 1


def _nobody() -> None:
    return None


class BufferedLoss(torch.autograd.Function):
    """A loss whose gradients a pass has left in the buffers: its backward pass adds them to those of the loop."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, buffers: GradientBuffers, passed: PassGradients
    ) -> torch.Tensor:
        ctx.buffers, ctx.passed = buffers, passed
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.buffers.add(ctx.passed, scale)
        return None, None, None, None
