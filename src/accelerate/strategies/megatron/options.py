"""Which options of a `MegatronLMPlugin` can be, and the names that megatron-core has for them."""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from accelerate._base.errors import ConfigurationError
from accelerate._base.imports import require
from accelerate.config.plugins.megatron import SCHEDULE, MegatronLMPlugin

# Arguments of Megatron-LM -> fields of megatron-core's configuration objects.
_RENAMED = {
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "bias_gelu_fusion": "bias_activation_fusion",
    "bias_swiglu_fusion": "bias_activation_fusion",
    "check_for_nan_in_loss_and_grad": "check_for_nan_in_grad",
    "ddp_average_in_collective": "average_in_collective",
    "ddp_bucket_size": "bucket_size",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "fp8_format": "fp8",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
    "norm_epsilon": "layernorm_epsilon",
    "num_experts": "num_moe_experts",
    "use_custom_fsdp": "use_megatron_fsdp",
}
# Arguments that are no fields: the functions below read these ...
_READ_HERE = (
    "DDP_impl activation_function bert_binary_head decoder_num_layers decoder_seq_length embedding_dropout "
    "encoder_num_layers encoder_seq_length global_batch_size group_query_attention lr_warmup_init lr_wsd_decay_iters "
    "lr_wsd_decay_samples lr_wsd_decay_style make_vocab_size_divisible_by max_position_embeddings micro_batch_size "
    "model_type_name num_labels num_layers_per_virtual_pipeline_stage num_micro_batches num_tokentypes openai_gelu "
    "orig_vocab_size override_opt_param_scheduler padded_vocab_size pipeline_model_parallel_split_rank "
    "position_embedding_type pretraining_flag quick_geglu recompute_activations relative_attention_max_distance "
    "relative_attention_num_buckets rope_scaling_factor rotary_base rotary_percent "
    "rotary_seq_len_interpolation_factor scale_decoder_outputs seq_length squared_relu swiglu tensorboard_dir "
    "untie_embeddings_and_output_weights use_checkpoint_opt_param_scheduler use_rope_scaling "
    "use_rotary_position_embeddings"
)
# ... and the strategy these.
_READ_BY_STRATEGY = (
    "consumed_samples create_attention_mask_in_dataloader data_cache_path data_impl data_parallel_size data_path "
    "eod_mask_loss eval_interval eval_iters lr_mult mask_prob megatron_dataset_flag merge_file mmap_warmup mock "
    "mock_data model_return_dict no_load_optim no_save_optim no_wd_decay_cond num_workers reset_attention_mask "
    "reset_position_ids return_logits scale_lr_cond seed short_seq_prob split splits_string test_data_path "
    "tokenizer_model tokenizer_type train_data_path valid_data_path vocab_file weight_map input_names"
)
# Arguments whose options have another name.
_OPTIONS = {
    "tensor_model_parallel_size": "tp_degree",
    "pipeline_model_parallel_size": "pp_degree",
    "use_megatron_fsdp": "use_custom_fsdp",
}
# The first five are degrees.
COUNTS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_micro_batches",
)
_WORDS = {
    "attention_backend": ("flash", "fused", "unfused", "local", "auto"),
    "lr_decay_style": ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    "weight_decay_incr_style": ("constant", "linear", "cosine"),
    "position_embedding_type": ("learned_absolute", "rope", "relative", "none"),
    "activation_function": ("gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu", "silu"),
    "model_type_name": ("gpt", "bert", "t5"),
}
_TRACKER = (
    "Megatron-LM's trainer has this, and megatron-core has no trainer. "
    'Write Accelerator(log_with="tensorboard", project_dir=...)'
)
_PADDING = (
    "the vocabulary is padded so that tp_degree processes can share it, and words that pad it have no probability. "
    "Leave it out"
)
_REFUSED = {
    "make_vocab_size_divisible_by": _PADDING,
    "padded_vocab_size": _PADDING,
    "pipeline_model_parallel_split_rank": "megatron-core 0.16 has no pipelines that are split into encoder and "
    "decoder. Leave it out, and split layers with tp_degree",
    "tensorboard_dir": _TRACKER,
    "set_all_logging_options": _TRACKER,
}
# Argument -> why it needs an accelerator, and what to write.
_NOT_ON_CPU = {
    "pipeline_model_parallel_size": (
        "stages hand over activations on a device's streams",
        "pp_degree=1, and split layers with tp_degree",
    ),
    "num_layers_per_virtual_pipeline_stage": ("there is no pipeline", "num_layers_per_virtual_pipeline_stage=None"),
    "context_parallel_size": ("only Transformer Engine attends over split sequences", "context_parallel_size=1"),
    "expert_model_parallel_size": ("a device's kernels send tokens to experts", "expert_model_parallel_size=1"),
    "use_megatron_fsdp": ("it gathers weights on a device's streams", "a FullyShardedDataParallelPlugin instead"),
    "optimizer_cpu_offload": ("the optimizer is on the CPU already", "optimizer_cpu_offload=False"),
    "overlap_cpu_optimizer_d2h_h2d": ("nothing is copied to the CPU", "overlap_cpu_optimizer_d2h_h2d=False"),
    "use_precision_aware_optimizer": ("only Transformer Engine has it", "use_precision_aware_optimizer=False"),
    "attention_backend": ("its kernels are a device's", "attention_backend='auto'"),
}


