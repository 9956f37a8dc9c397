"""What this library asks of DeepSpeed's engine: accumulate, measure, clip, scale and step, whatever its stage.

Everything that DeepSpeed does not offer by a public name is asked for here alone (deepspeed 0.19).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from accelerate._base.errors import UsageError


class DeepSpeedEngineWrapper:
    """Drive an engine the way a loop of PyTorch drives its objects: backward passes first, one step after them.

    Args:
        engine: What `deepspeed.initialize` returned.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._is_pending = False
        self._factor: torch.Tensor | float | None = None
        self._max_norm: float | None = None

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Compute gradients, and step the engine at once where they complete a window."""
        self.accumulate(loss, closes=sync_gradients, **kwargs)
        if sync_gradients:
            self.step()

    def accumulate(self, loss: torch.Tensor, *, closes: bool, **kwargs: Any) -> None:
        """Compute gradients; those of the pass that closes a window are final."""
        earlier = self._take_final_gradients() if self._is_pending else {}
        self.engine.set_gradient_accumulation_boundary(is_boundary=closes)
        self.engine.backward(loss, **kwargs)
        self._add_gradients(earlier)
        self._is_pending = closes

    def _take_final_gradients(self) -> dict[int, tuple[Any, list[torch.Tensor]]]:
        """Return the gradients of a pass that closed the window, which ZeRO 1 and 2 overwrite in another such pass."""
        optimizer = self.engine.optimizer
        if not hasattr(optimizer, "scaled_global_norm"):
            return {}
        if optimizer.cpu_offload:
            raise UsageError(
                "backward() was called twice for one step, and ZeRO 1 and 2 with offload_optimizer keep the gradients of the "
                "last call alone. Add the losses up and call backward() once, or use zero_stage=3."
            )
        held = optimizer.averaged_gradients.items()
        return {index: (parts, [part.clone() for part in parts]) for index, parts in held if parts is not None}

    def _add_gradients(self, earlier: dict[int, tuple[Any, list[torch.Tensor]]]) -> None:
        for index, (taken, parts) in earlier.items():
            now = self.engine.optimizer.averaged_gradients[index]
            if now is not taken:  # a buffer that stays the same was added to
                for part, more in zip(now, parts, strict=True):
                    part.add_(more)

    def note_backward(self, *, closes: bool) -> None:
        """Take note of a backward pass that went through the engine without its `backward`."""
        self._is_pending = closes and self._has_gradients()

    def _has_gradients(self) -> bool:
        held = getattr(self.engine.optimizer, "averaged_gradients", None) or {}
        return any(gradients is not None for gradients in held.values())

    def step(self) -> None:
        """Update the weights with gradients that are final; without any, do nothing."""
        if not self._is_pending:
            return
        self._is_pending = False
        optimizer = self.engine.optimizer
        restore = {}
        if self._max_norm is not None:
            restore["clip_grad"] = optimizer.clip_grad
            optimizer.clip_grad = self._max_norm
        if self._factor is not None:
            restore["custom_loss_scaler"] = optimizer.custom_loss_scaler
            restore["external_loss_scale"] = optimizer.external_loss_scale
            # Gradients are divided by the scale of the loss once more before they are used.
            optimizer.override_loss_scale(float(optimizer.loss_scale / self._factor))
        self._max_norm = self._factor = None
        try:
            self.engine.step()
        finally:
            for name, value in restore.items():
                setattr(optimizer, name, value)

    @property
    def _is_plain(self) -> bool:
        """Whether gradients are whole in the parameters, scaled by nothing: without ZeRO, in full precision."""
        return isinstance(self.engine.optimizer, torch.optim.Optimizer)

    def _gradients(self) -> Iterator[torch.Tensor]:
        return (parameter.grad for parameter in self.engine.module.parameters() if parameter.grad is not None)

    def scale_gradients(self, factor: torch.Tensor | float) -> None:
        """Multiply the gradients of the window by `factor` before they are used."""
        if hasattr(self.engine.optimizer, "averaged_gradients"):  # of ZeRO, which has taken them out of the parameters
            self._factor = factor if self._factor is None else self._factor * factor
        else:
            gradients = list(self._gradients())
            if gradients:
                torch._foreach_mul_(gradients, factor)

    def clip_grad_norm(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Let the step scale gradients down to a norm, and return the norm that they have."""
        if self._is_plain:
            return torch.nn.utils.clip_grad_norm_(self.engine.module.parameters(), max_norm, norm_type=norm_type)
        if math.isfinite(max_norm):
            self._max_norm = max_norm
        return self.norm()

    def norm(self) -> torch.Tensor:
        """Return the norm of the gradients of all ranks; every rank calls it."""
        optimizer = self.engine.optimizer
        if not self._is_pending:
            return torch.tensor(self.get_global_grad_norm() or 0.0, device=self.engine.device)
        if hasattr(optimizer, "scaled_global_norm"):
            scaled = optimizer.scaled_global_norm()
        elif hasattr(optimizer, "_get_norm_groups"):
            scaled = torch.linalg.vector_norm(torch.stack([group.float() for group in optimizer._get_norm_groups()]))
        else:
            norms = torch._foreach_norm([gradient.float() for gradient in self._gradients()])
            scaled = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        found = torch.as_tensor(scaled, dtype=torch.float32, device=self.engine.device) / optimizer_scale(optimizer)
        return found if self._factor is None else found * self._factor

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the gradients of the last step, None before the first."""
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def drop_gradients(self) -> None:
        """Forget the gradients of a window that is complete and was not used."""
        if not self._is_pending:
            return
        self._is_pending = False
        self._max_norm = self._factor = None
        optimizer = self.engine.optimizer
        if hasattr(optimizer, "averaged_gradients"):
            if hasattr(optimizer, "_pre_step"):
                optimizer._pre_step()  # it counts the passes since the last step
                optimizer.averaged_gradients = {}
            else:
                optimizer.averaged_gradients = dict.fromkeys(optimizer.averaged_gradients)
        optimizer.zero_grad()
        self.engine.zero_grad()


def optimizer_scale(optimizer: Any) -> float:
    """Return what the losses of an engine's optimizer are multiplied by."""
    scale = getattr(optimizer, "loss_scale", None) or getattr(optimizer, "cur_scale", None)
    return float(scale or 1.0)
