"""The private parts of torch that this library uses: the one place to look when torch changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import Store
from torch.amp.grad_scaler import OptState
from torch.distributed import distributed_c10d
from torch.nn.modules import module as module_internals
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.overrides import TorchFunctionMode


def default_store() -> Store:
    """Return the key-value store of the default process group.

    torch 2.9 to 2.13 give no public way to the store that `init_process_group` made from the environment.
    """
    return distributed_c10d._get_default_store()


def rearm_reducer(model: DistributedDataParallel) -> None:
    """Make DDP exchange gradients in the next backward pass although the forward pass was told not to.

    torch 2.9 to 2.13 prepare the reducer in the forward pass only.
    """
    model.reducer.prepare_for_backward([])


def is_unscaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the gradients of `optimizer` were already unscaled in this step.

    torch 2.9 to 2.13 raise an error when gradients are unscaled twice, and have no public way to ask before.
    """
    return scaler._per_optimizer_states[id(optimizer)]["stage"] is not OptState.READY


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Join the axes of a mesh into one, which its root then knows by `name`.

    torch 2.9 to 2.13 have no public way to name joined axes.
    """
    return mesh._flatten(name)


def after_backward(callback: Callable[[], None]) -> None:
    """Call a function once at the end of the backward pass that runs now.

    torch 2.9 to 2.13 have no public hook for the end of a pass; DDP and FSDP use this one.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def set_context_rotation(method: str) -> None:
    """Choose how torch's context parallelism passes keys and values around: "allgather" or "alltoall".

    torch 2.9 to 2.13 keep this option in a private module.
    """
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(method)


def flat_parameter_names(parameter: torch.nn.Parameter) -> tuple[str, ...]:
    """Return the names, below their module, of the parameters that FSDP 1 holds in one flat parameter.

    torch 2.9 to 2.13 have no public way from a flat parameter to what is in it.
    """
    return tuple(getattr(parameter, "_fqns", ()))


def is_flattened(parameter: torch.Tensor) -> bool:
    """Return whether FSDP 1 holds a parameter in shards, as a flat parameter or as a view into one.

    torch 2.9 to 2.13 mark them with private attributes.
    """
    return bool(getattr(parameter, "_is_flat_param", False) or getattr(parameter, "_fsdp_flattened", False))


def overflow_flags(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors in which unscaling noted whether a gradient of this process overflowed, one a device.

    torch 2.9 to 2.13 give no public way to them; its own scaler for FSDP 1 reads the same place.
    """
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


def has_registration_hooks() -> bool:
    """Return whether somebody wants to see every parameter that a module gets.

    torch 2.9 to 2.13 have a public way to add such a hook, and none to ask whether there is one.
    """
    return bool(module_internals._global_parameter_registration_hooks)


@contextmanager
def mode_in_backward(mode: TorchFunctionMode) -> Iterator[None]:
    """Let a mode see the functions that a backward pass started inside of this block calls, such as checkpointed ones.

    torch 2.9 to 2.13 hold a mode back in all that a call which it was asked about does, and the engine of backward
    passes remembers that.
    """
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_with_mode(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run(*args, **kwargs)

    torch.autograd._engine_run_backward = run_with_mode  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]
