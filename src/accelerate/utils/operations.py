"""Operations on nested data and between processes under their public path."""

from __future__ import annotations

from accelerate._base.errors import DistributedOperationException as DistributedOperationException
from accelerate.collectives.checked import chained_operation as chained_operation
from accelerate.collectives.checked import verify_operation as verify_operation
from accelerate.collectives.containers import honor_type as honor_type
from accelerate.collectives.containers import is_namedtuple as is_namedtuple
from accelerate.collectives.nested import concatenate as concatenate
from accelerate.collectives.nested import convert_to_fp32 as convert_to_fp32
from accelerate.collectives.nested import find_batch_size as find_batch_size
from accelerate.collectives.nested import find_device as find_device
from accelerate.collectives.nested import get_data_structure as get_data_structure
from accelerate.collectives.nested import get_shape as get_shape
from accelerate.collectives.nested import ignorant_find_batch_size as ignorant_find_batch_size
from accelerate.collectives.nested import initialize_tensors as initialize_tensors
from accelerate.collectives.nested import is_tensor_information as is_tensor_information
from accelerate.collectives.nested import is_torch_tensor as is_torch_tensor
from accelerate.collectives.nested import is_torch_xpu_tensor as is_torch_xpu_tensor
from accelerate.collectives.nested import listify as listify
from accelerate.collectives.nested import pad_input_tensors as pad_input_tensors
from accelerate.collectives.nested import recursively_apply as recursively_apply
from accelerate.collectives.nested import send_to_device as send_to_device
from accelerate.collectives.nested import slice_tensors as slice_tensors
from accelerate.collectives.ops import TENSOR_INT_TO_DTYPE as TENSOR_INT_TO_DTYPE
from accelerate.collectives.ops import TENSOR_TYPE_TO_INT as TENSOR_TYPE_TO_INT
from accelerate.collectives.ops import CannotPadNestedTensorWarning as CannotPadNestedTensorWarning
from accelerate.collectives.ops import GatheredParameters as GatheredParameters
from accelerate.collectives.ops import broadcast as broadcast
from accelerate.collectives.ops import broadcast_object_list as broadcast_object_list
from accelerate.collectives.ops import copy_tensor_to_devices as copy_tensor_to_devices
from accelerate.collectives.ops import gather as gather
from accelerate.collectives.ops import gather_object as gather_object
from accelerate.collectives.ops import gather_tensor_shape as gather_tensor_shape
from accelerate.collectives.ops import pad_across_processes as pad_across_processes
from accelerate.collectives.ops import reduce as reduce
from accelerate.collectives.outputs import ConvertOutputsToFp32 as ConvertOutputsToFp32
from accelerate.collectives.outputs import convert_outputs_to_fp32 as convert_outputs_to_fp32
