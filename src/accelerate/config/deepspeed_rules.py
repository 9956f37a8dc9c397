"""What DeepSpeed accepts in its configuration: names of entries, their values, and what excludes what."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from accelerate._base.errors import ConfigurationError
from accelerate._base.untrusted import shown

AUTO = "auto"
TOTAL, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
BATCH_SIZES = (TOTAL, MICRO, ACCUMULATION)
MISSING: Any = object()
# To look for what each name is near to takes a millisecond.
_MOST_UNKNOWN = 100


def look_up(config: Any, name: str, default: Any = None) -> Any:
    """Return the value under a dotted name."""
    node = config
    for part in name.split("."):
        node = node.get(part, MISSING) if isinstance(node, Mapping) else MISSING
    return default if node is MISSING else node


def unreadable(given: Any, reason: str, remedy: str) -> ConfigurationError:
    """Return the error for something that holds no configuration."""
    return ConfigurationError(f"{shown(given)} is not a configuration of DeepSpeed: {reason}. {remedy}.")


_TRUE = {"1", "on", "t", "true", "y", "yes"}
_FALSE = {"0", "off", "f", "false", "n", "no"}
_DEVICES = ("none", "cpu", "nvme")
# DeepSpeed's own and those of torch, which it takes by name.
SCHEDULERS = (
    *("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"),
    *("LambdaLR", "MultiplicativeLR", "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR"),
    *("SequentialLR", "CosineAnnealingLR", "ChainedScheduler", "ReduceLROnPlateau", "CyclicLR"),
    *("CosineAnnealingWarmRestarts", "OneCycleLR", "PolynomialLR", "LRScheduler"),
)
# Also those that newer versions have removed: DeepSpeed names what replaces them.
ENTRIES = (
    *BATCH_SIZES,
    *("managed_gradient_accumulation", "steps_per_print", "dump_state", "disable_python_gc", "disable_allgather"),
    *("communication_data_type", "seq_parallel_communication_data_type", "prescale_gradients"),
    *("gradient_predivide_factor", "gradient_allreduce_op", "gradient_clipping", "zero_optimization", "allgather_size"),
    *("activation_checkpointing", "comms_logger", "tensorboard", "wandb", "csv_monitor", "comet"),
    *("fp16", "bf16", "bfloat16", "torch_autocast", "optimizer", "scheduler", "zero_allow_untested_optimizer"),
    *("zero_force_ds_cpu_optimizer", "flops_profiler", "wall_clock_breakdown", "memory_breakdown", "autotuning"),
    *("use_data_before_expert_parallelism", "hybrid_engine", "pipeline", "data_efficiency", "checkpoint", "data_types"),
    *("aio", "dataloader_drop_last", "log_level", "datastates_ckpt", "weight_quantization", "compile", "timers"),
    *("tensor_parallel", "expert_parallel", "vocabulary_size", "sequence_parallel_size", "msamp", "elasticity"),
    *("nebula", "compression_training", "amp", "quantize_training", "sparse_gradients", "eigenvalue"),
    *("sparse_attention", "graph_harvesting", "curriculum_learning", "progressive_layer_drop"),
)
ZERO_ENTRIES = (
    *("stage", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce"),
    *("allgather_partitions", "allgather_bucket_size", "overlap_comm", "compute_grad_norm", "load_from_fp32_weights"),
    *("elastic_checkpoint", "offload_param", "offload_optimizer", "zenflow", "sub_group_size", "cpu_offload_param"),
    *("cpu_offload_use_pin_memory", "cpu_offload", "stage3_prefetch_bucket_size", "prefetch_bucket_size"),
    *("stage3_param_persistence_threshold", "param_persistence_threshold", "stage3_model_persistence_threshold"),
    *("model_persistence_threshold", "stage3_max_live_parameters", "max_live_parameters"),
    *("stage3_max_reuse_distance", "max_reuse_distance", "stage3_gather_16bit_weights_on_model_save"),
    *("gather_16bit_weights_on_model_save", "stage3_module_granularity_threshold", "module_granularity_threshold"),
    *("stage3_use_all_reduce_for_fetch_params", "use_all_reduce_for_fetch_params", "stage3_allgather_sequential"),
    *("allgather_sequential", "stage3_gather_fp16_weights_on_model_save", "ignore_unused_parameters"),
    *("legacy_stage1", "round_robin_gradients", "parameter_alignment", "zero_hpz_partition_size"),
    *("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
    *("memory_efficient_linear", "pipeline_loading_checkpoint", "override_module_apply", "log_trace_cache_warnings"),
    *("enable_sanity_checks", "save_muon_momentum_buffer_in_memory", "leaf_module", "mics_shard_size"),
    *("mics_hierarchical_params_gather", "zeropp_loco_param"),
)


def _is_whole(value: Any, least: int) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and value % 1 == 0 and value >= least


def _reads_as_whole(value: Any, least: int) -> bool:
    """Say whether DeepSpeed's sections read a value as a whole number: they take text and booleans as well."""
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        return False
    return isinstance(number, bool) or _is_whole(number, least)


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 <= value < math.inf


