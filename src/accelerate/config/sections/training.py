"""Options of the training loop: accumulation, loaders, project folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from accelerate._base.errors import ConfigurationError
from accelerate.config.knob import INTEGER, YES_NO, knob
from accelerate.config.settings import KwargsHandler, Settings


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Say over how many batches gradients are summed and when the sum is applied.

    Args:
        num_steps: Batches per optimizer step; the environment may give it, else it is 1.
        adjust_scheduler: Step the scheduler only when the optimizer steps.
        sync_with_dataloader: Close the window at the end of the loader, even if it is short.
        sync_each_batch: Communicate gradients after every batch: slower, but it saves the memory of unsynchronised ones.
        normalize: What a window's gradients are divided by: `"steps"` is always `num_steps`; `"window"` is the number
            of batches that the window really has, so that a short last window is a true mean.
    """

    num_steps: int | None = knob(
        help="Number of batches whose gradients are summed before the optimizer steps.",
        env="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        codec=INTEGER,
    )
    adjust_scheduler: bool = knob(True, help="Step the scheduler only when the optimizer steps.", codec=YES_NO)
    sync_with_dataloader: bool = knob(True, help="Close the window at the end of the loader.", codec=YES_NO)
    sync_each_batch: bool = knob(
        False, help="Communicate gradients after every batch, which needs less memory.", codec=YES_NO
    )
    normalize: Literal["steps", "window"] = knob(
        "steps",
        help="Divide gradients by num_steps ('steps') or by the batches that the window really has ('window').",
        choices=("steps", "window"),
    )

    def normalise(self) -> None:
        """Refuse a number of steps that no window can have."""
        if self.num_steps is not None and self.num_steps < 1:
            raise ConfigurationError(
                f"GradientAccumulationPlugin(num_steps={self.num_steps!r}) cannot work: a window has at least one batch. "
                "Write num_steps=1 to step at every batch."
            )


@dataclass
class DataLoaderConfiguration(Settings):
    """Say how `prepare` spreads a data loader over the processes.

    Args:
        split_batches: Cut each batch into one part per process, instead of giving each process whole batches.
        dispatch_batches: Read on the main process and send to the others; None decides by the kind of dataset.
        even_batches: Repeat samples from the start so that all processes get equally many batches of equal size.
        use_seedable_sampler: Shuffle by seed and epoch alone, the same on every number of processes.
        data_seed: The seed of that shuffle; None takes torch's initial seed.
        non_blocking: Move batches to the device without waiting.
        use_stateful_dataloader: Build on torchdata's `StatefulDataLoader`.
        custom_classes: Loader classes that are no torch `DataLoader`; `prepare` takes them for loaders and uses them
            as they are.
        restore_position: Let loading a checkpoint bring each loader back to its position.
    """

    split_batches: bool = knob(False, help="Cut each batch into one part per process.", codec=YES_NO)
    dispatch_batches: bool | None = knob(
        help="Read batches on the main process and send them to the others.", codec=YES_NO
    )
    even_batches: bool = knob(True, help="Repeat samples so that all processes get equal batches.", codec=YES_NO)
    use_seedable_sampler: bool = knob(False, help="Shuffle by seed and epoch alone.", codec=YES_NO)
    data_seed: int | None = knob(help="Seed of the shuffle.", codec=INTEGER)
    non_blocking: bool = knob(False, help="Move batches to the device without waiting.", codec=YES_NO)
    use_stateful_dataloader: bool = knob(False, help="Build on torchdata's StatefulDataLoader.", codec=YES_NO)
    custom_classes: tuple[type, ...] = knob((), help="Classes that are used as loaders as they are.")
    restore_position: bool = knob(True, help="Bring loaders back to their position with a checkpoint.", codec=YES_NO)

    def normalise(self) -> None:
        """Bring the classes into a tuple and refuse what is no class."""
        classes = self.custom_classes
        self.custom_classes = (classes,) if isinstance(classes, type) else tuple(classes)
        for entry in self.custom_classes:
            if not isinstance(entry, type):
                raise ConfigurationError(
                    f"DataLoaderConfiguration(custom_classes=...) holds {entry!r}, which is not a class, so no loader "
                    "can be recognised by it. List the classes of the loaders, such as `custom_classes=(MyLoader,)`."
                )


@dataclass
class ProjectConfiguration(Settings):
    """Say where a run keeps its checkpoints and logs.

    Args:
        project_dir: The folder of the run.
        logging_dir: The folder of its logs; `project_dir` where it is not given.
        automatic_checkpoint_naming: Name checkpoints `checkpoints/checkpoint_<iteration>` below `project_dir`.
        total_limit: How many of those to keep; None keeps all.
        iteration: The number of the next one.
        save_on_each_node: Write on the first process of each machine, for machines without a shared disk.
    """

    project_dir: str | None = knob(help="Folder of the run.")
    logging_dir: str | None = knob(help="Folder of its logs; the project folder where it is not given.")
    automatic_checkpoint_naming: bool = knob(False, help="Number the checkpoints of the run.", codec=YES_NO)
    total_limit: int | None = knob(help="Number of checkpoints to keep.", codec=INTEGER)
    iteration: int = knob(0, help="Number of the next checkpoint.", codec=INTEGER)
    save_on_each_node: bool = knob(False, help="Write checkpoints on each machine.", codec=YES_NO)

    def normalise(self) -> None:
        """Let the logs go to the project folder where nothing else is said."""
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set the project folder and, where it is not set, the folder of the logs."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir
