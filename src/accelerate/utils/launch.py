"""Public names around starting processes."""

from accelerate.launchers.entry import PrepareForLaunch as PrepareForLaunch
from accelerate.launchers.environment import _filter_args as _filter_args
from accelerate.launchers.environment import env_var_path_add as env_var_path_add
from accelerate.launchers.environment import prepare_deepspeed_cmd_env as prepare_deepspeed_cmd_env
from accelerate.launchers.environment import (
    prepare_extend_env_parallelism_config as prepare_extend_env_parallelism_config,
)
from accelerate.launchers.environment import prepare_multi_gpu_env as prepare_multi_gpu_env
from accelerate.launchers.environment import prepare_sagemager_args_inputs as prepare_sagemager_args_inputs
from accelerate.launchers.environment import prepare_simple_launcher_cmd_env as prepare_simple_launcher_cmd_env
from accelerate.launchers.environment import prepare_tpu as prepare_tpu
from accelerate.launchers.environment import setup_fp8_env as setup_fp8_env
