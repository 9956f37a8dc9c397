"""Weights in 8 and 4 bits under their public path."""

from __future__ import annotations

from accelerate._base.imports import is_4bit_bnb_available as is_4bit_bnb_available
from accelerate._base.imports import is_8bit_bnb_available as is_8bit_bnb_available
from accelerate.big_modeling import load_and_quantize_model as load_and_quantize_model
from accelerate.config.sections.plugins_quantization import BnbQuantizationConfig as BnbQuantizationConfig
from accelerate.offload.bnb import get_keys_to_not_convert as get_keys_to_not_convert
from accelerate.offload.bnb import get_parameter_device as get_parameter_device
from accelerate.offload.bnb import get_quantized_model_device_map as get_quantized_model_device_map
from accelerate.offload.bnb import has_4bit_bnb_layers as has_4bit_bnb_layers
from accelerate.offload.bnb import quantize_and_offload_8bit as quantize_and_offload_8bit
from accelerate.offload.bnb import replace_with_bnb_layers as replace_with_bnb_layers
from accelerate.offload.loading import load_checkpoint_in_model as load_checkpoint_in_model
from accelerate.offload.memory import get_balanced_memory as get_balanced_memory
from accelerate.offload.planner import infer_auto_device_map as infer_auto_device_map
from accelerate.offload.store import offload_weight as offload_weight
from accelerate.offload.tensors import set_module_tensor_to_device as set_module_tensor_to_device
from accelerate.offload.ties import find_tied_parameters as find_tied_parameters
