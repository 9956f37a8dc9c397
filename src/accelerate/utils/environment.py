"""Helpers for environment variables and driver facts under their public path."""

from __future__ import annotations

from accelerate.config.env import are_libraries_initialized as are_libraries_initialized
from accelerate.config.env import clear_environment as clear_environment
from accelerate.config.env import convert_dict_to_env_variables as convert_dict_to_env_variables
from accelerate.config.env import get_int_from_env as get_int_from_env
from accelerate.config.env import parse_choice_from_env as parse_choice_from_env
from accelerate.config.env import parse_flag_from_env as parse_flag_from_env
from accelerate.config.env import patch_environment as patch_environment
from accelerate.config.env import purge_accelerate_environment as purge_accelerate_environment
from accelerate.config.env import str_to_bool as str_to_bool
from accelerate.devices.nvidia import check_cuda_fp8_capability as check_cuda_fp8_capability
from accelerate.devices.nvidia import check_cuda_p2p_ib_support as check_cuda_p2p_ib_support
from accelerate.devices.nvidia import get_current_device_type as get_current_device_type
from accelerate.devices.nvidia import get_driver_version as get_driver_version
from accelerate.devices.nvidia import get_gpu_info as get_gpu_info
from accelerate.devices.nvidia import override_numa_affinity as override_numa_affinity
from accelerate.devices.nvidia import set_numa_affinity as set_numa_affinity
from accelerate.runtime.cpu_information import CPUInformation as CPUInformation
from accelerate.runtime.cpu_information import get_cpu_distributed_information as get_cpu_distributed_information
