"""Files of options: where they are, what they hold, how they are read and written."""

from __future__ import annotations

from accelerate.config.files.locations import (
    cache_dir,
    default_config_file,
    default_json_config_file,
    default_yaml_config_file,
    hf_cache_home,
)
from accelerate.config.files.objects import BaseConfig, ClusterConfig, SageMakerConfig, load_config_from_file
from accelerate.config.files.reading import ConfigFile, FileValue, read_config_file

__all__ = [
    "BaseConfig",
    "ClusterConfig",
    "ConfigFile",
    "FileValue",
    "SageMakerConfig",
    "cache_dir",
    "default_config_file",
    "default_json_config_file",
    "default_yaml_config_file",
    "hf_cache_home",
    "load_config_from_file",
    "read_config_file",
]
