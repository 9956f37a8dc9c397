"""FSDP's plugin: what names stand for, and what each version has."""

from __future__ import annotations

import functools
import os
import pickle
import warnings
from typing import Any

import pytest
import torch
from tests.support.logs import logged
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import reset_warnings
from accelerate.config import env
from accelerate.config.plugins.fsdp import FullyShardedDataParallelPlugin as Plugin
from accelerate.config.plugins.fsdp import disable_fsdp_ram_efficient_loading, enable_fsdp_ram_efficient_loading
from accelerate.config.plugins.fsdp_torch import empty_on_current_device, get_module_class_from_name

RAM = "FSDP_CPU_RAM_EFFICIENT_LOADING"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RAM, "")
    reset_warnings()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Model(nn.Module):
    _no_split_modules = ["Block"]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])


@pytest.mark.parametrize("value", ["HYBRID_SHARD_ZERO2", "hybrid_shard_zero2", 5, "5", fsdp.ShardingStrategy(5)])
def test_a_strategy_by_name_number_or_object(value: Any) -> None:
    with logged(r"sharding_strategy=...\) is the old name of reshard_after_forward"):
        assert Plugin(sharding_strategy=value).sharding_strategy is fsdp.ShardingStrategy(5)
    assert Plugin(reshard_after_forward=value).reshard_after_forward is fsdp.ShardingStrategy(5)


def test_the_new_name_of_the_strategy_takes_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Plugin(reshard_after_forward="SHARD_GRAD_OP").sharding_strategy is fsdp.ShardingStrategy.SHARD_GRAD_OP
    # The launcher writes both variables, the old one with its default.
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "FULL_SHARD")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "NO_SHARD")
    assert Plugin().sharding_strategy is fsdp.ShardingStrategy.NO_SHARD
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "true")
    assert Plugin().sharding_strategy is fsdp.ShardingStrategy.FULL_SHARD
    assert Plugin().reshard_after_forward is None


@pytest.mark.parametrize("value", ["NO_PREFETCH", "no_prefetch"])
def test_no_prefetch_is_none(value: str) -> None:
    assert Plugin(backward_prefetch=value).backward_prefetch is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fsdp_version": 3}, r"fsdp_version=3\) does not exist"),
        ({"reshard_after_forward": "sometimes"}, r"reshard_after_forward='sometimes'.*'FULL_SHARD'"),
        ({"reshard_after_forward": True}, r"reshard_after_forward=True\) is FSDP 2's way"),
        ({"fsdp_version": 2, "reshard_after_forward": "FULL_SHARD"}, r"'FULL_SHARD'\) names a strategy of FSDP 1"),
        ({"backward_prefetch": "soon"}, r"backward_prefetch='soon'.*'BACKWARD_PRE'"),
        ({"backward_prefetch": 7}, r"backward_prefetch=7"),
        ({"auto_wrap_policy": "none"}, r"auto_wrap_policy='none'.*'NO_WRAP'"),
        ({"state_dict_type": "half"}, r"state_dict_type='half'"),
        ({"fsdp_version": 2, "state_dict_type": "LOCAL_STATE_DICT"}, r"is not in FSDP 2"),
        ({"mixed_precision_policy": "fp4"}, r"compute in 'fp4'.*fp8, fp16, bf16, fp32"),
        ({"mixed_precision_policy": {"output_dtype": "bf16"}}, r"\['output_dtype'\], which FSDP 1 does not know"),
        ({"fsdp_version": 2, "mixed_precision_policy": {"buffer_dtype": "bf16"}}, r"which FSDP 2 does not know"),
        ({"mixed_precision_policy": fsdp.MixedPrecisionPolicy()}, r"not for FSDP 1.*MixedPrecision"),
        ({"fsdp_version": 2, "mixed_precision_policy": fsdp.MixedPrecision()}, r"not for FSDP 2.*MixedPrecisionPolicy"),
        ({"cpu_offload": fsdp.CPUOffloadPolicy()}, r"not for FSDP 1.*CPUOffload"),
        ({"fsdp_version": 2, "cpu_offload": fsdp.CPUOffload()}, r"not for FSDP 2.*OffloadPolicy"),
        ({"fsdp_version": 2, "forward_prefetch": False}, r"forward_prefetch=False\) is not in FSDP 2"),
        ({"activation_checkpointing_offload": True, "fsdp_version": 2}, r"activation_checkpointing=False"),
        ({"activation_checkpointing_offload": True, "activation_checkpointing": True}, r"fsdp_version=1"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Plugin(**options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sharding_strategy", "FULL_SHARD"),
        ("backward_prefetch", "BACKWARD_PRE"),
        ("use_orig_params", True),
        ("sync_module_states", True),
    ],
)
def test_version_2_names_what_it_leaves_out_once(name: str, value: Any) -> None:
    with logged(rf"\({name}=...\) means nothing to FSDP 2"):
        assert getattr(Plugin(fsdp_version=2, **{name: value}), name) is None
        Plugin(fsdp_version=2, **{name: value})


