"""What this library does around torch's public interface: the one place to look when torch changes."""

from __future__ import annotations

import functools
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.amp.grad_scaler import OptState
from torch.distributed import distributed_c10d
from torch.nn.modules import module as module_internals
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data._utils import signal_handling

from accelerate._base.imports import is_torch_version

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch.overrides import TorchFunctionMode

P = ParamSpec("P")
R = TypeVar("R")


def default_store() -> Store:
    """Return the key-value store of the default process group.

    torch 2.9 to 2.13 give no public way to the store that `init_process_group` made from the environment.
    """
    return distributed_c10d._get_default_store()


def handle_sigterm_in_loader_workers(handler: Callable[[int, Any], None]) -> None:
    """Let the workers that loaders fork from now on call a function at SIGTERM.

    torch 2.9 to 2.15 install their own handler when a worker starts, which ends it unless its parent sent the signal, and
    have no hook after that.
    """
    install = signal_handling._set_worker_signal_handlers

    def install_ours_too() -> None:
        install()
        signal.signal(signal.SIGTERM, handler)

    signal_handling._set_worker_signal_handlers = install_ours_too


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


def follow_optimizer(scheduler: LRScheduler, optimizer: Any) -> None:
    """Let a schedule drive another optimizer, with the same groups, than the one that it was made for.

    torch 2.9 to 2.13 mark the `step` of the optimizer that a schedule is made for, and warn where the mark is missing.
    """
    for group, old in zip(optimizer.param_groups, scheduler.optimizer.param_groups, strict=True):
        group.update({name: old[name] for name in ("initial_lr", "lr")})
    step = optimizer.step

    @functools.wraps(step)
    def tracked(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return step(*args, **kwargs)

    vars(tracked)["_wrapped_by_lr_sched"] = True
    optimizer.step = tracked
    scheduler.optimizer = optimizer


def register_first_step_hook(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> None:
    """Call a function before an optimizer steps, and before the hooks that it has already.

    torch 2.9 to 2.13 have no public way to be the first.
    """
    handle = optimizer.register_step_pre_hook(hook)
    hooks: Any = optimizer._optimizer_step_pre_hooks
    hooks.move_to_end(handle.id, last=False)


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


@dataclass(frozen=True)
class Piece:
    """The run of numbers that this rank has of a parameter.

    Args:
        held: The numbers of this rank, perhaps joined over several parameters.
        offset: Where those of this parameter begin there.
        begin: Where they begin in the whole parameter, counted through.
        count: How many they are.
        whole: How many the whole parameter has.
    """

    held: torch.Tensor
    offset: int
    begin: int
    count: int
    whole: int

    def take(self, stretch: torch.Tensor, at: int) -> None:
        """Copy what falls into this piece out of a stretch of the whole parameter that begins at `at`."""
        first, last = max(self.begin, at), min(self.begin + self.count, at + stretch.numel())
        if first < last:
            to = self.offset + first - self.begin
            with torch.no_grad():
                self.held[to : to + last - first].copy_(stretch[first - at : last - at])


def flat_shard(unit: torch.nn.Module) -> torch.Tensor | None:
    """Return what this rank holds of the parameters of one wrapper of FSDP 1, joined; None where it has none.

    torch 2.9 to 2.13 have no public way to it.
    """
    handle = getattr(unit, "_handle", None)
    return None if handle is None else handle.flat_param.data


def flat_pieces(unit: torch.nn.Module) -> dict[str, Piece]:
    """Return this rank's piece of every parameter that one wrapper of FSDP 1 holds, by its name below the wrapper.

    torch 2.9 to 2.13 have no public way to it without gathering the parameters.
    """
    handle: Any = getattr(unit, "_handle", None)
    if handle is None:
        return {}
    flat = handle.flat_param
    held = flat.data
    return {
        name: Piece(held, info.offset_in_shard or 0, info.intra_param_start_idx or 0, info.numel_in_shard or 0, whole)
        for name, info, whole in zip(flat._fqns, flat._shard_param_infos, flat._numels, strict=True)
    }


class HeldBackGradients(ABC):
    """The gradients of one unit of FSDP that are whole, and wait on their rank for the exchange at the end of a window.

    torch 2.9 to 2.13 show them nowhere: a parameter has its gradient once it was exchanged.
    """

    @abstractmethod
    def parameters(self) -> list[Any]:
        """Return what stands for each parameter of the unit."""

    @abstractmethod
    def read(self) -> dict[Any, torch.Tensor]:
        """Return those that are there."""

    @abstractmethod
    def write(self, gradients: Mapping[Any, torch.Tensor]) -> None:
        """Put gradients in place of those that are there; those that are not given are forgotten."""


class _OfVersion2(HeldBackGradients):
    """Of the parameters of version 2, by the identity of the parameter in the model."""

    def __init__(self, unit: Any) -> None:
        state = unit._get_fsdp_state()
        # Before torch 2.13 a unit has one group.
        groups = getattr(state, "_fsdp_param_groups", None) or [group for group in [state._fsdp_param_group] if group]
        self._parameters = [parameter for group in groups for parameter in group.fsdp_params]

    def parameters(self) -> list[Any]:
        return [id(parameter.sharded_param) for parameter in self._parameters]

    def read(self) -> dict[Any, torch.Tensor]:
        found = {}
        for parameter in self._parameters:
            gradient = parameter.unsharded_accumulated_grad
            if gradient is None:
                gradient = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
            if gradient is not None:
                found[id(parameter.sharded_param)] = gradient
        return found

    def write(self, gradients: Mapping[Any, torch.Tensor]) -> None:
        for parameter in self._parameters:
            gradient = gradients.get(id(parameter.sharded_param))
            # What is here is added to the gradient of the next pass, as if that pass had followed.
            parameter.unsharded_accumulated_grad = (
                None if gradient is None else gradient.to(parameter.device, copy=True)
            )
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


class _OfVersion1(HeldBackGradients):
    """Of the parameters that one wrapper of version 1 joined, by their names below the wrapper."""

    def __init__(self, unit: torch.nn.Module) -> None:
        self._handle: Any = unit._handle

    def parameters(self) -> list[Any]:
        return list(self._handle.flat_param._fqns) if self._handle is not None else []

    def read(self) -> dict[Any, torch.Tensor]:
        flat = self._handle.flat_param if self._handle is not None else None
        if flat is None or flat.grad is None or flat.grad.size() != flat._unpadded_unsharded_size:
            return {}
        return dict(zip(flat._fqns, self._handle._get_unflat_views(flat.grad), strict=True))

    def write(self, gradients: Mapping[Any, torch.Tensor]) -> None:
        if self._handle is None:
            return
        flat = self._handle.flat_param
        flat.grad = None
        own = [gradients.get(name) for name in flat._fqns]
        given = next((gradient for gradient in own if gradient is not None), None)
        if given is not None:
            joined = torch.zeros(flat._unpadded_unsharded_size, dtype=given.dtype, device=self._handle.device)
            for part, gradient in zip(self._handle._get_unflat_views(joined), own, strict=True):
                if gradient is not None:
                    part.copy_(gradient)
            # A gradient is taken only by a parameter of its size, which this one has while it is whole.
            held, flat.data = flat.data, torch.empty_like(joined)
            flat.grad = joined
            flat.data = held
        if self._handle._use_orig_params:
            self._handle._use_unsharded_grad_views()


def held_back_gradients(model: torch.nn.Module) -> Iterator[tuple[str, HeldBackGradients]]:
    """Return the gradients that wait in each unit of a model that FSDP shards, with the name of the unit."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    for name, unit in model.named_modules():
        if isinstance(unit, FSDPModule):
            yield name, _OfVersion2(unit)
        elif isinstance(unit, FullyShardedDataParallel):
            yield name, _OfVersion1(unit)


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


class PartwiseGradScaler(torch.amp.GradScaler):
    """Unscale the part of each gradient that this rank holds, where ranks tell each other of overflows.

    torch 2.9 to 2.13 unscale gradients in lists, and refuse a list of split and whole ones.
    """

    agree_on_overflow = False
    """Take an overflow on one rank as one on all, where each rank holds a part of the gradients."""

    def _unscale_grads_(self, optimizer: Any, *args: Any) -> dict[torch.device, torch.Tensor]:
        held: Any = _HeldGradients(optimizer) if self.agree_on_overflow else optimizer
        return super()._unscale_grads_(held, *args)


class _HeldGradients:
    """What torch reads of an optimizer to unscale gradients, with the parts that this rank holds."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        parts = [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in gradients]
        self.param_groups = [{"params": [_holder_of(part) for part in parts if part is not None]}]


def _holder_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose gradient this is; it takes no memory."""
    holder = gradient.detach()
    holder.grad = gradient
    return holder


# Not empty if somebody wants to see every parameter that a module gets: torch 2.9 to 2.13 have a public way to add such a
# hook, and none to ask whether there is one.
parameter_registration_hooks = module_internals._global_parameter_registration_hooks


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


@contextmanager
def traced_by_running() -> Iterator[None]:
    """Let torch's pipelines trace a model by running it, which takes more models than reading its code does.

    torch 2.10 and later do so by themselves; torch 2.9 calls this function to read the code.
    """
    if is_torch_version(">=", "2.10"):
        yield
        return
    exports: Any = torch.export
    read_code = exports.export_for_training

    def run(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None, *, strict: bool) -> Any:
        return exports.export(model, args, kwargs, strict=False)

    exports.export_for_training = run
    try:
        yield
    finally:
        exports.export_for_training = read_code


def mend_first_messages(stage: PipelineStage) -> None:
    """Give the messages by which the stages of a pipeline meet one length.

    torch 2.9 sends 8 bytes where 4 are received, which gloo refuses; torch 2.10 and later do not.
    """
    operations = stage._get_init_p2p_neighbors_ops

    def of_one_length() -> list[dist.P2POp]:
        found = operations()
        for operation in found:
            operation.tensor = operation.tensor.float()
        return found

    if is_torch_version("<", "2.10"):
        vars(stage)["_get_init_p2p_neighbors_ops"] = of_one_length


def gpipe_schedule(stage: PipelineStage, num_microbatches: int, **options: Any) -> ScheduleGPipe:
    """Return the schedule in which all parts of a batch go forward before the first one goes back.

    torch 2.9 and 2.10 refuse fewer parts than stages; this schedule does not need so many.
    """
    from torch.distributed.pipelining import ScheduleGPipe

    schedule = ScheduleGPipe(stage, max(num_microbatches, stage.num_stages), **options)
    schedule._n_microbatches = num_microbatches
    return schedule


def keeps_identity(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether `Module.to` moves a parameter to a device in place; for tensors of another kind it makes a new one.

    torch 2.9 to 2.13 let a parameter take over tensors of the CPU and of the devices in its own source, and give no
    public way to ask.
    """
    return bool(torch._has_compatible_shallow_copy_type(tensor, torch.empty(0, device=device)))


def eager_only(function: Callable[P, R]) -> Callable[P, R]:
    """Keep torch.compile out of a function, for instance one that changes the parameters of a module.

    `torch.compiler.disable` as a decorator would import the compiler, which takes a second, for everybody.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        runs = torch.compiler.disable(function) if torch.compiler.is_compiling() else function
        return runs(*args, **kwargs)

    return call
