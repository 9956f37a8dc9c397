"""The private parts of torch that this library uses: the one place to look when torch changes."""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import Store
from torch.amp.grad_scaler import OptState
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel


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