def test_version_2_passes_over_what_the_launcher_always_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    written = {
        "SHARDING_STRATEGY": "FULL_SHARD",
        "USE_ORIG_PARAMS": "true",
        "SYNC_MODULE_STATES": "true",
        "FORWARD_PREFETCH": "false",
        "BACKWARD_PREFETCH": "BACKWARD_PRE",
        "RESHARD_AFTER_FORWARD": "false",
        "VERSION": "2",
    }
    for name, text in written.items():
        monkeypatch.setenv(f"FSDP_{name}", text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugin = Plugin()
    names = ("sharding_strategy", "use_orig_params", "sync_module_states", "forward_prefetch", "backward_prefetch")
    assert [getattr(plugin, name) for name in names] == [None] * 5
    assert plugin.reshard_after_forward is False
    assert plugin.param_init_fn is None


def test_version_2_defaults() -> None:
    plugin = Plugin(fsdp_version="2")  # type: ignore[arg-type]
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.state_dict_type is fsdp.StateDictType.SHARDED_STATE_DICT
    assert type(plugin.cpu_offload) is fsdp.OffloadPolicy
    offloaded = Plugin(fsdp_version=2, cpu_offload=True).cpu_offload
    assert isinstance(offloaded, fsdp.CPUOffloadPolicy)
    assert offloaded.pin_memory is torch.accelerator.is_available()
    both = Plugin(fsdp_version=2, activation_checkpointing=True, activation_checkpointing_offload=True)
    assert both.activation_checkpointing_offload is True


def test_checkpointing_offload_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "true")
    two = {"fsdp_version": 2, "activation_checkpointing": True}
    assert Plugin(**two).activation_checkpointing_offload is True  # type: ignore[arg-type]
    assert Plugin(**two, activation_checkpointing_offload=False).activation_checkpointing_offload is False  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "cls", "last"),
    [(1, fsdp.MixedPrecision, "buffer_dtype"), (2, fsdp.MixedPrecisionPolicy, "output_dtype")],
)
@pytest.mark.parametrize(
    ("value", "dtype"),
    [("bf16", torch.bfloat16), ("fp8", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)],
)
def test_precision_by_name(version: int, cls: Any, last: str, value: str, dtype: torch.dtype) -> None:
    policy: Any = Plugin(fsdp_version=version, mixed_precision_policy=value).mixed_precision_policy
    assert isinstance(policy, cls)
    assert (policy.param_dtype, policy.reduce_dtype, getattr(policy, last)) == (dtype, dtype, dtype)


def test_precision_by_parts() -> None:
    parts = {"param_dtype": "bf16", "reduce_dtype": torch.float32}
    one: Any = Plugin(mixed_precision_policy=parts).mixed_precision_policy
    assert (one.param_dtype, one.reduce_dtype, one.buffer_dtype) == (torch.bfloat16, torch.float32, None)
    parts["output_dtype"] = "float16"
    two: Any = Plugin(fsdp_version=2, mixed_precision_policy=parts).mixed_precision_policy
    assert (two.param_dtype, two.output_dtype) == (torch.bfloat16, torch.float16)


def test_precision_is_set_once_unless_overridden() -> None:
    plugin: Any = Plugin()
    plugin.set_mixed_precision("bf16")
    plugin.set_mixed_precision("fp16")
    assert plugin.mixed_precision_policy.param_dtype is torch.bfloat16
    plugin.set_mixed_precision(torch.float16, buffer_autocast=True, override=True)
    assert plugin.mixed_precision_policy.param_dtype is torch.float16
    assert plugin.mixed_precision_policy.buffer_dtype is torch.float32


def test_the_form_of_checkpoints_brings_options_that_fit() -> None:
    plugin = Plugin()
    assert plugin.state_dict_config == fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    assert plugin.optim_state_dict_config == fsdp.FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
    plugin.set_state_dict_type("SHARDED_STATE_DICT")
    assert plugin.state_dict_config == fsdp.ShardedStateDictConfig(offload_to_cpu=True)
    assert plugin.optim_state_dict_config == fsdp.ShardedOptimStateDictConfig(offload_to_cpu=True)
    own = fsdp.FullStateDictConfig(offload_to_cpu=False)
    assert Plugin(state_dict_type=1, state_dict_config=own).state_dict_config is own


@pytest.mark.parametrize("given", ["LOCAL_STATE_DICT", "local_state_dict", 2, fsdp.StateDictType.LOCAL_STATE_DICT])
def test_local_weights_say_once_that_they_are_saved_in_shards(given: Any) -> None:
    with logged(r"'LOCAL_STATE_DICT'\) is saved by save_state in the shards"):
        local = Plugin(state_dict_type=given)
        local.set_state_dict_type()
        Plugin(state_dict_type=given)
    assert (local.state_dict_config, local.optim_state_dict_config) == (None, None)


