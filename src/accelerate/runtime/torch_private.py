"""Access to private parts of torch: the one place to adapt when torch changes.

Verified with torch 2.9 to 2.15. A remark names versions only where it holds for some of these. Nothing private is read
when this module is imported, so that a part that a later torch lacks stops only the feature that needs it.
"""

from __future__ import annotations

import functools
import importlib
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState
from torch.distributed import distributed_c10d
from torch.nn.modules import module as module_internals
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from accelerate._base.errors import UnsupportedTorchError
from accelerate._base.imports import is_torch_version

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch.distributed.tensor import Placement
    from torch.overrides import TorchFunctionMode

P = ParamSpec("P")
R = TypeVar("R")

OLDEST_TORCH, NEWEST_TESTED_TORCH = (2, 9), (2, 15)
"""Releases with which this library is tested; `constraints-xla.txt` and `constraints-newest.txt` pin them."""


def private(owner: Any, name: str) -> Any:
    """Return a private attribute of torch.

    Args:
        owner: The object that has it, or the full name of a module, which is imported.

    Raises:
        UnsupportedTorchError: The installed torch does not have it.
    """
    try:
        return getattr(importlib.import_module(owner) if isinstance(owner, str) else owner, name)
    except (AttributeError, ImportError) as error:
        kind = owner if isinstance(owner, type) else type(owner)
        place = owner.__name__ if isinstance(owner, ModuleType) else f"{kind.__module__}.{kind.__qualname__}"
        oldest, newest = (".".join(map(str, release)) for release in (OLDEST_TORCH, NEWEST_TESTED_TORCH))
        raise UnsupportedTorchError(
            f"torch {torch.__version__} has no {owner if isinstance(owner, str) else place}.{name}, a private attribute "
            f"that this feature needs. Install torch {oldest} to {newest}."
        ) from error


def default_store() -> Store:
    """Return the key-value store of the default process group.

    torch gives no public way to the store that `init_process_group` made from the environment.
    """
    store: Store = private(distributed_c10d, "_get_default_store")()
    return store


def handle_sigterm_in_loader_workers(handler: Callable[[int, Any], None]) -> None:
    """Let the workers that loaders fork from now on call a function at SIGTERM.

    torch installs its own handler when a worker starts, which ends it unless its parent sent the signal, and has no hook
    after that.
    """
    module, name = "torch.utils.data._utils.signal_handling", "_set_worker_signal_handlers"
    install = private(module, name)

    def install_ours_too() -> None:
        install()
        signal.signal(signal.SIGTERM, handler)

    setattr(importlib.import_module(module), name, install_ours_too)


def rearm_reducer(model: DistributedDataParallel) -> None:
    """Make DDP exchange gradients in the next backward pass although the forward pass was told not to.

    torch prepares the reducer in the forward pass only.
    """
    private(model, "reducer").prepare_for_backward([])


