"""Files of earlier releases, back to 0.11, in the words of today."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Keys that did something once. They are read past, with a note.
_GONE = {
    "ipex_config": "Intel's extension is part of torch now",
    "use_mps_device": "the accelerator of Apple is found by itself",
    "use_xpu": "the accelerator of Intel is found by itself",
    "fsdp_use_orig_param": "it was renamed and never read",
}
_GONE_IN = {"mpirun_config": {"mpirun_ccl": "oneCCL is part of torch's own backends now"}}
_RENAMED_TYPES = {"TPU": "XLA", "MPS": "NO"}

Migration = Callable[[dict[str, Any]], None]


def migrate(data: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a copy in the words of today, without empty values, and a note on each key that does nothing any more."""
    current = {key: _without_empty(value) for key, value in data.items() if value is not None}
    for step in _STEPS:
        step(current)
    notes = [_gone(key, reason) for key, reason in _GONE.items() if current.pop(key, None) is not None]
    for section, keys in _GONE_IN.items():
        values = current.get(section)
        if isinstance(values, dict):
            notes += [_gone(f"{section}.{key}", why) for key, why in keys.items() if values.pop(key, None) is not None]
    return current, tuple(notes)


def _without_empty(value: Any) -> Any:
    return {key: entry for key, entry in value.items() if entry is not None} if isinstance(value, dict) else value


def _gone(key: str, reason: str) -> str:
    return f"{key!r} does nothing any more ({reason}); it can be removed."


def _half_precision(data: dict[str, Any]) -> None:
    """Turn the yes or no of the first releases into a number format."""
    if isinstance(data.get("fp16"), bool):
        data.setdefault("mixed_precision", "fp16" if data.pop("fp16") else "no")
        data.pop("fp16", None)


def _compiler(data: dict[str, Any]) -> None:
    """Put the backend of torch.compile into its section."""
    if "dynamo_backend" in data:
        backend = data.pop("dynamo_backend")
        if str(backend).upper() != "NO" and backend is not False:
            data.setdefault("dynamo_config", {}).setdefault("dynamo_backend", backend)


def _kinds(data: dict[str, Any]) -> None:
    """Rename kinds of runs."""
    kind = data.get("distributed_type")
    if isinstance(kind, str):
        data["distributed_type"] = _RENAMED_TYPES.get(kind, kind)


def _tensor_parallel(data: dict[str, Any]) -> None:
    """Turn the tensor parallelism of its own kind into an axis."""
    section = data.pop("tp_config", None)
    if isinstance(section, dict) and "tp_size" in section:
        data.setdefault("parallelism_config", {}).setdefault("parallelism_config_tp_size", section["tp_size"])
    if data.get("distributed_type") == "TP":
        data["distributed_type"] = "MULTI_GPU"


_STEPS: tuple[Migration, ...] = (_half_precision, _compiler, _kinds, _tensor_parallel)
