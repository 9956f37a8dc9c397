"""What only accelerators have in a checkpoint: the state of Megatron's own optimizer, and of its generators."""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.tensor_parallel.random import convert_cuda_rng_state, is_graph_safe_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from accelerate._base.constants import OPTIMIZER_NAME
from accelerate._base.errors import CheckpointError, printable
from accelerate._base.untrusted import parse_json, read_limited, shown
from accelerate.checkpointing import sharded
from accelerate.checkpointing.files import FolderWriter
from accelerate.checkpointing.parts import LoadOptions, Part, read_torch
from accelerate.checkpointing.sharded import ShardFolder
from accelerate.checkpointing.torch_files import broken
from accelerate.runtime import current
from accelerate.strategies.megatron.accelerator_optimizer import EngineOptimizer
from accelerate.strategies.megatron.engine import MegatronEngine
from accelerate.strategies.megatron.train_steps import inner_model, replica_group
from accelerate.strategies.sharded_state import ShardedPart, StateDict

_LOG = logging.getLogger(__name__)
_STEM = f"megatron_core_{OPTIMIZER_NAME}"
_RANDOM = "megatron_rng"
# The files of megatron-core's checkpoints beside the shards.
_COMMON, _BACKENDS = "common.pt", "metadata.json"
_FORMAT = "torch_dist"
_NEW = "new.bin"
"""The file that stands for an optimizer which has taken no step; megatron-core cannot save one."""
_FACTS = "accelerate"
"""The entry that holds what megatron-core does not save."""


def accelerator_parts(engine: MegatronEngine, index: int) -> list[Part]:
    """Return the parts of one model's training that stand beside its weights, and after them."""
    parts: list[Part] = [MegatronOptimizerPart(engine, index)] if engine.optimizer is not None else []
    return [*parts, MegatronRandomPart()] if index == 0 else parts


class _ShardWriter(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Write shards with torch's writer; that of megatron-core starts processes, which run the script of a program again."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: str) -> None:
        """Write shards; all ranks call it."""
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        planner = MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False)
        with sharded.written_by_torch():
            save(mcore_to_pyt_state_dict(by_key), storage_writer=FileSystemWriter(checkpoint_dir), planner=planner)


class _State:
    """A state that all ranks write together, where they talk over the process group of training.

    A save in the background makes a copy first, in the thread that trains: then each rank writes to a folder of its own,
    which the thread that saves moves into the checkpoint.
    """

    def __init__(self, state: StateDict) -> None:
        self.state = state

    def __deepcopy__(self, memo: dict[int, Any]) -> _WrittenState:
        folder = tempfile.TemporaryDirectory(prefix="accelerate-megatron-")
        self.write(Path(folder.name))
        return _WrittenState(folder)

    def write(self, folder: Path) -> None:
        """Write it; all ranks call it."""
        folder.mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(self.state, str(folder), sharded_strategy=_ShardWriter(_FORMAT, 1))


