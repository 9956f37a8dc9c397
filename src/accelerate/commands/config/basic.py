"""A file of options for the machine as it is, without questions."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from accelerate._base.enums import ComputeEnvironment, DistributedType
from accelerate._base.errors import ConfigurationError
from accelerate.config import env
from accelerate.config.cluster_config import ClusterConfig
from accelerate.config.files import default_json_config_file, place_to_write
from accelerate.config.sections.launch import PRECISIONS
from accelerate.devices.machine import detect


def write_basic_config(
    mixed_precision: str = "no", save_location: str | Path = default_json_config_file
) -> Path | Literal[False]:
    """Write a file of options for the hardware that this machine has.

    Args:
        mixed_precision: The number format of training.
        save_location: Where to write it.

    Returns:
        The path of the file; False if there is one already, which is left as it is.

    Raises:
        ConfigurationError: The number format is not known, or the file cannot be written there.
    """
    if mixed_precision.lower() not in PRECISIONS:
        raise ConfigurationError(
            f"write_basic_config(mixed_precision={mixed_precision!r}) is not a known number format. "
            f"Write one of {', '.join(PRECISIONS)}."
        )
    path = place_to_write(save_location)
    if path.exists():
        return False
    machine = detect(env.items())
    config = ClusterConfig(
        compute_environment=ComputeEnvironment.LOCAL_MACHINE,
        distributed_type=machine.label if machine.device_count > 1 else DistributedType.NO,
        mixed_precision=mixed_precision.lower(),
        use_cpu=not machine.has_accelerator,
        debug=False,
        num_processes=max(1, machine.device_count),
    )
    config.to_json_file(path)
    return path
