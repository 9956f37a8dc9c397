"""Public names that programs import from modules that only use them, as `from accelerate.accelerator import DistributedType`.

Module -> home of the names -> the names. Imported when the first such name is read. Private names are here because
other libraries read them.
"""

PASSING_NAMES = {
    "accelerate.accelerator": {
        "accelerate.checkpointing": (
            "load_accelerator_state load_custom_state save_accelerator_state save_custom_state"
        ),
        "accelerate.data_loader": "DataLoaderDispatcher prepare_data_loader skip_first_batches",
        "accelerate.logging": "get_logger",
        "accelerate.optimizer": "AcceleratedOptimizer",
        "accelerate.scheduler": "AcceleratedScheduler",
        "accelerate.state": "AcceleratorState GradientState PartialState",
        "accelerate.tracking": "GeneralTracker LOGGER_TYPE_TO_CLASS filter_trackers",
        "accelerate.utils": (
            "AORecipeKwargs AutocastKwargs DTENSOR_PYTORCH_VERSION DataLoaderConfiguration DeepSpeedEngineWrapper "
            "DeepSpeedOptimizerWrapper DeepSpeedPlugin DeepSpeedSchedulerWrapper map_pytorch_optim_to_deepspeed "
            "DistributedDataParallelKwargs DistributedType DummyOptim DummyScheduler DynamoBackend FP8BackendType FP8RecipeKwargs "
            "FSDP2_PYTORCH_VERSION FSDP_PYTORCH_VERSION FullyShardedDataParallelPlugin GradScalerKwargs "
            "GradientAccumulationPlugin InitProcessGroupKwargs KwargsHandler LoggerType MODEL_NAME MSAMPRecipeKwargs "
            "MegatronLMPlugin PROFILE_PATTERN_NAME ParallelismConfig PrecisionType ProfileKwargs "
            "ProjectConfiguration RNGType SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME SAFE_WEIGHTS_PATTERN_NAME "
            "SCALER_NAME TERecipeKwargs TorchDynamoPlugin TorchTensorParallelPlugin WEIGHTS_INDEX_NAME WEIGHTS_NAME "
            "WEIGHTS_PATTERN_NAME apply_fp8_autowrap check_os_kernel clean_state_dict_for_safetensors "
            "compare_versions compile_regions compile_regions_deepspeed compile_regions_fsdp2 convert_model "
            "convert_model_to_fp8_ao convert_outputs_to_fp32 ensure_weights_retied extract_model_from_parallel "
            "fsdp2_apply_ac fsdp2_canonicalize_names fsdp2_prepare_model fsdp2_switch_optimizer_parameters gather "
            "gather_object get_fsdp2_grad_scaler get_grad_scaler get_mixed_precision_context_manager "
            "get_model_tp_size get_pretty_name get_state_dict_offloaded_model has_offloaded_params is_bf16_available "
            "is_bitsandbytes_multi_backend_available is_compiled_module is_deepspeed_available is_lomo_available "
            "is_megatron_lm_available is_mlu_available is_msamp_available is_musa_available is_npu_available "
            "is_torch_version is_torch_xla_available is_torchao_available is_transformer_engine_available "
            "is_xpu_available load_fsdp_model load_fsdp_optimizer model_has_dtensor pad_across_processes "
            "parse_choice_from_env recursively_apply reduce release_memory save save_fsdp_model save_fsdp_optimizer "
            "wait_for_everyone"
        ),
    },
    "accelerate.big_modeling": {
        "accelerate.hooks": "LayerwiseCastingHook attach_align_device_hook_on_blocks",
        "accelerate.utils": (
            "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING check_cuda_p2p_ib_support extract_submodules_state_dict "
            "get_balanced_memory infer_auto_device_map is_bnb_available is_mlu_available is_musa_available "
            "is_neuron_available is_npu_available is_sdaa_available is_xpu_available parse_flag_from_env "
            "recursive_getattr retie_parameters"
        ),
    },
    "accelerate.checkpointing": {
        "accelerate.logging": "get_logger",
        "accelerate.state": "PartialState",
        "accelerate.utils": (
            "MODEL_NAME OPTIMIZER_NAME RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_NAME SAMPLER_NAME SCALER_NAME "
            "SCHEDULER_NAME WEIGHTS_NAME get_pretty_name is_cuda_available is_hpu_available is_mlu_available "
            "is_musa_available is_neuron_available is_sdaa_available is_torch_version is_torch_xla_available "
            "is_xpu_available load save"
        ),
    },
    "accelerate.commands.launch": {
        "accelerate.commands.config.config_args": "SageMakerConfig load_config_from_file",
        "accelerate.commands.config.config_utils": "DYNAMO_BACKENDS",
        "accelerate.commands.utils": "CustomArgumentParser",
        "accelerate.utils": (
            "ComputeEnvironment DEEPSPEED_MULTINODE_LAUNCHERS DistributedType PrepareForLaunch TORCH_DYNAMO_MODES "
            "check_cuda_p2p_ib_support convert_dict_to_env_variables get_int_from_env is_bf16_available "
            "is_deepspeed_available is_hpu_available is_mlu_available is_musa_available is_neuron_available "
            "is_npu_available is_rich_available is_sagemaker_available is_sdaa_available is_torch_xla_available "
            "is_xpu_available patch_environment prepare_deepspeed_cmd_env prepare_multi_gpu_env "
            "prepare_sagemager_args_inputs prepare_simple_launcher_cmd_env prepare_tpu str_to_bool"
        ),
    },
    "accelerate.data_loader": {
        "accelerate.logging": "get_logger",
        "accelerate.state": "GradientState PartialState",
        "accelerate.utils": (
            "DistributedType RNGType broadcast broadcast_object_list compare_versions concatenate find_batch_size "
            "get_data_structure initialize_tensors is_datasets_available is_torch_version is_torch_xla_available "
            "is_torchdata_stateful_dataloader_available send_to_device slice_tensors synchronize_rng_states"
        ),
    },
    "accelerate.hooks": {
        "accelerate.hooks.base": "_accelerate_added_attributes",
        "accelerate.state": "PartialState",
        "accelerate.utils": (
            "PrefixedDataset clear_device_cache find_device get_non_persistent_buffers is_mlu_available "
            "is_musa_available is_npu_available named_module_tensors recursive_getattr send_to_device "
            "set_module_tensor_to_device"
        ),
    },
    "accelerate.inference": {
        "accelerate.state": "PartialState",
        "accelerate.utils": (
            "calculate_maximum_sizes convert_bytes copy_tensor_to_devices ignorant_find_batch_size "
            "infer_auto_device_map is_pippy_available pad_input_tensors send_to_device"
        ),
    },
    "accelerate.launchers": {
        "accelerate.state": "AcceleratorState PartialState",
        "accelerate.utils": (
            "ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION PrecisionType PrepareForLaunch "
            "are_libraries_initialized check_cuda_p2p_ib_support get_current_device_type get_gpu_info "
            "is_mps_available is_rocm_available is_torch_version patch_environment"
        ),
    },
    "accelerate.local_sgd": {
        "accelerate.accelerator": "Accelerator",
        "accelerate.utils": "DistributedType",
    },
    "accelerate.logging": {
        "accelerate.state": "PartialState",
    },
    "accelerate.optimizer": {
        "accelerate.state": "AcceleratorState",
        "accelerate.utils": "DistributedType honor_type is_lomo_available is_torch_xla_available",
    },
    "accelerate.parallelism_config": {
        "accelerate.utils": "DistributedType is_torch_version",
    },
    "accelerate.scheduler": {
        "accelerate.state": "AcceleratorState",
    },
    "accelerate.state": {
        "accelerate.utils": (
            "DynamoBackend GradientAccumulationPlugin SageMakerDistributedType check_cuda_fp8_capability "
            "check_cuda_p2p_ib_support deepspeed_required get_cpu_distributed_information is_datasets_available "
            "is_habana_gaudi1 is_hpu_available is_mlu_available is_mps_available is_musa_available "
            "is_neuron_available is_npu_available is_sdaa_available is_torch_xla_available is_xccl_available "
            "is_xpu_available set_numa_affinity"
        ),
    },
    "accelerate.tracking": {
        "accelerate.logging": "get_logger",
        "accelerate.state": "PartialState",
        "accelerate.utils": (
            "compare_versions is_aim_available is_clearml_available is_comet_ml_available is_dvclive_available "
            "is_mlflow_available is_swanlab_available is_tensorboard_available is_trackio_available "
            "is_wandb_available listify str_to_bool"
        ),
    },
    "accelerate.utils.bnb": {
        "accelerate.big_modeling": "dispatch_model init_empty_weights",
    },
    "accelerate.utils.dataclasses": {
        "accelerate.utils": (
            "BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_TP_AVAILABLE_PYTORCH_VERSION "
            "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION FSDP2_PYTORCH_VERSION FSDP_AUTO_WRAP_POLICY "
            "FSDP_BACKWARD_PREFETCH FSDP_SHARDING_STRATEGY MITA_PROFILING_AVAILABLE_PYTORCH_VERSION "
            "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION compare_versions is_cuda_available is_hpu_available "
            "is_mlu_available is_msamp_available is_musa_available is_neuron_available is_npu_available "
            "is_rocm_available is_torch_version is_torchao_available is_transformer_engine_available "
            "is_xpu_available parse_flag_from_env str_to_bool"
        ),
    },
    "accelerate.utils.fsdp_utils": {
        "accelerate.logging": "get_logger",
        "accelerate.strategies.fsdp.public": "_get_model_state_dict _set_model_state_dict",
        "accelerate.utils": (
            "FSDP_MODEL_NAME OPTIMIZER_NAME SAFE_WEIGHTS_NAME WEIGHTS_NAME get_module_children_bottom_up "
            "get_module_class_from_name get_non_persistent_buffers is_compiled_module is_peft_model is_torch_version "
            "save"
        ),
    },
    "accelerate.utils.imports": {
        "accelerate.utils": ("compare_versions is_torch_version parse_flag_from_env patch_environment str_to_bool"),
    },
    "accelerate.utils.launch": {
        "accelerate.commands.config.config_args": "SageMakerConfig",
        "accelerate.utils": (
            "DEEPSPEED_MULTINODE_LAUNCHERS DistributedType DynamoBackend PrecisionType SageMakerDistributedType "
            "compare_versions get_free_port is_fp8_available is_hpu_available is_mlu_available is_musa_available "
            "is_neuron_available is_npu_available is_port_in_use is_sdaa_available is_torch_xla_available "
            "is_xpu_available merge_dicts str_to_bool"
        ),
    },
    "accelerate.utils.memory": {
        "accelerate.utils": (
            "is_cuda_available is_hpu_available is_mlu_available is_mps_available is_musa_available "
            "is_neuron_available is_npu_available is_sdaa_available is_xpu_available"
        ),
    },
    "accelerate.utils.modeling": {
        "accelerate.offload.memory": "logger",
        "accelerate.offload.tensors:resolve_dtype": "_get_proper_dtype",
        "accelerate.state": "AcceleratorState",
        "accelerate.utils": (
            "AutocastKwargs CustomDtype DistributedType SAFE_WEIGHTS_NAME WEIGHTS_NAME clear_device_cache "
            "is_hpu_available is_mlu_available is_mps_available is_musa_available is_npu_available is_peft_available "
            "is_sdaa_available is_torch_version is_torch_xla_available is_tqdm_available is_xpu_available "
            "load_offloaded_weight offload_weight save_offload_index tqdm"
        ),
    },
    "accelerate.utils.operations": {
        "accelerate.state": "AcceleratorState PartialState",
        "accelerate.utils": (
            "DistributedType TORCH_DISTRIBUTED_OPERATION_TYPES TensorInformation is_npu_available "
            "is_torch_distributed_available is_torch_version is_torch_xla_available"
        ),
    },
    "accelerate.utils.other": {
        "accelerate.logging": "get_logger",
        "accelerate.state": "PartialState",
        "accelerate.utils": (
            "DistributedType FSDP_PYTORCH_VERSION convert_model id_tensor_storage is_deepspeed_available "
            "is_numpy_available is_torch_distributed_available is_torch_version is_torch_xla_available "
            "is_weights_only_available write_basic_config"
        ),
    },
    "accelerate.utils.random": {
        "accelerate.state": "AcceleratorState",
        "accelerate.utils": (
            "CUDA_DISTRIBUTED_TYPES DistributedType RNGType is_hpu_available is_mlu_available is_musa_available "
            "is_neuron_available is_npu_available is_sdaa_available is_torch_xla_available is_xpu_available"
        ),
    },
    "accelerate.utils.tqdm": {
        "accelerate.state": "PartialState",
        "accelerate.utils": "is_tqdm_available",
    },
    "accelerate.utils.versions": {
        "accelerate.utils": "STR_OPERATION_TO_FUNC",
    },
}