class _WrittenState:
    """The files of this rank, somewhere else."""

    def __init__(self, folder: tempfile.TemporaryDirectory[str]) -> None:
        self.folder = folder

    def write(self, folder: Path) -> None:
        """Move them to a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(Path(self.folder.name).iterdir()):
            shutil.move(file, folder / file.name)
        self.folder.cleanup()


class MegatronOptimizerPart(ShardedPart):
    """The state of Megatron's optimizer, which any layout of ranks can read."""

    def __init__(self, engine: MegatronEngine, index: int = 0) -> None:
        super().__init__("optimizer", _STEM, index, full=False)
        self.engine = engine

    @property
    def _held(self) -> EngineOptimizer:
        held: EngineOptimizer = self.engine.optimizer.optimizer
        return held

    def _facts(self) -> dict[str, Any]:
        held = self._held
        config = held.passes.configs.optimizer
        return {
            "num_updates": held.num_updates,
            "num_groups": len(held.param_groups),
            "use_distributed_optimizer": bool(config is not None and config.use_distributed_optimizer),
        }

    def _described(self, *, loads: bool) -> Any:
        metadata: dict[str, Any] = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": replica_group(),
        }
        chunks = [inner_model(chunk) for chunk in self._held.passes.chunks]
        weights = {f"model{index}": chunk.sharded_state_dict(metadata=metadata) for index, chunk in enumerate(chunks)}
        return self._held.sharded_state(weights if len(chunks) > 1 else weights["model0"], metadata, loads=loads)

    def state(self) -> StateDict:
        return {self.key: self._described(loads=False), _FACTS: self._facts()}

    def snapshot(self) -> Any:
        if self.engine.plugin.no_save_optim:
            return None
        return _State(super().snapshot()) if self._held.num_updates else self._facts()

    def write(self, payload: Any, folder: FolderWriter) -> None:
        if payload is None:
            return
        rank = current.runtime().rank
        if isinstance(payload, dict):
            if rank == 0:
                folder.write_torch(f"{self.folder_name}/{_NEW}", payload)
            return
        target = folder.path / self.folder_name
        payload.write(target)
        for file in sorted(target.glob(f"__{rank}_*")):
            folder.add_written(file)
        for name in (sharded.METADATA, _COMMON, _BACKENDS) if rank == 0 else ():
            folder.add_written(target / name)

    def read(self, folder: Path, options: LoadOptions) -> Any:
        if self.engine.plugin.no_load_optim:
            return None
        path = folder / self.folder_name
        if (path / _NEW).is_file():
            return read_torch(path / _NEW, options)
        if not (path / _BACKENDS).is_file():
            raise CheckpointError(
                f"{str(folder)!r} has no {self.folder_name!r}: its optimizer was not saved by Megatron's, as on a CPU, or "
                "no_save_optim was set. Write MegatronLMPlugin(no_load_optim=True) to begin with a new state."
            )
        _check_backends(path)
        # Read here too: megatron-core reads with code what is no tensor.
        shards = ShardFolder(path, options.allows_pickle)
        others = [key for key, entry in shards.metadata.state_dict_metadata.items() if not hasattr(entry, "size")]
        shards.read(others)
        self._check(path, read_torch(path / _COMMON, options, map_location="cpu").get(_FACTS, {}))
        return path

    def _check(self, path: Path, saved: dict[str, Any]) -> None:
        here = self._facts()
        for name in ("num_groups", "use_distributed_optimizer"):
            if saved.get(name) != here[name]:
                raise CheckpointError(
                    f"The optimizer in {str(path)!r} has {name}={saved.get(name)!r}, and the one here {here[name]!r}. Build it "
                    "as it was when it was saved, or write MegatronLMPlugin(no_load_optim=True) to begin with a new state."
                )

    def restore(self, payload: Any) -> None:
        held = self._held
        if payload is None:
            held.take_over_weights()
            return
        if isinstance(payload, dict):
            held.forget_state()
            return
        try:
            loaded = dist_checkpointing.load({self.key: self._described(loads=True)}, str(payload))
        except (CheckpointException, dist_checkpointing.core.CheckpointingException, RuntimeError, KeyError) as error:
            reasons = list(getattr(error, "failures", {}).values())
            text = str(reasons[0][0] if reasons else error).strip().splitlines()
            raise CheckpointError(
                f"The shards in {str(payload)!r} do not fit the optimizer here, or are broken: "
                f"{text[0] if text else error!r}. Build model and optimizer as they were when they were saved."
            ) from error
        held.load_state_dict(loaded[self.key])
        held.num_updates = int(loaded[_FACTS]["num_updates"])


def _check_backends(path: Path) -> None:
    """Refuse a folder in a format whose readers run code."""
    try:
        found = parse_json(read_limited(path / _BACKENDS))
        known = found["sharded_backend"] == _FORMAT and found.get("common_backend", "torch") == "torch"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(broken(path / _BACKENDS, error)) from error
    if not known:
        raise CheckpointError(
            f"{str(path)!r} is in the format {shown(found)} of megatron-core, and only {_FORMAT!r} is read here. Use another "
            "checkpoint, or write MegatronLMPlugin(no_load_optim=True)."
        )


class MegatronRandomPart:
    """The states of the generators that Megatron's layers draw from, another one on each rank."""

    name = "random states of Megatron"
    everywhere = True

    def snapshot(self) -> dict[str, torch.Tensor]:
        states = tensor_parallel.get_cuda_rng_tracker().get_states()
        return {name: convert_cuda_rng_state(state) for name, state in states.items()}

    def write(self, payload: Any, folder: FolderWriter) -> None:
        folder.write_torch(f"{_RANDOM}_{current.runtime().rank}.bin", payload)

    def read(self, folder: Path, options: LoadOptions) -> Any:
        path = folder / f"{_RANDOM}_{options.rank}.bin"
        if options.saved_world_size == options.world_size and path.is_file():
            return read_torch(path, options, map_location="cpu")
        _LOG.warning(
            "The generators of Megatron's layers go on as they are: %s has no states for this rank.", printable(folder)
        )
        return None

    def restore(self, payload: Any) -> None:
        if payload is not None:
            tracker = tensor_parallel.get_cuda_rng_tracker()
            graphs = is_graph_safe_cuda_rng_tracker(tracker)
            tracker.set_states({name: convert_cuda_rng_state(state, graphs) for name, state in payload.items()})
