"""DeepSpeed's own configuration, read by dotted names without the package."""

from __future__ import annotations

import base64
import binascii
import copy
import json
from pathlib import Path
from typing import Any

from accelerate._base.errors import ConfigurationError

AUTO = "auto"
_OFFLOAD_PLACES = ("cpu", "nvme")


class HfDeepSpeedConfig:
    """Hold DeepSpeed's configuration and look things up in it.

    Args:
        config_file_or_dict: A dictionary (copied), the path of a JSON file, or JSON text, plain or in base 64.

    Raises:
        ConfigurationError: It is none of these.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config: dict[str, Any] = _read(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Remember the ZeRO stage, and whether anything is offloaded."""
        self._stage: Any = self.get_value("zero_optimization.stage", -1)
        places = (self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param"))
        self._offload = (self.is_zero2() or self.is_zero3()) and any(place in _OFFLOAD_PLACES for place in places)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the dictionary that holds the last part of a dotted name, and that part; None where a part lacks."""
        *path, last = ds_key_long.split(".")
        node: Any = self.config
        for part in path:
            node = node.get(part) if isinstance(node, dict) else None
        return (node if isinstance(node, dict) else None), last

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value under a dotted name, or `default`."""
        node, last = self.find_config_node(ds_key_long)
        return default if node is None else node.get(last, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove what is under a dotted name.

        Raises:
            ConfigurationError: It is not there, and must be.
        """
        node, last = self.find_config_node(ds_key_long)
        if node is not None and last in node:
            del node[last]
        elif must_exist:
            raise ConfigurationError(
                f"{ds_key_long!r} is not in DeepSpeed's configuration, so it cannot be removed. "
                f"Its entries are {', '.join(map(repr, self.config))}."
            )

    def is_true(self, ds_key_long: str) -> bool:
        """Say whether the value under a dotted name is there and counts as true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Say whether the value under a dotted name is there and counts as false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Say whether the ZeRO stage is 2."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Say whether the ZeRO stage is 3."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Say whether ZeRO 2 or 3 keeps optimizer states or weights elsewhere."""
        return self._offload


def _read(given: Any) -> dict[str, Any]:
    if isinstance(given, dict):
        return copy.deepcopy(given)
    if isinstance(given, (str, Path)):
        config = _read_text(str(given))
        if isinstance(config, dict):
            return config
    raise ConfigurationError(
        f"{given!r} is not a configuration of DeepSpeed: no such file, and no JSON. "
        "Write the path of a JSON file that exists, or a dictionary."
    )


def _read_text(text: str) -> Any:
    texts = [text]
    try:
        if Path(text).is_file():
            texts = [Path(text).read_text(encoding="utf-8")]
        else:
            texts.append(base64.urlsafe_b64decode(text).decode("utf-8"))
    except (OSError, ValueError, binascii.Error):
        pass  # too long for a path, or not in base 64: the text itself is left
    for candidate in texts:
        try:
            return json.loads(candidate)
        except json.JSONDecodeError:
            continue
    return None
