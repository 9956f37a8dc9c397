"""Megatron-LM in programs: its options, as the arguments that they give it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import warn_once
from accelerate._base.imports import require
from accelerate.config.knob import Codec, Settings, knob, shared
from accelerate.config.plugins.megatron_models import (
    MODEL_CONFIGS_TO_MEGATRON_PARSERS,
    add_model_config_to_megatron_parser,
    parse_bert_config,
    parse_glm4_moe_config,
    parse_gpt2_config,
    parse_llama_config,
    parse_t5_config,
)
from accelerate.config.sections.engines import MegatronOptions

# The names of models stand here for programs, whose place for them this is.
__all__ = [
    "MODEL_CONFIGS_TO_MEGATRON_PARSERS",
    "SCHEDULE",
    "MegatronLMPlugin",
    "add_model_config_to_megatron_parser",
    "parse_bert_config",
    "parse_glm4_moe_config",
    "parse_gpt2_config",
    "parse_llama_config",
    "parse_t5_config",
]

_WORD: Codec[Any] = Codec(
    parse=lambda text: {"true": True, "false": False}.get(text.lower(), text),
    format=str,
    meaning="true, false or a name",
)
# Options that Megatron-LM calls by another name.
_OTHER_NAMES = {
    "tensor_model_parallel_size": "tp_degree",
    "pipeline_model_parallel_size": "pp_degree",
    "sequence_parallel": "sequence_parallelism",
    "clip_grad": "gradient_clipping",
}
_SAME_NAMES = [
    "pipeline_model_parallel_split_rank",
    "num_layers_per_virtual_pipeline_stage",
    "use_distributed_optimizer",
    "num_micro_batches",
    "consumed_samples",
    "no_wd_decay_cond",
    "scale_lr_cond",
    "lr_mult",
    "megatron_dataset_flag",
    "eval_iters",
    "eval_interval",
    "use_custom_fsdp",
    "no_load_optim",
    "eod_mask_loss",
    "no_save_optim",
    "optimizer_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
    "use_precision_aware_optimizer",
    "decoder_last_pipeline_num_layers",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "attention_backend",
    "expert_model_parallel_size",
    "context_parallel_size",
    "attention_dropout",
    "hidden_dropout",
    "attention_softmax_in_fp32",
    "expert_tensor_parallel_size",
    "calculate_per_token_loss",
    "use_rotary_position_embeddings",
]
SCHEDULE = (
    "train_iters",
    "lr_warmup_iters",
    "train_samples",
    "lr_warmup_samples",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_warmup_fraction",
    "lr_decay_style",
    "weight_decay_incr_style",
    "start_weight_decay",
    "end_weight_decay",
    "min_lr",
)
"""The arguments of the schedules of the learning rate and of weight decay."""
# Where these are not given they are as the model says, so they are no arguments then.
_OF_THE_MODEL = {
    "attention_dropout",
    "hidden_dropout",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "use_rotary_position_embeddings",
}
# What torch's optimizers may be told and Megatron-LM's cannot.
_ONLY = {"amsgrad": False, "maximize": False, "nesterov": False, "dampening": 0}


@dataclass
class MegatronLMPlugin(Settings):
    """Say how Megatron-LM trains; what is not given comes from the `MEGATRON_LM_*` variables.

    The arguments of Megatron-LM are gathered in `megatron_lm_default_args`, which may be edited.

    Raises:
        ConfigurationError: A value is unknown.
    """

    tp_degree: int = shared(MegatronOptions, "megatron_lm_tp_degree", fallback=1)
    pp_degree: int = shared(MegatronOptions, "megatron_lm_pp_degree", fallback=1)
    use_custom_fsdp: bool = shared(MegatronOptions, "megatron_lm_use_custom_fsdp", fallback=False)
    overlap_cpu_optimizer_d2h_h2d: bool = shared(
        MegatronOptions, "megatron_lm_overlap_cpu_optimizer_d2h_h2d", fallback=False
    )
    no_load_optim: bool = shared(MegatronOptions, "megatron_lm_no_load_optim", fallback=False)
    eod_mask_loss: bool = shared(MegatronOptions, "megatron_lm_eod_mask_loss", fallback=False)
    no_save_optim: bool = shared(MegatronOptions, "megatron_lm_no_save_optim", fallback=False)
    optimizer_cpu_offload: bool = shared(MegatronOptions, "megatron_lm_optimizer_cpu_offload", fallback=False)
    use_precision_aware_optimizer: bool = shared(
        MegatronOptions, "megatron_lm_use_precision_aware_optimizer", fallback=False
    )
    decoder_last_pipeline_num_layers: int | None = shared(
        MegatronOptions, "megatron_lm_decoder_last_pipeline_num_layers"
    )
    # Nobody who trains should pay for recomputation unasked.
    recompute_granularity: str | None = shared(MegatronOptions, "megatron_lm_recompute_granularity")
    recompute_method: str | None = shared(MegatronOptions, "megatron_lm_recompute_method")
    recompute_num_layers: int | None = shared(MegatronOptions, "megatron_lm_recompute_num_layers")
    attention_backend: bool | str = shared(MegatronOptions, "megatron_lm_attention_backend", codec=_WORD, fallback=True)
    expert_model_parallel_size: int = shared(MegatronOptions, "megatron_lm_expert_model_parallel_size", fallback=1)
    # Two would refuse every run of an odd number of processes, and every run on the CPU.
    context_parallel_size: int = shared(MegatronOptions, "megatron_lm_context_parallel_size", fallback=1)
    # A number of our own would silently train another model than the given one.
    attention_dropout: float | None = shared(MegatronOptions, "megatron_lm_attention_dropout")
    hidden_dropout: float | None = shared(MegatronOptions, "megatron_lm_hidden_dropout")
    attention_softmax_in_fp32: bool = shared(MegatronOptions, "megatron_lm_attention_softmax_in_fp32", fallback=True)
    expert_tensor_parallel_size: int = shared(MegatronOptions, "megatron_lm_expert_tensor_parallel_size", fallback=1)
    calculate_per_token_loss: bool = shared(MegatronOptions, "megatron_lm_calculate_per_token_loss", fallback=True)
    # Only the model knows which positions its weights were made for.
    use_rotary_position_embeddings: bool | None = shared(MegatronOptions, "megatron_lm_use_rotary_position_embeddings")
    num_micro_batches: int = shared(MegatronOptions, "megatron_lm_num_micro_batches", fallback=1)
    gradient_clipping: float = shared(MegatronOptions, "megatron_lm_gradient_clipping", fallback=1.0)
    sequence_parallelism: bool = shared(MegatronOptions, "megatron_lm_sequence_parallelism", fallback=False)
    recompute_activations: bool = shared(MegatronOptions, "megatron_lm_recompute_activations", fallback=False)
    use_distributed_optimizer: bool = shared(MegatronOptions, "megatron_lm_use_distributed_optimizer", fallback=False)
    pipeline_model_parallel_split_rank: int | None = knob(
        help="Stage at which the decoder of an encoder-decoder begins."
    )
    num_layers_per_virtual_pipeline_stage: int | None = knob(help="Layers of a stage, where a process has several.")
    is_train_batch_min: bool = knob(True, help="Take the smallest batch size of the loaders, else the largest.")
    train_iters: int | None = knob(help="Steps of the training.")
    train_samples: int | None = knob(help="Samples of the training.")
    weight_decay_incr_style: str = knob("constant", help="How weight decay changes.")
    start_weight_decay: float | None = knob(help="Weight decay at the start.")
    end_weight_decay: float | None = knob(help="Weight decay at the end.")
    lr_decay_style: str = knob("linear", help="How the learning rate falls.")
    lr_decay_iters: int | None = knob(help="Steps in which the learning rate falls.")
    lr_decay_samples: int | None = knob(help="Samples in which the learning rate falls.")
    lr_warmup_iters: int | None = knob(help="Steps in which the learning rate rises.")
    lr_warmup_samples: int | None = knob(help="Samples in which the learning rate rises.")
    lr_warmup_fraction: float | None = knob(help="Part of the training in which the learning rate rises.")
    min_lr: float = knob(0, help="Lowest learning rate.")
    consumed_samples: list[int] | None = knob(help="Samples seen in training, validation and test before the start.")
    no_wd_decay_cond: Callable[..., bool] | None = knob(help="Says which weights do not decay.")
    scale_lr_cond: Callable[..., bool] | None = knob(help="Says which weights learn at another rate.")
    lr_mult: float = knob(1.0, help="Factor of that rate.")
    megatron_dataset_flag: bool = knob(False, help="Data come in Megatron's own format.")
    seq_length: int | None = knob(help="Length of sequences.")
    encoder_seq_length: int | None = knob(help="Length of sequences of the encoder.")
    decoder_seq_length: int | None = knob(help="Length of sequences of the decoder.")
    tensorboard_dir: str | None = knob(help="Folder of TensorBoard's files.")
    set_all_logging_options: bool = knob(False, help="Log everything that can be logged.")
    eval_iters: int = knob(100, help="Steps of an evaluation.")
    eval_interval: int = knob(1000, help="Steps between two evaluations.")
    return_logits: bool = knob(False, help="Return the model's output beside the loss.")
    custom_train_step_class: Any = knob(help="Class of the training step.")
    custom_train_step_kwargs: dict[str, Any] | None = knob(help="Arguments of that class.")
    custom_model_provider_function: Callable[..., Any] | None = knob(help="Makes the model.")
    custom_prepare_model_function: Callable[..., Any] | None = knob(help="Prepares the model.")
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = knob(help="Makes the datasets.")
    custom_get_batch_function: Callable[..., Any] | None = knob(help="Fetches a batch.")
    custom_loss_function: Callable[..., Any] | None = knob(help="Computes the loss.")
    other_megatron_args: dict[str, Any] | None = knob(
        help="More arguments of Megatron-LM, by name; they win over all others."
    )

    def normalise(self) -> None:
        """Gather the arguments of Megatron-LM."""
        if self.consumed_samples is not None:
            # One number each for training, validation and test.
            self.consumed_samples = [*self.consumed_samples, 0, 0, 0][: max(3, len(self.consumed_samples))]
        self.DDP_impl = "local" if self.pp_degree > 1 or self.use_distributed_optimizer else "torch"
        self.megatron_lm_default_args: dict[str, Any] = {
            **{name: getattr(self, ours) for name, ours in _OTHER_NAMES.items()},
            "DDP_impl": self.DDP_impl,
            **{name: getattr(self, name) for name in _SAME_NAMES},
        }
        for name in _OF_THE_MODEL:
            if getattr(self, name) is None:
                del self.megatron_lm_default_args[name]
        self._of_former_model: set[str] = set()
        if self.recompute_activations:
            self.megatron_lm_default_args["recompute_activations"] = True
        if self.tensorboard_dir is not None:
            self.megatron_lm_default_args["tensorboard_dir"] = self.tensorboard_dir
        self._apply_others()

    def _apply_others(self) -> None:
        """Let the arguments that win over all others do so."""
        self.megatron_lm_default_args.update(self.other_megatron_args or {})

    def set_network_size_args(self, model: Any, batch_data: Mapping[str, Any] | None = None) -> None:
        """Add the sizes of a Transformers model.

        Args:
            batch_data: A batch, whose sequences have the length of all where none is given.

        Raises:
            ConfigurationError: No parser is registered for the model's type.
        """
        kind = model.config.model_type
        parsers = (parse for name, parse in MODEL_CONFIGS_TO_MEGATRON_PARSERS.items() if name in kind.lower())
        parser = next(parsers, None)
        if parser is None:
            raise ConfigurationError(
                f"Models of type {kind!r} are not known here, so Megatron-LM cannot be told their sizes. "
                f"Known are {', '.join(MODEL_CONFIGS_TO_MEGATRON_PARSERS)}; register another with "
                "add_model_config_to_megatron_parser."
            )
        arguments = self.megatron_lm_default_args
        for name in self._of_former_model:
            arguments.pop(name, None)
        self._apply_others()
        before = set(arguments)
        parser(self, model, batch_data)
        self._of_former_model = set(arguments) - before
        self._apply_others()

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Add the precision."""
        for name in ("fp16", "bf16"):
            self.megatron_lm_default_args.pop(name, None)
        if mixed_precision in ("fp16", "bf16"):
            self.megatron_lm_default_args[mixed_precision] = True
        if mixed_precision == "bf16":
            # Only this one sums gradients in 32 bits.
            self.DDP_impl = "local"
            self.megatron_lm_default_args["DDP_impl"] = self.DDP_impl
        self._apply_others()

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Add the sizes of batches.

        Args:
            micro_batch_size: Samples that go through the pipeline at a time.
            dp_degree: Replicas of the model.
        """
        self.data_parallel_size = dp_degree
        self.micro_batch_size = micro_batch_size
        num_micro_batches = (self.other_megatron_args or {}).get("num_micro_batches", self.num_micro_batches)
        self.global_batch_size = dp_degree * micro_batch_size * num_micro_batches
        for name in ("data_parallel_size", "micro_batch_size", "global_batch_size"):
            self.megatron_lm_default_args[name] = getattr(self, name)

    def set_optimizer_type(self, optimizer: Any) -> None:
        """Add the optimizer and its numbers.

        Raises:
            ConfigurationError: Megatron-LM has no such optimizer.
        """
        kind, numbers = type(optimizer).__name__.lower(), optimizer.defaults
        if kind not in ("adam", "adamw", "sgd"):
            raise ConfigurationError(
                f"{type(optimizer).__name__} is not an optimizer of Megatron-LM. Use Adam, AdamW or SGD."
            )
        for name, value in _ONLY.items():
            if numbers.get(name, value) != value:
                raise ConfigurationError(
                    f"{type(optimizer).__name__}({name}={numbers[name]!r}) is nothing that the optimizers of "
                    f"Megatron-LM do. Write {name}={value!r}."
                )
        args = self.megatron_lm_default_args
        if kind == "sgd":
            args.update(optimizer="sgd", sgd_momentum=numbers["momentum"])
        else:
            args["optimizer"] = "adam"
            args["adam_beta1"], args["adam_beta2"] = numbers["betas"]
            args["adam_eps"] = numbers["eps"]
            args["decoupled_weight_decay"] = numbers.get("decoupled_weight_decay", kind == "adamw")
        args["lr"], args["weight_decay"] = numbers["lr"], numbers["weight_decay"]
        self._apply_others()

    def set_scheduler_args(self, scheduler: Any) -> None:
        """Add the schedule; steps that were not given come from a `MegatronLMDummyScheduler`.

        Its steps are those of the program, which Megatron-LM shares among the replicas: call `set_training_args` first.

        Raises:
            ConfigurationError: The scheduler is one that computes learning rates itself.
        """
        if not hasattr(scheduler, "total_num_steps"):
            raise ConfigurationError(
                f"{type(scheduler).__name__} does not say how many steps there are, and Megatron-LM has schedules of "
                "its own. Give a MegatronLMDummyScheduler(optimizer, total_num_steps=..., warmup_num_steps=...)."
            )
        replicas = self.megatron_lm_default_args["data_parallel_size"]
        if self.train_iters is None and scheduler.total_num_steps is not None:
            self.train_iters = scheduler.total_num_steps // replicas
            self._leave_out("train_samples", "train_iters", None)
        warmup = (scheduler.warmup_num_steps or 0) // replicas
        if self.lr_warmup_iters is None and (warmup or not (self.lr_warmup_samples or self.lr_warmup_fraction)):
            self.lr_warmup_iters = warmup
            self._leave_out("lr_warmup_samples", "lr_warmup_iters", 0)
            self._leave_out("lr_warmup_fraction", "lr_warmup_iters", None)
        self.megatron_lm_default_args.update({name: getattr(self, name) for name in SCHEDULE})
        self._apply_others()

    def _leave_out(self, name: str, instead: str, value: int | None) -> None:
        if getattr(self, name) is not None:
            warn_once(
                f"MegatronLMPlugin({name}={getattr(self, name)!r}) is left out: the scheduler gives steps, and so "
                f"{instead} counts. Leave it out.",
                stacklevel=3,
            )
        setattr(self, name, value)

    def set_tensorboard_logging_options(self) -> None:
        """Turn on everything that Megatron-LM's own trainer can log.

        Raises:
            MissingPackageError: Megatron-LM is not installed with its trainer.
        """
        arguments = require("megatron.training.arguments", why="MegatronLMPlugin(set_all_logging_options=True)")
        known = argparse.ArgumentParser()
        arguments._add_logging_args(known)
        for name in vars(known.parse_args([])):
            if name.startswith("log_"):
                self.megatron_lm_default_args[name] = True
