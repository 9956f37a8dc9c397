"""Read checkpoints as a whole, to know that their bytes are those that were written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from accelerate._base.errors import CheckpointError
from accelerate.checkpointing.catalog import CheckpointInfo
from accelerate.checkpointing.manifest import Manifest


def verified(checkpoint: CheckpointInfo, advance: Callable[[int], object] = lambda size: None) -> CheckpointInfo:
    """Return what is known of a checkpoint once all its bytes are read; without a manifest that is what it was.

    Args:
        advance: Called with the size of each file that was read.
    """
    try:
        manifest = Manifest.read(checkpoint.path)
    except CheckpointError as error:
        return replace(checkpoint, is_valid=False, problem=str(error))
    if manifest is None:
        return checkpoint
    problems = []
    for record in manifest.files:
        problems += manifest.problems(checkpoint.path, checksums=True, records=[record])
        advance(record.size)
    return replace(checkpoint, is_valid=not problems, problem="; ".join(map(str, problems)) or None)