def check_options(plugin: MegatronLMPlugin) -> None:
    """Refuse options that no model and no device could have.

    Raises:
        ConfigurationError: A value, or two together, cannot be; the message names them.
    """
    values = values_of(plugin)
    for name, why in _REFUSED.items():
        given = values.get(name, getattr(plugin, name, None))
        if given not in (None, False):
            raise ConfigurationError(f"MegatronLMPlugin({name}={given!r}) cannot work: {why}.")
    for name in COUNTS:
        if not isinstance(values[name], int) or values[name] < 1:
            raise ConfigurationError(f"{as_given(values, name)} is no number of processes or parts. Write 1 or more.")
    for name, words in _WORDS.items():
        if name in values:
            _check_word(name, values[name], words)
    if values["num_layers_per_virtual_pipeline_stage"] and values["pipeline_model_parallel_size"] == 1:
        raise ConfigurationError(
            f"{as_given(values, 'num_layers_per_virtual_pipeline_stage')} splits the stages of a pipeline, and there is "
            "none. Write pp_degree=2 or more, or leave it out."
        )
    for name in ("use_megatron_fsdp", "use_precision_aware_optimizer"):
        if values[name] and not values["use_distributed_optimizer"]:
            raise ConfigurationError(
                f"{as_given(values, name)} shards the states of the optimizer, which only the distributed one does. "
                "Write use_distributed_optimizer=True too."
            )
    for prefix in ("train", "lr_decay", "lr_warmup"):
        names = [name for name in (f"{prefix}_iters", f"{prefix}_samples", f"{prefix}_fraction") if values.get(name)]
        if len(names) > 1:
            both = ", ".join(f"{name}={values[name]!r}" for name in names)
            raise ConfigurationError(f"MegatronLMPlugin({both}) says one thing twice. Give one of them.")
    recompute(values)
    check_names("other_megatron_args", plugin.other_megatron_args or {})


