"""Where the file of options is looked for when no other is named."""

from __future__ import annotations

from pathlib import Path

from accelerate.config import env

_NAME = "default_config.yaml"


def _cache_home() -> Path:
    return Path(env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface").expanduser()


def current_default_file() -> Path:
    """Return the default file by the variables of this moment; the constants below are those of the import."""
    return _cache_home() / "accelerate" / _NAME


hf_cache_home: str = str(_cache_home())
cache_dir: str = str(Path(hf_cache_home) / "accelerate")
default_yaml_config_file: str = str(Path(cache_dir) / _NAME)
# One file under both names: JSON is YAML.
default_json_config_file: str = default_yaml_config_file
default_config_file: str = default_yaml_config_file
