"""Training in 8-bit floats with torchao, under its public path."""

from __future__ import annotations

from accelerate._base.imports import is_torchao_available as is_torchao_available
from accelerate._base.imports import torchao_required as torchao_required
from accelerate.precision.torchao_fp8 import convert_model_to_fp8_ao as convert_model_to_fp8_ao
from accelerate.precision.torchao_fp8 import filter_first_and_last_linear_layers as filter_first_and_last_linear_layers
from accelerate.precision.torchao_fp8 import filter_linear_layers as filter_linear_layers
from accelerate.precision.torchao_fp8 import find_first_last_linear_layers as find_first_last_linear_layers
from accelerate.precision.torchao_fp8 import has_ao_layers as has_ao_layers
