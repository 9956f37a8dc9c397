"""Run one plain PyTorch loop on one process or on many, with the same numbers.

The names are imported when they are first read: `import accelerate` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate._base.lazy import attach, by_home, starred
from accelerate.config import env

if TYPE_CHECKING:
    from accelerate import accelerator as accelerator
    from accelerate import big_modeling as big_modeling
    from accelerate import checkpointing as checkpointing
    from accelerate import data_loader as data_loader
    from accelerate import errors as errors
    from accelerate import hooks as hooks
    from accelerate import inference as inference
    from accelerate import launchers as launchers
    from accelerate import local_sgd as local_sgd
    from accelerate import logging as logging
    from accelerate import optimizer as optimizer
    from accelerate import parallelism_config as parallelism_config
    from accelerate import scheduler as scheduler
    from accelerate import state as state
    from accelerate import tracking as tracking
    from accelerate import utils as utils
    from accelerate._base.enums import DDPCommunicationHookType as DDPCommunicationHookType
    from accelerate._base.enums import DistributedType as DistributedType
    from accelerate.accelerator import Accelerator as Accelerator
    from accelerate.big_modeling import cpu_offload as cpu_offload
    from accelerate.big_modeling import cpu_offload_with_hook as cpu_offload_with_hook
    from accelerate.big_modeling import disk_offload as disk_offload
    from accelerate.big_modeling import dispatch_model as dispatch_model
    from accelerate.big_modeling import init_empty_weights as init_empty_weights
    from accelerate.big_modeling import init_on_device as init_on_device
    from accelerate.big_modeling import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
    from accelerate.config.availability import is_rich_available as is_rich_available
    from accelerate.config.sections.handlers import AutocastKwargs as AutocastKwargs
    from accelerate.config.sections.handlers import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from accelerate.config.sections.handlers import GradScalerKwargs as GradScalerKwargs
    from accelerate.config.sections.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
    from accelerate.config.sections.handlers import ProfileKwargs as ProfileKwargs
    from accelerate.config.sections.plugins_deepspeed import DeepSpeedPlugin as DeepSpeedPlugin
    from accelerate.config.sections.plugins_fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
    from accelerate.config.sections.training import DataLoaderConfiguration as DataLoaderConfiguration
    from accelerate.data_loader import skip_first_batches as skip_first_batches
    from accelerate.inference import prepare_pippy as prepare_pippy
    from accelerate.launchers import debug_launcher as debug_launcher
    from accelerate.launchers import notebook_launcher as notebook_launcher
    from accelerate.parallelism_config import ParallelismConfig as ParallelismConfig
    from accelerate.state import PartialState as PartialState
    from accelerate.utils.memory import find_executable_batch_size as find_executable_batch_size
    from accelerate.utils.modeling import infer_auto_device_map as infer_auto_device_map
    from accelerate.utils.modeling import load_checkpoint_in_model as load_checkpoint_in_model
    from accelerate.utils.random import synchronize_rng_states as synchronize_rng_states
else:
    _MODULES = (
        "accelerator big_modeling checkpointing data_loader errors hooks inference launchers local_sgd logging "
        "optimizer parallelism_config scheduler state tracking utils"
    )
    _TABLE = {
        **{name: f"accelerate.{name}" for name in _MODULES.split()},
        **by_home(
            {
                "accelerate._base.enums": "DDPCommunicationHookType DistributedType",
                "accelerate.accelerator": "Accelerator",
                "accelerate.big_modeling": (
                    "cpu_offload cpu_offload_with_hook disk_offload dispatch_model init_empty_weights init_on_device "
                    "load_checkpoint_and_dispatch"
                ),
                "accelerate.config.availability": "is_rich_available",
                "accelerate.config.sections.handlers": (
                    "AutocastKwargs DistributedDataParallelKwargs GradScalerKwargs InitProcessGroupKwargs ProfileKwargs"
                ),
                "accelerate.config.sections.plugins_deepspeed": "DeepSpeedPlugin",
                "accelerate.config.sections.plugins_fsdp": "FullyShardedDataParallelPlugin",
                "accelerate.config.sections.training": "DataLoaderConfiguration",
                "accelerate.data_loader": "skip_first_batches",
                "accelerate.inference": "prepare_pippy",
                "accelerate.launchers": "debug_launcher notebook_launcher",
                "accelerate.parallelism_config": "ParallelismConfig",
                "accelerate.state": "PartialState",
                "accelerate.utils.memory": "find_executable_batch_size",
                "accelerate.utils.modeling": "infer_auto_device_map load_checkpoint_in_model",
                "accelerate.utils.random": "synchronize_rng_states",
            }
        ),
    }
    __getattr__, __dir__ = attach(__name__, _TABLE)
    __all__ = list(starred(_TABLE))

__version__ = "2.0.0"

# Asked of the variable alone, so that the usual import does not look for rich.
if env.flag("ACCELERATE_ENABLE_RICH"):
    from accelerate.config.availability import install_rich_traceback

    install_rich_traceback()
