"""DeepSpeed's own files inside a checkpoint: written with it as a whole, and read again by any number of processes."""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accelerate._base import constants
from accelerate._base.errors import CheckpointError, printable
from accelerate._base.imports import require
from accelerate._base.untrusted import is_whole, path_inside, read_limited, shown
from accelerate.checkpointing.files import FolderWriter
from accelerate.checkpointing.manifest import WINDOW
from accelerate.checkpointing.parts import (
    LoadOptions,
    ModelPart,
    Part,
    Prepared,
    check_optimizer_state,
    indexed,
    read_torch,
)
from accelerate.checkpointing.run_parts import read_window
from accelerate.checkpointing.torch_files import trust, warn_of_code
from accelerate.collectives.base import communicator
from accelerate.strategies.deepspeed.engine import is_training_engine

_LOG = logging.getLogger(__name__)
_WHY = "Checkpoints of DeepSpeed"
_LATEST = "latest"
_UNIVERSAL = "universal"
_OWN = "accelerate"
"""The entry of DeepSpeed's files that holds what it does not restore itself."""
_KNOWN_FILE = re.compile(
    r"(?:(?:bf16_|fp16_)?zero_pp_rank_[0-9]{1,6}_|expp_rank_[0-9]{1,6}_|(?:layer_[0-9]{1,6}_)?expert_[0-9]{1,6}_)?"
    r"mp_rank_[0-9]{1,6}_(?:model|optim)_states\.pt"
)
_OF_PATTERNS = re.compile(r"[*+?()\[\]{}|^$\\]")
"""What means more than itself in the patterns that DeepSpeed makes of names."""
_MOST_REPEATS = 2
_EXPERTS = ("ds_autoep_layers", "autoep_layers")


def engine_parts(prepared: Prepared) -> list[Part]:
    """Return a part for each model: the engine's, with its optimizer, or the weights of a model that has none."""
    safe = prepared.safe_serialization
    return [
        EnginePart(model, index, prepared.engine_options)
        if is_training_engine(model)
        else ModelPart(model, index, safe_serialization=safe)
        for index, model in enumerate(prepared.models)
    ]


