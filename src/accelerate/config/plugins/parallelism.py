"""Options of tensor, context and sequence parallelism in programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate._base.constants import BETA_TP_AVAILABLE_TRANSFORMERS_VERSION
from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import warn_once
from accelerate.config.knob import Settings, knob, shared
from accelerate.config.sections.compute import ParallelismOptions

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_ATTENTIONS = ("flash_attention_2", "flash_attention_3", "sdpa")


@dataclass
class TorchTensorParallelPlugin:
    """Hold the degree of tensor parallelism, for programs that still do; `ParallelismConfig` has taken its place.

    Args:
        tp_size: Processes that split each layer.
        torch_device_mesh: The mesh that they form.
    """

    tp_size: int = 1
    torch_device_mesh: DeviceMesh | None = None


@dataclass
class TorchTensorParallelConfig(Settings):
    """Say how layers are split.

    Raises:
        ConfigurationError: The installed Transformers cannot split layers.
    """

    enable_async_tp: bool = knob(
        False, help="Communicate while computing; torch cannot do that yet in training, so it is left out."
    )
    plan: dict[str, Any] | None = knob(
        help="How each module is split: its dotted name, with `*` for any part of it, and the name of a style "
        '(`"colwise"`, `"rowwise"`, ...) or a `ParallelStyle` of torch. The model\'s own `tp_plan` if None.'
    )

    def normalise(self) -> None:
        """Check the version of Transformers, which does the splitting, and name what is left out."""
        from accelerate._base.imports import has_package, is_transformers_available

        if is_transformers_available() and not has_package(
            "transformers", minimum=BETA_TP_AVAILABLE_TRANSFORMERS_VERSION
        ):
            raise ConfigurationError(
                f"Tensor parallelism needs transformers {BETA_TP_AVAILABLE_TRANSFORMERS_VERSION} or later, but an older "
                "one is installed. Install a newer one, or set tp_size=1."
            )
        if self.enable_async_tp:
            warn_once(
                "TorchTensorParallelConfig(enable_async_tp=True) has no effect yet. Leave it out.",
                stacklevel=4,
            )


@dataclass
class TorchContextParallelConfig(Settings):
    """Say how sequences are split by context parallelism.

    Raises:
        ConfigurationError: The strategy is not known.
    """

    cp_comm_strategy: str = shared(ParallelismOptions, "parallelism_config_cp_comm_strategy", fallback="allgather")


@dataclass
class TorchPipelineParallelConfig(Settings):
    """Say how the stages of a pipeline take turns.

    Raises:
        ConfigurationError: The schedule is not known, or there is no part.
    """

    schedule: str = shared(
        ParallelismOptions,
        "parallelism_config_pp_schedule",
        fallback="1f1b",
        help='`"1f1b"` (a stage begins backward passes as soon as it can, so that few activations are kept) or `"gpipe"` '
        "(all forward passes come first).",
    )
    num_microbatches: int | None = shared(ParallelismOptions, "parallelism_config_pp_num_microbatches")

    def normalise(self) -> None:
        """Refuse a batch without parts."""
        if self.num_microbatches is not None and self.num_microbatches < 1:
            raise ConfigurationError(
                f"TorchPipelineParallelConfig(num_microbatches={self.num_microbatches!r}) leaves nothing to compute. "
                "Write a number from 1 on, or leave it out for one part a stage."
            )


@dataclass
class DeepSpeedSequenceParallelConfig(Settings):
    """Say how sequences are split by DeepSpeed's sequence parallelism.

    Raises:
        ConfigurationError: A fixed length is not given, or the attention cannot be split.
    """

    sp_seq_length: int | None = shared(ParallelismOptions, "parallelism_config_sp_seq_length")
    sp_seq_length_is_variable: bool = shared(
        ParallelismOptions, "parallelism_config_sp_seq_length_is_variable", fallback=True
    )
    sp_attn_implementation: str | None = shared(
        ParallelismOptions,
        "parallelism_config_sp_attn_implementation",
        help="The attention of the model: sdpa, a flash attention, or one of the hub's kernels for it.",
    )

    def normalise(self) -> None:
        """Refuse a fixed length that is not given, and attention that cannot be split."""
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise ConfigurationError(
                "DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False) says that all sequences have one "
                "length, but not which. Set sp_seq_length or the variable PARALLELISM_CONFIG_SP_SEQ_LENGTH."
            )
        attention = self.sp_attn_implementation
        if attention is not None and attention not in _ATTENTIONS and not _is_hub_flash_attention(attention):
            raise ConfigurationError(
                f"DeepSpeedSequenceParallelConfig(sp_attn_implementation={attention!r}) cannot be split along the "
                f"sequence. Write one of {', '.join(_ATTENTIONS)}, or a flash attention of the hub such as "
                "'kernels-community/flash-attn2'."
            )


def _is_hub_flash_attention(name: str) -> bool:
    owner, slash, kernel = name.partition("/")
    return bool(owner and slash) and "flash-attn" in kernel.replace("_", "-")