def _reduced_parameters(model: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters whose gradients DDP exchanges, by name, in the order of its indices."""
    named = model.module.named_parameters()
    return {name: entry for name, entry in named if entry.requires_grad and name not in model.parameters_to_ignore}


def bucket_order(model: DistributedDataParallel) -> list[str]:
    """Return the parameters of DDP's buckets in their order; empty while they are in the order of the model.

    DDP sorts its buckets at the second forward pass, by the order in which the first backward pass computed gradients.
    The sum of more than two numbers depends on where they are in a bucket. Every rank calls this between two steps. torch
    2.9 to 2.15 write the order to a log only, one exchange later.
    """
    reduced = _reduced_parameters(model)
    names = list(reduced)
    logged: str = model._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    if logged:
        order = [int(index) for index in logged.replace(",", " ").split()]
    elif _sort_buckets(model) or model._has_rebuilt_buckets:
        # In the first steps alone: these buckets take the memory of all gradients.
        index_of = {id(entry): index for index, entry in enumerate(reduced.values())}
        buckets = model.reducer._get_zeros_like_grad_buckets()
        order = [index_of.get(id(entry), -1) for bucket in buckets for entry in bucket.parameters()]
    else:
        return []
    # Parameters may have been frozen since.
    return [names[index] for index in order] if sorted(order) == list(range(len(names))) else []


def _sort_buckets(model: DistributedDataParallel) -> bool:
    """Let DDP sort its buckets now instead of at the next forward pass; return whether there was anything to sort."""
    is_sorted: bool = model.reducer._rebuild_buckets()
    if is_sorted:
        model._has_rebuilt_buckets = True
    return is_sorted


def can_restore_bucket_order(model: DistributedDataParallel, order: list[str]) -> bool:
    """Return whether `restore_bucket_order` works here; every rank calls both, if it does on all ranks.

    Not for buckets that are sorted already, and not where the backward pass of zeros could be noticed: by hooks, sparse
    gradients, or the count of uses in a static graph.
    """
    reduced = _reduced_parameters(model)
    if _sort_buckets(model) or model._has_rebuilt_buckets or sorted(order) != sorted(reduced):
        return False
    if model.find_unused_parameters or model.static_graph or model._comm_hooks or model.mixed_precision is not None:
        return False
    has_hooks = any(entry._backward_hooks or entry._post_accumulate_grad_hooks for entry in reduced.values())
    has_sparse = any(getattr(module, "sparse", False) for module in model.module.modules())
    return not has_hooks and not has_sparse and len({entry.device for entry in reduced.values()}) == 1


def restore_bucket_order(model: DistributedDataParallel, order: list[str]) -> None:
    """Sort the buckets of a new DDP model as those of another run were, by a backward pass of zeros in that order."""
    reduced = _reduced_parameters(model)
    gradients = {name: entry.grad for name, entry in reduced.items()}
    for entry in reduced.values():
        entry.grad = None
    rearm_reducer(model)
    with torch.enable_grad():
        # Autograd begins with what was computed last.
        sums = [reduced[name].sum() for name in reversed(order)]
    torch.autograd.backward(sums, [torch.zeros_like(entry) for entry in sums])
    for name, entry in reduced.items():
        entry.grad = gradients[name]
    _sort_buckets(model)


def is_unscaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the gradients of `optimizer` were already unscaled in this step.

    torch raises an error when gradients are unscaled twice, and has no public way to ask before.
    """
    return private(scaler, "_per_optimizer_states")[id(optimizer)]["stage"] is not OptState.READY


def follow_optimizer(scheduler: LRScheduler, optimizer: Any) -> None:
    """Let a schedule drive another optimizer, with the same groups, than the one that it was made for.

    torch marks the `step` of the optimizer that a schedule is made for, and warns where the mark is missing.
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

    torch has no public way to be the first.
    """
    handle = optimizer.register_step_pre_hook(hook)
    private(optimizer, "_optimizer_step_pre_hooks").move_to_end(handle.id, last=False)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Join the axes of a mesh into one, which its root then knows by `name`.

    torch has no public way to name joined axes.
    """
    joined: DeviceMesh = private(mesh, "_flatten")(name)
    return joined


def after_backward(callback: Callable[[], None]) -> None:
    """Call a function once at the end of the backward pass that runs now.

    The function is public since torch 2.15.
    """
    public = getattr(torch.autograd.graph, "queue_callback", None)
    queue = public or private(torch.autograd.Variable, "_execution_engine").queue_callback
    queue(callback)


def set_context_rotation(method: str) -> None:
    """Choose how torch's context parallelism passes keys and values around: "allgather" or "alltoall".

    torch keeps this option in a private module.
    """
    private("torch.distributed.tensor.experimental._attention", "set_rotate_method")(method)


def interleaved_shard(dimension: int, groups: int) -> Placement:
    """Return the placement of a packed weight: each rank holds one shard of each of its groups of rows or columns.

    torch 2.9 to 2.13 have a placement for it that is private.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dimension, split_factor=groups)


def contiguous_placements(tensor: Any) -> tuple[Placement, ...] | None:
    """Return the placements of an interleaved tensor with its shards in one stretch each; None for any other tensor.

    FSDP 2 uses the same private placement for an outer axis of the mesh, where shards are in one stretch.
    """
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if not isinstance(tensor, DTensor) or not isinstance(tensor.placements[-1], _StridedShard):
        return None
    return *tensor.placements[:-1], Shard(tensor.placements[-1].dim)


