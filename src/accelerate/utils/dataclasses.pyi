from accelerate._base.enums import BaseEnum as BaseEnum
from accelerate._base.enums import ComputeEnvironment as ComputeEnvironment
from accelerate._base.enums import CustomDtype as CustomDtype
from accelerate._base.enums import DDPCommunicationHookType as DDPCommunicationHookType
from accelerate._base.enums import DistributedType as DistributedType
from accelerate._base.enums import DynamoBackend as DynamoBackend
from accelerate._base.enums import EnumWithContains as EnumWithContains
from accelerate._base.enums import FP8BackendType as FP8BackendType
from accelerate._base.enums import LoggerType as LoggerType
from accelerate._base.enums import PrecisionType as PrecisionType
from accelerate._base.enums import ProfilerActivity as ProfilerActivity
from accelerate._base.enums import RNGType as RNGType
from accelerate._base.enums import SageMakerDistributedType as SageMakerDistributedType
from accelerate.collectives.nested import TensorInformation as TensorInformation
from accelerate.config.sections.dynamo import TorchDynamoPlugin as TorchDynamoPlugin
from accelerate.config.sections.fp8 import AmaxComputeAlgorithm as AmaxComputeAlgorithm
from accelerate.config.sections.fp8 import AORecipeKwargs as AORecipeKwargs
from accelerate.config.sections.fp8 import Backend as Backend
from accelerate.config.sections.fp8 import FP8Format as FP8Format
from accelerate.config.sections.fp8 import FP8RecipeKwargs as FP8RecipeKwargs
from accelerate.config.sections.fp8 import MSAMPRecipeKwargs as MSAMPRecipeKwargs
from accelerate.config.sections.fp8 import OptLevel as OptLevel
from accelerate.config.sections.fp8 import TERecipeKwargs as TERecipeKwargs
from accelerate.config.sections.fsdp_torch import get_module_class_from_name as get_module_class_from_name
from accelerate.config.sections.handlers import AutocastKwargs as AutocastKwargs
from accelerate.config.sections.handlers import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from accelerate.config.sections.handlers import GradScalerKwargs as GradScalerKwargs
from accelerate.config.sections.handlers import InitProcessGroupKwargs as InitProcessGroupKwargs
from accelerate.config.sections.handlers import ProfileKwargs as ProfileKwargs
from accelerate.config.sections.megatron_models import (
    MODEL_CONFIGS_TO_MEGATRON_PARSERS as MODEL_CONFIGS_TO_MEGATRON_PARSERS,
)
from accelerate.config.sections.megatron_models import (
    add_model_config_to_megatron_parser as add_model_config_to_megatron_parser,
)
from accelerate.config.sections.megatron_models import parse_bert_config as parse_bert_config
from accelerate.config.sections.megatron_models import parse_glm4_moe_config as parse_glm4_moe_config
from accelerate.config.sections.megatron_models import parse_gpt2_config as parse_gpt2_config
from accelerate.config.sections.megatron_models import parse_llama_config as parse_llama_config
from accelerate.config.sections.megatron_models import parse_t5_config as parse_t5_config
from accelerate.config.sections.plugins_deepspeed import DeepSpeedPlugin as DeepSpeedPlugin
from accelerate.config.sections.plugins_fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from accelerate.config.sections.plugins_megatron import MegatronLMPlugin as MegatronLMPlugin
from accelerate.config.sections.plugins_parallel import (
    DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
)
from accelerate.config.sections.plugins_parallel import TorchContextParallelConfig as TorchContextParallelConfig
from accelerate.config.sections.plugins_parallel import TorchPipelineParallelConfig as TorchPipelineParallelConfig
from accelerate.config.sections.plugins_parallel import TorchTensorParallelConfig as TorchTensorParallelConfig
from accelerate.config.sections.plugins_parallel import TorchTensorParallelPlugin as TorchTensorParallelPlugin
from accelerate.config.sections.plugins_quantization import BnbQuantizationConfig as BnbQuantizationConfig
from accelerate.config.sections.training import DataLoaderConfiguration as DataLoaderConfiguration
from accelerate.config.sections.training import GradientAccumulationPlugin as GradientAccumulationPlugin
from accelerate.config.sections.training import ProjectConfiguration as ProjectConfiguration
from accelerate.config.settings import KwargsHandler as KwargsHandler
