"""From the arguments of an `Accelerator` to its run: what is refused before anything starts, and why a part was chosen."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tests.support.logs import logged

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate._base.enums import FP8BackendType
from accelerate._base.errors import ConfigurationError, WrongTypeError
from accelerate.config.env import patch_environment
from accelerate.config.plugins.megatron import MegatronLMPlugin
from accelerate.config.plugins.quantization import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs
from accelerate.config.plugins.training import (
    AutocastKwargs,
    GradientAccumulationPlugin,
    ProfileKwargs,
    TorchDynamoPlugin,
)
from accelerate.runtime import current
from accelerate.session.setup import Handlers, RunSettings, resolve_precision, start_run
from accelerate.state import AcceleratorState
from accelerate.utils.dataclasses import FullyShardedDataParallelPlugin, TorchTensorParallelPlugin

CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2)},
        "gradient_accumulation_steps=2 and a gradient_accumulation_plugin",
    ),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0"),
    ({"dynamo_backend": "eager", "dynamo_plugin": TorchDynamoPlugin(backend="eager")}, "dynamo_backend='eager'"),  # type: ignore[arg-type]
    ({"dynamo_backend": "warp"}, "'warp'"),
    (
        {"split_batches": True, "dataloader_config": DataLoaderConfiguration(split_batches=False)},
        "split_batches=True was given with a dataloader_config",
    ),
    ({"global_batch_size": 8, "split_batches": True}, "global_batch_size=8 was given with split_batches=True"),
    (
        {"global_batch_size": 8, "dataloader_config": DataLoaderConfiguration(dispatch_batches=True)},
        "global_batch_size=8 was given with dispatch_batches=True",
    ),
    ({"global_batch_size": 8, "gradient_accumulation_steps": 2}, "global_batch_size=8 and 2 accumulation steps"),
    (
        {"global_batch_size": 8, "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=3)},
        "global_batch_size=8 and 3 accumulation steps",
    ),
    ({"global_batch_size": 0}, "global_batch_size=0"),
    ({"global_batch_size": True}, "global_batch_size=True"),
    ({"global_batch_size": 2.0}, "global_batch_size=2.0"),
    ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]}, "two AutocastKwargs"),
    ({"kwargs_handlers": [MSAMPRecipeKwargs()]}, "MSAMPRecipeKwargs was given with mixed_precision='no'"),
    ({"mixed_precision": "fp4"}, "mixed_precision='fp4'"),
    ({"fsdp_plugin": FullyShardedDataParallelPlugin(), "megatron_lm_plugin": MegatronLMPlugin()}, "engines"),
    ({"megatron_lm_plugin": MegatronLMPlugin(tp_degree=2)}, "needs a multiple of 2 processes, and there are 1"),
    ({"deepspeed_plugin": object(), "deepspeed_plugins": object()}, "are one argument"),
]


@pytest.mark.parametrize(("arguments", "message"), CONTRADICTIONS)
def test_arguments_that_contradict(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Accelerator(**arguments)
    assert current.active() is None  # it was refused before anything was started


@pytest.mark.parametrize("handler", ["text", object(), AutocastKwargs])
def test_a_handler_of_another_type(handler: Any) -> None:
    with pytest.raises(WrongTypeError, match="kwargs_handlers holds") as caught:
        Accelerator(kwargs_handlers=[handler])
    assert isinstance(caught.value, AssertionError)  # as in releases before 2.0


def test_handlers_of_different_classes_go_together() -> None:
    cast, profile = AutocastKwargs(enabled=False), ProfileKwargs()
    accelerator = Accelerator(kwargs_handlers=[profile, cast])
    assert (accelerator.autocast_handler, accelerator.profile_handler) == (cast, profile)
    assert accelerator.ddp_handler is None


def test_an_engine_switched_on_by_the_environment() -> None:
    settings = {"accelerate_use_megatron_lm": "true", "megatron_lm_tp_degree": "3"}
    with patch_environment(**settings), pytest.raises(ConfigurationError, match="needs a multiple of 3 processes"):
        Accelerator()
    assert current.active() is None


def test_a_run_says_why_it_runs_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="accelerate.session.setup"):
        run = start_run(RunSettings(mixed_precision="bf16", cpu=True))
    assert run.reasons == {
        "device": "the CPU was asked for",
        "strategy": "there are 1 process(es)",
        "precision": "mixed_precision was given",
    }
    assert (run.strategy.name, run.precision.name, run.runtime.device) == ("single", "bf16", torch.device("cpu"))
    assert "strategy single, precision bf16" in caplog.text


@pytest.mark.parametrize(
    ("given", "variable", "value", "reason"),
    [
        ("BF16", "fp16", "bf16", "mixed_precision was given"),
        (None, "fp16", "fp16", "ACCELERATE_MIXED_PRECISION is set"),
        (None, None, "no", "no other precision was asked for"),
    ],
)
def test_the_precision_and_its_reason(given: str | None, variable: str | None, value: str, reason: str) -> None:
    with patch_environment(**({"accelerate_mixed_precision": variable} if variable else {})):
        choice = resolve_precision(given)
    assert (choice.value, choice.reason) == (value, reason)


def test_a_second_run_of_a_process_keeps_the_settings_of_the_first() -> None:
    first = Accelerator(mixed_precision="bf16")
    second = Accelerator()
    assert second.mixed_precision == "bf16"
    assert second.precision.name == "bf16"
    assert second.precision is not first.precision
    with pytest.raises(ConfigurationError, match="already uses 'bf16'"):
        Accelerator(mixed_precision="fp16")


def test_what_the_program_changes_on_the_accelerator_reaches_its_parts() -> None:
    accelerator = Accelerator(device_placement=False)
    accelerator.device_placement = True
    accelerator.even_batches = False
    accelerator.step = 7
    assert accelerator._run.options.device_placement is True
    assert accelerator.dataloader_config.even_batches is False
    assert accelerator._stepper.step == 7
    accelerator._models = [torch.nn.Linear(1, 1)]
    assert accelerator._objects.models is accelerator._models


def test_the_state_of_a_run_is_a_view_on_it() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    state = AcceleratorState()
    assert state.__dict__ is current.ACCELERATOR
    assert state.mixed_precision == accelerator.mixed_precision
    assert state.device == accelerator.device == current.runtime().device


def test_the_launcher_decides_on_accumulation_and_says_so() -> None:
    with (
        patch_environment(accelerate_gradient_accumulation_steps="4"),
        logged("gradient_accumulation_steps=2 was given.*=4 is set by the launcher and wins"),
    ):
        accelerator = Accelerator(gradient_accumulation_steps=2)
    assert accelerator.gradient_accumulation_steps == 4


def test_a_recipe_says_which_library_computes_in_fp8() -> None:
    assert Handlers().fp8_backend is FP8BackendType.NO
    assert Handlers(ao_recipe_handler=AORecipeKwargs()).fp8_backend is FP8BackendType.AO
    assert Handlers(msamp_recipe_handler=MSAMPRecipeKwargs()).fp8_backend is FP8BackendType.MSAMP
    with pytest.warns(FutureWarning, match="FP8RecipeKwargs is deprecated"):
        older = FP8RecipeKwargs(backend="MSAMP")
    assert Handlers(fp8_recipe_handler=older).fp8_backend is FP8BackendType.MSAMP


def test_the_older_form_of_tensor_parallelism_becomes_an_axis() -> None:
    plugin = TorchTensorParallelPlugin(tp_size=1)
    with pytest.warns(FutureWarning, match=r"ParallelismConfig\(tp_size=1\)"):
        accelerator = Accelerator(torch_tp_plugin=plugin)
    assert accelerator.parallelism_config is not None
    assert accelerator.parallelism_config.tp_size == 1
    assert accelerator.state.torch_tp_plugin is plugin
