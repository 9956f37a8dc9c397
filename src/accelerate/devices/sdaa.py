"""Tecorigin SDAA accelerators."""

from __future__ import annotations

from accelerate._base.enums import DistributedType
from accelerate.devices.base import DeviceBackend

BACKEND = DeviceBackend(
    type="sdaa",
    label=DistributedType.MULTI_SDAA,
    group_backend="tccl",
    package="torch_sdaa",
    visible_devices_variable="SDAA_VISIBLE_DEVICES",
    priority=70,
    rng_key="torch_sdaa_manual_seed",
    autocast_dtypes=frozenset({"float16"}),
)