NEVER_CALLED = (
    "CustomArgumentParser PrepareForLaunch TorchTensorParallelPlugin apply_fp8_autowrap calculate_maximum_sizes "
    "check_os_kernel convert_dict_to_env_variables convert_outputs_to_fp32 copy_tensor_to_devices "
    "deepspeed_required ensure_weights_retied fsdp2_apply_ac fsdp2_canonicalize_names "
    "fsdp2_switch_optimizer_parameters get_cpu_distributed_information get_current_device_type get_data_structure "
    "get_fsdp2_grad_scaler get_grad_scaler get_int_from_env get_mixed_precision_context_manager "
    "get_module_children_bottom_up get_pretty_name id_tensor_storage initialize_tensors is_bf16_available "
    "is_lomo_available is_megatron_lm_available is_numpy_available "
    "is_rocm_available is_sagemaker_available is_torch_distributed_available is_tqdm_available "
    "is_weights_only_available listify load_accelerator_state load_custom_state load_fsdp_model "
    "load_fsdp_optimizer parse_choice_from_env parse_flag_from_env prepare_deepspeed_cmd_env "
    "prepare_sagemager_args_inputs prepare_simple_launcher_cmd_env prepare_tpu recursive_getattr release_memory "
    "save_accelerator_state save_custom_state save_fsdp_model save_fsdp_optimizer slice_tensors"
)
"""Functions and classes among these names that no code of this package uses, so that replacing one has no effect."""