def recompute(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is computed again in backward: what is given, and what that needs.

    Raises:
        ConfigurationError: The options contradict each other.
    """
    method, num_layers = values.get("recompute_method"), values.get("recompute_num_layers")
    granularity = values.get("recompute_granularity")
    if granularity is None and values.get("recompute_activations"):
        granularity = "selective"
    if granularity is None and (method is not None or num_layers is not None):
        granularity = "full"
    if granularity == "full":
        method, num_layers = method or "uniform", num_layers or 1
    if granularity == "selective" and num_layers is not None:
        raise ConfigurationError(
            f"MegatronLMPlugin(recompute_num_layers={num_layers!r}) counts layers that are computed again as a whole, "
            "and selective recomputation takes parts of all layers. Write recompute_granularity='full', or leave the "
            "number out."
        )
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
    return dict(zip(names, (granularity, method, num_layers), strict=True))


def renamed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments under megatron-core's names."""
    return {_RENAMED.get(name, name): value for name, value in arguments.items()}


def values_of(plugin: MegatronLMPlugin) -> dict[str, Any]:
    """Return a copy of the arguments under megatron-core's names; those that win over all others stand last."""
    values = {name: getattr(plugin, name) for name in SCHEDULE}
    values |= {**renamed(plugin.megatron_lm_default_args), **renamed(plugin.other_megatron_args or {})}
    backend = getattr(values["attention_backend"], "name", values["attention_backend"])
    values["attention_backend"] = {True: "auto", False: "local"}[backend] if isinstance(backend, bool) else backend
    return values


def as_given(values: Mapping[str, Any], name: str) -> str:
    """Return an option as a program writes it."""
    return f"MegatronLMPlugin({_OPTIONS.get(name, name)}={values[name]!r})"


def _check_word(name: str, word: object, words: tuple[str, ...]) -> None:
    if word not in words:
        near = difflib.get_close_matches(str(word), words, n=1, cutoff=0)[0]
        raise ConfigurationError(
            f"MegatronLMPlugin({name}={word!r}) is nothing that megatron-core knows. Write {near!r}, or another of "
            f"{', '.join(words)}."
        )


def check_names(owner: str, names: Iterable[str]) -> None:
    """Refuse an argument that would reach nobody.

    Raises:
        ConfigurationError: A name is unknown; the message has the nearest one.
    """
    known = {*_RENAMED, *SCHEDULE, *_READ_HERE.split(), *_READ_BY_STRATEGY.split()}
    rest = set(names) - known
    for module, kind in (
        ("transformer.transformer_config", "TransformerConfig"),
        ("optimizer", "OptimizerConfig"),
        ("distributed", "DistributedDataParallelConfig"),
        ("datasets.gpt_dataset", "GPTDatasetConfig"),
    ):
        # Each takes its time to import, so the next one is looked at only for what is not found before.
        if rest:
            known |= fields_of(getattr(core(module), kind))
            rest -= known
    for name in sorted(rest):
        near = difflib.get_close_matches(str(name), sorted(known), n=1, cutoff=0)[0]
        raise ConfigurationError(
            f"MegatronLMPlugin.{owner} holds {name!r}, which is no argument of Megatron-LM that megatron-core has. "
            f"Write {near!r} if that is meant, or leave it out."
        )


def core(module: str) -> ModuleType:
    """Import a module of megatron-core.

    Raises:
        MissingPackageError: It is not installed.
    """
    with quiet_imports():
        return require(f"megatron.core.{module}", why="MegatronLMPlugin", extra="megatron")


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Import modules of megatron-core without what that does to a program.

    It warns of every package for accelerators that is not there, and lets `torch.load(weights_only=True)` trust further
    classes, in every file that the program reads (megatron-core 0.16.1).
    """
    trusted = torch.serialization.get_safe_globals()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(trusted)


def fields_of(kind: type[Any]) -> set[str]:
    """Return the names of the fields that a configuration object takes."""
    return {item.name for item in dataclasses.fields(kind) if item.init and not item.name.startswith("_")}


def check_device(plugin: MegatronLMPlugin, device_type: str, mixed_precision: str) -> None:
    """Refuse what a device cannot do.

    Raises:
        ConfigurationError: An option needs another device, or a precision another name.
    """
    if mixed_precision == "fp8":
        raise ConfigurationError(
            "mixed_precision='fp8' has no meaning with MegatronLMPlugin, because Transformer Engine decides on the "
            "format. Write mixed_precision='bf16' and other_megatron_args={'fp8': 'hybrid'}."
        )
    if device_type != "cpu":
        return
    if mixed_precision == "fp16":
        raise ConfigurationError(
            "mixed_precision='fp16' cannot train on the CPU, where nothing scales the loss. "
            "Write mixed_precision='bf16'."
        )
    values = values_of(plugin)
    for name in ("bf16", "fp16", "fp8", "fp8_format", "fp4", "params_dtype"):
        if name in (plugin.other_megatron_args or {}):
            raise ConfigurationError(
                f"MegatronLMPlugin(other_megatron_args={{{name!r}: {(plugin.other_megatron_args or {})[name]!r}}}) cannot work on the CPU: weights "
                "stay in 32 bits there. Write Accelerator(mixed_precision='bf16') instead."
            )
    for name, (why, instead) in _NOT_ON_CPU.items():
        value = values[name]
        match value:
            case bool() | None:
                needed = bool(value)
            case int():
                needed = value > 1 or name.startswith("num_layers")
            case _:
                needed = value in ("flash", "fused")
        if needed:
            raise ConfigurationError(
                f"{as_given(values, name)} needs an accelerator, and this is the CPU: {why}. Write {instead}."
            )
