"""Save and load the state of the whole run."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from accelerate._base.errors import ConfigurationError
from accelerate.accelerator.window import AccumulationWindow
from accelerate.checkpointing import catalog
from accelerate.checkpointing.catalog import CHECKPOINTS, CheckpointInfo, number_of, numbered
from accelerate.checkpointing.manifest import Facts, Manifest
from accelerate.checkpointing.parts import Part, Prepared, load_options
from accelerate.checkpointing.run_parts import CustomPart, ProgressPart, RandomPart, WindowPart
from accelerate.checkpointing.state import Checkpointer, LoadHook, RunState, SaveHook
from accelerate.config.plugins.training import DataLoaderConfiguration, ProjectConfiguration
from accelerate.runtime import current
from accelerate.runtime.gradient_clock import GradientState, Progress
from accelerate.strategies.base import Strategy

_LOG = logging.getLogger(__name__)
_LATEST = "latest"


class CheckpointMixin:
    """`save_state`, `load_state` and their relatives."""

    strategy: Strategy
    project_configuration: ProjectConfiguration
    dataloader_config: DataLoaderConfiguration
    gradient_state: GradientState
    _progress: Progress
    step: int
    _models: list[torch.nn.Module]
    _optimizers: list[Any]
    _schedulers: list[Any]
    _dataloaders: list[Any]
    _custom_objects: list[Any]
    _window: AccumulationWindow
    _checkpointer: Checkpointer
    _save_model_state_pre_hook: OrderedDict[int, SaveHook]
    _load_model_state_pre_hook: OrderedDict[int, LoadHook]

    def _init_checkpoints(self) -> None:
        self._custom_objects = []
        self._checkpointer = Checkpointer(self.project_configuration)
        self._save_model_state_pre_hook = OrderedDict()
        self._load_model_state_pre_hook = OrderedDict()

    def save_state(
        self,
        output_dir: str | PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Save the state of the run: models, optimizers, schedulers, loaders, random states, registered objects.

        Every rank calls it. A checkpoint appears as a whole or not at all, and older ones are removed after that. With
        `ProjectConfiguration(automatic_checkpoint_naming=True)` it is numbered and `output_dir` is not used.

        Args:
            output_dir: The folder of the checkpoint.
            safe_serialization: Write weights as safetensors.
            blocking: Wait until the checkpoint is on the disk. False returns when the weights are copied to host memory;
                the state of optimizers follows until their next step, which waits for it. The copy takes as much memory
                as the state; one such save runs at a time.
            **save_model_func_kwargs: Options of an engine that saves by itself.

        Returns:
            The folder of the checkpoint; it is there after `wait_for_save()` if `blocking` is False.

        Raises:
            CheckpointError: If it could not be saved, or an earlier one in the background could not.

        Example:
            ```python
            accelerator.save_state("checkpoints/last", blocking=False)
            ```
        """
        self.wait_for_save()
        target = self._next_target(output_dir)
        config = self.project_configuration
        facts = Facts(**self._progress.state_dict(), iteration=config.iteration)
        self._checkpointer.save(
            target.resolve(),
            self._state(safe_serialization=safe_serialization),
            facts,
            hooks=list(self._save_model_state_pre_hook.values()),
            blocking=blocking,
            keep=config.total_limit if config.automatic_checkpoint_naming else None,
        )
        config.iteration += 1
        return target

    def load_state(
        self,
        input_dir: str | PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Restore the state of a run, on any number of processes.

        Every rank calls it, with the same objects prepared and registered as when the checkpoint was saved. Loaders go on
        with the batch after the last one that was handed out. If the checkpoint is broken or of another run, nothing is
        changed.

        Args:
            input_dir: The folder of a checkpoint; None or "latest" take the newest valid one of the project.
            load_kwargs: Arguments of `torch.load` for optimizers, schedulers and loaders.
            **load_model_func_kwargs: Arguments of `load_state_dict` of models; `map_location` ("cpu" or "on_device")
                says where tensors are put while they are read.

        Raises:
            ConfigurationError: (a ValueError) if there is no such folder.
            CheckpointError: (a RuntimeError) if the checkpoint is broken, or does not fit what is prepared.

        Example:
            ```python
            accelerator.load_state()
            ```
        """
        self.wait_for_save()
        place = load_model_func_kwargs.pop("map_location", None)
        options = load_options(place, load_kwargs or {}, load_model_func_kwargs, rank=current.runtime().rank)
        hooks = list(self._load_model_state_pre_hook.values())
        given = Path(input_dir).expanduser() if input_dir is not None else None
        source: Path
        manifest: Manifest | None
        if given is None or (str(input_dir) == _LATEST and not given.is_dir()):
            folder = self._checkpoints_folder("load_state() without a folder")
            source, manifest = self._checkpointer.load_newest(folder, self._state(), options, hooks=hooks)
        else:
            if not given.is_dir():
                raise ConfigurationError(
                    f"load_state was given {str(input_dir)!r}, and there is no such folder. Give the folder of a "
                    "checkpoint; accelerator.checkpoints() lists those of the project."
                )
            source = given
            manifest = self._checkpointer.load(source, self._state(), options, hooks=hooks)
        self._progress.was_restored = True  # also by a checkpoint that says nothing of it
        self._go_on_counting(source, manifest)

    def wait_for_save(self) -> None:
        """Wait until a save in the background is on the disk.

        Raises:
            CheckpointError: If it could not be saved.
        """
        self._checkpointer.wait()

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return the checkpoints of the project, the newest last."""
        return catalog.catalog(self._checkpoints_folder("checkpoints()"))

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and restore these objects with the state of the run, in the order of registration.

        Raises:
            ConfigurationError: (a ValueError) if an object has no `state_dict` or `load_state_dict`.
        """
        unfit = [entry for entry in objects if not (hasattr(entry, "state_dict") and hasattr(entry, "load_state_dict"))]
        if unfit:
            raise ConfigurationError(
                f"register_for_checkpointing was given {unfit!r}, which cannot be saved: `state_dict` and "
                "`load_state_dict` are needed. Pass objects that have both."
            )
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` before `save_state` writes.

        What it takes out of the list of weights is not written; what it writes to `output_dir` becomes part of the
        checkpoint. The result has a method `remove`.
        """
        handle = RemovableHandle(self._save_model_state_pre_hook)
        self._save_model_state_pre_hook[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call `hook(models, input_dir)` before `load_state` reads.

        What it takes out of the list of models is not loaded. The result has a method `remove`.
        """
        handle = RemovableHandle(self._load_model_state_pre_hook)
        self._load_model_state_pre_hook[handle.id] = hook
        return handle

    def _state(self, *, safe_serialization: bool = True) -> RunState:
        runtime = current.runtime()
        prepared = Prepared(
            models=self._models,
            optimizers=self._optimizers,
            schedulers=self._schedulers,
            loaders=self._dataloaders,
            safe_serialization=safe_serialization,
            restore_positions=self.dataloader_config.restore_position,
        )
        # Random states come last, when nothing draws any more.
        run_parts: list[Part] = [
            *(CustomPart(entry, index) for index, entry in enumerate(self._custom_objects)),
            ProgressPart(self._progress),
            WindowPart(self._window, self.gradient_state, self._models, runtime.rank, self.strategy),
            RandomPart(self, runtime.rank, runtime.backend),
        ]
        return RunState(self.strategy, prepared, run_parts)

    def _checkpoints_folder(self, what: str) -> Path:
        """Return where checkpoints are looked for: the numbered ones, or the folder of the project."""
        project = self.project_configuration.project_dir
        if project is None:
            raise ConfigurationError(
                f"{what} looks in the folder of the project, and this Accelerator has none. Write "
                "Accelerator(project_dir=...), or give a folder."
            )
        inside = Path(project).expanduser() / CHECKPOINTS
        return inside if inside.is_dir() else Path(project).expanduser()

    def _next_target(self, output_dir: str | PathLike[str] | None) -> Path:
        config = self.project_configuration
        if not config.automatic_checkpoint_naming:
            if output_dir is None:
                raise ConfigurationError(
                    "save_state was given no output_dir, and checkpoints are not named automatically. Give a folder, or "
                    "use ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
                )
            return Path(output_dir).expanduser()
        if config.project_dir is None:
            raise ConfigurationError(
                "automatic_checkpoint_naming=True was given without a project_dir, so there is no place for "
                "checkpoints. Write ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
            )
        target = numbered(Path(config.project_dir).expanduser() / CHECKPOINTS, config.iteration)
        if target.is_dir() and catalog.inspect(target).is_valid:
            raise ConfigurationError(
                f"save_state would write {str(target)!r}, and there is a checkpoint already, of another run perhaps. "
                "Call load_state() to go on from it, set project_configuration.iteration to a number that is free, or "
                "take another project_dir."
            )
        return target

    def _go_on_counting(self, source: Path, manifest: Manifest | None) -> None:
        """Give the next checkpoint a number after that of the one that was loaded, and after all that are there."""
        config = self.project_configuration
        number = number_of(source)
        if number is None and manifest is not None:
            number = manifest.facts.iteration
        if number is None:
            return
        taken = [number]
        if config.automatic_checkpoint_naming and config.project_dir is not None:
            folder = Path(config.project_dir).expanduser() / CHECKPOINTS
            entries = folder.iterdir() if folder.is_dir() else ()
            taken += [found for entry in entries if (found := number_of(entry)) is not None]
        config.iteration = max(taken) + 1
