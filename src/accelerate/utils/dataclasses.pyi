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
from accelerate.config.knob import KwargsHandler as KwargsHandler
from accelerate.config.plugins.deepspeed import DeepSpeedPlugin as DeepSpeedPlugin
from accelerate.config.plugins.fsdp import FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin
from accelerate.config.plugins.fsdp_torch import get_module_class_from_name as get_module_class_from_name
from accelerate.config.plugins.megatron import (
    MODEL_CONFIGS_TO_MEGATRON_PARSERS as MODEL_CONFIGS_TO_MEGATRON_PARSERS,
)
from accelerate.config.plugins.megatron import MegatronLMPlugin as MegatronLMPlugin
from accelerate.config.plugins.megatron import (
    add_model_config_to_megatron_parser as add_model_config_to_megatron_parser,
)
from accelerate.config.plugins.megatron import parse_bert_config as parse_bert_config
from accelerate.config.plugins.megatron import parse_glm4_moe_config as parse_glm4_moe_config
from accelerate.config.plugins.megatron import parse_gpt2_config as parse_gpt2_config
from accelerate.config.plugins.megatron import parse_llama_config as parse_llama_config
from accelerate.config.plugins.megatron import parse_t5_config as parse_t5_config
from accelerate.config.plugins.parallelism import (
    DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
)
from accelerate.config.plugins.parallelism import TorchContextParallelConfig as TorchContextParallelConfig
from accelerate.config.plugins.parallelism import TorchPipelineParallelConfig as TorchPipelineParallelConfig
from accelerate.config.plugins.parallelism import TorchTensorParallelConfig as TorchTensorParallelConfig
from accelerate.config.plugins.parallelism import TorchTensorParallelPlugin as TorchTensorParallelPlugin
from accelerate.config.plugins.quantization import AmaxComputeAlgorithm as AmaxComputeAlgorithm
from accelerate.config.plugins.quantization import AORecipeKwargs as AORecipeKwargs
from accelerate.config.plugins.quantization import Backend as Backend
from accelerate.config.plugins.quantization import BnbQuantizationConfig as BnbQuantizationConfig
from accelerate.config.plugins.quantization import FP8Format as FP8Format
from accelerate.config.plugins.quantization import FP8RecipeKwargs as FP8RecipeKwargs
from accelerate.config.plugins.quantization import MSAMPRecipeKwargs as MSAMPRecipeKwargs
from accelerate.config.plugins.quantization import OptLevel as OptLevel
from accelerate.config.plugins.quantization import TERecipeKwargs as TERecipeKwargs
from accelerate.config.plugins.training import AutocastKwargs as AutocastKwargs
from accelerate.config.plugins.training import DataLoaderConfiguration as DataLoaderConfiguration
from accelerate.config.plugins.training import DistributedDataParallelKwargs as DistributedDataParallelKwargs
from accelerate.config.plugins.training import GradientAccumulationPlugin as GradientAccumulationPlugin
from accelerate.config.plugins.training import GradScalerKwargs as GradScalerKwargs
from accelerate.config.plugins.training import InitProcessGroupKwargs as InitProcessGroupKwargs
from accelerate.config.plugins.training import ProfileKwargs as ProfileKwargs
from accelerate.config.plugins.training import ProjectConfiguration as ProjectConfiguration
from accelerate.config.plugins.training import TorchDynamoPlugin as TorchDynamoPlugin
