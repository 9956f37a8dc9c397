"""DeepSpeed in programs: its own configuration, read by dotted names without the package, and the options beside it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import log_once, warn_once
from accelerate._base.imports import is_transformers_available, require
from accelerate.config import env
from accelerate.config.deepspeed import (
    HALF,
    PLACES,
    Fact,
    add_missing,
    check_against,
    entry_facts,
    from_options,
    merge_entries,
    read,
    refuse_doubles,
)
from accelerate.config.deepspeed_rules import AUTO, check, refuse, wrong_values
from accelerate.config.knob import INTEGER, NUMBER, TEXT, Codec, Settings, knob, knobs, or_auto, shared
from accelerate.config.plugins.fsdp_torch import get_module_class_from_name
from accelerate.config.plugins.quantization import OptLevel
from accelerate.config.sections.compute import Fp8Options
from accelerate.config.sections.engines import DeepSpeedOptions

if TYPE_CHECKING:
    from torch import nn

_GATHERING = PLACES["zero3_save_16bit_model"]
_IS_MSAMP: Codec[bool] = Codec(
    parse=lambda text: text.upper() == "MSAMP", format=lambda value: "MSAMP" if value else "", meaning="a library"
)


class HfDeepSpeedConfig:
    """Hold DeepSpeed's configuration and look things up in it.

    Args:
        config_file_or_dict: A dictionary (copied), the path of a JSON file, or JSON text, plain or in base 64.

    Raises:
        ConfigurationError: It is none of these.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config: dict[str, Any]
        self.config, self.place = read(config_file_or_dict)
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Remember the ZeRO stage, and whether anything is offloaded."""
        self._stage: Any = self.get_value("zero_optimization.stage", -1)
        places = (self.get_value(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param"))
        self._offload = (self.is_zero2() or self.is_zero3()) and any(place in ("cpu", "nvme") for place in places)

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the dictionary that holds the last part of a dotted name, and that part; None where a part lacks."""
        *path, last = ds_key_long.split(".")
        node: Any = self.config
        for part in path:
            node = node.get(part) if isinstance(node, dict) else None
        return (node if isinstance(node, dict) else None), last

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value under a dotted name, or `default`."""
        node, last = self.find_config_node(ds_key_long)
        return default if node is None else node.get(last, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove what is under a dotted name.

        Raises:
            ConfigurationError: It is not there, and must be.
        """
        node, last = self.find_config_node(ds_key_long)
        if node is not None and last in node:
            del node[last]
        elif must_exist:
            raise ConfigurationError(
                f"{ds_key_long!r} is not in DeepSpeed's configuration, so it cannot be removed. "
                f"Its entries are {', '.join(map(repr, self.config))}."
            )

    def is_true(self, ds_key_long: str) -> bool:
        """Say whether the value under a dotted name is there and counts as true."""
        return bool(self.get_value(ds_key_long))

    def is_false(self, ds_key_long: str) -> bool:
        """Say whether the value under a dotted name is there and counts as false."""
        value = self.get_value(ds_key_long)
        return value is not None and not value

    def is_zero2(self) -> bool:
        """Say whether the ZeRO stage is 2."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Say whether the ZeRO stage is 3."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Say whether ZeRO 2 or 3 keeps optimizer states or weights elsewhere."""
        return self._offload


