"""The checkpoints of a run: which folder, which parts, which hooks, and how the run goes on from one."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch.utils.hooks import RemovableHandle

from accelerate._base.errors import ConfigurationError
from accelerate.checkpointing import catalog
from accelerate.checkpointing.catalog import CHECKPOINTS, number_of, numbered
from accelerate.checkpointing.manifest import Facts, Manifest
from accelerate.checkpointing.parts import Part, Prepared, load_options
from accelerate.checkpointing.run_parts import CustomPart, ProgressPart, RandomPart, WindowPart
from accelerate.checkpointing.state import Checkpointer, LoadHook, RunState, SaveHook
from accelerate.config.plugins.training import ProjectConfiguration
from accelerate.runtime import claims
from accelerate.runtime.gradient_clock import Progress
from accelerate.session.prepared import PreparedObjects
from accelerate.session.setup import Run
from accelerate.session.stepper import GradientStepper

_LOG = logging.getLogger(__name__)
_LATEST = "latest"


@dataclass
class RunCheckpoints:
    """Save and load the state of a run."""

    run: Run
    objects: PreparedObjects
    stepper: GradientStepper
    progress: Progress
    checkpointer: Checkpointer
    save_hooks: OrderedDict[int, SaveHook] = field(default_factory=OrderedDict)
    load_hooks: OrderedDict[int, LoadHook] = field(default_factory=OrderedDict)

    @property
    def project(self) -> ProjectConfiguration:
        """Return the folder of the run and the naming of its checkpoints."""
        return self.run.options.project_configuration

    def save(
        self,
        output_dir: str | PathLike[str] | None,
        *,
        safe_serialization: bool,
        blocking: bool,
        engine_options: Mapping[str, Any],
    ) -> Path:
        """Save the state of the run, and return its folder."""
        self.checkpointer.wait()
        target = self._next_target(output_dir)
        is_numbered = self.project.automatic_checkpoint_naming
        self.checkpointer.save(
            target.resolve(),
            self._state(safe_serialization=safe_serialization, engine_options=engine_options),
            Facts(**self.progress.state_dict(), iteration=self.project.iteration),
            hooks=list(self.save_hooks.values()),
            blocking=blocking,
            # Numbered ones are removed when newer ones come: no other run may save beside them.
            claimed=target.resolve().parent if is_numbered else None,
            keep=self.project.total_limit if is_numbered else None,
        )
        self.project.iteration += 1
        return target

    def load(
        self,
        input_dir: str | PathLike[str] | None,
        load_kwargs: Mapping[str, Any],
        map_location: str | None,
        model_kwargs: Mapping[str, Any],
    ) -> None:
        """Restore the state of a run from a folder, or from the newest valid checkpoint of the project."""
        self.checkpointer.wait()
        options = load_options(map_location, load_kwargs, model_kwargs, rank=self.run.runtime.rank)
        given = Path(input_dir).expanduser() if input_dir is not None else None
        hooks = list(self.load_hooks.values())
        source: Path
        manifest: Manifest | None
        if given is None or (str(input_dir) == _LATEST and not given.is_dir()):
            folder = self.folder("load_state() without a folder")
            source, manifest = self.checkpointer.load_newest(folder, self._state(), options, hooks=hooks)
        elif given.is_dir():
            source = given
            manifest = self.checkpointer.load(source, self._state(), options, hooks=hooks)
        else:
            raise ConfigurationError(
                f"load_state was given {str(input_dir)!r}, and there is no such folder. Give the folder of a "
                "checkpoint; accelerator.checkpoints() lists those of the project."
            )
        self.progress.was_restored = True  # also by a checkpoint that says nothing of it
        self._continue_numbering(source, manifest)

    def resume(self) -> bool:
        """Load the newest valid checkpoint of the project, if there are any; return whether there were."""
        project = self.project.project_dir
        if project is None:
            raise ConfigurationError(
                "resume() was called and project_dir is None, so it is unknown where the checkpoints are. Write "
                "Accelerator(project_dir=...), or load one by its path with load_state(...)."
            )
        found = [self.run.runtime.rank == 0 and bool(catalog.catalog(project))]
        self.run.communicator.broadcast_objects(found)
        if found[0]:
            self.load(None, {}, None, {})  # if none of them is valid, nobody should train on from the beginning
        elif self.run.runtime.rank == 0:
            _LOG.info("The run starts from the beginning: there is no checkpoint in %r.", str(project))
        return found[0]

    def register(self, objects: Sequence[Any]) -> None:
        """Save and restore these objects too."""
        unfit = [entry for entry in objects if not (hasattr(entry, "state_dict") and hasattr(entry, "load_state_dict"))]
        if unfit:
            raise ConfigurationError(
                f"register_for_checkpointing was given {unfit!r}, which cannot be saved: `state_dict` and "
                "`load_state_dict` are needed. Pass objects that have both."
            )
        self.objects.custom.extend(objects)

    def add_save_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call `hook(models, weights, output_dir)` before a save writes."""
        handle = RemovableHandle(self.save_hooks)
        self.save_hooks[handle.id] = hook
        return handle

    def add_load_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call `hook(models, input_dir)` before a load reads."""
        handle = RemovableHandle(self.load_hooks)
        self.load_hooks[handle.id] = hook
        return handle

    def folder(self, what: str) -> Path:
        """Return where checkpoints are looked for: the numbered ones, or the folder of the project."""
        project = self.project.project_dir
        if project is None:
            raise ConfigurationError(
                f"{what} looks in the folder of the project, and this Accelerator has none. Write "
                "Accelerator(project_dir=...), or give a folder."
            )
        inside = Path(project).expanduser() / CHECKPOINTS
        return inside if inside.is_dir() else Path(project).expanduser()

    def _state(
        self, *, safe_serialization: bool = True, engine_options: Mapping[str, Any] = MappingProxyType({})
    ) -> RunState:
        runtime, strategy, objects = self.run.runtime, self.run.strategy, self.objects
        prepared = Prepared(
            models=objects.models,
            optimizers=objects.optimizers,
            schedulers=objects.schedulers,
            loaders=objects.loaders,
            safe_serialization=safe_serialization,
            restore_positions=self.run.options.dataloader_config.restore_position,
            engine_options=engine_options,
        )
        # Random states come last, when nothing draws any more.
        run_parts: list[Part] = [
            *(CustomPart(entry, index) for index, entry in enumerate(objects.custom)),
            ProgressPart(self.progress),
            WindowPart(self.stepper.window, self.run.clock, objects.models, runtime.rank, strategy),
            RandomPart(self.stepper, runtime.rank, runtime.backend),
        ]
        return RunState(strategy, prepared, run_parts)

    def _next_target(self, output_dir: str | PathLike[str] | None) -> Path:
        if not self.project.automatic_checkpoint_naming:
            if output_dir is None:
                raise ConfigurationError(
                    "save_state was given no output_dir, and checkpoints are not named automatically. Give a folder, or "
                    "use ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
                )
            if "://" in str(output_dir):
                raise ConfigurationError(
                    f"save_state was given the address {str(output_dir)!r}, and a checkpoint is put in place by names on a "
                    "disk. Give a folder, and copy what is in it; save_model() takes addresses."
                )
            return Path(output_dir).expanduser()
        if self.project.project_dir is None:
            raise ConfigurationError(
                "automatic_checkpoint_naming=True was given without a project_dir, so there is no place for "
                "checkpoints. Write ProjectConfiguration(project_dir=..., automatic_checkpoint_naming=True)."
            )
        checkpoints = Path(self.project.project_dir).expanduser() / CHECKPOINTS
        target = numbered(checkpoints, self.project.iteration)
        if target.is_dir() and catalog.inspect(target).is_valid:
            holder = claims.other_run(checkpoints)
            if holder is not None:
                raise ConfigurationError(
                    f"save_state would write {str(target)!r}, and there is a checkpoint already: {holder} saves into "
                    f"{str(checkpoints)!r}. Give this run a project_dir of its own, or end the other one."
                )
            raise ConfigurationError(
                f"save_state would write {str(target)!r}, and there is a checkpoint already, of another run perhaps. "
                "Call load_state() to go on from it, set project_configuration.iteration to a number that is free, or "
                "take another project_dir."
            )
        return target

    def _continue_numbering(self, source: Path, manifest: Manifest | None) -> None:
        """Give the next checkpoint a number after that of the one that was loaded, and after all that are there."""
        number = number_of(source)
        if number is None and manifest is not None:
            number = manifest.facts.iteration
        if number is None:
            return
        taken = [number]
        if self.project.automatic_checkpoint_naming and self.project.project_dir is not None:
            checkpoints = Path(self.project.project_dir).expanduser() / CHECKPOINTS
            entries = checkpoints.iterdir() if checkpoints.is_dir() else ()
            taken += [found for entry in entries if (found := number_of(entry)) is not None]
        self.project.iteration = max(taken) + 1
