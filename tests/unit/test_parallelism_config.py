"""The sizes of the axes: where they come from, what they exclude, and what would fit."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from accelerate import ParallelismConfig
from accelerate._base.enums import MeshAxis
from accelerate._base.errors import ConfigurationError
from accelerate.session.setup import parallelism_from_environment
from accelerate.utils import (
    DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig,
    TorchPipelineParallelConfig,
    TorchTensorParallelConfig,
)


def test_sizes_not_given_are_one() -> None:
    config = ParallelismConfig()
    assert config.sizes == dict.fromkeys(("dp_replicate", "dp_shard", "cp", "sp", "tp", "pp"), 1)
    assert (config.total_size, config.data_parallel_size, config.non_data_parallel_size) == (1, 1, 1)
    assert config.active_mesh_dims == []
    assert (config.cp_backend, config.sp_backend) == ("torch", "deepspeed")
    assert config.device_mesh is ParallelismConfig.device_mesh is None


def test_sizes_not_given_come_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parallelism_from_environment() is None
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "4")
    monkeypatch.setenv("PARALLELISM_CONFIG_PP_SIZE", "2")
    monkeypatch.setenv("PARALLELISM_CONFIG_PP_SCHEDULE", "gpipe")
    monkeypatch.setenv("PARALLELISM_CONFIG_PP_NUM_MICROBATCHES", "8")
    config = parallelism_from_environment()
    assert config is not None
    assert (config.tp_size, config.pp_size) == (4, 2)
    assert (config.pp_handler.schedule, config.pp_handler.num_microbatches) == ("gpipe", 8)
    assert ParallelismConfig(tp_size=2).tp_size == 2


def test_names_of_axes() -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=3, cp_size=5, tp_size=7)
    assert config.total_size == 210
    assert list(config.sizes) == [axis.value for axis in MeshAxis]
    assert (config.data_parallel_size, config.non_data_parallel_size) == (6, 35)
    assert config.dp_dim_names == ["dp_replicate", "dp_shard"]
    assert config.non_dp_dim_names == ["tp", "cp"]
    assert config.dp_shard_cp_dim_names == ["dp_shard", "cp"]
    assert config.dp_cp_dim_names == ["dp_replicate", "dp_shard", "cp"]
    assert config.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    assert config.active_mesh_dims == ["dp_replicate", "dp_shard", "tp", "cp"]
    assert ParallelismConfig(dp_shard_size=2).fsdp_dim_names == ["dp_shard_cp"]
    enabled = [name for name in dir(config) if name[0] != "_" and name.endswith("_enabled") and getattr(config, name)]
    assert enabled == ["cp_enabled", "dp_replicate_enabled", "dp_shard_enabled", "tp_enabled"]


@pytest.mark.parametrize(
    ("axis", "kind"),
    [
        ("tp", TorchTensorParallelConfig),
        ("cp", TorchContextParallelConfig),
        ("sp", DeepSpeedSequenceParallelConfig),
        ("pp", TorchPipelineParallelConfig),
    ],
)
def test_an_axis_in_use_has_options(axis: str, kind: type) -> None:
    assert getattr(ParallelismConfig(), f"{axis}_handler") is None
    assert type(getattr(ParallelismConfig(**{f"{axis}_size": 2}), f"{axis}_handler")) is kind
    late = ParallelismConfig()
    setattr(late, f"{axis}_size", 2)
    late.fit(2)
    assert type(getattr(late, f"{axis}_handler")) is kind
    own = kind()
    assert getattr(ParallelismConfig(**{f"{axis}_size": 2, f"{axis}_handler": own}), f"{axis}_handler") is own


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_size": 0}, r"tp_size=0\) is not a number of ranks"),
        ({"dp_shard_size": -1}, r"dp_shard_size=-1\) is not a number of ranks"),
        ({"cp_size": 2.0}, r"cp_size=2.0\) is not a number of ranks"),
        ({"cp_backend": "ring"}, r"cp_backend='ring'\) names no engine. Write one of torch"),
        ({"sp_backend": "torch"}, r"sp_backend='torch'\) names no engine. Write one of deepspeed"),
        ({"cp_size": 2, "sp_size": 2}, r"cp_size=2 and sp_size=2 both split the sequence"),
        (
            {"cp_handler": DeepSpeedSequenceParallelConfig(sp_seq_length=8)},
            r"(?s)cp_handler=DeepSpeedSequenceParallelConfig\(.*Write cp_handler=TorchContextParallelConfig\(",
        ),
        ({"tp_size": 2, "tp_handler": {}}, r"tp_handler=\{\}\) is of the type dict.*=TorchTensorParallelConfig\("),
        ({"sp_handler": TorchContextParallelConfig()}, r"Write sp_handler=DeepSpeedSequenceParallelConfig\("),
        ({"pp_handler": TorchTensorParallelConfig}, r"is of the type type.*=TorchPipelineParallelConfig\("),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ParallelismConfig(**options)


@pytest.mark.parametrize("axis", ["dp_replicate", "dp_shard", "cp", "sp", "tp", "pp"])
@pytest.mark.parametrize(("text", "shown"), [("-1", "-1"), ("0", "0"), ("two", "'two'"), ("2.0", "'2.0'")])
def test_a_size_in_the_environment_is_judged_like_an_argument(
    axis: str, text: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = f"PARALLELISM_CONFIG_{axis.upper()}_SIZE"
    monkeypatch.setenv(variable, text)
    with pytest.raises(ConfigurationError) as caught:
        ParallelismConfig()
    assert str(caught.value) == (
        f"ParallelismConfig({axis}_size={shown}), which the variable {variable} says, is not a number of ranks. "
        "Write a whole number from 1 on."
    )
    monkeypatch.setenv(variable, "")
    assert ParallelismConfig().sizes[axis] == 1


def test_a_handler_that_was_set_later_is_judged_too() -> None:
    config = ParallelismConfig()
    config.tp_handler = TorchContextParallelConfig()
    with pytest.raises(ConfigurationError, match="tp_handler=TorchContextParallelConfig"):
        config.fit(2)


@pytest.mark.parametrize(("schedule", "parts"), [("2f2b", None), ("gpipe", 0)])
def test_a_pipeline_needs_a_known_schedule_and_parts(schedule: str, parts: int | None) -> None:
    with pytest.raises(ConfigurationError):
        TorchPipelineParallelConfig(schedule=schedule, num_microbatches=parts)


@pytest.mark.parametrize(
    ("options", "world_size", "fits"),
    [
        ({"tp_size": 2}, 8, ["dp_replicate_size=4, tp_size=2", "dp_shard_size=4, tp_size=2", "tp_size=8"]),
        ({"tp_size": 3}, 4, ["tp_size=4"]),
        ({"dp_shard_size": 4, "tp_size": 4}, 8, ["dp_shard_size=2, tp_size=4", "dp_shard_size=4, tp_size=2"]),
        ({"dp_shard_size": 4}, 1, ["no axis at all"]),
    ],
)
def test_the_message_lists_what_would_fit(options: dict[str, int], world_size: int, fits: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=f"but there are {world_size}") as caught:
        ParallelismConfig(**options).fit(world_size)
    listed = str(caught.value).partition("These would fit: ")[2].rstrip(".").split("; ")
    assert set(fits) <= set(listed)
    for layout in listed:
        sizes = dict(entry.split("=") for entry in layout.split(", ")) if "=" in layout else {}
        ParallelismConfig(**{name: int(size) for name, size in sizes.items()}).fit(world_size)


def test_a_product_that_no_single_size_mends_says_so() -> None:
    with pytest.raises(ConfigurationError, match="Their product must be 7"):
        ParallelismConfig(tp_size=2, cp_size=2).fit(7)


def test_no_sizes_mean_replicas() -> None:
    config = ParallelismConfig()
    config.fit(6)
    assert config.dp_replicate_size == 6


def test_a_mesh_needs_a_device_and_an_axis() -> None:
    with pytest.raises(ConfigurationError, match="needs a device type"):
        ParallelismConfig(tp_size=2).get_device_mesh()
    assert ParallelismConfig().get_device_mesh("cpu") is None
    assert ParallelismConfig(sp_size=2).build_device_mesh("cpu") is None
    with pytest.raises(ConfigurationError, match="no axis over which weights are sharded"):
        ParallelismConfig(tp_size=2).fsdp_mesh()


def test_settings_become_plain_values() -> None:
    plain = ParallelismConfig(tp_size=2, pp_size=2).to_json()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["tp_handler"]["enable_async_tp"] is False
    assert (plain["tp_size"], plain["dp_shard_size"], plain["cp_handler"]) == (2, 1, None)


def test_a_mesh_lives_as_long_as_its_process_group_and_is_not_copied() -> None:
    config = ParallelismConfig()
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        config.__dict__["device_mesh"] = made = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        config.__dict__["_world"] = dist.group.WORLD
        assert config.get_device_mesh("cpu") is made
        with pytest.raises(ConfigurationError, match="'meta' was asked for"):
            config.get_device_mesh("meta")
        copied = pickle.loads(pickle.dumps(config))
        assert copied == config
        assert copied.device_mesh is None
        dist.destroy_process_group()
    assert config.get_device_mesh("cpu") is None
