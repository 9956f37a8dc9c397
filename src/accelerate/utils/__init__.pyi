from accelerate.commands.config.default import write_basic_config as write_basic_config
from accelerate.parallelism_config import ParallelismConfig as ParallelismConfig
from accelerate.strategies.megatron.datasets import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader
from accelerate.strategies.megatron.engine import MegatronEngine as MegatronEngine
from accelerate.strategies.megatron.public import (
    initialize,
    prepare_data_loader,
    prepare_model_optimizer_scheduler,
    prepare_optimizer,
    prepare_scheduler,
)
from accelerate.strategies.megatron.train_steps import AbstractTrainStep as AbstractTrainStep
from accelerate.strategies.megatron.train_steps import BertTrainStep as BertTrainStep
from accelerate.strategies.megatron.train_steps import GPTTrainStep as GPTTrainStep
from accelerate.strategies.megatron.train_steps import T5TrainStep as T5TrainStep
from accelerate.strategies.megatron.train_steps import (
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
)
from accelerate.strategies.megatron.train_steps import (
    gather_across_data_parallel_groups as gather_across_data_parallel_groups,
)
from accelerate.strategies.megatron.wrappers import MegatronLMDummyScheduler as MegatronLMDummyScheduler
from accelerate.strategies.megatron.wrappers import MegatronLMOptimizerWrapper as MegatronLMOptimizerWrapper
from accelerate.strategies.megatron.wrappers import MegatronLMSchedulerWrapper as MegatronLMSchedulerWrapper
from accelerate.utils.ao import *
from accelerate.utils.bnb import *
from accelerate.utils.constants import *
from accelerate.utils.dataclasses import *
from accelerate.utils.deepspeed import *
from accelerate.utils.environment import *
from accelerate.utils.fsdp_utils import *
from accelerate.utils.imports import *
from accelerate.utils.launch import *
from accelerate.utils.memory import *
from accelerate.utils.modeling import *
from accelerate.utils.offload import *
from accelerate.utils.operations import *
from accelerate.utils.other import *
from accelerate.utils.random import *
from accelerate.utils.torch_xla import *
from accelerate.utils.tqdm import tqdm as tqdm
from accelerate.utils.transformer_engine import *
from accelerate.utils.versions import *

megatron_lm_initialize = initialize
megatron_lm_prepare_data_loader = prepare_data_loader
megatron_lm_prepare_model_optimizer_scheduler = prepare_model_optimizer_scheduler
megatron_lm_prepare_optimizer = prepare_optimizer
megatron_lm_prepare_scheduler = prepare_scheduler
