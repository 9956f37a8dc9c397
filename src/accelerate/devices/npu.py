"""Huawei Ascend NPUs."""

from __future__ import annotations

from accelerate._base.enums import DistributedType
from accelerate.devices.base import DeviceBackend

BACKEND = DeviceBackend(
    type="npu",
    label=DistributedType.MULTI_NPU,
    group_backend="hccl",
    package="torch_npu",
    visible_devices_variable="ASCEND_RT_VISIBLE_DEVICES",
    priority=50,
    rng_key="torch_npu_manual_seed",
    autocast_dtypes=frozenset({"float16"}),
)
