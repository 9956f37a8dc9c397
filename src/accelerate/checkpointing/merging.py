"""Bring the shards of a model together in one file, from the files alone and in bounded memory."""

from __future__ import annotations

import shutil
from os import PathLike
from pathlib import Path

import torch

from accelerate._base.constants import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from accelerate._base.errors import ConfigurationError
from accelerate.checkpointing.sharded import METADATA, WholeTensors, is_sharded
from accelerate.offload.safetensors_format import write_safetensors
from accelerate.runtime import current
from accelerate.runtime.atomic import atomic_file
from accelerate.runtime.process_control import barrier

_SHOWN = 6


def merge_fsdp_weights(
    checkpoint_dir: str | PathLike[str],
    output_path: str | PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Write the shards of a model as one file that any program can load.

    In a program with several processes all of them may call it; the first one works.

    Args:
        checkpoint_dir: A folder of shards, such as `pytorch_model_fsdp_0` in a checkpoint, or a checkpoint with one
            such folder.
        output_path: The folder to write to.
        safe_serialization: Write `model.safetensors`, tensor by tensor; otherwise `pytorch_model.bin`, which takes the
            memory of the whole model.
        remove_checkpoint_dir: Delete the shards after that.

    Raises:
        ConfigurationError: If there are no shards in the folder.
    """
    started = current.active()
    try:
        if started is None or started.rank == 0:
            _merge(Path(checkpoint_dir), Path(output_path), safe_serialization, remove_checkpoint_dir)
    finally:
        if started is not None:
            barrier()


def _merge(folder: Path, target: Path, safe_serialization: bool, remove: bool) -> None:
    source = find_shards(folder)
    target.mkdir(parents=True, exist_ok=True)
    tensors = WholeTensors(source)
    if safe_serialization:
        with atomic_file(target / SAFE_WEIGHTS_NAME) as partial, partial.open("wb") as file:
            write_safetensors(file, tensors.shapes, {"format": "pt"}, tensors.in_order)
    else:
        with atomic_file(target / WEIGHTS_NAME) as partial, partial.open("wb") as file:
            torch.save(dict(tensors.in_order(tensors.shapes)), file)
    if remove:
        shutil.rmtree(source)


def find_shards(folder: Path) -> Path:
    """Return the folder of the shards of a model: the one given, or the only one of a checkpoint.

    Raises:
        ConfigurationError: If there is none, or several.
    """
    if is_sharded(folder):
        return folder
    if not folder.is_dir():
        raise ConfigurationError(
            f"There is no folder {str(folder)!r}, so there are no shards to merge. Give the folder that holds "
            f"{METADATA!r}, such as 'pytorch_model_fsdp_0' in a checkpoint."
        )
    inside = sorted(entry for entry in folder.iterdir() if entry.is_dir() and is_sharded(entry))
    models = [entry for entry in inside if not entry.name.startswith("optimizer")]
    if len(models) == 1:
        return models[0]
    shown = ", ".join(repr(str(entry)) for entry in (models or inside)[:_SHOWN])
    what = "several models are in it" if models else f"there is no {METADATA!r} in it"
    raise ConfigurationError(
        f"{str(folder)!r} is not the folder of one model's shards: {what}. "
        + (f"Give one of {shown}." if shown else "Give a folder that was saved with SHARDED_STATE_DICT.")
    )
