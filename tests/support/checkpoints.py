"""Checkpoints of plain text files, and single parts that are written and read."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Any

from accelerate.checkpointing.files import FileRecord, FolderWriter
from accelerate.checkpointing.manifest import Facts, Manifest, publish
from accelerate.checkpointing.parts import LoadOptions, Part
from accelerate.runtime import atomic


def write_checkpoint(target: Path, content: dict[str, str], step: int = 0, created: float | None = None) -> Path:
    """Publish a checkpoint of plain text files."""
    inside = target.is_dir()
    stage = (target if inside else target.parent) / atomic.partial_name(target.name)
    stage.mkdir(parents=True)
    for name, text in content.items():
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        (stage / name).write_text(text)
    records = tuple(FileRecord.of(stage / name, stage) for name in content)
    manifest = Manifest(records, 2, Facts(step=step, samples=10 * step, epoch=1), created or time.time())
    publish(stage, target, manifest)
    return target


def save_part(part: Part, folder: Path) -> None:
    with closing(FolderWriter(folder)) as staged:
        part.write(part.snapshot(), staged)
        staged.finish()


def load_part(part: Part, folder: Path, **options: Any) -> None:
    part.restore(part.read(folder, LoadOptions(**options)))
