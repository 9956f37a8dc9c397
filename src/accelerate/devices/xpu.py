"""Intel GPUs."""

from __future__ import annotations

from accelerate._base.enums import DistributedType
from accelerate.devices.base import DeviceBackend

BACKEND = DeviceBackend(
    type="xpu",
    label=DistributedType.MULTI_XPU,
    group_backend="xccl",
    visible_devices_variable="ZE_AFFINITY_MASK",
    priority=20,
    rng_key="torch_xpu_manual_seed",
    autocast_dtypes=frozenset({"float16", "bfloat16"}),
    can_fork=False,
)
