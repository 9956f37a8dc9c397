"""The objects and places of configuration files, under the names that programs import."""

from __future__ import annotations

from accelerate.config.cluster_config import BaseConfig, ClusterConfig, SageMakerConfig, load_config_from_file
from accelerate.config.files import (
    cache_dir,
    default_config_file,
    default_json_config_file,
    default_yaml_config_file,
    hf_cache_home,
)

__all__ = [
    "BaseConfig",
    "ClusterConfig",
    "SageMakerConfig",
    "cache_dir",
    "default_config_file",
    "default_json_config_file",
    "default_yaml_config_file",
    "hf_cache_home",
    "load_config_from_file",
]
