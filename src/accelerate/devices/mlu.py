"""Cambricon MLUs."""

from __future__ import annotations

from accelerate._base.enums import DistributedType
from accelerate.devices.base import DeviceBackend

BACKEND = DeviceBackend(
    type="mlu",
    label=DistributedType.MULTI_MLU,
    group_backend="cncl",
    package="torch_mlu",
    visible_devices_variable="MLU_VISIBLE_DEVICES",
    priority=80,
    rng_key="torch_mlu_manual_seed",
    autocast_dtypes=frozenset({"float16"}),
)