@dataclass
class DeepSpeedPlugin(Settings):
    """Say how DeepSpeed trains, by its own configuration or by the options here.

    With a configuration, its `"auto"` entries are filled from the options here, which must not contradict the others.
    What is not given comes from the `ACCELERATE_DEEPSPEED_*` variables. DeepSpeed need not be installed.

    Raises:
        ConfigurationError: The configuration is unusable, or an option contradicts it.
    """

    hf_ds_config: Any = shared(
        DeepSpeedOptions,
        "deepspeed_config_file",
        help="DeepSpeed's configuration: a path, a dictionary, or an `HfDeepSpeedConfig`, which is kept as it is.",
    )
    gradient_accumulation_steps: int | str = shared(
        DeepSpeedOptions,
        "gradient_accumulation_steps",
        codec=or_auto(INTEGER),
        fallback=AUTO,
        help='Batches per optimizer step; `"auto"` waits for the accelerator\'s.',
    )
    gradient_clipping: float | str = shared(
        DeepSpeedOptions,
        "gradient_clipping",
        codec=or_auto(NUMBER),
        fallback=AUTO,
        help='Norm that gradients are clipped to; `"auto"` waits for `clip_grad_norm_`.',
    )
    zero_stage: int = shared(DeepSpeedOptions, "zero_stage", fallback=2)
    is_train_batch_min: bool = knob(
        True, help="Take the smallest batch size of the prepared loaders, else the largest."
    )
    offload_optimizer_device: str = shared(DeepSpeedOptions, "offload_optimizer_device", fallback="none")
    offload_param_device: str = shared(DeepSpeedOptions, "offload_param_device", fallback="none")
    offload_optimizer_nvme_path: str = shared(DeepSpeedOptions, "offload_optimizer_nvme_path", fallback="none")
    offload_param_nvme_path: str = shared(DeepSpeedOptions, "offload_param_nvme_path", fallback="none")
    zero3_init_flag: bool = shared(DeepSpeedOptions, "zero3_init_flag")
    zero3_save_16bit_model: bool = shared(DeepSpeedOptions, "zero3_save_16bit_model", fallback=False)
    transformer_moe_cls_names: str | None = shared(DeepSpeedOptions, "deepspeed_moe_layer_cls_names")
    enable_msamp: bool = shared(
        Fp8Options, "fp8_backend", codec=_IS_MSAMP, choices=(), fallback=False, help="Train in 8 bits with MS-AMP."
    )
    msamp_opt_level: OptLevel = shared(Fp8Options, "fp8_opt_level", codec=TEXT, fallback="O1")

    def __post_init__(self) -> None:
        # Before defaults take the place of what nobody said.
        self._facts: dict[str, Fact] = {}
        for name, key in PLACES.items():
            given, declared = getattr(self, name), knobs(self)[name]
            value = declared.resolve(given) if given is not None or env.get(str(declared.env)) else None
            origin = f"DeepSpeedPlugin({name}={given!r})" if given is not None else f"the variable {declared.env}"
            if value is not None and value != AUTO:
                self._facts[key] = Fact(value, origin)
        # Entries that the launcher's file holds next to its options.
        declared = knobs(DeepSpeedOptions)["deepspeed_entries"]
        self._entries: dict[str, Any] = declared.resolve(None) or {}
        self._entries_place = str(declared.env)
        self._facts = entry_facts(self._entries, f"the variable {declared.env}") | self._facts
        super().__post_init__()

    def normalise(self) -> None:
        """Build DeepSpeed's configuration, or fill the one given and take its values over."""
        self._selected = False
        self._gathering_said = _GATHERING in self._facts
        self._unsaid: tuple[str, ...] = ()
        self._filled: tuple[dict[str, Any], dict[str, Any]] | None = None
        self.dschf: Any = None
        if self.hf_ds_config in (None, "none"):
            config = self._own_config()
            merge_entries(config, self._entries)
            self.hf_ds_config = HfDeepSpeedConfig(config)
            if self._entries:
                check(config, self._entries_place)
                check_against(config, self._facts, self._entries_place)
                for name, key in PLACES.items():
                    setattr(self, name, self.get_value(key, getattr(self, name)))
            refuse([*wrong_values(self.deepspeed_config)], "DeepSpeedPlugin")
        else:
            self._adopt_config()
        self.zero_stage = _stage(self.zero_stage)
        self.deepspeed_config["steps_per_print"] = float("inf")
        if self.zero3_init_flag is None:
            self.zero3_init_flag = self.zero_stage == 3
        if self.zero3_init_flag and self.zero_stage != 3:
            warn_once(
                f"DeepSpeedPlugin(zero3_init_flag=True) works with ZeRO 3 only, but zero_stage={self.zero_stage!r}. "
                "It is set to False; leave it out.",
                stacklevel=5,
            )
            self.zero3_init_flag = False
        if self.enable_msamp:
            if self.zero_stage == 3:
                raise ConfigurationError(
                    "DeepSpeedPlugin(enable_msamp=True) cannot work with zero_stage=3: MS-AMP's weights cannot be "
                    "sharded. Write zero_stage=2 or less."
                )
            self.deepspeed_config["msamp"] = {"enabled": True, "opt_level": self.msamp_opt_level}

    def _own_config(self) -> dict[str, Any]:
        stage = _stage(self.zero_stage)
        if self.offload_param_device in ("cpu", "nvme") and stage != 3:
            log_once(
                __name__,
                f"DeepSpeedPlugin(offload_param_device={self.offload_param_device!r}) works with ZeRO 3 only, but "
                f"zero_stage={stage!r}: the weights stay on the device. Leave it out.",
            )
        return from_options({**{name: getattr(self, name) for name in PLACES}, "zero_stage": stage})

    def _adopt_config(self) -> None:
        """Take a configuration of DeepSpeed's own, and fill what it leaves to the options here."""
        refuse_doubles((env.get("ACCELERATE_CONFIG_DS_FIELDS") or "").split(","))
        # By what it offers, not by its class: other libraries have their own.
        if not (hasattr(self.hf_ds_config, "config") and hasattr(self.hf_ds_config, "find_config_node")):
            self.hf_ds_config = HfDeepSpeedConfig(self.hf_ds_config)
        config = self.deepspeed_config
        check(config, self.place)
        check_against(config, self._facts, self.place)
        self._gathering_said |= self.get_value(_GATHERING) not in (None, AUTO)
        if config.get("bf16") is None and "bfloat16" in config:
            config["bf16"] = config.pop("bfloat16")  # its old name, which DeepSpeed overlooks beside the new one
        # What the configuration leaves out, the options may say.
        add_missing(config, self._facts)
        # Written down, so that the engine and this plugin agree on what a missing entry means.
        if config.get("gradient_accumulation_steps") is None:
            config["gradient_accumulation_steps"] = 1
            self._unsaid = ("gradient_accumulation_steps",)
        config["zero_optimization"].setdefault("stage", _stage(self.zero_stage))
        for name, key in PLACES.items():
            self.fill_match(key, must_match=False, **{key: getattr(self, name)})
            setattr(self, name, self.get_value(key, getattr(self, name)))
        check(config, self.place)
        config["zero_optimization"]["stage"] = _stage(self.zero_stage)
        self.hf_ds_config.set_stage_and_offload()

    @property
    def place(self) -> str:
        """Return where DeepSpeed's configuration comes from: the path of a file, or the name of an argument."""
        return str(getattr(self.hf_ds_config, "place", "hf_ds_config"))

    @property
    def gathers_16bit_weights(self) -> bool | None:
        """Return whether whole weights are gathered in 16 bits for saving; None where nobody has said it."""
        value = bool(self.get_value(_GATHERING))
        return value if value or self._gathering_said else None

    def open_config(self) -> dict[str, Any]:
        """Return a copy of DeepSpeed's configuration in which entries that nobody has said are "auto"."""
        if self._filled is not None and self.deepspeed_config == self._filled[1]:
            return copy.deepcopy(self._filled[0])  # another model may fill them otherwise
        config = copy.deepcopy(self.deepspeed_config)
        return config | {name: AUTO for name in self._unsaid if config.get(name) == 1}

    def fill(self, config: dict[str, Any]) -> None:
        """Put a complete configuration in force; until somebody edits it, it is known what was open in it."""
        before = self.open_config()
        self.deepspeed_config = config
        self._filled = before, copy.deepcopy(config)

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """Return DeepSpeed's configuration, to read and to edit."""
        return self.hf_ds_config.config  # type: ignore[no-any-return]

    @deepspeed_config.setter
    def deepspeed_config(self, config: dict[str, Any]) -> None:
        self.hf_ds_config.config = config

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value under a dotted name of DeepSpeed's configuration, or `default`."""
        return self.hf_ds_config.get_value(ds_key_long, default)

    def is_auto(self, ds_key_long: str) -> bool:
        """Say whether an entry of DeepSpeed's configuration waits to be filled."""
        return bool(self.get_value(ds_key_long) == AUTO)

    def fill_match(
        self, ds_key_long: str, mismatches: list[str] | None = None, must_match: bool = True, **kwargs: Any
    ) -> None:
        """Fill an entry that waits for its value, or note that it has another one.

        Args:
            ds_key_long: The dotted name of the entry; one that is not there is left so.
            mismatches: Where a difference is noted.
            must_match: Note differences.
            kwargs: The values, by dotted name.

        Raises:
            ConfigurationError: The entry waits, and no value is given for it.
        """
        node, last = self.hf_ds_config.find_config_node(ds_key_long)
        present = None if node is None else node.get(last)
        if node is None or present is None:
            return
        if present == AUTO:
            if ds_key_long not in kwargs:
                raise ConfigurationError(
                    f"The entry {ds_key_long!r} of DeepSpeed's configuration is 'auto', but nothing here gives its "
                    f"value. Set it in the configuration, or pass {ds_key_long!r} as a keyword."
                )
            node[last] = kwargs[ds_key_long]
        elif must_match and mismatches is not None and kwargs.get(ds_key_long, present) != present:
            mismatches.append(f"- ds {ds_key_long}={present} vs arg {ds_key_long}={kwargs[ds_key_long]}")

    def deepspeed_config_process(
        self,
        prefix: str = "",
        mismatches: list[str] | None = None,
        config: dict[str, Any] | None = None,
        must_match: bool = True,
        **kwargs: Any,
    ) -> None:
        """Fill every entry that waits for its value.

        Args:
            prefix: The dotted name of `config` inside the whole.
            mismatches: Where differences are noted, by an outer call.
            config: The part to walk; the whole by default.
            must_match: Refuse entries that differ from the value given for them.
            kwargs: The values, by dotted name.

        Raises:
            ConfigurationError: An entry waits without a value, or differs from the one given.
        """
        noted: list[str] = [] if mismatches is None else mismatches
        for key, value in (self.deepspeed_config if config is None else config).items():
            if isinstance(value, dict):
                self.deepspeed_config_process(f"{prefix}{key}.", noted, value, must_match, **kwargs)
            else:
                self.fill_match(prefix + key, noted, must_match, **kwargs)
        if noted and not prefix:
            raise ConfigurationError(
                "DeepSpeed's configuration differs from what the program says:\n"
                + "\n".join(noted)
                + "\nSet these entries to 'auto', so that they are filled from the program."
            )

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Add the precision to DeepSpeed's configuration.

        Raises:
            ConfigurationError: The configuration turns the other half precision on.
        """
        config = self.deepspeed_config
        chosen = HALF.get(mixed_precision)
        for name in ("fp16", "bf16"):
            if chosen not in (None, name) and self.get_value(f"{name}.enabled") is True:
                raise ConfigurationError(
                    f"mixed_precision={mixed_precision!r} contradicts DeepSpeed's configuration, which turns {name} on. "
                    f"Set {name}.enabled to 'auto' there, or use mixed_precision={name!r}."
                )
        if chosen == "fp16" and "fp16" not in config:
            config["fp16"] = {"enabled": True, "auto_cast": True}
        for name in ("fp16", "bf16"):
            entry = config[name] = config.get(name) or {}
            if entry.setdefault("enabled", AUTO) == AUTO:
                entry["enabled"] = name == chosen
        if chosen == "bf16":
            import torch

            if torch.version.hip is not None:
                config.setdefault("communication_data_type", "fp32")

    def set_deepspeed_weakref(self) -> None:
        """Tell Transformers whether to build models in shards, and by which configuration.

        Below stage 3, a configuration that the program has registered with Transformers stays registered.

        Raises:
            MissingPackageError: It is, and DeepSpeed is not installed.
        """
        if not self.zero3_init_flag:
            self.dschf = None
            # What was never imported was never told anything.
            if self.zero_stage == 3 and env.are_libraries_initialized("transformers.integrations.deepspeed"):
                require("transformers.integrations.deepspeed", why="ZeRO").unset_hf_deepspeed_config()
            return
        why = "DeepSpeedPlugin(zero3_init_flag=True)"
        require("deepspeed", why=why, extra="deepspeed")
        if not is_transformers_available():
            return  # there is nobody to tell
        # Building in shards asks for sizes that only the loaders will give.
        config = {name: value for name, value in self.deepspeed_config.items() if value != AUTO}
        if "train_batch_size" not in config:
            config.setdefault("train_micro_batch_size_per_gpu", 1)
        self.dschf = require("transformers.integrations.deepspeed", why=why).HfDeepSpeedConfig(config)

    def is_zero3_init_enabled(self) -> bool:
        """Say whether models are built in shards."""
        return self.zero3_init_flag

    @contextlib.contextmanager
    def zero3_init_context_manager(self, enable: bool = False) -> Iterator[None]:
        """Turn building models in shards on or off inside a block."""
        before, registered = self.zero3_init_flag, self.dschf is not None
        if before == enable:
            yield
            return
        self.zero3_init_flag = enable
        try:
            self.set_deepspeed_weakref()
            yield
        finally:
            self.zero3_init_flag = before
            if registered or not before:
                self.set_deepspeed_weakref()

    @property
    def selected(self) -> bool:
        """Return whether these settings are in force."""
        return self._selected

    @selected.setter
    def selected(self, value: bool) -> None:
        raise NotImplementedError(
            f"DeepSpeedPlugin.selected = {value!r} would leave the other plugins in force. "
            "Write accelerator.state.select_deepspeed_plugin(name)."
        )

    def select(self, _from_accelerator_state: bool = False) -> None:
        """Put these settings in force; the accelerator's state does that.

        Raises:
            ConfigurationError: Somebody else calls.
        """
        if not _from_accelerator_state:
            raise ConfigurationError(
                "DeepSpeedPlugin.select() alone would leave the other plugins in force. "
                "Write accelerator.state.select_deepspeed_plugin(name)."
            )
        self._selected = True
        self.set_deepspeed_weakref()

    def _unselect(self) -> None:
        self._selected = False
        self.dschf = None  # Transformers holds it weakly, and forgets it with this

    def set_moe_leaf_modules(self, model: nn.Module) -> None:
        """Let ZeRO 3 gather each mixture-of-experts layer as a whole, where classes of such layers are named.

        Raises:
            ConfigurationError: The model has no layer of a class that was named.
            MissingPackageError: DeepSpeed is not installed.
        """
        names = [name.strip() for name in (self.transformer_moe_cls_names or "").split(",") if name.strip()]
        if not names:
            return
        found = {name: get_module_class_from_name(model, name) for name in names}
        missing = [name for name, cls in found.items() if cls is None]
        if missing:
            raise ConfigurationError(
                f"transformer_moe_cls_names={self.transformer_moe_cls_names!r} names {', '.join(missing)}, but "
                f"{type(model).__name__} has no layer of that class. Name classes of its own layers."
            )
        utils = require("deepspeed.utils", why="transformer_moe_cls_names", extra="deepspeed")
        utils.set_z3_leaf_modules(model, list(found.values()))


def _stage(value: Any) -> int:
    if str(value) not in ("0", "1", "2", "3"):
        raise ConfigurationError(f"DeepSpeedPlugin(zero_stage={value!r}) is not a stage of ZeRO. Write 0, 1, 2 or 3.")
    return int(value)
