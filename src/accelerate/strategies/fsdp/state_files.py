"""The files of a sharded model and of its optimizer, written and read for both versions of FSDP."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from accelerate._base.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from accelerate._base.errors import ConfigurationError
from accelerate.parallel.describe import is_peft_model
from accelerate.strategies.fsdp.adapters import adapter_state_dict, model_names
from accelerate.strategies.fsdp.shards import local_shards, write_into

FilePath = str | os.PathLike[str]
StateDict = dict[str, Any]

FULL, LOCAL, SHARDED = "FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"


def kind_of(fsdp_plugin: Any) -> str:
    """Return the state dict type of a plugin, which holds it as text or as torch's enum."""
    given = fsdp_plugin.state_dict_type
    kind = str(getattr(given, "name", given)).rpartition(".")[2].upper()
    if kind not in (FULL, LOCAL, SHARDED):
        raise ConfigurationError(
            f"The state dict type {given!r} is not known, so there is no layout for its files. "
            f"Write one of {FULL!r}, {SHARDED!r} or {LOCAL!r}."
        )
    return kind


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _moves_to_host(model: nn.Module) -> bool:
    # FSDP1 on the CPU cannot copy a state dict to the CPU: it raises, or ends the process (torch 2.13).
    first = next(model.parameters(), None)
    return first is not None and first.device.type != "cpu"


@dataclass(frozen=True)
class _Files:
    """Where the state of one object lies, by the type of its state dict."""

    folder: Path
    name: str
    index: int

    @property
    def full(self) -> Path:
        suffix = f"_{self.index}" if self.index else ""
        return self.folder / f"{self.name}{suffix}.bin"

    @property
    def sharded(self) -> Path:
        return self.folder / f"{self.name}_{self.index}"

    def of_rank(self, kind: str) -> Path:
        """Return the file of this rank; only a sharded dict has the index 0 in its name."""
        suffix = f"_{self.index}" if self.index or kind == SHARDED else ""
        return self.folder / f"{self.name}{suffix}_rank{_rank()}.bin"


def _write(
    files: _Files, kind: str, use_dcp: bool, key: str, state: Callable[[bool], StateDict], accelerator: Any
) -> None:
    """Write a state dict in the layout of its kind; `state(full)` returns it.

    Args:
        key: The name of the state inside a folder of torch.distributed.checkpoint.
    """
    files.folder.mkdir(parents=True, exist_ok=True)
    if kind == FULL:
        whole = state(True)
        if _rank() == 0:
            torch.save(whole, files.full)
    elif kind == SHARDED and use_dcp:
        save({key: state(False)}, storage_writer=FileSystemWriter(files.sharded))
    else:
        torch.save(local_shards(state(False)), files.of_rank(kind))
    accelerator.wait_for_everyone()


def _read(
    files: _Files, kind: str, use_dcp: bool, key: str, present: Callable[[], StateDict], accelerator: Any
) -> StateDict:
    """Return the state dict of a checkpoint: whole and on the first rank only, or this rank's shards.

    Args:
        present: Returns the sharded state as it is now, whose tensors are filled.
    """
    accelerator.wait_for_everyone()
    if kind == FULL:
        return _load(files.full) if _rank() == 0 else {}
    state = present()
    if kind == SHARDED and use_dcp:
        # A folder that a user gives may be that of the state itself.
        folder = files.sharded if files.sharded.is_dir() else files.folder
        held: dict[str, StateDict] = {key: state}
        load(held, storage_reader=FileSystemReader(folder))
        return held[key]
    filled: StateDict = write_into(state, _load(files.of_rank(kind)))
    return filled


def _load(path: Path) -> StateDict:
    if not path.is_file():
        raise ConfigurationError(
            f"There is no file {str(path)!r}: the checkpoint was saved with another state dict type, or elsewhere. "
            "Set `state_dict_type` of the plugin to the one that it was saved with."
        )
    loaded: StateDict = torch.load(path, map_location="cpu", weights_only=True)
    return loaded


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    output_dir: FilePath,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write the weights of a sharded model, as the plugin's `state_dict_type` says.

    Args:
        model_index: Which of several models this is.
        adapter_only: Of a PEFT model, write the adapter only.
        use_dcp: Write shards with torch.distributed.checkpoint, which can load them on any number of processes;
            otherwise in one file a rank.
    """
    only_adapter = adapter_only and is_peft_model(model)

    def state(full: bool) -> StateDict:
        options = StateDictOptions(full_state_dict=full, cpu_offload=_moves_to_host(model))
        found = get_model_state_dict(model, options=options)
        return adapter_state_dict(model, found) if only_adapter and found else found

    files = _Files(Path(output_dir), FSDP_MODEL_NAME, model_index)
    _write(files, kind_of(fsdp_plugin), use_dcp, "model", state, accelerator)


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    input_dir: FilePath,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Read what `save_fsdp_model` wrote into a sharded model, and return the keys that did not match.

    A whole state dict is read by the first rank and sent to the others.
    """
    kind = kind_of(fsdp_plugin)
    only_adapter = adapter_only and is_peft_model(model)

    def present() -> StateDict:
        found = get_model_state_dict(model, options=StateDictOptions(cpu_offload=False))
        return adapter_state_dict(model, found) if only_adapter else found

    files = _Files(Path(input_dir), FSDP_MODEL_NAME, model_index)
    state = _read(files, kind, use_dcp, "model", present, accelerator)
    if only_adapter:  # asked on every rank, since FSDP1 makes the state dict together
        names = model_names(model, get_model_state_dict(model))
        state = {names.get(name, name): value for name, value in state.items()}
    whole = kind == FULL
    options = StateDictOptions(full_state_dict=whole, broadcast_from_rank0=whole, strict=not only_adapter)
    result = set_model_state_dict(model, state, options=options)
    accelerator.wait_for_everyone()
    return result


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer of torch inside its wrappers."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    plain: torch.optim.Optimizer = optimizer
    return plain


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    output_dir: FilePath,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write the state of the optimizer of a sharded model, as the plugin's `state_dict_type` says."""

    def state(full: bool) -> StateDict:
        options = StateDictOptions(full_state_dict=full, cpu_offload=_moves_to_host(model))
        return dict(get_optimizer_state_dict(model, _plain(optimizer), options=options))

    files = _Files(Path(output_dir), OPTIMIZER_NAME, optimizer_index)
    _write(files, _optimizer_kind(fsdp_plugin), use_dcp, "optimizer", state, accelerator)


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    input_dir: FilePath,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Read what `save_fsdp_optimizer` wrote into the optimizer of a sharded model.

    Args:
        adapter_only: Accepted for symmetry with the model: an optimizer knows the trained parameters alone.
    """
    kind = _optimizer_kind(fsdp_plugin)
    plain = _plain(optimizer)

    def present() -> StateDict:
        return dict(get_optimizer_state_dict(model, plain, options=StateDictOptions(cpu_offload=False)))

    files = _Files(Path(input_dir), OPTIMIZER_NAME, optimizer_index)
    state = _read(files, kind, use_dcp, "optimizer", present, accelerator)
    whole = kind == FULL
    options = StateDictOptions(full_state_dict=whole, broadcast_from_rank0=whole)
    set_optimizer_state_dict(model, plain, state, options=options)
    accelerator.wait_for_everyone()


def _optimizer_kind(fsdp_plugin: Any) -> str:
    # A local state dict is a matter of the weights; the optimizer of such a model is kept in shards.
    kind = kind_of(fsdp_plugin)
    return SHARDED if kind == LOCAL else kind
