"""What this library asks of DeepSpeed's engine: accumulate, measure, clip, scale and step, whatever its stage.

What DeepSpeed does with gradients and has no public name for is asked for here alone (deepspeed 0.19).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from accelerate._base.errors import UsageError
from accelerate._base.imports import require
from accelerate.config.plugins.deepspeed import DeepSpeedPlugin


def is_training_engine(model: Any) -> bool:
    """Return whether a prepared model is an engine that has an optimizer."""
    return getattr(model, "basic_optimizer", None) is not None


class DeepSpeedEngineWrapper:
    """Drive an engine the way a loop of PyTorch drives its objects: backward passes first, one step after them.

    Args:
        engine: What `deepspeed.initialize` returned.
        plugin: The settings that it was made with.
    """

    def __init__(self, engine: Any, plugin: DeepSpeedPlugin | None = None) -> None:
        self.engine = engine
        self.plugin = plugin
        self._is_pending = False
        self._factor: torch.Tensor | float | None = None
        self._max_norm: float | None = None
        self._scaled_norm: torch.Tensor | None = None
        """The norm of the gradients of a complete window, scaled as they are, once somebody has asked for it."""

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Compute gradients, and step the engine at once where they complete a window."""
        self.accumulate(loss, closes=sync_gradients, **kwargs)
        if sync_gradients:
            self.step()

    def accumulate(self, loss: torch.Tensor, *, closes: bool, **kwargs: Any) -> None:
        """Compute gradients; those of the pass that closes a window are final."""
        with self.passing(closes=closes):
            self.engine.backward(loss, **kwargs)

    @contextmanager
    def passing(self, *, closes: bool) -> Iterator[None]:
        """Return a context for a backward pass, in which this engine may take part or not."""
        self._scale_final_gradients()
        earlier = self._take_final_gradients() if self._is_pending else {}
        self._scaled_norm = None
        self.engine.set_gradient_accumulation_boundary(is_boundary=closes)
        yield
        self._add_gradients(earlier)
        self._is_pending = closes and self._has_gradients()

    def _scale_final_gradients(self) -> None:
        """Multiply at once what waits to be multiplied: another pass adds to it."""
        factor, self._factor = self._factor, None
        if factor is None:
            return
        optimizer = self.engine.optimizer
        if getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False):
            raise UsageError(
                "backward(num_items=...) was called twice for one step, and offload_optimizer keeps gradients where they cannot be "
                "scaled in between. Add the losses up and call backward() once."
            )
        if _is_sharded(self.engine):
            shards = list(_partitions(self.engine).values())
        else:
            shards = [part for parts in optimizer.averaged_gradients.values() for part in parts or ()]
        if shards:
            torch._foreach_mul_(shards, factor)

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

    def _has_gradients(self) -> bool:
        """Return whether there is something to step with; with one engine there is, after every pass."""
        optimizer = self.engine.optimizer
        held = getattr(optimizer, "averaged_gradients", None)
        is_offloaded = getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False)
        if held is None or is_offloaded:
            return True
        return any(gradients is not None for gradients in held.values())

    def step(self) -> None:
        """Update the weights with gradients that are final; without any, do nothing."""
        if not self._is_pending:
            return
        self._is_pending = False
        optimizer = self.engine.optimizer
        restore: dict[str, Any] = {}
        known, self._scaled_norm = self._scaled_norm, None
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
            with _known_norm(optimizer, known):
                self.engine.step()
        finally:
            for name, value in restore.items():
                setattr(optimizer, name, value)

    @property
    def _is_plain(self) -> bool:
        """Whether gradients are whole in the parameters, scaled by nothing: without ZeRO, in full precision."""
        return isinstance(self.engine.optimizer, torch.optim.Optimizer)

    def _gradients(self) -> list[torch.Tensor]:
        """Return the gradients of an engine that keeps them whole."""
        parameters = self.engine.module.parameters()
        held = (_whole(self.engine.optimizer, parameter) for parameter in parameters)
        return [gradient for gradient in held if gradient is not None]

    def scale_gradients(self, factor: torch.Tensor | float) -> None:
        """Multiply the gradients of the window by `factor` before they are used."""
        if hasattr(self.engine.optimizer, "averaged_gradients"):  # of ZeRO, which has taken them out of the parameters
            self._factor = factor if self._factor is None else self._factor * factor
        else:
            gradients = self._gradients()
            if gradients:
                torch._foreach_mul_(gradients, factor)

    def clip_grad_norm(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """Let the step scale gradients down to a norm, and return the norm that they have."""
        if self._is_plain:
            clip = require("deepspeed.runtime.utils", why="Clipping", extra="deepspeed").clip_grad_norm_
            norm = clip(self.engine.module.parameters(), max_norm, norm_type, mpu=self.engine.mpu)
            return torch.as_tensor(norm, device=self.engine.device)
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
            combine = require("deepspeed.runtime.utils", why="Clipping", extra="deepspeed").combine_grad_norm_groups
            scaled = combine(optimizer._get_norm_groups())
        else:
            gradients = self._gradients()
            norms = list(torch._foreach_norm([gradient.float() for gradient in gradients])) if gradients else []
            scaled = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        self._scaled_norm = scaled
        found = torch.as_tensor(scaled, dtype=torch.float32, device=self.engine.device) / optimizer_scale(optimizer)
        found = torch.where(found < 0, float("inf"), found)  # DeepSpeed's word for a norm that is not finite
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
        self._max_norm = self._factor = self._scaled_norm = None
        optimizer = self.engine.optimizer
        if hasattr(optimizer, "averaged_gradients"):
            if hasattr(optimizer, "_pre_step"):
                optimizer._pre_step()  # it counts the passes since the last step
                optimizer.averaged_gradients = {}
            else:
                optimizer.averaged_gradients = dict.fromkeys(optimizer.averaged_gradients)
        optimizer.zero_grad()
        self.engine.zero_grad()


@contextmanager
def _known_norm(optimizer: Any, norm: torch.Tensor | None) -> Iterator[None]:
    """Let a step of ZeRO use a norm that is known already, instead of exchanging it once more."""
    names = {"scaled_global_norm": lambda norm_type=2: norm, "_get_norm_groups": lambda: [norm]}
    name = next((name for name in names if hasattr(optimizer, name)), None)
    # An optimizer on the host may change gradients before it measures them.
    if norm is None or name is None or getattr(optimizer, "cpu_offload", False):
        yield
        return
    setattr(optimizer, name, names[name])
    try:
        yield
    finally:
        delattr(optimizer, name)


def optimizer_scale(optimizer: Any) -> float:
    """Return what the losses of an engine's optimizer are multiplied by."""
    scale = getattr(optimizer, "loss_scale", None) or getattr(optimizer, "cur_scale", None)
    return float(scale or 1.0)


# --- gradients of a window that is open --------------------------------------------------------------------------------

_SHARD = "shard of {rank} in {size}: "


def open_gradients(engine: Any) -> dict[str, torch.Tensor]:
    """Return what this rank has summed up in a window that is open.

    Without ZeRO and with ZeRO 1 these are whole gradients, by the names of their parameters. ZeRO 2 and 3 have exchanged
    them already, and hold shards: their names say whose, and only as many ranks can go on with them.

    Raises:
        UsageError: If they are where they cannot be read.
    """
    optimizer, module = engine.optimizer, engine.module
    if int(engine.zero_optimization_stage()) < 2:
        held = {name: _whole(optimizer, parameter) for name, parameter in module.named_parameters()}
        return {name: gradient for name, gradient in held.items() if gradient is not None}
    if getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False):
        raise UsageError(
            "save_state() was called in the middle of an accumulation window, whose gradients offload_optimizer keeps in "
            "host memory, out of reach. Save when accelerator.sync_gradients is True."
        )
    prefix = _SHARD.format(rank=engine.global_rank, size=engine.seq_dp_world_size)
    return {f"{prefix}{name}": shard for name, shard in _shards(engine).items()}


