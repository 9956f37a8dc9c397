"""A whole model that waits on the CPU and visits its device to run."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn

from accelerate.collectives.nested import send_to_device
from accelerate.devices import registry
from accelerate.hooks.base import Arguments, ModelHook, remove_hook_from_module
from accelerate.offload.places import Place, as_device
from accelerate.offload.tensors import check_device_same
from accelerate.runtime.eager import eager_only


class CpuOffload(ModelHook):
    """Keep a model on the CPU until its forward, then move it to its device, where it stays.

    Args:
        execution_device: Where the model runs; the accelerator of this host if not given.
        prev_module_hook: The handle of the model that ran before and makes room first.
    """

    def __init__(
        self, execution_device: Place | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = registry.default().value.device() if execution_device is None else execution_device

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the model to the CPU."""
        return module.to("cpu")

    @eager_only
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
        """Send the model before it back to the CPU, and bring this one and its inputs to the device."""
        device = as_device(self.execution_device)
        if self.prev_module_hook is not None and _device_of(self.prev_module_hook.model).type != "cpu":
            self.prev_module_hook.offload()
        if check_device_same(_device_of(module), device):
            return args, kwargs
        module.to(device)
        return send_to_device(args, device), send_to_device(kwargs, device)


def _device_of(model: nn.Module) -> torch.device:
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


class UserCpuOffloadHook:
    """The user's handle of a model that waits on the CPU: send it back, or stop managing it."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model back to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook off the model, which stays where it is."""
        remove_hook_from_module(self.model)
