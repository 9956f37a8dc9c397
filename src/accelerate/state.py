"""The public state objects: views over the runtime, the run's label and the gradient clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Generic, TypeVar, overload

import torch
import torch.distributed as dist

from accelerate._base.enums import DistributedType
from accelerate._base.errors import ConfigurationError, UsageError
from accelerate._base.imports import is_deepspeed_available, is_fp8_available
from accelerate._base.lazy import attach_passing_names
from accelerate.config import env
from accelerate.config.env import get_int_from_env, parse_choice_from_env, parse_flag_from_env
from accelerate.devices import registry as devices
from accelerate.parallel.mesh import axis_rank
from accelerate.runtime import current, process_control, process_group
from accelerate.runtime import start as starting
from accelerate.runtime.gradient_clock import GradientState
from accelerate.runtime.process_control import do_nothing
from accelerate.session.setup import PROCESS_FACTS, SWITCHED_ON, RunSettings, check_agreement, start_run
from accelerate.strategies.base import EngineRequest

__all__ = [
    "AcceleratorState",
    "DistributedType",
    "GradientState",
    "PartialState",
    "SharedDict",
    "ThreadLocalSharedDict",
    "do_nothing",
    "get_int_from_env",
    "is_deepspeed_available",
    "is_fp8_available",
    "is_initialized",
    "parse_choice_from_env",
    "parse_flag_from_env",
]

attach_passing_names(__name__)

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

SharedDict = dict


class View(Generic[T]):
    """An attribute that shows, and sets, what another object of the owner holds.

    Args:
        holder: Dotted path from the owner to that object.
        description: What it is, for readers of the documentation.
        name: Its name there, where that is another one.
    """

    def __init__(self, holder: str, description: str = "", *, name: str | None = None) -> None:
        self.__doc__ = description
        self._holder: Callable[[Any], Any] = attrgetter(holder)
        self._name = name or ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = self._name or name

    @overload
    def __get__(self, instance: None, owner: type) -> View[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> View[T] | T:
        if instance is None:
            return self
        value: T = getattr(self._holder(instance), self._name)
        return value

    def __set__(self, instance: object, value: T) -> None:
        setattr(self._holder(instance), self._name, value)


class AxisRank:
    """An attribute that shows the rank of this process along an axis of the owner's mesh.

    Args:
        axis: Its name in the mesh.
        description: What it is, for readers of the documentation.
    """

    def __init__(self, axis: str, description: str) -> None:
        self.__doc__ = description
        self._axis = axis

    @overload
    def __get__(self, instance: None, owner: type) -> AxisRank: ...
    @overload
    def __get__(self, instance: Any, owner: type) -> int: ...
    def __get__(self, instance: Any, owner: type) -> AxisRank | int:
        if instance is None:
            return self
        if instance.parallelism_config is None:
            raise UsageError(
                f"The rank along {self._axis!r} was asked for, but this Accelerator has no parallelism_config, so there "
                "are no axes. Pass parallelism_config=ParallelismConfig(...)."
            )
        return axis_rank(instance.torch_device_mesh, self._axis)


class ThreadLocalSharedDict(threading.local):
    """A dictionary per thread behind a class attribute, for backends whose ranks are threads.

    Args:
        thread_local: Accepted for compatibility; the storage is always per thread.
    """

    def __init__(self, thread_local: bool = False) -> None:
        self._storage: dict[str, Any] = {}

    def __get__(self, owner: object, owner_type: type | None = None) -> dict[str, Any]:
        return self._storage

    def __set__(self, owner: object, value: dict[str, Any]) -> None:
        self._storage = value


def is_initialized() -> bool:
    """Return whether an `Accelerator` has set up this process."""
    return current.ACCELERATOR != {}


def _is_known(state: object, name: str) -> bool:
    """Return whether a started state has this attribute; a property comes here when what it reads is gone."""
    return name in type(state).__annotations__ or name in PROCESS_FACTS or hasattr(type(state), name)


class ProcessControl:
    """What both state objects and the `Accelerator` offer to steer processes."""

    process_index: int
    local_process_index: int
    num_processes: int
    distributed_type: DistributedType
    device: torch.device

    @property
    def use_distributed(self) -> bool:
        """Return whether more than one process takes part."""
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Return whether this process prints, logs and saves for all: rank 0, under Megatron-LM the last one."""
        return self.process_index == current.main_rank()

    @property
    def is_local_main_process(self) -> bool:
        """Return whether this process prints for its machine: the first one there, under Megatron-LM the last of all."""
        return self.local_process_index == 0 if current.main_rank() == 0 else self.is_main_process

    @property
    def is_last_process(self) -> bool:
        """Return whether this is the process with the highest rank."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Wait until every process has come here."""
        process_control.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let the main process run the block before the others."""
        with process_control.one_goes_first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Let the first process of each machine run the block before the others of that machine."""
        with process_control.one_goes_first(self.is_local_main_process):
            yield

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield this process's contiguous slice of `inputs`: a list, tuple, tensor or `datasets.Dataset`, or a dict of these.

        The first `len(inputs) % num_processes` processes get one element more; with fewer inputs than processes the
        last ones get nothing. `apply_padding` repeats the last element so that all slices have the same length. Inputs of
        other types, such as strings and NumPy arrays, are not split: every process gets all of them.

        Example:
            ```python
            from accelerate import PartialState

            state = PartialState()
            with state.split_between_processes(["A", "B", "C"]) as mine:
                print(mine)
            ```
        """
        yield process_control.split_between(inputs, self.process_index, self.num_processes, apply_padding=apply_padding)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once a machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    def destroy_process_group(self, group: dist.ProcessGroup | None = None) -> None:
        """Leave the process group, if there is one; a forked worker leaves the default group to its launcher."""
        if group is None and current.PARTIAL.get("fork_launched", False):
            return
        process_group.leave(group)


class PartialState(ProcessControl):
    """What this process is and how it steers itself among the others; every instance shows the same values.

    The first instance starts the process: it finds its rank, chooses its device and joins the process group. Later
    ones are free, and their arguments are not looked at.

    Args:
        cpu: Use the CPU even if an accelerator is there.
        **kwargs: Passed to `torch.distributed.init_process_group` (`backend`, `timeout`, ...).

    Raises:
        ConfigurationError: If a group exists already and has another backend than the one asked for.

    Example:
        ```python
        from accelerate import PartialState

        state = PartialState()
        print(state.process_index, state.num_processes, state.device)
        ```
    """

    _shared_state = current.PARTIAL

    backend: str | None
    debug: bool
    fork_launched: bool
    _cpu: bool

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            kwargs.pop("_from_accelerator", None)
            starting.start(cpu=cpu, group_options=kwargs, choose_group=choose_group)
        self.fork_launched = env.flag("FORK_LAUNCHED")

    @property
    def initialized(self) -> bool:
        """Return whether this process was started since the last reset."""
        return self._shared_state != {}

    def _prepare_backend(
        self, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None
    ) -> tuple[str | None, DistributedType]:
        """Choose the backend of the process group and the label of the run; other libraries replace this method."""
        return starting.choose_group(cpu, backend)

    @property
    def default_device(self) -> torch.device:
        """Return the device a single process would use."""
        return devices.default().value.device()

    def set_device(self) -> None:
        """Make the device of this process the current one."""
        runtime = current.runtime()
        runtime.backend.set_device(runtime.device)

    def _restrict(self, function: F | None, runs_here: bool) -> Any:
        if function is None:
            return lambda given: self._restrict(given, runs_here)
        return function if runs_here or not self.use_distributed else do_nothing

    def on_main_process(self, function: F | None = None) -> Any:
        """Return `function` on the main process and a function that does nothing on the others."""
        if not self.initialized:
            raise ConfigurationError(
                "on_main_process was used before this process was started, so its rank is not known. "
                "Make a PartialState() or an Accelerator() first."
            )
        return self._restrict(function, self.is_main_process)

    def on_local_main_process(self, function: F | None = None) -> Any:
        """Return `function` on the first process of each machine and a function that does nothing on the others."""
        return self._restrict(function, self.is_local_main_process)

    def on_last_process(self, function: F) -> Any:
        """Return `function` on the last process and a function that does nothing on the others."""
        return self._restrict(function, self.is_last_process)

    def on_process(self, function: F | None = None, process_index: int | None = None) -> Any:
        """Return `function` on the process with this rank and a function that does nothing on the others."""
        return self._restrict(function, self.process_index == process_index)

    def on_local_process(self, function: F | None = None, local_process_index: int | None = None) -> Any:
        """Return `function` on the processes with this local rank and a function that does nothing on the others."""
        return self._restrict(function, self.local_process_index == local_process_index)

    @staticmethod
    def _reset_state() -> None:
        current.PARTIAL.clear()

    def __getattr__(self, name: str) -> Any:
        if not self._shared_state and _is_known(self, name):
            raise AttributeError(
                f"{type(self).__name__} has no {name!r} any more because the state was reset after this object was "
                f"made. Make a new {type(self).__name__}() or Accelerator()."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}{('  Backend: ' + self.backend) if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )


def choose_group(cpu: bool, backend: str | None) -> tuple[str | None, DistributedType]:
    """Return what `PartialState._prepare_backend` chooses, before there is a state."""
    return PartialState._prepare_backend(PartialState.__new__(PartialState), cpu, False, backend)


class AcceleratorState(ProcessControl):
    """The facts of `PartialState`, the number format and the engines of the run; one set of values per process.

    It is made by `Accelerator`; a program only makes instances to look at the values.

    Raises:
        ConfigurationError: If no `Accelerator` was made before, or an argument contradicts what is in force.
    """

    _shared_state = current.ACCELERATOR

    backend: str | None
    dynamo_plugin: Any
    deepspeed_plugins: dict[str, Any] | None
    parallelism_config: Any
    device_mesh: Any
    fsdp_plugin: Any
    _mixed_precision: str

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        self.__dict__ = self._shared_state
        if self.initialized:
            check_agreement(mixed_precision, cpu)
            return
        if not _from_accelerator:
            raise ConfigurationError(
                "AcceleratorState() was made before any Accelerator, so there are no settings to show. "
                "Make an Accelerator() first, or use PartialState() for ranks and devices."
            )
        start_run(
            RunSettings(
                mixed_precision=mixed_precision,
                cpu=cpu,
                request=EngineRequest.from_plugins(
                    deepspeed=deepspeed_plugin,
                    fsdp=fsdp_plugin,
                    megatron=megatron_lm_plugin,
                    parallelism=parallelism_config,
                ),
                torch_tp_plugin=torch_tp_plugin,
                group_options=kwargs,
                **({"dynamo": dynamo_plugin} if dynamo_plugin is not None else {}),
            ),
            choose_group,
        )

    @property
    def initialized(self) -> bool:
        """Return whether an `Accelerator` was made since the last reset."""
        return self._shared_state != {}

    @property
    def debug(self) -> bool:
        """Return whether collectives compare their arguments between processes first; it can be set, on all of them."""
        return bool(current.PARTIAL.get("debug", False))

    @debug.setter
    def debug(self, value: bool) -> None:
        PartialState().debug = value

    @property
    def fork_launched(self) -> bool:
        """Return whether a launcher forked this process."""
        return bool(current.PARTIAL.get("fork_launched", False))

    @property
    def mixed_precision(self) -> str:
        """Return the number format in force: "no", "fp16", "bf16" or "fp8"; DeepSpeed's configuration says its own."""
        plugin = self.deepspeed_plugin
        if plugin is None or self._mixed_precision == "fp8":
            return self._mixed_precision
        from accelerate.config.deepspeed import precision_of

        return precision_of(plugin.deepspeed_config)

    @property
    def is_fsdp2(self) -> bool:
        """Return whether the run shards its weights with version 2 of FSDP."""
        return getattr(self.__dict__.get("fsdp_plugin"), "fsdp_version", None) == 2

    @property
    def deepspeed_plugin(self) -> Any | None:
        """Return the DeepSpeed settings in force, None without DeepSpeed."""
        plugins = self.__dict__.get("deepspeed_plugins") or {}
        return next((plugin for plugin in plugins.values() if plugin.selected), None)

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Return the DeepSpeed settings that were given under `name`.

        Raises:
            ConfigurationError: If there are none of that name.
        """
        plugins = self.deepspeed_plugins or {}
        if name not in plugins:
            raise ConfigurationError(
                f"There are no settings of DeepSpeed under {name!r}: those of this run are "
                f"{', '.join(map(repr, plugins)) or 'none'}. Give it to the first Accelerator, as "
                f"deepspeed_plugins={{{name!r}: DeepSpeedPlugin(...), ...}}."
            )
        return plugins[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Put the DeepSpeed settings under `name` in force: models are built and prepared with them from now on.

        Args:
            name: The name that they were given under; the first ones if None.
        """
        plugins = self.deepspeed_plugins or {}
        chosen = self.get_deepspeed_plugin(next(iter(plugins), "") if name is None else name)
        for plugin in plugins.values():
            if plugin is not chosen:
                plugin._unselect()
        chosen.select(_from_accelerator_state=True)

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        for switch in current.ACCELERATOR.get(SWITCHED_ON, ()):
            env.drop(switch)
        current.ACCELERATOR.clear()
        if reset_partial_state:
            PartialState._reset_state()

    def __getattr__(self, name: str) -> Any:
        if not self._shared_state and _is_known(self, name):
            raise AttributeError(
                f"AcceleratorState has no {name!r} any more because the state was reset after this object was made. "
                "Make a new Accelerator()."
            )
        raise AttributeError(f"'AcceleratorState' object has no attribute {name!r}")

    def __repr__(self) -> str:
        return repr(PartialState()) + f"Mixed precision type: {self.mixed_precision}\n"


def get_active_deepspeed_plugin(state: Any) -> Any:
    """Return the settings of DeepSpeed that are in force.

    Args:
        state: The `AcceleratorState` of a run.

    Raises:
        ConfigurationError: If the run has none.
    """
    plugin = getattr(state, "deepspeed_plugin", None)
    if plugin is None:
        raise ConfigurationError(
            "The settings of DeepSpeed were asked for, but this run has none. Pass deepspeed_plugin=DeepSpeedPlugin(...) to "
            "the Accelerator, or launch with --use_deepspeed."
        )
    return plugin