class EnginePart:
    """A model and its optimizer, which DeepSpeed writes in its own layout, a file or two on every rank.

    Args:
        engine: The engine that holds them.
        options: Arguments of the engine's `save_checkpoint`.
    """

    everywhere = True

    def __init__(self, engine: Any, index: int = 0, options: Mapping[str, Any] | None = None) -> None:
        self.name = f"DeepSpeed engine {index}"
        self.engine = engine
        self.folder_name = indexed(constants.MODEL_NAME, index, "")
        self.options = dict(options or {})
        self._keywords: Mapping[str, Any] = {}
        self._reader = _Reader()
        self._converted: tempfile.TemporaryDirectory[str] | None = None
        """What the first rank has converted; it goes with this part, if it was not used."""

    def snapshot(self) -> Any:
        """Return what the engine would write: the path of each file, and what is in it.

        Raises:
            CheckpointError: If the engine could not go on from it.
        """
        engine = self.engine
        if engine.zero_nvme_offload_optimizer():
            raise CheckpointError(
                "save_state() was called with offload_optimizer_device='nvme', whose moments and step counts DeepSpeed 0.19 does "
                "not bring back when it loads, so the run could not go on exactly. Write offload_optimizer_device='cpu', or save "
                "the weights alone with save_model()."
            )
        tag = str(self.options.get("tag") or f"global_step{engine.global_steps}")
        client_state = {**self.options.get("client_state", {}), _OWN: {"groups": _group_values(engine)}}
        if engine.global_rank == 0:
            warn_of_code(client_state, self.name)
        files = _Collector()
        with _replaced(engine, checkpoint_engine=files, _copy_recovery_script=lambda path: None):
            engine.save_checkpoint(
                self.folder_name, **{**self.options, "tag": tag, "client_state": client_state, "save_latest": False}
            )
        return {"tag": tag, "files": files.states}

    def write(self, payload: Any, folder: FolderWriter) -> None:
        """Write the files of this rank; the first one writes which is the latest, and how to read them without us."""
        for name, state in payload["files"].items():
            folder.write_torch(name, state)
        if self.engine.global_rank == 0:
            own = folder.path / self.folder_name
            own.mkdir(exist_ok=True)
            folder.write_text(f"{self.folder_name}/{_LATEST}", payload["tag"])
            before = set(own.iterdir())
            self.engine._copy_recovery_script(str(own))
            for script in sorted(set(own.iterdir()) - before):
                folder.add_written(script)

    def read(self, folder: Path, options: LoadOptions) -> Any:
        """Return where the files are from which this engine can go on; of another number of processes, converted ones.

        Raises:
            CheckpointError: If they are not there, of another engine, or DeepSpeed cannot convert them.
        """
        self._keywords = options.model_kwargs
        self._reader = _Reader(options.allows_pickle)
        tag, needs_conversion, error = "", False, None
        try:
            tag, needs_conversion = self._inspect(folder, options)
        except CheckpointError as caught:
            error = caught
        # A conversion needs all ranks: one that has failed must not be waited for.
        failures = [text for text in communicator().gather_object(None if error is None else str(error)) if text]
        if failures:
            raise error or CheckpointError(failures[0])
        own = folder / self.folder_name
        if not needs_conversion:
            return {"folder": own, "tag": tag, "universal": False}
        return {"folder": self._convert(own / tag), "tag": _UNIVERSAL, "universal": True}

    def _inspect(self, folder: Path, options: LoadOptions) -> tuple[str, bool]:
        """Return the name of the latest files, and whether they are for another number of processes."""
        own = folder / self.folder_name
        latest = own / _LATEST
        if not latest.is_file():
            raise CheckpointError(
                f"{str(own)!r} has no files of DeepSpeed: the checkpoint is of a run without it, or of fewer models. Load it "
                "as it was saved, or load the weights alone with load_checkpoint_in_model before prepare()."
            )
        try:
            tag = read_limited(latest).decode().strip()
            path_inside(own, tag, repr(str(latest)))
        except ValueError as error:
            raise CheckpointError(f"{str(latest)!r} cannot be read: {error}") from error
        facts = read_facts(own / tag, self._reader)
        facts.check(self.engine, own)
        if facts.num_shards in (None, self.engine.seq_dp_world_size):
            return tag, False
        if facts.stage >= 2 and _has_open_window(folder, options):
            raise CheckpointError(
                f"{str(folder)!r} was saved by {facts.num_shards} processes in the middle of an accumulation window, and ZeRO "
                f"{facts.stage} has the gradients in shards that other numbers of processes cannot take over. Load it with "
                f"{facts.num_shards} processes, or save when accelerator.sync_gradients is True."
            )
        return tag, True

    def _convert(self, source: Path) -> Path:
        """Let the first rank write the files in the layout that any number of processes reads, beside the checkpoint."""
        ranks = communicator()
        found: list[Any] = [None]
        if ranks.rank == 0:
            try:
                self._converted = tempfile.TemporaryDirectory(prefix=".universal-", dir=source.parents[2])
                _to_universal(source, Path(self._converted.name), self._reader)
                found = [self._converted.name]
            except Exception as error:  # noqa: BLE001 - the other ranks must hear of it
                found = [error]
                self._clean_up()
        ranks.broadcast_objects(found)
        if isinstance(found[0], Exception):
            raise CheckpointError(
                f"The checkpoint {str(source)!r} was saved by another number of processes, and DeepSpeed cannot convert it "
                f"({type(found[0]).__name__}: {found[0]}). Load it with as many processes as it was saved by."
            ) from found[0]
        return Path(found[0])

    def restore(self, payload: Any) -> None:
        """Let the engine go on from the files."""
        engine, universal = self.engine, payload["universal"]
        strict = self._keywords.get("load_module_strict", self._keywords.get("strict", True))
        try:
            with (
                _replaced(engine, checkpoint_engine=self._reader),
                _replaced(engine._config, load_universal_checkpoint=universal),
            ):
                path, client_state = engine.load_checkpoint(
                    str(payload["folder"]), tag=payload["tag"], load_module_strict=strict
                )
            if path is None:
                raise CheckpointError(f"DeepSpeed found nothing to load in {str(payload['folder'])!r}.")
            if universal:
                _separate_steps(engine)
            _set_group_values(engine, (client_state.get(_OWN) or {}).get("groups"))
        finally:
            communicator().barrier()
            self._clean_up()

    def _clean_up(self) -> None:
        if self._converted is not None:
            self._converted.cleanup()
            self._converted = None


