"""What megatron-core is told: its configuration objects, from a `MegatronLMPlugin` and a Transformers model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from accelerate._base.errors import ConfigurationError
from accelerate._base.imports import require
from accelerate.config.plugins.megatron import MegatronLMPlugin
from accelerate.strategies.megatron.options import (
    COUNTS,
    as_given,
    check_device,
    check_names,
    check_options,
    core,
    fields_of,
    recompute,
    renamed,
    values_of,
)
from accelerate.strategies.megatron.schedules import schedule_of
from accelerate.strategies.megatron.weights import padded_rows

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["Degrees", "MegatronConfigs", "ModelArguments", "check_options", "degrees_of", "gelu_tanh", "translate"]

# Fused kernels are those of accelerators, and so is the other place where weights can be made.
_ON_CPU = {
    "use_cpu_initialization": True,
    "transformer_impl": "local",
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "cross_entropy_loss_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
}
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


# --- what comes out ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Degrees:
    """Over how many processes each part of the work is split.

    Args:
        virtual_pipeline: Stages of each process of a pipeline; None for one.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual_pipeline: int | None = None

    def data_parallel(self, world_size: int) -> int:
        """Return the number of replicas of the model.

        Raises:
            ConfigurationError: The processes cannot be shared out evenly.
        """
        model = self.tensor * self.pipeline * self.context
        if world_size % model:
            raise ConfigurationError(
                f"MegatronLMPlugin(tp_degree={self.tensor}, pp_degree={self.pipeline}, "
                f"context_parallel_size={self.context}) needs a multiple of {model} processes, and there are "
                f"{world_size}. Start {math.ceil(world_size / model) * model} of them, or lower a degree."
            )
        experts = self.expert * self.expert_tensor * self.pipeline
        if world_size % experts:
            raise ConfigurationError(
                f"MegatronLMPlugin(expert_model_parallel_size={self.expert}, "
                f"expert_tensor_parallel_size={self.expert_tensor}, pp_degree={self.pipeline}) needs a multiple of "
                f"{experts} processes, and there are {world_size}. Write expert_model_parallel_size=1 and "
                "expert_tensor_parallel_size=1, or start more processes."
            )
        return world_size // model


@dataclass(frozen=True)
class ModelArguments:
    """What the models of megatron-core are told beside a `TransformerConfig`.

    Args:
        vocab_size: Words that there are; `padded_vocab_size` rows, the same number on each process, hold them.
        sequence_length: That of a batch; of the encoder's batch where there are two.
        num_decoder_layers: Layers of a T5's decoder; `TransformerConfig.num_layers` are its encoder's.
        num_tokentypes: Kinds of tokens of a BERT.
        is_pretraining: A BERT predicts masked words.
        embedding_dropout: Dropout after the embeddings, which megatron-core takes from `hidden_dropout`.
        output_scale: What hidden states are multiplied by before the output layer; T5 alone has another than 1.
    """

    family: str
    vocab_size: int
    padded_vocab_size: int
    max_sequence_length: int
    sequence_length: int
    decoder_sequence_length: int | None
    share_embeddings: bool
    position_embedding_type: str
    rotary_percent: float
    rotary_base: float
    rope_scaling: bool
    rope_scaling_factor: float
    seq_len_interpolation_factor: float | None
    relative_attention_num_buckets: int
    relative_attention_max_distance: int
    num_decoder_layers: int | None
    num_tokentypes: int
    add_binary_head: bool
    num_labels: int
    is_pretraining: bool
    embedding_dropout: float
    output_scale: float


@dataclass(frozen=True)
class MegatronConfigs:
    """All that megatron-core is told.

    Args:
        schedule: The arguments of `OptimizerParamScheduler` beside the optimizer, in steps of the optimizer.
        num_micro_batches: Parts of a batch that go through the model one by one.
        micro_batch_size: Samples of such a part, where they are known.
    """

    degrees: Degrees
    transformer: TransformerConfig
    model: ModelArguments
    ddp: DistributedDataParallelConfig
    optimizer: OptimizerConfig | None
    schedule: dict[str, Any] | None
    num_micro_batches: int
    micro_batch_size: int | None


# --- the way there ----------------------------------------------------------------------------------------------------


