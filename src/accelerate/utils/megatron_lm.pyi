from accelerate.strategies.megatron.datasets import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader
from accelerate.strategies.megatron.engine import MegatronEngine as MegatronEngine
from accelerate.strategies.megatron.public import finish_mpu_init as finish_mpu_init
from accelerate.strategies.megatron.public import initialize as initialize
from accelerate.strategies.megatron.public import model_provider_func as model_provider_func
from accelerate.strategies.megatron.public import prepare_data_loader as prepare_data_loader
from accelerate.strategies.megatron.public import (
    prepare_model_optimizer_scheduler as prepare_model_optimizer_scheduler,
)
from accelerate.strategies.megatron.public import prepare_optimizer as prepare_optimizer
from accelerate.strategies.megatron.public import prepare_scheduler as prepare_scheduler
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
