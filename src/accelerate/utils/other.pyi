from accelerate._base.helpers import check_os_kernel as check_os_kernel
from accelerate._base.helpers import convert_bytes as convert_bytes
from accelerate._base.helpers import get_pretty_name as get_pretty_name
from accelerate._base.helpers import merge_dicts as merge_dicts
from accelerate._base.helpers import recursive_getattr as recursive_getattr
from accelerate.checkpointing.torch_files import TORCH_SAFE_GLOBALS as TORCH_SAFE_GLOBALS
from accelerate.checkpointing.torch_files import load as load
from accelerate.checkpointing.torch_files import save as save
from accelerate.devices.machine import get_free_port as get_free_port
from accelerate.devices.machine import is_port_in_use as is_port_in_use
from accelerate.offload.safetensors_format import clean_state_dict_for_safetensors as clean_state_dict_for_safetensors
from accelerate.parallel.compile import compile_regions as compile_regions
from accelerate.parallel.compile import compile_regions_deepspeed as compile_regions_deepspeed
from accelerate.parallel.compile import compile_regions_fsdp2 as compile_regions_fsdp2
from accelerate.parallel.compile import has_repeated_blocks as has_repeated_blocks
from accelerate.parallel.compile import is_repeated_blocks as is_repeated_blocks
from accelerate.parallel.tensor import get_model_tp_size as get_model_tp_size
from accelerate.parallel.tensor import model_has_dtensor as model_has_dtensor
from accelerate.parallel.unwrap import extract_model_from_parallel as extract_model_from_parallel
from accelerate.parallel.unwrap import get_module_children_bottom_up as get_module_children_bottom_up
from accelerate.parallel.unwrap import has_compiled_regions as has_compiled_regions
from accelerate.parallel.unwrap import is_compiled_module as is_compiled_module
from accelerate.runtime.process_control import barrier

wait_for_everyone = barrier