def _has_open_window(folder: Path, options: LoadOptions) -> bool:
    files = folder.glob(f"{WINDOW}_*.bin")
    return any(read_window(file, options, map_location="meta")["is_open"] for file in files)


@contextlib.contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Give an object other attributes for a while."""
    before = {name: owner.__dict__[name] for name in values if name in owner.__dict__}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


def _group_values(engine: Any) -> list[dict[str, Any]]:
    """Return what each group of parameters has beside them; the layout for any number of processes keeps the first only."""
    groups = engine.optimizer.param_groups
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]


def _separate_steps(engine: Any) -> None:
    """Give every parameter a count of its own: after a conversion ZeRO 3 has one tensor for all (deepspeed 0.19)."""
    for state in engine.basic_optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


def _set_group_values(engine: Any, saved: list[dict[str, Any]] | None) -> None:
    groups = engine.optimizer.param_groups
    if saved is not None and len(saved) == len(groups):
        for group, values in zip(groups, saved, strict=True):
            group.update(values)


# --- how DeepSpeed's files are written and read ------------------------------------------------------------------------


class _Collector:
    """Stand in the place of what writes the engine's files, and keep what it is given."""

    def __init__(self) -> None:
        self.states: dict[str, Any] = {}

    def create(self, info: Any) -> None:
        """Begin."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make nothing: folders come with their files."""

    def save(self, state_dict: Any, path: str) -> None:
        """Keep a file."""
        self.states[Path(path).as_posix()] = state_dict

    def commit(self, info: Any) -> bool:
        """End."""
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Say who writes what all ranks have."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Say that files are not written behind training by DeepSpeed itself."""
        return False

    def preserves_storage_sharing(self) -> bool:
        """Say that tensors which share memory do so in the file as well."""
        return True


class _Reader(_Collector):
    """Stand in the place of what reads the engine's files, and run nothing that is in them.

    Args:
        allows_pickle: Somebody asked for it by name that files run code while they are read.
    """

    def __init__(self, allows_pickle: bool = False) -> None:
        super().__init__()
        self.allows_pickle = allows_pickle

    def load(self, path: str | Path, map_location: Any = "cpu") -> Any:
        """Return the content of a file, which may hold tensors, plain values and DeepSpeed's own settings.

        Raises:
            CheckpointError: If it cannot be read, or holds anything else.
        """
        options = LoadOptions(load_kwargs={"weights_only": not self.allows_pickle})
        with trust(_known_classes()):
            return read_torch(Path(path), options, map_location=map_location)


def _known_classes() -> list[Any]:
    """Return the classes of DeepSpeed's own that it writes into its files."""
    scalers = require("deepspeed.runtime.fp16.loss_scaler", why=_WHY, extra="deepspeed")
    names = require("deepspeed.utils.tensor_fragment", why=_WHY, extra="deepspeed")
    zero = require("deepspeed.runtime.zero.config", why=_WHY, extra="deepspeed")
    offload = require("deepspeed.runtime.zero.offload_config", why=_WHY, extra="deepspeed")
    found = [
        getattr(scalers, name) for name in ("LossScaler", "DynamicLossScaler", "LossScaleConfig", "LossScaleProfile")
    ]
    found += [names.fragment_address, zero.ZeroStageEnum, offload.OffloadDeviceEnum]
    return found


@dataclass(frozen=True)
class EngineFacts:
    """What DeepSpeed's files say of the engine that wrote them.

    Args:
        stage: The stage of ZeRO.
        num_shards: Over how many processes the optimizer is sharded; None where it is whole.
        groups: The options of each group of parameters, as this library saves them.
    """

    stage: int
    num_shards: int | None
    groups: list[dict[str, Any]]

    def check(self, engine: Any, folder: Path) -> None:
        """Refuse the files of another engine.

        Raises:
            CheckpointError: If they are of another stage of ZeRO, or of another optimizer.
        """
        own = int(engine.zero_optimization_stage())
        if self.stage != own:
            raise CheckpointError(
                f"{str(folder)!r} was saved with ZeRO {self.stage}, and this run has zero_stage={own}, whose files are others. "
                f"Write zero_stage={self.stage}, or load the weights alone."
            )
        if self.groups:
            saved = {"state": {}, "param_groups": self.groups}
            check_optimizer_state(engine.optimizer, saved, {}, repr(str(folder)))