def degrees_of(plugin: MegatronLMPlugin) -> Degrees:
    """Return the degrees that the options say.

    Raises:
        ConfigurationError: The layers, where they are known, do not fill the stages of the pipeline evenly.
    """
    values = values_of(plugin)
    pipeline, part = values["pipeline_model_parallel_size"], values["num_layers_per_virtual_pipeline_stage"]
    virtual = values.get("virtual_pipeline_model_parallel_size")
    if virtual is None and part and "num_layers" in values:
        if values["num_layers"] % (pipeline * part):
            raise ConfigurationError(
                f"{as_given(values, 'num_layers_per_virtual_pipeline_stage')} with pp_degree={pipeline} needs a multiple "
                f"of {pipeline * part} layers, and the model has {values['num_layers']}. Write another number."
            )
        # One stage in each process is a pipeline as any other.
        virtual = values["num_layers"] // (pipeline * part) if values["num_layers"] > pipeline * part else None
    tensor, pipeline, context, expert, expert_tensor = (values[name] for name in COUNTS[:5])
    return Degrees(tensor, pipeline, context, expert, expert_tensor, virtual)


def translate(
    plugin: MegatronLMPlugin,
    model: Any | None,
    batch: Mapping[str, Any] | None = None,
    *,
    device_type: str = "cpu",
    mixed_precision: str = "no",
    micro_batch_size: int | None = None,
    world_size: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
) -> MegatronConfigs:
    """Make the configuration objects of megatron-core; the plugin's arguments are completed on the way.

    Args:
        model: A Transformers model, or what has a `config` of one; None where the arguments say the sizes already.
        batch: A batch, whose sequences have the length of all where none is given.
        optimizer: torch's Adam, AdamW or SGD.
        scheduler: A `MegatronLMDummyScheduler`.

    Raises:
        ConfigurationError: megatron-core cannot do what is asked; the message says what to write.
        MissingPackageError: megatron-core is not installed.
    """
    check_device(plugin, device_type, mixed_precision)
    check_options(plugin)
    plugin.set_mixed_precision(mixed_precision)
    if model is not None:
        plugin.set_network_size_args(model, batch)
    degrees = degrees_of(plugin)
    replicas = degrees.data_parallel(world_size)
    plugin.megatron_lm_default_args["data_parallel_size"] = replicas
    if micro_batch_size is not None:
        plugin.set_training_args(micro_batch_size, replicas)
    if optimizer is not None:
        plugin.set_optimizer_type(optimizer)
    if scheduler is not None:
        plugin.set_scheduler_args(scheduler)
    check_names("megatron_lm_default_args", plugin.megatron_lm_default_args)
    check_options(plugin)

    values = values_of(plugin)
    others = renamed(plugin.other_megatron_args or {})
    dtype = torch.float32 if device_type == "cpu" else _HALF.get(_precision(values), torch.float32)
    values |= {name: half == dtype for name, half in _HALF.items()}
    values.setdefault("params_dtype", dtype)
    if device_type == "cpu":
        values.update({name: value for name, value in _ON_CPU.items() if name not in others})
        # The processes of a CPU keep whole states, as they keep whole gradients.
        values["use_distributed_optimizer"] = False
    made = _model_arguments(values, degrees)
    _check_sizes(values, made, degrees, with_batch=batch is not None)
    return MegatronConfigs(
        degrees=degrees,
        transformer=_transformer(values, degrees),
        model=made,
        ddp=_ddp(values),
        optimizer=None if optimizer is None else _optimizer(values),
        schedule=None if optimizer is None else schedule_of(values, needed=scheduler is not None),
        num_micro_batches=values["num_micro_batches"],
        micro_batch_size=micro_batch_size,
    )


# --- the objects ------------------------------------------------------------------------------------------------------


def _make(module: str, kind: str, values: Mapping[str, Any]) -> Any:
    """Make a configuration object from the arguments that it has."""
    made = getattr(core(module), kind)
    taken = {name: values[name] for name in sorted(fields_of(made)) if values.get(name) is not None}
    with warnings.catch_warnings():
        # It warns of its own defaults.
        warnings.simplefilter("ignore")
        try:
            return made(**taken)
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"megatron-core refuses its {kind}: {str(error).rstrip('.')}. Change what this names, among the options of "
                "MegatronLMPlugin or in its other_megatron_args."
            ) from error


def _precision(values: Mapping[str, Any]) -> str:
    return next((name for name in _HALF if values.get(name)), "no")


def gelu_tanh(hidden: torch.Tensor) -> torch.Tensor:
    """Compute GELU by its formula with tanh, as GPT-2 does."""
    return functional.gelu(hidden, approximate="tanh")


