"""NVIDIA and AMD GPUs."""

from __future__ import annotations

import torch

from accelerate._base.enums import DistributedType
from accelerate.devices.base import DeviceBackend

BACKEND = DeviceBackend(
    type="cuda",
    label=DistributedType.MULTI_GPU,
    group_backend="nccl",
    visible_devices_variable="CUDA_VISIBLE_DEVICES",
    priority=30,
    rng_key="torch_cuda_manual_seed",
    autocast_dtypes=frozenset({"float16"}),
    can_fork=torch.version.hip is None,
)