def set_open_gradients(engine: Any, gradients: Mapping[str, torch.Tensor]) -> None:
    """Go on in a window with what was summed up in it; without gradients, begin anew."""
    optimizer, module = engine.optimizer, engine.module
    if int(engine.zero_optimization_stage()) < 2:
        for name, parameter in module.named_parameters():
            gradient = gradients.get(name)
            _set_whole(optimizer, parameter, None if gradient is None else gradient.to(parameter.device))
        return
    _forget_shards(engine)
    if not gradients:
        return
    prefix = _SHARD.format(rank=engine.global_rank, size=engine.seq_dp_world_size)
    assert all(name.startswith(prefix) for name in gradients), "shards of another layout are refused before"
    _set_shards(engine, {name.removeprefix(prefix): shard for name, shard in gradients.items()})


def _whole(optimizer: Any, parameter: Any) -> torch.Tensor | None:
    """Return the gradient of a parameter: its own, or one in another number format beside it."""
    if hasattr(optimizer, "fp32_groups_gradients"):
        group, index = _place_in_groups(optimizer, parameter)
        held: torch.Tensor = optimizer.fp32_groups_gradients[group][index]
        return held if optimizer.fp32_groups_has_gradients[group][index] else None
    beside: torch.Tensor | None = getattr(parameter, "grad_accum", None)
    return beside if getattr(optimizer, "use_grad_accum_attribute", False) else parameter.grad


