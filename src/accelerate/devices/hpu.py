"""Intel Gaudi HPUs."""

from __future__ import annotations

from accelerate._base.enums import DistributedType
from accelerate.devices.base import DeviceBackend

BACKEND = DeviceBackend(
    type="hpu",
    label=DistributedType.MULTI_HPU,
    group_backend="hccl",
    package="habana_frameworks.torch",
    visible_devices_variable="HABANA_VISIBLE_MODULES",
    priority=40,
    rng_key="torch_hpu_manual_seed",
    autocast_dtypes=frozenset({"float16", "bfloat16"}),
)
