"""The engines a program asks for, and what cannot be asked for together."""

from __future__ import annotations

import pytest

from accelerate import ParallelismConfig
from accelerate._base.errors import ConfigurationError, WrongTypeError
from accelerate.config.env import patch_environment
from accelerate.strategies.base import EngineRequest, Strategy
from accelerate.strategies.parallel import check_pipeline
from accelerate.strategies.registry import register, require_known, unregister
from accelerate.utils import FullyShardedDataParallelPlugin


def test_engines_from_plugins_and_switches() -> None:
    assert EngineRequest.from_plugins(fsdp=None, deepspeed=None) == EngineRequest({}, None)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    assert EngineRequest.from_plugins(fsdp=plugin).engines == {"fsdp": plugin}
    with pytest.raises(WrongTypeError, match="FullyShardedDataParallelPlugin"):
        EngineRequest.from_plugins(fsdp="FULL_SHARD")
    with patch_environment(accelerate_use_fsdp="true", fsdp_version="2"):
        assert EngineRequest.from_plugins().engines["fsdp"].fsdp_version == 2
        assert EngineRequest.from_plugins(fsdp=plugin).engines == {"fsdp": plugin}


@pytest.mark.parametrize("other", ["tp_size", "cp_size"])
def test_stages_with_another_axis_are_refused(other: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_pipeline(ParallelismConfig(pp_size=2, **{other: 4}), scales=False)
    told = str(caught.value)
    assert f"pp_size=2 was given with {other}=4" in told  # what was given
    assert "stages are combined with replicas only" in told  # why it cannot work
    assert "set dp_replicate_size, or set pp_size=1" in told  # what to write


def test_stages_with_replicas_are_taken() -> None:
    check_pipeline(ParallelismConfig(pp_size=2, dp_replicate_size=4), scales=False)


def test_stages_with_shards_are_refused_before_anything_starts() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    request = EngineRequest(engines={"fsdp": plugin}, parallelism=ParallelismConfig(pp_size=2, dp_shard_size=2))
    with pytest.raises(ConfigurationError) as caught:
        require_known(request)
    told = str(caught.value)
    assert "pp_size=2 was given with the engine 'fsdp'" in told
    assert "does not know stages" in told
    assert "combine pp_size with dp_replicate_size, or set pp_size=1" in told


def test_stages_with_scaled_losses_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="Use mixed_precision='bf16'"):
        check_pipeline(ParallelismConfig(pp_size=2), scales=True)


def test_two_engines_at_once_are_refused() -> None:
    class Own(Strategy):
        engine = "own"

    register(Own)
    try:
        with pytest.raises(
            ConfigurationError, match=r"\['fsdp', 'own'\] were asked for together.*one engine. Give one"
        ):
            require_known(EngineRequest({"fsdp": FullyShardedDataParallelPlugin(fsdp_version=2), "own": Own}, None))
    finally:
        unregister(Own)
