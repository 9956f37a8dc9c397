"""AWS Trainium and Inferentia through torch-neuronx."""

from __future__ import annotations

from accelerate._base.enums import DistributedType
from accelerate.devices.base import DeviceBackend

BACKEND = DeviceBackend(
    type="neuron",
    label=DistributedType.MULTI_NEURON,
    group_backend="neuron",
    package="torch_neuronx",
    visible_devices_variable="NEURON_RT_VISIBLE_CORES",
    priority=10,
    rng_key="torch_neuron_manual_seed",
    autocast_dtypes=frozenset({"bfloat16"}),
)