def test_policies_are_bound_to_the_model() -> None:
    plugin: Any = Plugin(auto_wrap_policy="transformer_based_wrap")
    plugin.set_auto_wrap_policy(Model())
    assert isinstance(plugin.auto_wrap_policy, functools.partial)
    assert plugin.auto_wrap_policy.func is transformer_auto_wrap_policy
    assert plugin.auto_wrap_policy.keywords == {"transformer_layer_cls": {Block}}
    named: Any = Plugin(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap="Linear, Block")
    named.set_auto_wrap_policy(Model())
    assert named.auto_wrap_policy.keywords == {"transformer_layer_cls": {Block, nn.Linear}}
    sized: Any = Plugin(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=10)
    sized.set_auto_wrap_policy(Model())
    assert (sized.auto_wrap_policy.func, sized.auto_wrap_policy.keywords) == (
        size_based_auto_wrap_policy,
        {"min_num_params": 10},
    )


def test_policies_that_wrap_nothing() -> None:
    for options in ({}, {"auto_wrap_policy": "no_wrap"}, {"auto_wrap_policy": "size_based_wrap"}):
        plugin = Plugin(**options)  # type: ignore[arg-type]
        plugin.set_auto_wrap_policy(Model())
        assert plugin.auto_wrap_policy is None
    assert Plugin(auto_wrap_policy="size_based_wrap").min_num_params == 0
    plugin = Plugin(auto_wrap_policy="transformer_based_wrap")
    with pytest.warns(UserWarning, match=r"Linear does not name them") as seen:
        plugin.set_auto_wrap_policy(nn.Linear(1, 1))
    assert seen[0].filename == __file__


def test_a_layer_that_is_not_there_is_named() -> None:
    plugin = Plugin(auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Brick"])
    with pytest.raises(ConfigurationError, match=r"holds 'Brick', but Model has no layer.*Block, Linear"):
        plugin.set_auto_wrap_policy(Model())


def test_a_function_stays_the_policy() -> None:
    def policy(**kwargs: Any) -> bool:
        return True

    plugin = Plugin(auto_wrap_policy=policy)
    plugin.set_auto_wrap_policy(Model())
    assert plugin.auto_wrap_policy is policy


def test_classes_are_found_by_name() -> None:
    assert get_module_class_from_name(Model(), "Linear") is nn.Linear
    assert get_module_class_from_name(Model(), "Model") is Model
    assert get_module_class_from_name(Model(), "Nothing") is None


def test_one_reader_of_weights_sends_them_to_all() -> None:
    with pytest.warns(UserWarning, match=r"sync_module_states=False\) cannot be with cpu_ram_efficient_loading"):
        plugin = Plugin(cpu_ram_efficient_loading=True, sync_module_states=False)
    assert plugin.sync_module_states is True
    assert os.environ[RAM] == "True"
    with torch.device("meta"):
        layer = nn.Linear(2, 2)
    assert plugin.param_init_fn is not None
    plugin.param_init_fn(layer)
    assert layer.weight.device.type != "meta"


def test_a_given_value_reaches_the_environment_and_a_missing_one_does_not() -> None:
    Plugin()
    assert os.environ[RAM] == ""
    Plugin(cpu_ram_efficient_loading=False)
    assert os.environ[RAM] == "False"
    assert Plugin(fsdp_version=2, cpu_ram_efficient_loading=True).sync_module_states is None
    assert os.environ[RAM] == "True"


def test_a_plugin_can_be_edited_and_pickled() -> None:
    plugin = Plugin(auto_wrap_policy="transformer_based_wrap")
    plugin.fsdp_version = 2
    plugin.set_state_dict_type("FULL_STATE_DICT")
    assert pickle.loads(pickle.dumps(plugin)) == plugin


def test_memory_saving_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING")
    for name in names:
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)
    enable_fsdp_ram_efficient_loading()
    assert [env.get(name) for name in names] == ["True", "True"]
    env.put("ACCELERATE_USE_FSDP", "false")
    enable_fsdp_ram_efficient_loading()
    assert env.get("ACCELERATE_USE_FSDP") == "false"
    disable_fsdp_ram_efficient_loading()
    assert [env.get(name) for name in names] == ["false", "False"]
    for name in names:
        env.drop(name)


def test_weights_get_memory_on_the_device_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
    empty_on_current_device(model[0])
    expected = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    assert expected is not None
    assert model[0].weight.device.type == expected.type
    # An accelerator is addressed with the index of this process.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    empty_on_current_device(model[0])
    assert model[0].weight.device.type == "meta"