def read_facts(folder: Path, reader: _Reader) -> EngineFacts:
    """Return what the files in a folder say of the engine that wrote them.

    Raises:
        CheckpointError: If they cannot be read.
    """
    models = sorted(folder.glob("*model_states.pt"))
    if not models:
        raise CheckpointError(f"{str(folder)!r} has no weights of DeepSpeed. Use another checkpoint.")
    state = reader.load(models[0], "meta")
    try:
        stage = ((state.get("ds_config") or {}).get("zero_optimization") or {}).get("stage", 0)
        num_shards = state["dp_world_size"] if stage else None
        groups = [dict(group) for group in (state.get(_OWN) or {}).get("groups") or ()]
    except (AttributeError, KeyError, TypeError, ValueError):
        stage, num_shards, groups = None, None, []
    if not is_whole(stage, most=3) or not (num_shards is None or is_whole(num_shards, least=1)):
        raise CheckpointError(
            f"{str(models[0])!r} does not say which stage of ZeRO it is of, and of how many processes, as what DeepSpeed "
            "writes does. Use another checkpoint."
        )
    return EngineFacts(stage, num_shards, groups)


def _to_universal(source: Path, target: Path, reader: _Reader) -> None:
    """Write the files of an engine in the layout that any number of processes reads."""
    # DeepSpeed reads all files in a folder and below it with pickle, and makes paths of names in them: it is given a folder
    # of our own, with files that are written anew from what was found to be data.
    copied = target / "copied"
    copied.mkdir(parents=True)
    for path in sorted(source.glob("*.pt")):
        if _KNOWN_FILE.fullmatch(path.name):
            _copy_checked(path, copied / path.name, reader)
    arguments = argparse.Namespace(
        input_folder=str(copied),
        output_folder=str(target / _UNIVERSAL),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(io.StringIO()):  # it draws bars
        require("deepspeed.checkpoint.ds_to_universal", why=_WHY, extra="deepspeed").main(arguments)
    shutil.rmtree(copied)
    _LOG.info("%s was converted for another number of processes.", printable(source))


def _copy_checked(source: Path, target: Path, reader: _Reader) -> None:
    """Write what a file of DeepSpeed holds to another one, if DeepSpeed can be trusted with it.

    Raises:
        CheckpointError: If it holds code, or names that would be paths out of a folder, or patterns.
    """
    state = reader.load(source)
    origin = repr(str(source))
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{origin} holds {shown(state)}, and DeepSpeed writes a dictionary. Use another checkpoint."
        )
    try:
        for name in _weight_names(state):
            path_inside(target.parent, name, origin)
            if _OF_PATTERNS.search(name):
                raise ValueError(f"{origin} names the weight {shown(name)}, which holds a character of patterns.")
    except ValueError as error:
        raise CheckpointError(f"{error} DeepSpeed would make paths and patterns of such names.") from error
    for text in _texts(state.get("universal_checkpoint_info")):
        if "(" in text or len(re.findall(r"[*+?{]", text)) > _MOST_REPEATS:
            raise CheckpointError(
                f"{origin} has the pattern {shown(text)}, with groups or more than {_MOST_REPEATS} repetitions: to look for it "
                "in names may take for ever. Use another checkpoint."
            )
    if not reader.allows_pickle and any(state.get(name) for name in _EXPERTS):
        raise CheckpointError(
            f"{origin} is of a model whose experts DeepSpeed divides (AutoEP), and DeepSpeed reads their files by names that "
            "stand in it. If you trust whoever wrote it, write load_state(..., load_kwargs={'weights_only': False})."
        )
    torch.save(state, target)


def _weight_names(state: dict[str, Any]) -> Iterator[Any]:
    """Yield the names in a file of DeepSpeed of which it makes paths."""
    optimizer = state.get("optimizer_state_dict")
    slices = optimizer.get("param_slice_mappings") if isinstance(optimizer, dict) else None
    for groups in (state.get("module"), state.get("param_shapes"), state.get("frozen_param_shapes"), slices):
        for group in groups if isinstance(groups, list | tuple) else [groups]:
            yield from group if isinstance(group, dict) else ()


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a value and in lists and dictionaries inside it, each of which is looked at once."""
    waiting, seen = [value], set()
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict | list | tuple | set) and id(entry) not in seen:
            seen.add(id(entry))
            waiting += [*entry, *entry.values()] if isinstance(entry, dict) else entry