def _activation(values: Mapping[str, Any]) -> dict[str, Any]:
    if "activation_func" in values:
        return {}
    short = {"swiglu": "silu", "quick_geglu": "quick_gelu", "squared_relu": "squared_relu", "openai_gelu": "gelu_tanh"}
    flag = next((name for name in short if values.get(name)), None)
    name = short[flag] if flag is not None else values.get("activation_function", "gelu")
    functions: dict[str, Callable[..., Any]] = {
        "gelu": functional.gelu,
        "gelu_tanh": gelu_tanh,
        "relu": functional.relu,
        "silu": functional.silu,
    }
    if name not in functions:
        functions["quick_gelu"] = core("fusions.fused_bias_geglu").quick_gelu
        functions["squared_relu"] = core("activations").squared_relu
    gated = flag in ("swiglu", "quick_geglu") or bool(values.get("gated_linear_unit"))
    return {"activation_func": functions[name], "gated_linear_unit": gated}


def _transformer(values: Mapping[str, Any], degrees: Degrees) -> TransformerConfig:
    backends = core("transformer.enums").AttnBackend
    return _make(
        "transformer.transformer_config",
        "TransformerConfig",
        {
            # Its default is a word that it warns of; this means the same.
            "cuda_graph_scope": [],
            "pipeline_dtype": values["params_dtype"],
            **values,
            **_activation(values),
            **recompute(values),
            "attention_backend": backends[values["attention_backend"]],
            "num_query_groups": _num_query_groups(values),
            "sequence_parallel": bool(values["sequence_parallel"]) and degrees.tensor > 1,
            "virtual_pipeline_model_parallel_size": degrees.virtual_pipeline,
        },
    )


def _need(values: Mapping[str, Any], name: str) -> Any:
    if values.get(name) is None:
        raise ConfigurationError(
            f"Nothing says the model's {name!r}. Write it into plugin.megatron_lm_default_args, in the parser that is "
            "registered for this type of model or by hand."
        )
    return values[name]


def _num_query_groups(values: Mapping[str, Any]) -> int:
    grouped = values.get("num_query_groups") if values.get("group_query_attention", True) else None
    return int(grouped or _need(values, "num_attention_heads"))


def _positions(values: Mapping[str, Any]) -> str:
    """Return the kind of positions: the model's, which nobody can change by an option."""
    rotary = values.get("use_rotary_position_embeddings")
    kind = str(values.get("position_embedding_type") or ("rope" if rotary else "learned_absolute"))
    if rotary is not None and rotary != (kind == "rope"):
        raise ConfigurationError(
            f"MegatronLMPlugin(use_rotary_position_embeddings={rotary!r}) cannot be: the positions of this model are of "
            f"the kind {kind!r}, and its weights were made for them. Leave the option out."
        )
    return kind


def _model_arguments(values: Mapping[str, Any], degrees: Degrees) -> ModelArguments:
    family, vocab_size = _need(values, "model_type_name"), _need(values, "orig_vocab_size")
    two_lengths = family == "t5"
    scaled = values.get("scale_decoder_outputs")
    return ModelArguments(
        family=family,
        vocab_size=vocab_size,
        padded_vocab_size=padded_rows(vocab_size, degrees.tensor),
        max_sequence_length=_need(values, "max_position_embeddings"),
        sequence_length=_need(values, "encoder_seq_length" if two_lengths else "seq_length"),
        decoder_sequence_length=_need(values, "decoder_seq_length") if two_lengths else None,
        share_embeddings=not values.get("untie_embeddings_and_output_weights", False),
        position_embedding_type=_positions(values),
        rotary_percent=values.get("rotary_percent", 1.0),
        rotary_base=values.get("rotary_base", 10000.0),
        rope_scaling=values.get("use_rope_scaling", False),
        rope_scaling_factor=values.get("rope_scaling_factor", 8.0),
        seq_len_interpolation_factor=values.get("rotary_seq_len_interpolation_factor"),
        relative_attention_num_buckets=values.get("relative_attention_num_buckets", 32),
        relative_attention_max_distance=values.get("relative_attention_max_distance", 128),
        num_decoder_layers=values.get("decoder_num_layers", values.get("num_layers")) if two_lengths else None,
        num_tokentypes=values.get("num_tokentypes", 2 if family == "bert" else 0),
        add_binary_head=values.get("bert_binary_head", family == "bert"),
        num_labels=values.get("num_labels", 2),
        is_pretraining=values.get("pretraining_flag", True),
        embedding_dropout=values.get("embedding_dropout", values.get("hidden_dropout", 0.1)),
        output_scale=_need(values, "hidden_size") ** -0.5 if scaled else 1.0,
    )