def overflow_flags(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors in which unscaling noted whether a gradient of this process overflowed, one a device.

    torch gives no public way to them; its own scaler for FSDP 1 reads the same place.
    """
    return list(private(scaler, "_per_optimizer_states")[id(optimizer)]["found_inf_per_device"].values())


class PartwiseGradScaler(torch.amp.GradScaler):
    """Unscale the part of each gradient that this rank holds, where ranks tell each other of overflows.

    torch unscales gradients in lists, and refuses a list of both DTensors and plain tensors.
    """

    agree_on_overflow = False
    """Take an overflow on one rank as one on all, where each rank holds a part of the gradients."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, and note overflows."""
        if self.agree_on_overflow:
            private(torch.amp.GradScaler, "_unscale_grads_")  # if torch did not call it, overflows would go unnoticed
        super().unscale_(optimizer)

    def _unscale_grads_(self, optimizer: Any, *args: Any) -> dict[torch.device, torch.Tensor]:
        held: Any = _HeldGradients(optimizer) if self.agree_on_overflow else optimizer
        return super()._unscale_grads_(held, *args)


class _HeldGradients:
    """Optimizer interface that unscaling reads, with the local shards of the gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        parts = [gradient.to_local() if hasattr(gradient, "to_local") else gradient for gradient in gradients]
        self.param_groups = [{"params": [_holder_of(part) for part in parts if part is not None]}]


def _holder_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose gradient this is; it takes no memory."""
    holder = gradient.detach()
    holder.grad = gradient
    return holder


# Not empty if a program registered a hook that sees every new parameter of a module. torch has no public way to ask;
# where this is missing, code that skips the hooks otherwise takes the way that calls them.
parameter_registration_hooks: Any = getattr(module_internals, "_global_parameter_registration_hooks", True)


@contextmanager
def mode_in_backward(mode: TorchFunctionMode) -> Iterator[None]:
    """Let a mode see the functions that a backward pass started inside of this block calls, such as checkpointed ones.

    torch holds a mode back in all that a call which it was asked about does, and the engine of backward passes
    remembers that.
    """
    run = private(torch.autograd, "_engine_run_backward")

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

    torch 2.10 and later do so; torch 2.9 calls this function to read the code.
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
    if is_torch_version(">=", "2.10"):
        return
    operations = private(stage, "_get_init_p2p_neighbors_ops")

    def of_one_length() -> list[dist.P2POp]:
        found: list[dist.P2POp] = operations()
        for operation in found:
            operation.tensor = operation.tensor.float()
        return found

    vars(stage)["_get_init_p2p_neighbors_ops"] = of_one_length


def gpipe_schedule(stage: PipelineStage, num_microbatches: int, **options: Any) -> ScheduleGPipe:
    """Return the schedule in which all parts of a batch go forward before the first one goes back.

    torch 2.9 and 2.10 refuse fewer microbatches than stages, which this schedule can run.
    """
    from torch.distributed.pipelining import ScheduleGPipe

    if is_torch_version(">=", "2.11"):
        return ScheduleGPipe(stage, num_microbatches, **options)
    schedule = ScheduleGPipe(stage, max(num_microbatches, stage.num_stages), **options)
    schedule._n_microbatches = num_microbatches
    return schedule


def keeps_identity(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether `Module.to` moves a parameter to a device in place; for tensors of another kind it makes a new one.

    This holds for tensors of the CPU and of the devices in torch itself; torch has no public way to ask.
    """
    return bool(private(torch, "_has_compatible_shallow_copy_type")(tensor, torch.empty(0, device=device)))


def pin_batch(batch: Any) -> Any:
    """Copy the tensors of a batch to pinned memory, as a `DataLoader` does.

    torch pins nested data in a private function only.
    """
    return private("torch.utils.data._utils.pin_memory", "pin_memory")(batch)


def checkpoint_activations(block: torch.nn.Module, *, offload: bool) -> torch.nn.Module:
    """Wrap a block so that its activations are computed again in the backward pass.

    torch keeps the wrappers, which leave names in state dicts as they are, in a private module.

    Args:
        offload: Keep the inputs of the block on the CPU until then.
    """
    wrappers = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
    wrapped: torch.nn.Module = private(wrappers, "checkpoint_wrapper")(block)
    return private(wrappers, "offload_wrapper")(wrapped) if offload else wrapped


def eager_only(function: Callable[P, R]) -> Callable[P, R]:
    """Keep torch.compile out of a function, for instance one that changes the parameters of a module.

    `torch.compiler.disable` as a decorator would import the compiler, which takes a second, for everybody.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        runs = torch.compiler.disable(function) if torch.compiler.is_compiling() else function
        return runs(*args, **kwargs)

    return call