def _set_whole(optimizer: Any, parameter: Any, gradient: torch.Tensor | None) -> None:
    if hasattr(optimizer, "fp32_groups_gradients"):
        group, index = _place_in_groups(optimizer, parameter)
        optimizer.fp32_groups_has_gradients[group][index] = gradient is not None
        optimizer.fp32_groups_gradients[group][index].copy_(0.0 if gradient is None else gradient)
        parameter.grad = None
    elif getattr(optimizer, "use_grad_accum_attribute", False):
        parameter.grad_accum, parameter.grad = gradient, None
    else:
        parameter.grad = gradient


def _place_in_groups(optimizer: Any, parameter: Any) -> tuple[int, int]:
    places = (
        (group, index)
        for group, parameters in enumerate(optimizer.bf16_groups)
        for index, entry in enumerate(parameters)
        if entry is parameter
    )
    return next(places)


def _partitions(engine: Any) -> dict[str, torch.Tensor]:
    """Return the memory in which ZeRO 3 sums up its shards, by the names of their parameters."""
    held = engine.optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
    named = engine.module.named_parameters()
    return {name: held[parameter.ds_id] for name, parameter in named if parameter.ds_id in held}


def _is_sharded(engine: Any) -> bool:
    return int(engine.zero_optimization_stage()) == 3


def _shards(engine: Any) -> dict[str, torch.Tensor]:
    if _is_sharded(engine):
        return _partitions(engine)
    optimizer = engine.optimizer
    lists = {
        index: optimizer.averaged_gradients.get(index)
        if optimizer._use_compact_grad_partition_buffer(index)
        else optimizer.all_grad_tensors.get(index)
        for index in range(len(optimizer.bit16_groups))
    }
    return {f"{index}.{number}": shard for index, shards in lists.items() for number, shard in enumerate(shards or ())}


def _forget_shards(engine: Any) -> None:
    optimizer = engine.optimizer
    optimizer.zero_grad()
    if _is_sharded(engine):
        optimizer.micro_step_id = 0  # the next pass overwrites
    else:
        optimizer.all_grad_tensors = {}
        optimizer.averaged_gradients = {}
    optimizer._epilogue_ran_this_backward = False


def _set_shards(engine: Any, shards: Mapping[str, torch.Tensor]) -> None:
    optimizer = engine.optimizer
    if _is_sharded(engine):
        for name, memory in _partitions(engine).items():
            memory.copy_(shards[name])
        optimizer.micro_step_id = 1  # the next pass adds
        return
    for index in range(len(optimizer.bit16_groups)):
        own = [shard for name, shard in shards.items() if name.partition(".")[0] == str(index)]
        if optimizer._use_compact_grad_partition_buffer(index):
            for memory, shard in zip(optimizer._get_compact_grad_partition_buffer(index), own, strict=True):
                memory.copy_(shard)
        else:
            optimizer.all_grad_tensors[index] = [shard.clone() for shard in own]
