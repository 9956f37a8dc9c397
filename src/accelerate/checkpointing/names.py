"""The names of the files and folders of a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

from accelerate._base import constants

MANIFEST = "manifest.json"
PROGRESS = "progress.json"
SCALER = constants.SCALER_NAME
CHECKPOINTS = "checkpoints"
"""The folder of a project that holds its numbered checkpoints."""

_LOADER, _STATEFUL_LOADER, _CUSTOM, _WINDOW = "loader", "dl_state_dict", "custom_checkpoint", "window"
_STEMS = [
    constants.MODEL_NAME,
    constants.SAFE_MODEL_NAME,
    constants.OPTIMIZER_NAME,
    constants.SCHEDULER_NAME,
    constants.SAMPLER_NAME,
    constants.RNG_STATE_NAME,
    _LOADER,
    _STATEFUL_LOADER,
    _CUSTOM,
    _WINDOW,
]
_OWN_FILE = re.compile(
    rf"(?:{'|'.join(_STEMS)})(?:_\d+)?(?:_rank\d+)?\.(?:bin|pkl|pt|safetensors)|{SCALER}|{PROGRESS}|{re.escape(MANIFEST)}"
)
_NUMBERED = re.compile(r"checkpoint_(\d+)")


def indexed(stem: str, index: int, ending: str) -> str:
    """Return the name of the file of one of several objects; the first has no number."""
    return f"{stem}_{index}{ending}" if index else f"{stem}{ending}"


def model_file(index: int, *, safe: bool) -> str:
    """Return the name of the weights of a model."""
    if safe:
        return indexed(constants.SAFE_MODEL_NAME, index, ".safetensors")
    return indexed(constants.MODEL_NAME, index, ".bin")


def optimizer_file(index: int) -> str:
    """Return the name of the state of an optimizer."""
    return indexed(constants.OPTIMIZER_NAME, index, ".bin")


def sharded_model(index: int) -> str:
    """Return the name of the folder of shards of a model; here the first is numbered too."""
    return f"{constants.FSDP_MODEL_NAME}_{index}"


def sharded_optimizer(index: int) -> str:
    """Return the name of the folder of shards of an optimizer; here the first is numbered too."""
    return f"{constants.OPTIMIZER_NAME}_{index}"


def gathered_model_file(index: int) -> str:
    """Return the name of the weights of a sharded model that were saved whole."""
    return indexed(constants.FSDP_MODEL_NAME, index, ".bin")


def scheduler_file(index: int) -> str:
    """Return the name of the state of a scheduler."""
    return indexed(constants.SCHEDULER_NAME, index, ".bin")


def loader_file(index: int, rank: int = 0, *, stateful: bool = False) -> str:
    """Return the name of the position of a loader; that of the first rank has no rank in it.

    Args:
        stateful: The loader is torchdata's, whose state other libraries know under a name of its own.
    """
    return indexed(_STATEFUL_LOADER if stateful else _LOADER, index, f"_rank{rank}.bin" if rank else ".bin")


def custom_file(index: int) -> str:
    """Return the name of the state of a registered object; here the first is numbered too."""
    return f"{_CUSTOM}_{index}.pkl"


def random_file(rank: int) -> str:
    """Return the name of the random states of a rank."""
    return f"{constants.RNG_STATE_NAME}_{rank}.pkl"


def window_file(rank: int) -> str:
    """Return the name of the open accumulation window of a rank."""
    return f"{_WINDOW}_{rank}.bin"


def is_own_file(name: str) -> bool:
    """Return whether a file of this name, in a folder without a manifest, belongs to a checkpoint."""
    return _OWN_FILE.fullmatch(name) is not None


def numbered(folder: Path, number: int) -> Path:
    """Return the folder of a checkpoint that is named automatically."""
    return folder / f"checkpoint_{number}"


def number_of(folder: Path) -> int | None:
    """Return the number in the name of a checkpoint's folder, None if it has another name."""
    match = _NUMBERED.fullmatch(folder.name)
    return int(match[1]) if match else None