def _check_sizes(values: Mapping[str, Any], model: ModelArguments, degrees: Degrees, *, with_batch: bool) -> None:
    """Refuse sizes that the degrees do not divide, each by its own name."""
    num_layers, hidden = _need(values, "num_layers"), _need(values, "hidden_size")
    expert, shared = (values.get(f"moe_{name}") or 0 for name in ("ffn_hidden_size", "shared_expert_intermediate_size"))
    stages = (
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "pipeline_model_parallel_layout",
    )
    uneven = any(values.get(name) for name in stages)
    for what, size, option, degree in (
        ("attention heads", _need(values, "num_attention_heads"), "tp_degree", degrees.tensor),
        ("groups of queries (heads of keys and values)", _num_query_groups(values), "tp_degree", degrees.tensor),
        ("columns of an MLP", values.get("ffn_hidden_size") or 4 * hidden, "tp_degree", degrees.tensor),
        ("layers", 0 if uneven else num_layers, "pp_degree", degrees.pipeline),
        ("experts", values.get("num_moe_experts") or 0, "expert_model_parallel_size", degrees.expert),
        ("columns of an expert", expert, "expert_tensor_parallel_size", degrees.expert_tensor),
        ("columns of the shared experts", shared, "tp_degree", degrees.tensor),
    ):
        if size % degree:
            fits = max(part for part in range(1, degree) if size % part == 0)
            raise ConfigurationError(
                f"MegatronLMPlugin({option}={degree}) cannot share out {size} {what} evenly. "
                f"Write {option}={fits}, or another divisor of {size}."
            )
    if model.family == "t5" and degrees.pipeline > 1:
        raise ConfigurationError(
            f"MegatronLMPlugin(pp_degree={degrees.pipeline}) cannot hold an encoder and a decoder, because megatron-core "
            "0.16 has no such pipelines. Write pp_degree=1, and split layers with tp_degree."
        )
    if degrees.expert > 1 and not values.get("num_moe_experts"):
        raise ConfigurationError(
            f"MegatronLMPlugin(expert_model_parallel_size={degrees.expert}) shares out experts, and this model has none. "
            "Write expert_model_parallel_size=1."
        )
    if values.get("num_moe_experts") and degrees.tensor > 1 and not values["sequence_parallel"]:
        raise ConfigurationError(
            f"MegatronLMPlugin(tp_degree={degrees.tensor}) with experts needs sequences that are split too, because "
            "megatron-core routes each token once. Write sequence_parallelism=True."
        )
    longest = model.max_sequence_length
    if model.position_embedding_type == "learned_absolute" and model.sequence_length > longest:
        raise ConfigurationError(
            f"Sequences of length {model.sequence_length} do not fit a model that has learned {longest} positions. "
            f"Write MegatronLMPlugin(seq_length={longest}), and cut the batches to that."
        )
    parts = degrees.tensor if values["sequence_parallel"] and degrees.tensor > 1 else 1
    # Ranks of split sequences take one part from the front and one from the back, so that causal work is even.
    parts *= 2 * degrees.context if degrees.context > 1 else 1
    for length in (model.sequence_length, model.decoder_sequence_length or 0) if with_batch else ():
        if length % parts:
            raise ConfigurationError(
                f"Sequences of length {length} cannot be split into {parts} equal parts, as MegatronLMPlugin("
                f"sequence_parallelism={values['sequence_parallel']!r}, tp_degree={degrees.tensor}, "
                f"context_parallel_size={degrees.context}) asks. Pad them to {math.ceil(length / parts) * parts}."
            )


def _ddp(values: Mapping[str, Any]) -> DistributedDataParallelConfig:
    defaults = {"grad_reduce_in_fp32": values["bf16"]}
    if values["use_megatron_fsdp"]:
        # Its own default shards nothing.
        defaults["data_parallel_sharding_strategy"] = "optim_grads_params"
    return _make("distributed", "DistributedDataParallelConfig", {**defaults, **values})


def _optimizer(values: Mapping[str, Any]) -> OptimizerConfig:
    if values["use_precision_aware_optimizer"]:
        require("transformer_engine", why="MegatronLMPlugin(use_precision_aware_optimizer=True)")
    # The fraction's own default offloads nothing.
    defaults = {"optimizer_offload_fraction": 1.0} if values["optimizer_cpu_offload"] else {}
    return _make("optimizer", "OptimizerConfig", {**defaults, **values})
