"""Constants under their public path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate._base.constants import BETA_CP_AVAILABLE_PYTORCH_VERSION as BETA_CP_AVAILABLE_PYTORCH_VERSION
from accelerate._base.constants import BETA_SP_AVAILABLE_DEEPSPEED_VERSION as BETA_SP_AVAILABLE_DEEPSPEED_VERSION
from accelerate._base.constants import BETA_TP_AVAILABLE_PYTORCH_VERSION as BETA_TP_AVAILABLE_PYTORCH_VERSION
from accelerate._base.constants import BETA_TP_AVAILABLE_TRANSFORMERS_VERSION as BETA_TP_AVAILABLE_TRANSFORMERS_VERSION
from accelerate._base.constants import CUDA_DISTRIBUTED_TYPES as CUDA_DISTRIBUTED_TYPES
from accelerate._base.constants import DEEPSPEED_MULTINODE_LAUNCHERS as DEEPSPEED_MULTINODE_LAUNCHERS
from accelerate._base.constants import DTENSOR_PYTORCH_VERSION as DTENSOR_PYTORCH_VERSION
from accelerate._base.constants import (
    ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION as ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION,
)
from accelerate._base.constants import FSDP2_PYTORCH_VERSION as FSDP2_PYTORCH_VERSION
from accelerate._base.constants import FSDP2_STATE_DICT_TYPE as FSDP2_STATE_DICT_TYPE
from accelerate._base.constants import FSDP_AUTO_WRAP_POLICY as FSDP_AUTO_WRAP_POLICY
from accelerate._base.constants import FSDP_BACKWARD_PREFETCH as FSDP_BACKWARD_PREFETCH
from accelerate._base.constants import FSDP_MODEL_NAME as FSDP_MODEL_NAME
from accelerate._base.constants import FSDP_PYTORCH_VERSION as FSDP_PYTORCH_VERSION
from accelerate._base.constants import FSDP_SHARDING_STRATEGY as FSDP_SHARDING_STRATEGY
from accelerate._base.constants import FSDP_STATE_DICT_TYPE as FSDP_STATE_DICT_TYPE
from accelerate._base.constants import (
    MITA_PROFILING_AVAILABLE_PYTORCH_VERSION as MITA_PROFILING_AVAILABLE_PYTORCH_VERSION,
)
from accelerate._base.constants import MODEL_NAME as MODEL_NAME
from accelerate._base.constants import OPTIMIZER_NAME as OPTIMIZER_NAME
from accelerate._base.constants import PROFILE_PATTERN_NAME as PROFILE_PATTERN_NAME
from accelerate._base.constants import RNG_STATE_NAME as RNG_STATE_NAME
from accelerate._base.constants import SAFE_MODEL_NAME as SAFE_MODEL_NAME
from accelerate._base.constants import SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME
from accelerate._base.constants import SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME
from accelerate._base.constants import SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME
from accelerate._base.constants import SAGEMAKER_PARALLEL_EC2_INSTANCES as SAGEMAKER_PARALLEL_EC2_INSTANCES
from accelerate._base.constants import SAGEMAKER_PYTHON_VERSION as SAGEMAKER_PYTHON_VERSION
from accelerate._base.constants import SAGEMAKER_PYTORCH_VERSION as SAGEMAKER_PYTORCH_VERSION
from accelerate._base.constants import SAGEMAKER_TRANSFORMERS_VERSION as SAGEMAKER_TRANSFORMERS_VERSION
from accelerate._base.constants import SAMPLER_NAME as SAMPLER_NAME
from accelerate._base.constants import SCALER_NAME as SCALER_NAME
from accelerate._base.constants import SCHEDULER_NAME as SCHEDULER_NAME
from accelerate._base.constants import STR_OPERATION_TO_FUNC as STR_OPERATION_TO_FUNC
from accelerate._base.constants import TORCH_DISTRIBUTED_OPERATION_TYPES as TORCH_DISTRIBUTED_OPERATION_TYPES
from accelerate._base.constants import TORCH_DYNAMO_MODES as TORCH_DYNAMO_MODES
from accelerate._base.constants import TORCH_LAUNCH_PARAMS as TORCH_LAUNCH_PARAMS
from accelerate._base.constants import WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME
from accelerate._base.constants import WEIGHTS_NAME as WEIGHTS_NAME
from accelerate._base.constants import WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME
from accelerate._base.constants import (
    XPU_PROFILING_AVAILABLE_PYTORCH_VERSION as XPU_PROFILING_AVAILABLE_PYTORCH_VERSION,
)
from accelerate._base.lazy import attach, by_home, starred

if TYPE_CHECKING:
    from accelerate._base.constants import (
        SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING as SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING,
    )
else:
    _TABLE = by_home({"accelerate._base.constants": "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING"})
    __getattr__, __dir__ = attach(__name__, _TABLE)
    __all__ = list(starred([*globals(), *_TABLE]))
