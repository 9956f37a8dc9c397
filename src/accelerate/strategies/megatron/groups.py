"""The groups of ranks that Megatron's layers talk over."""

from __future__ import annotations

import os

from accelerate._base.imports import has_package, require
from accelerate.config.plugins.megatron import MegatronLMPlugin
from accelerate.runtime import current, process_group
from accelerate.runtime.current import Runtime
from accelerate.strategies.megatron.configs import Degrees, check_options, degrees_of
from accelerate.strategies.megatron.options import core

_KEY = "groups of Megatron"
_MAKER, _OF_PARENT = "maker of Megatron's groups", "Megatron's groups of the parent"


def check_run(plugin: MegatronLMPlugin, world_size: int) -> None:
    """Refuse settings that cannot work, before a process is started.

    Raises:
        ConfigurationError: If a value cannot be, or the processes cannot be shared out as it says.
        MissingPackageError: If megatron-core is not installed.
    """
    if not has_package("megatron.core"):
        require("megatron.core", why="MegatronLMPlugin", extra="megatron")
    check_options(plugin)
    degrees_of(plugin).data_parallel(world_size)


def make_groups(degrees: Degrees, runtime: Runtime) -> None:
    """Make the groups for these degrees, unless this process has them."""
    if current.remember(_KEY, lambda: _make(degrees, runtime)) != degrees:
        current.forget(_KEY)
        current.remember(_KEY, lambda: _make(degrees, runtime))


def _make(degrees: Degrees, runtime: Runtime) -> Degrees:
    state = core("parallel_state")
    process_group.join_alone(runtime.backend.group_backend or "gloo")
    if state.model_parallel_is_initialized():
        # Of an earlier run of this process, whose process group may be gone.
        if current.RENDEZVOUS.get(_MAKER) != os.getpid():
            # Those of the process that this one was forked from: to end them would wait for threads that are not here.
            current.RENDEZVOUS[_OF_PARENT] = state._global_process_group_list
        state.destroy_model_parallel()
    state.initialize_model_parallel(
        tensor_model_parallel_size=degrees.tensor,
        pipeline_model_parallel_size=degrees.pipeline,
        virtual_pipeline_model_parallel_size=degrees.virtual_pipeline,
        context_parallel_size=degrees.context,
        expert_model_parallel_size=degrees.expert,
        expert_tensor_parallel_size=degrees.expert_tensor,
        create_gloo_process_groups=runtime.group_backend not in (None, "gloo"),
    )
    current.RENDEZVOUS[_MAKER] = os.getpid()
    return degrees
