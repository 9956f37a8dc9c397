"""Options of FSDP in programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import log_once, warn_once
from accelerate.config import env
from accelerate.config.knob import Settings, knob, shared
from accelerate.config.plugins import fsdp_torch
from accelerate.config.sections.engines import FsdpOptions

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed import fsdp

# What only FSDP 1 has. With FSDP 2 the launcher's variables for these are passed over; a program's own value is named.
_VERSION_1 = ("sharding_strategy", "backward_prefetch", "use_orig_params", "sync_module_states", "forward_prefetch")
# What FSDP 2 has instead.
_IN_VERSION_2 = {"sharding_strategy": "Write reshard_after_forward=True for FULL_SHARD, False for SHARD_GRAD_OP"}
_YES_NO = {"true": True, "false": False}
_RAM_EFFICIENT_LOADING = "FSDP_CPU_RAM_EFFICIENT_LOADING"


@dataclass
class FullyShardedDataParallelPlugin(Settings):
    """Say how FSDP shards a model; what is not given comes from the `FSDP_*` variables.

    Names and numbers become the objects of torch that they stand for.

    Raises:
        ConfigurationError: A value is unknown, or this version of FSDP does not have what it asks for.
    """

    fsdp_version: int = shared(FsdpOptions, "fsdp_version", fallback=1)
    sharding_strategy: str | int | fsdp.ShardingStrategy | None = shared(
        FsdpOptions, "fsdp_sharding_strategy", choices=()
    )
    reshard_after_forward: str | bool | fsdp.ShardingStrategy | None = shared(FsdpOptions, "fsdp_reshard_after_forward")
    backward_prefetch: str | int | fsdp.BackwardPrefetch | None = shared(
        FsdpOptions, "fsdp_backward_prefetch", choices=()
    )
    mixed_precision_policy: dict[str, Any] | str | fsdp.MixedPrecision | fsdp.MixedPrecisionPolicy | None = knob(
        help="A precision, a dictionary (`param_dtype`, `reduce_dtype`, and `buffer_dtype` with FSDP 1 or `output_dtype` "
        "with FSDP 2), or torch's own object."
    )
    auto_wrap_policy: Callable[..., Any] | str | None = shared(FsdpOptions, "fsdp_auto_wrap_policy", choices=())
    cpu_offload: bool | fsdp.CPUOffload | fsdp.OffloadPolicy | None = shared(
        FsdpOptions, "fsdp_offload_params", fallback=False
    )
    ignored_modules: Iterable[nn.Module] | str | None = shared(
        FsdpOptions,
        "fsdp_ignored_modules",
        help="Modules that are not sharded, or a pattern that their whole name matches.",
    )
    state_dict_type: str | int | fsdp.StateDictType | None = shared(FsdpOptions, "fsdp_state_dict_type", choices=())
    state_dict_config: fsdp.FullStateDictConfig | fsdp.ShardedStateDictConfig | None = knob(
        help="Torch's options of that form; made to fit where not given."
    )
    optim_state_dict_config: fsdp.FullOptimStateDictConfig | fsdp.ShardedOptimStateDictConfig | None = knob(
        help="The same for the optimizer."
    )
    limit_all_gathers: bool = knob(True, help="Let FSDP 1 hold no more than two gathered modules at a time.")
    use_orig_params: bool | None = shared(FsdpOptions, "fsdp_use_orig_params", fallback=False)
    param_init_fn: Callable[[nn.Module], None] | None = knob(
        help="Gives memory to a module whose weights have none yet."
    )
    sync_module_states: bool | None = shared(FsdpOptions, "fsdp_sync_module_states", fallback=False)
    forward_prefetch: bool | None = shared(FsdpOptions, "fsdp_forward_prefetch", fallback=False)
    activation_checkpointing: bool = shared(FsdpOptions, "fsdp_activation_checkpointing", fallback=False)
    activation_checkpointing_offload: bool = shared(
        FsdpOptions, "fsdp_activation_checkpointing_offload", fallback=False
    )
    cpu_ram_efficient_loading: bool = shared(
        FsdpOptions,
        "fsdp_cpu_ram_efficient_loading",
        fallback=False,
        help="Let one process alone read the weights. A value given here is also set in the environment, where model "
        "libraries look for it.",
    )
    transformer_cls_names_to_wrap: list[str] | str | None = shared(FsdpOptions, "fsdp_transformer_layer_cls_to_wrap")
    min_num_params: int | None = shared(FsdpOptions, "fsdp_min_num_params")

    def __post_init__(self) -> None:
        # What the program says differs from what the launcher's variables say by default: only the first is refused.
        given = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        self._given = {name: value for name, value in given.items() if value is not None}
        super().__post_init__()

    def normalise(self) -> None:
        """Turn names into the objects of torch, and refuse what this version of FSDP does not have."""
        if str(self.fsdp_version) not in ("1", "2"):
            raise ConfigurationError(
                f"FullyShardedDataParallelPlugin(fsdp_version={self.fsdp_version!r}) does not exist. Write 1 or 2."
            )
        self.fsdp_version = int(self.fsdp_version)
        if self.fsdp_version == 1:
            self._normalise_version_1()
        else:
            self._normalise_version_2()
        self._normalise_shared()
        self.set_state_dict_type()
        self.set_cpu_offload()
        self.validate_cpu_offload()
        if isinstance(self.mixed_precision_policy, (str, dict)):
            self.set_mixed_precision(self.mixed_precision_policy, override=True)
        self.validate_mixed_precision_policy()

    def _normalise_version_1(self) -> None:
        if "sharding_strategy" in self._given:
            log_once(
                __name__,
                "FullyShardedDataParallelPlugin(sharding_strategy=...) is the old name of reshard_after_forward. "
                f"Write reshard_after_forward={self.sharding_strategy!r}.",
            )
        reshard = self.reshard_after_forward
        if isinstance(self._given.get("reshard_after_forward"), bool):
            raise ConfigurationError(
                f"FullyShardedDataParallelPlugin(reshard_after_forward={reshard!r}) is FSDP 2's way to say it; FSDP 1 "
                "takes a sharding strategy. Write 'FULL_SHARD' or 'SHARD_GRAD_OP', or set fsdp_version=2."
            )
        # The launcher's variable holds FSDP 2's default, which says nothing to FSDP 1.
        if reshard is None or str(reshard).lower() in _YES_NO:
            self.reshard_after_forward = None
        else:
            self.reshard_after_forward = fsdp_torch.enum_member("reshard_after_forward", reshard)
            if "sharding_strategy" not in self._given:
                self.sharding_strategy = self.reshard_after_forward
        wanted = "FULL_SHARD" if self.sharding_strategy is None else self.sharding_strategy
        self.sharding_strategy = fsdp_torch.enum_member("sharding_strategy", wanted)
        if str(self.backward_prefetch).upper() == "NO_PREFETCH":
            self.backward_prefetch = None
        elif self.backward_prefetch is not None:
            self.backward_prefetch = fsdp_torch.enum_member("backward_prefetch", self.backward_prefetch)
        if self.cpu_ram_efficient_loading and not self.sync_module_states:
            if self._given.get("sync_module_states") is False:
                warn_once(
                    "FullyShardedDataParallelPlugin(sync_module_states=False) cannot be with cpu_ram_efficient_loading: "
                    "only rank 0 has the weights. It is set to True; write that, or cpu_ram_efficient_loading=False.",
                    stacklevel=6,
                )
            self.sync_module_states = True
        if self.sync_module_states and self.param_init_fn is None:
            self.param_init_fn = fsdp_torch.empty_on_current_device

    def _normalise_version_2(self) -> None:
        if "forward_prefetch" in self._given:
            raise ConfigurationError(
                f"FullyShardedDataParallelPlugin(forward_prefetch={self.forward_prefetch!r}) is not in FSDP 2, which "
                "fetches ahead by itself. Leave it out, or set fsdp_version=1."
            )
        for name in _VERSION_1:
            if name in self._given:
                log_once(
                    __name__,
                    f"FullyShardedDataParallelPlugin({name}=...) means nothing to FSDP 2 and is left out. "
                    f"{_IN_VERSION_2.get(name, 'Leave it out')}, or set fsdp_version=1.",
                )
            setattr(self, name, None)
        reshard = True if self.reshard_after_forward is None else self.reshard_after_forward
        word = str(reshard).lower()
        if word not in _YES_NO:
            raise ConfigurationError(
                f"FullyShardedDataParallelPlugin(reshard_after_forward={reshard!r}) names a strategy of FSDP 1, but "
                "fsdp_version is 2. Write True or False."
            )
        self.reshard_after_forward = _YES_NO[word]

    def _normalise_shared(self) -> None:
        if self.activation_checkpointing_offload and not (self.activation_checkpointing and self.fsdp_version == 2):
            raise ConfigurationError(
                "FullyShardedDataParallelPlugin(activation_checkpointing_offload=True) moves what activation "
                f"checkpointing keeps, in FSDP 2, but activation_checkpointing={self.activation_checkpointing!r} and "
                f"fsdp_version={self.fsdp_version}. Set activation_checkpointing=True and fsdp_version=2."
            )
        if "cpu_ram_efficient_loading" in self._given:
            env.put(_RAM_EFFICIENT_LOADING, bool(self.cpu_ram_efficient_loading))
        if isinstance(self.transformer_cls_names_to_wrap, str):
            names = (name.strip() for name in self.transformer_cls_names_to_wrap.split(","))
            self.transformer_cls_names_to_wrap = [name for name in names if name]
        if self.auto_wrap_policy is None:
            return
        self.auto_wrap_policy = fsdp_torch.wrap_policy(self.auto_wrap_policy)
        if self.min_num_params is None and fsdp_torch.wraps_by_size(self.auto_wrap_policy):
            self.min_num_params = 0

    def set_state_dict_type(self, state_dict_type: str | int | fsdp.StateDictType | None = None) -> None:
        """Choose the form of weights in checkpoints, with the options of torch that go with it.

        Args:
            state_dict_type: The form; None keeps the one there is, or takes the default of this version of FSDP.

        Raises:
            ConfigurationError: It is no such form, or FSDP 2 does not have it.
        """
        default = "FULL_STATE_DICT" if self.fsdp_version == 1 else "SHARDED_STATE_DICT"
        wanted = self.state_dict_type if state_dict_type is None else state_dict_type
        kind = fsdp_torch.enum_member("state_dict_type", default if wanted is None else wanted)
        if self.fsdp_version == 2 and kind.name == "LOCAL_STATE_DICT":
            raise ConfigurationError(
                f"FullyShardedDataParallelPlugin(state_dict_type={wanted!r}) is not in FSDP 2. "
                "Write 'SHARDED_STATE_DICT' or 'FULL_STATE_DICT'."
            )
        if kind.name == "LOCAL_STATE_DICT":
            log_once(
                __name__,
                "FullyShardedDataParallelPlugin(state_dict_type='LOCAL_STATE_DICT') is saved by save_state in the shards of "
                "SHARDED_STATE_DICT, which load on any number of processes. Write 'SHARDED_STATE_DICT'.",
            )
        self.state_dict_type = kind
        self.state_dict_config, self.optim_state_dict_config = fsdp_torch.state_dict_configs(
            kind, self.state_dict_config, self.optim_state_dict_config
        )

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Bind the policy to the classes of a model, or to the size of modules.

        Raises:
            ConfigurationError: The model has no layer of a class that was named.
        """
        names = self.transformer_cls_names_to_wrap
        self.auto_wrap_policy = fsdp_torch.bind_policy(self.auto_wrap_policy, model, names, self.min_num_params)

    def set_mixed_precision(
        self,
        mixed_precision: str | torch.dtype | dict[str, Any],
        buffer_autocast: bool = False,
        override: bool = False,
    ) -> None:
        """Choose the types of numbers, unless they are chosen already.

        Args:
            mixed_precision: A precision (`"fp8"` computes around it in bf16), a type, or one for each part.
            buffer_autocast: Leave buffers in 32 bits, for autocast to convert.
            override: Replace the types that are chosen already.

        Raises:
            ConfigurationError: A part or a type is not known.
        """
        if self.mixed_precision_policy is None or override:
            buffers = fsdp_torch.dtype_of("fp32") if buffer_autocast else None
            self.mixed_precision_policy = fsdp_torch.precision_policy(self.fsdp_version, mixed_precision, buffers)

    def validate_mixed_precision_policy(self) -> None:
        """Refuse a precision policy of the other version of FSDP.

        Raises:
            ConfigurationError: It is one.
        """
        self._refuse_other("mixed_precision_policy")

    def set_cpu_offload(self) -> None:
        """Turn a bool into torch's object for offloading."""
        if self.cpu_offload is None or isinstance(self.cpu_offload, bool):
            self.cpu_offload = fsdp_torch.offload_policy(self.fsdp_version, bool(self.cpu_offload))

    def validate_cpu_offload(self) -> None:
        """Refuse an offload policy of the other version of FSDP.

        Raises:
            ConfigurationError: It is one.
        """
        self._refuse_other("cpu_offload")

    def _refuse_other(self, name: str) -> None:
        value, wanted = getattr(self, name), fsdp_torch.policy_class(name, self.fsdp_version)
        if value is not None and not isinstance(value, wanted):
            raise ConfigurationError(
                f"FullyShardedDataParallelPlugin({name}={value!r}) is not for FSDP {self.fsdp_version}. "
                f"Write a torch.distributed.fsdp.{wanted.__name__}, or a plain value that is turned into one."
            )


def enable_fsdp_ram_efficient_loading() -> None:
    """Let only the main process read the weights; the others get them when FSDP shares them out."""
    # Model libraries look for both variables, and the launcher sets the first only for its own runs.
    if env.get("ACCELERATE_USE_FSDP") is None:
        env.put("ACCELERATE_USE_FSDP", "True")
    env.put(_RAM_EFFICIENT_LOADING, "True")


def disable_fsdp_ram_efficient_loading() -> None:
    """Let every process read the weights itself."""
    env.put(_RAM_EFFICIENT_LOADING, "False")
