"""Moore Threads GPUs."""

from __future__ import annotations

from accelerate._base.enums import DistributedType
from accelerate.devices.base import DeviceBackend

BACKEND = DeviceBackend(
    type="musa",
    label=DistributedType.MULTI_MUSA,
    group_backend="mccl",
    package="torch_musa",
    visible_devices_variable="MUSA_VISIBLE_DEVICES",
    priority=60,
    rng_key="torch_musa_manual_seed",
    autocast_dtypes=frozenset({"float16"}),
)
