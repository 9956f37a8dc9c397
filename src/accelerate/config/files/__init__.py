"""Files of options: where they are, what they hold, how they are read and written.

The names are imported when they are first read: a launch without a file reads none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate._base.lazy import attach, by_home, starred

if TYPE_CHECKING:
    from accelerate.config.files.locations import cache_dir as cache_dir
    from accelerate.config.files.locations import default_config_file as default_config_file
    from accelerate.config.files.locations import default_json_config_file as default_json_config_file
    from accelerate.config.files.locations import default_yaml_config_file as default_yaml_config_file
    from accelerate.config.files.locations import hf_cache_home as hf_cache_home
    from accelerate.config.files.objects import BaseConfig as BaseConfig
    from accelerate.config.files.objects import ClusterConfig as ClusterConfig
    from accelerate.config.files.objects import SageMakerConfig as SageMakerConfig
    from accelerate.config.files.objects import load_config_from_file as load_config_from_file
    from accelerate.config.files.reading import ConfigFile as ConfigFile
    from accelerate.config.files.reading import FileValue as FileValue
    from accelerate.config.files.reading import read_config_file as read_config_file
else:
    _TABLE = by_home(
        {
            "accelerate.config.files.locations": (
                "cache_dir default_config_file default_json_config_file default_yaml_config_file hf_cache_home"
            ),
            "accelerate.config.files.objects": "BaseConfig ClusterConfig SageMakerConfig load_config_from_file",
            "accelerate.config.files.reading": "ConfigFile FileValue read_config_file",
        }
    )
    __getattr__, __dir__ = attach(__name__, _TABLE)
    __all__ = list(starred(_TABLE))