def _reads_as_number(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and _is_number(float(value))
    except (TypeError, ValueError, OverflowError):
        return False


def _reads_as_flag(value: Any) -> bool:
    return value in (True, False) if not isinstance(value, str) else value.lower() in _TRUE | _FALSE


def _is_stage(value: Any) -> bool:
    return value in (0, 1, 2, 3) if not isinstance(value, str) else value in ("0", "1", "2", "3")


def _is_on(value: Any) -> bool:
    """Say whether a flag that DeepSpeed can read is on; one that waits is not."""
    return value.lower() in _TRUE if isinstance(value, str) else bool(value)


def is_word(value: Any, words: tuple[str, ...], *, any_case: bool = False) -> bool:
    """Say whether a value is one of a few texts."""
    return isinstance(value, str) and (value.lower() if any_case else value) in words


Rule = tuple[Callable[[Any], bool], str, str]
"""Whether a value is right, what a right one is, and what to write."""
_COUNT: Rule = (partial(_is_whole, least=1), "a whole number from 1 on", 'one, or "auto"')
_FLAG: Rule = (_reads_as_flag, "a yes or no", 'true, false or "auto"')
_SIZE: Rule = (
    partial(_reads_as_whole, least=0),
    "a whole number from 0 on",
    'one without quotes, such as 500000000, or "auto"',
)
_DEVICE: Rule = (partial(is_word, words=_DEVICES), "a place to offload to", '"none", "cpu" or "nvme"')
_PATH: Rule = (lambda value: isinstance(value, (str, Path)), "a path", "the path of a folder on an NVMe disk")
_FORMAT: Rule = (
    partial(is_word, words=("fp16", "bf16", "fp32"), any_case=True),
    "a number format",
    '"fp16", "bf16" or "fp32"',
)
_TYPE: Rule = (lambda value: isinstance(value, str) and value != AUTO, "a name", 'one, such as "AdamW"')
_RULES: dict[str, Rule] = {
    **dict.fromkeys(BATCH_SIZES, _COUNT),
    "gradient_clipping": (_is_number, "a number from 0 on", 'one, such as 1.0, 0 to clip nothing, or "auto"'),
    "communication_data_type": _FORMAT,
    "gradient_allreduce_op": (
        partial(is_word, words=("mean", "sum"), any_case=True),
        "a way to reduce gradients",
        '"mean" or "sum"',
    ),
    "fp16.enabled": _FLAG,
    "bf16.enabled": _FLAG,
    "bfloat16.enabled": _FLAG,
    "fp16.loss_scale": (_reads_as_number, "a number from 0 on", "one, or 0 for a scale that adapts"),
    "zero_optimization.stage": (_is_stage, "a stage of ZeRO", "0, 1, 2 or 3"),
    "zero_optimization.offload_optimizer.device": _DEVICE,
    "zero_optimization.offload_optimizer.nvme_path": _PATH,
    "zero_optimization.offload_param.device": _DEVICE,
    "zero_optimization.offload_param.nvme_path": _PATH,
    "zero_optimization.reduce_bucket_size": (
        partial(_reads_as_whole, least=1),
        "a whole number from 1 on",
        'one without quotes, such as 500000000, or "auto"',
    ),
    "zero_optimization.allgather_bucket_size": _SIZE,
    "zero_optimization.sub_group_size": _SIZE,
    "zero_optimization.stage3_prefetch_bucket_size": _SIZE,
    "zero_optimization.stage3_param_persistence_threshold": _SIZE,
    "zero_optimization.stage3_max_live_parameters": _SIZE,
    "zero_optimization.stage3_max_reuse_distance": _SIZE,
    "zero_optimization.overlap_comm": _FLAG,
    "zero_optimization.contiguous_gradients": _FLAG,
    "zero_optimization.reduce_scatter": _FLAG,
    "zero_optimization.allgather_partitions": _FLAG,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _FLAG,
    "optimizer.type": _TYPE,
    "scheduler.type": (
        partial(is_word, words=SCHEDULERS),
        "a schedule of DeepSpeed or torch",
        '"WarmupLR" or another one',
    ),
}
_SECTIONS = (
    *("zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param"),
    *("fp16", "bf16", "bfloat16", "optimizer", "optimizer.params", "scheduler", "scheduler.params"),
)
# Entries that DeepSpeed takes as not given where they are null.
_NULLABLE = {
    *(
        *BATCH_SIZES,
        "bf16",
        "bfloat16",
        "communication_data_type",
        "optimizer.params",
        "zero_optimization.overlap_comm",
    ),
    *(f"zero_optimization.offload_{what}{part}" for what in ("optimizer", "param") for part in ("", ".nvme_path")),
}
_NEVER_AUTO = {"optimizer.type", "scheduler.type"}


def check(config: Any, place: str) -> None:
    """Refuse what DeepSpeed cannot work with, as far as the configuration alone shows it.

    Args:
        place: Where it comes from, for the message.

    Raises:
        ConfigurationError: Something is wrong; every fault is named with its entry, value and remedy.
    """
    if not isinstance(config, Mapping):
        raise unreadable(config, f"{place} is of type {type(config).__name__}", "Write an object of entries")
    faults = list(find_faults(config))
    if "zero_optimization" not in config and not any("'zero_optimization'" in fault for fault in faults):
        names = ", ".join(map(repr, config)) or "none"
        faults.append(
            f"the entries are {names}, but not 'zero_optimization', which says what is sharded. "
            'Add it, such as {"stage": 2}.'
        )
    refuse(faults, place)


def refuse(faults: list[str], place: str) -> None:
    """Name every fault in one error, if there are any.

    Raises:
        ConfigurationError: There are.
    """
    if len(faults) == 1:
        raise ConfigurationError(f"{place}: {faults[0]}")
    if faults:
        lines = "".join(f"\n- {fault}" for fault in faults)
        raise ConfigurationError(f"{place} has {len(faults)} faults:{lines}")


def find_faults(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for everything that is wrong with the entries that are there."""
    yield from _misspelt(config, "", ENTRIES)
    for name in _SECTIONS:
        value = look_up(config, name, MISSING)
        if value is not MISSING and not isinstance(value, Mapping) and not (value is None and name in _NULLABLE):
            yield f"{name}={value!r} is not an object. Write its entries in braces, such as {{{_example(name)}}}."
    zero = config.get("zero_optimization")
    if isinstance(zero, Mapping):
        yield from _misspelt(zero, "zero_optimization.", ZERO_ENTRIES)
    wrong = [*wrong_values(config)]
    yield from wrong
    if not wrong:  # what follows calculates with the values
        yield from _contradictions_inside(config)


def _example(section: str) -> str:
    examples = {"zero_optimization": '"stage": 2', "optimizer": '"type": "AdamW"', "scheduler": '"type": "WarmupLR"'}
    default = '"device": "cpu"' if "offload" in section else '"enabled": "auto"'
    return examples.get(section, '"lr": "auto"' if section.endswith("params") else default)


def _misspelt(section: Mapping[str, Any], prefix: str, known: tuple[str, ...]) -> Iterator[str]:
    """Yield names that are near a known one; others may belong to another version of DeepSpeed."""
    unknown = [(name, value) for name, value in section.items() if name not in known]
    for name, value in unknown[:_MOST_UNKNOWN]:
        near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.8)
        if near and near[0] not in section:
            shown = f"={value!r}" if not isinstance(value, Mapping) else ""
            yield f"{prefix}{name}{shown} is no entry of DeepSpeed's. Write '{near[0]}', if that is meant."


def wrong_values(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for every entry whose value alone shows that it is wrong."""
    for name, (is_right, meaning, remedy) in _RULES.items():
        value = look_up(config, name, MISSING)
        waits = is_word(value, (AUTO,)) and name not in _NEVER_AUTO
        if value is MISSING or waits or (value is None and name in _NULLABLE):
            continue
        if not is_right(value):
            near = difflib.get_close_matches(value, SCHEDULERS, n=1) if isinstance(value, str) else []
            yield f"{name}={value!r} is not {meaning}. Write {repr(near[0]) if near else remedy}."


def _contradictions_inside(config: Mapping[str, Any]) -> Iterator[str]:
    for section in ("optimizer", "scheduler"):
        entry = config.get(section)
        if isinstance(entry, Mapping) and "type" not in entry:
            example = "AdamW" if section == "optimizer" else "WarmupLR"
            yield f'{section}={dict(entry)!r} has no type, so DeepSpeed would ignore it. Add "type": "{example}".'
    norm = look_up(config, "optimizer.params.max_grad_norm", MISSING)
    if norm is not MISSING:
        yield f"optimizer.params.max_grad_norm={norm!r} is not an option of an optimizer here. Write gradient_clipping."
    bf16 = "bf16" if config.get("bf16") is not None else "bfloat16"
    if all(_is_on(look_up(config, f"{name}.enabled")) for name in ("fp16", bf16)):
        on = look_up(config, "fp16.enabled")
        yield (
            f"fp16.enabled={on!r} and {bf16}.enabled={look_up(config, f'{bf16}.enabled')!r} exclude each other: weights "
            'have one format. Set one of them to false, or both to "auto".'
        )
    yield from _offload_faults(config)
    yield from _batch_faults(config)


def _offload_faults(config: Mapping[str, Any]) -> Iterator[str]:
    for what in ("optimizer", "param"):
        place = f"zero_optimization.offload_{what}"
        path = look_up(config, f"{place}.nvme_path")
        if look_up(config, f"{place}.device") == "nvme" and path in (None, "", "none"):
            yield (
                f"{place}.device='nvme' needs a folder, and {place}.nvme_path is {path!r}. "
                "Add the path of a folder on an NVMe disk."
            )


def _batch_faults(config: Mapping[str, Any]) -> Iterator[str]:
    total, *others = (look_up(config, name) for name in BATCH_SIZES)
    known = {name: value for name, value in zip(BATCH_SIZES[1:], others, strict=True) if value not in (None, AUTO)}
    product = math.prod(known.values())
    if total not in (None, AUTO) and total % product:
        shown = " times ".join(f"{name}={value!r}" for name, value in known.items())
        yield (
            f"train_batch_size={total!r} is no multiple of {shown}, and it is that times the number of processes. "
            'Write one of them as "auto".'
        )
