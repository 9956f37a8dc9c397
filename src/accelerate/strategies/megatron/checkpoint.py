"""The weights and the optimizer of a model that Megatron trains, in checkpoints that any tensor-parallel degree reads."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accelerate._base.constants import OPTIMIZER_NAME
from accelerate._base.errors import CheckpointError
from accelerate.checkpointing.files import FolderWriter
from accelerate.checkpointing.parts import (
    LoadOptions,
    Part,
    Prepared,
    check_optimizer_file,
    check_optimizer_state,
    read_weights,
)
from accelerate.checkpointing.sharded import ShardFolder, is_sharded
from accelerate.parallel.unwrap import plain_optimizer
from accelerate.strategies.megatron.engine import MegatronEngine
from accelerate.strategies.megatron.weights import Layout
from accelerate.strategies.sharded_state import ShardedPart, StateDict
from accelerate.strategies.tools import local

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_MODEL, _OPTIMIZER = "megatron_model", f"megatron_{OPTIMIZER_NAME}"


def engine_parts(prepared: Prepared) -> list[Part]:
    """Return the parts of the models that Megatron trains, and of their optimizers as far as the plugin wants them."""
    parts: list[Part] = []
    for index, model in enumerate(prepared.models):
        assert isinstance(model, MegatronEngine)
        parts.append(PiecesPart(model, index))
        if hasattr(model.passes, "gradients"):  # Megatron's own, on an accelerator
            from accelerate.strategies.megatron.accelerator_checkpoint import accelerator_parts

            parts += accelerator_parts(model, index)
        elif model.optimizer is not None and not (model.plugin.no_save_optim and model.plugin.no_load_optim):
            parts.append(PiecesOptimizerPart(model, index))
    return parts


class PiecesPart(ShardedPart):
    """The weights of a model, in pieces."""

    def __init__(self, engine: MegatronEngine, index: int = 0) -> None:
        super().__init__("model", _MODEL, index, full=False)
        self.carried = engine.carried

    def state(self) -> StateDict:
        return dict(self.carried.weights.state())

    def read(self, folder: Path, options: LoadOptions) -> Any:
        path = folder / self.folder_name
        if is_sharded(path):
            shards = ShardFolder(path, options.allows_pickle)
            self.check(path, shards.metadata)
            return shards
        if self.carried.map is None:
            raise CheckpointError(
                f"{str(folder)!r} has no {self.folder_name!r}: it was not saved under Megatron, and the model here was built "
                "by custom_model_provider_function, so its weights have no other names. Use another checkpoint."
            )
        # A checkpoint of a run without Megatron holds the weights of the Transformers model.
        found = read_weights(folder, self.index, options)
        missing = [name for name in self.carried.map.weights if name not in found]
        if missing:
            raise CheckpointError(
                f"{str(folder)!r} has no weights {missing[:3]!r} of this model. Use another checkpoint."
            )
        return found

    def check(self, path: Path, metadata: Metadata) -> None:
        for name, piece in self.carried.weights.state().items():
            entry = metadata.state_dict_metadata.get(f"{self.key}.{name}")
            saved = None if entry is None else tuple(getattr(entry, "size", ()))
            if saved != tuple(piece.shape):
                raise CheckpointError(
                    f"The weights in {str(path)!r} are not those of this model: {name!r} has the shape {tuple(piece.shape)}, and "
                    f"there it {'is missing' if saved is None else f'has {saved}'}. Build the model as it was when it was saved."
                )

    def restore(self, payload: Any) -> None:
        weights = self.carried.weights
        if isinstance(payload, ShardFolder):
            state = {self.key: dict(weights.state())}
            payload.load_into(state)
            weights.load_parts(state[self.key])
            return
        assert self.carried.map is not None
        weights.load_whole(partial(self.carried.map.read, payload))


class PiecesOptimizerPart(ShardedPart):
    """The state of an optimizer, in pieces as its parameters are."""

    def __init__(self, engine: MegatronEngine, index: int = 0) -> None:
        super().__init__("optimizer", _OPTIMIZER, index, full=False)
        self.engine = engine
        self.carried = engine.carried

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer of torch."""
        return plain_optimizer(self.engine.optimizer)

    def _layouts(self) -> dict[int, Layout]:
        return {id(parameter): layout for layout, parameter in self.carried.weights}

    def state(self) -> StateDict:
        layouts, weights, optimizer = self._layouts(), self.carried.weights, self.optimizer
        state: dict[str, dict[str, Any]] = {}
        for parameter, entry in optimizer.state.items():
            layout = layouts[id(parameter)]
            for field, value in entry.items():
                is_like = isinstance(value, torch.Tensor) and value.shape == parameter.shape
                pieces = weights.spread(layout, value) if is_like else dict.fromkeys(layout.piece_names, value)
                for name, piece in pieces.items():
                    state.setdefault(name, {})[field] = piece
        return {"state": state, "param_groups": self._groups(layouts)}

    def _groups(self, layouts: dict[int, Layout]) -> list[dict[str, Any]]:
        """Return the groups with the names of pieces in the place of parameters."""
        return [
            {**group, "params": [name for entry in group["params"] for name in layouts[id(entry)].piece_names]}
            for group in self.optimizer.param_groups
        ]

    def snapshot(self) -> Any:
        return None if self.engine.plugin.no_save_optim else super().snapshot()

    def write(self, payload: Any, folder: Any) -> None:
        if payload is not None:
            super().write(payload, folder)

    def read(self, folder: Path, options: LoadOptions) -> Any:
        if self.engine.plugin.no_load_optim:
            return None
        path = folder / self.folder_name
        if not is_sharded(path):
            raise CheckpointError(
                f"{str(folder)!r} has no {self.folder_name!r}: its optimizer was not saved under Megatron, or no_save_optim was "
                "set. Write MegatronLMPlugin(no_load_optim=True) to begin with a new state."
            )
        here = self._groups(self._layouts())
        shards = ShardFolder(path, options.allows_pickle)
        outline = shards.optimizer_outline
        check_optimizer_file(outline, repr(str(path)))
        there = outline["param_groups"]
        if [set(group["params"]) for group in here] != [set(group["params"]) for group in there]:
            raise CheckpointError(
                f"{str(path)!r} is of an optimizer with other groups of parameters, or of another model. Build both as they "
                "were when it was saved."
            )
        shapes = {name: tuple(piece.shape) for name, piece in self.carried.weights.state().items()}
        check_optimizer_state(self.optimizer, outline, shapes, repr(str(path)))
        return shards

    def restore(self, payload: Any) -> None:
        if payload is None:
            return
        layouts, weights, optimizer = self._layouts(), self.carried.weights, self.optimizer
        shapes = payload.optimizer_outline
        parameters = [entry for group in optimizer.param_groups for entry in group["params"]]
        state: dict[str, dict[str, Any]] = {}
        for parameter in parameters:
            layout = layouts[id(parameter)]
            blank = weights.spread(layout, torch.zeros_like(parameter))
            for name, piece in blank.items():
                saved = shapes["state"].get(name, {})
                state[name] = {field: _room(shape, piece) for field, shape in saved.items()}
        boxed = {self.key: {"state": {name: entry for name, entry in state.items() if entry}}}
        if boxed[self.key]["state"]:
            payload.load_into(boxed)
        loaded = boxed[self.key]["state"]
        for parameter in parameters:
            layout = layouts[id(parameter)]
            first = loaded.get(layout.piece_names[0])
            if first is None:
                optimizer.state.pop(parameter, None)
                continue
            optimizer.state[parameter] = {
                field: _joined(layout, [loaded[name][field] for name in layout.piece_names], parameter)
                for field in first
            }
        for group, saved in zip(optimizer.param_groups, shapes["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})


def _room(shape: Any, piece: torch.Tensor) -> Any:
    """Return memory for a saved entry: spread as the piece of the parameter is, if it has its shape."""
    if not isinstance(shape, torch.Tensor):
        return shape
    if tuple(shape.shape) == tuple(piece.shape):
        return torch.zeros_like(piece, dtype=shape.dtype)
    return torch.zeros(shape.shape, dtype=shape.dtype)


def _joined(layout: Layout, values: list[Any], parameter: torch.Tensor) -> Any:
    """Return an entry of the state of a parameter, of those of its pieces."""
    parts = [local(value) if isinstance(value, torch.Tensor) else value for value in values]
    if not isinstance(parts[0], torch.Tensor) or parts[0].dim() != parameter.dim():
        return parts[0]
    return layout.join(parts, parameter).clone()


def save_engine(engine: MegatronEngine, folder: str | Path) -> None:
    """Write weights and optimizer of one model into a folder; all ranks call it."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with closing(FolderWriter(target)) as writer:
        for part in engine_parts(Prepared(models=[engine])):
            payload = part.snapshot()
            if payload is not None:
                part.write(payload, writer)
        writer.finish()


def load_engine(engine: MegatronEngine, folder: str | Path) -> None:
    """Take over weights and optimizer that `save_engine` wrote; all ranks call it."""
    parts = engine_parts(Prepared(models=[engine]))
    payloads = [part.read(Path(folder), LoadOptions()) for part in parts]
    for part, payload in zip(parts, payloads, strict=True):
        part.restore(payload)
