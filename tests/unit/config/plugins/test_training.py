"""The option classes: defaults, precedence, conversion, refusal."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
from tests.support.processes import run_group

from accelerate._base.enums import DDPCommunicationHookType, DynamoBackend
from accelerate._base.errors import ConfigurationError, MissingPackageError
from accelerate._base.helpers import reset_warnings
from accelerate._base.imports import is_torchao_available, is_transformer_engine_available
from accelerate.config.knob import KwargsHandler
from accelerate.config.plugins.quantization import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accelerate.config.plugins.training import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)

STEPS = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"


@dataclass
class Numbers(KwargsHandler):
    """A handler as users write them: plain fields."""

    a: int = 0
    b: bool = False
    c: float = 3.0


def test_to_kwargs_gives_what_differs_from_the_defaults() -> None:
    assert Numbers().to_kwargs() == {}
    assert Numbers(a=2).to_kwargs() == {"a": 2}
    assert Numbers(a=2, b=True, c=2.25).to_kwargs() == {"a": 2, "b": True, "c": 2.25}
    assert Numbers(a=2).to_dict() == {"a": 2, "b": False, "c": 3.0}


def test_to_dict_is_a_deep_copy() -> None:
    handler = DistributedDataParallelKwargs(comm_state_option={"rank": 1})
    handler.to_dict(ignore_keys=())["comm_state_option"]["rank"] = 2
    assert handler.comm_state_option == {"rank": 1}


def test_to_kwargs_compares_with_an_empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    before = dict(os.environ)
    assert TorchDynamoPlugin().to_kwargs() == {"backend": "inductor"}
    assert dict(os.environ) == before


def test_values_edited_after_construction_count() -> None:
    scaler = GradScalerKwargs()
    scaler.init_scale = 8.0
    assert scaler.to_kwargs() == {"init_scale": 8.0}
    plugin = TorchDynamoPlugin(backend="eager")  # type: ignore[arg-type]
    plugin.backend = "INDUCTOR"  # type: ignore[assignment]
    assert plugin.to_kwargs()["backend"] == "inductor"


def test_grad_scaler_kwargs_are_arguments_of_the_scaler() -> None:
    kwargs = GradScalerKwargs(init_scale=1024, growth_factor=3).to_kwargs()
    scaler = torch.amp.GradScaler("cpu", **kwargs)
    assert scaler.get_scale() == 1024
    assert scaler.get_growth_factor() == 3
    assert scaler.get_backoff_factor() == 0.5


def test_autocast_kwargs() -> None:
    assert AutocastKwargs().to_kwargs() == {}
    with torch.autocast("cpu", dtype=torch.bfloat16, **AutocastKwargs(enabled=False).to_kwargs()):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_process_group_defaults_hand_on_nothing_and_another_backend_brings_its_timeout() -> None:
    assert InitProcessGroupKwargs().to_kwargs() == {}
    assert InitProcessGroupKwargs().timeout == timedelta(seconds=600)
    assert InitProcessGroupKwargs(backend="gloo").to_kwargs() == {
        "backend": "gloo",
        "timeout": timedelta(seconds=1800),
    }
    assert InitProcessGroupKwargs(timeout=timedelta(seconds=5)).to_kwargs() == {"timeout": timedelta(seconds=5)}


def test_accumulation_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GradientAccumulationPlugin().num_steps is None
    assert GradientAccumulationPlugin().to_kwargs() == {}
    monkeypatch.setenv(STEPS, "4")
    assert GradientAccumulationPlugin().num_steps == 4
    assert GradientAccumulationPlugin().to_kwargs() == {"num_steps": 4}
    assert GradientAccumulationPlugin(num_steps=2).num_steps == 2


@pytest.mark.parametrize("num_steps", [0, -3])
def test_accumulation_needs_a_window(num_steps: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"num_steps={num_steps}\) cannot work"):
        GradientAccumulationPlugin(num_steps=num_steps)


def test_accumulation_normalize_names_value_and_choices() -> None:
    assert GradientAccumulationPlugin().normalize == "steps"
    assert GradientAccumulationPlugin(normalize="window").normalize == "window"
    with pytest.raises(ConfigurationError, match=r"normalize='nonsense'.*'steps', 'window'"):
        GradientAccumulationPlugin(normalize="nonsense")  # type: ignore[arg-type]


def test_loader_configuration() -> None:
    class Loader: ...

    configuration = DataLoaderConfiguration()
    assert configuration.custom_classes == ()
    assert configuration.restore_position is True
    assert configuration.dispatch_batches is None
    assert DataLoaderConfiguration(custom_classes=[Loader]).custom_classes == (Loader,)  # type: ignore[arg-type]
    assert DataLoaderConfiguration(custom_classes=Loader).custom_classes == (Loader,)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"holds 'Loader', which is not a class"):
        DataLoaderConfiguration(custom_classes=("Loader",))  # type: ignore[arg-type]


def test_project_folders() -> None:
    assert ProjectConfiguration("run").logging_dir == "run"
    assert ProjectConfiguration("run", "logs").logging_dir == "logs"
    project = ProjectConfiguration()
    assert project.logging_dir is None
    project.set_directories("later")
    assert (project.project_dir, project.logging_dir) == ("later", "later")
    project.set_directories("again")
    assert (project.project_dir, project.logging_dir) == ("again", "later")


def test_dynamo_defaults_and_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = TorchDynamoPlugin()
    assert plugin.backend is DynamoBackend.NO
    assert (plugin.mode, plugin.fullgraph, plugin.dynamic) == ("default", False, None)
    assert plugin.use_regional_compilation is False
    for name, value in {
        "BACKEND": "eager",
        "USE_DYNAMIC": "false",
        "USE_FULLGRAPH": "True",
        "MODE": "max-autotune",
    }.items():
        monkeypatch.setenv("ACCELERATE_DYNAMO_" + name, value)
    plugin = TorchDynamoPlugin(mode="reduce-overhead", use_regional_compilation=True)
    assert plugin.to_kwargs() == {"backend": "eager", "mode": "reduce-overhead", "fullgraph": True, "dynamic": False}
    assert plugin.to_dict()["use_regional_compilation"] is True


def test_dynamo_backend_in_any_case_and_unknown() -> None:
    assert TorchDynamoPlugin(backend="aot_eager").backend is DynamoBackend.AOT_EAGER  # type: ignore[arg-type]
    assert TorchDynamoPlugin(backend=DynamoBackend.INDUCTOR).to_dict()["backend"] == "inductor"
    with pytest.raises(ConfigurationError, match=r"backend='gcc'\) names no known compiler.*inductor"):
        TorchDynamoPlugin(backend="gcc")  # type: ignore[arg-type]


def test_profiler_is_built_and_records() -> None:
    events: list[Any] = []
    kwargs = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 0, "warmup": 1, "active": 1, "repeat": 1},
        on_trace_ready=lambda profiler: events.extend(profiler.key_averages()),
        record_shapes=True,
    )
    with kwargs.build() as profiler:
        for _ in range(2):
            torch.ones(4, 4) @ torch.ones(4, 4)
            profiler.step()
    assert any(event.key == "aten::mm" for event in events)


def test_an_activity_that_torch_does_not_know() -> None:
    with pytest.raises(ConfigurationError, match=r"'abacus'.*cpu"):
        ProfileKwargs(activities=["abacus"]).build()  # type: ignore[list-item]


def test_ddp_kwargs_leave_out_the_hooks_and_take_their_names() -> None:
    handler = DistributedDataParallelKwargs(comm_hook="fp16", find_unused_parameters=True)  # type: ignore[arg-type]
    assert handler.comm_hook is DDPCommunicationHookType.FP16
    assert handler.to_kwargs() == {"find_unused_parameters": True}
    with pytest.raises(ConfigurationError, match=r"comm_hook='zip'.*power_sgd"):
        DistributedDataParallelKwargs(comm_hook="zip")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"comm_wrapper=<DDPCommunicationHookType.POWER_SGD"):
        DistributedDataParallelKwargs(comm_wrapper=DDPCommunicationHookType.POWER_SGD)  # type: ignore[arg-type]


# The bf16 hook and wrapper are missing here: torch refuses them without an accelerator.
HOOKS = [("no", "no"), ("fp16", "no"), ("power_sgd", "no"), ("power_sgd", "fp16"), ("batched_power_sgd", "no")]


def _gradients_with_hooks() -> dict[str, list[float]]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    found: dict[str, list[float]] = {}
    try:
        for hook, wrapper in HOOKS:
            torch.manual_seed(0)
            model = DistributedDataParallel(torch.nn.Linear(4, 4, bias=False))
            option = {"matrix_approximation_rank": 4, "start_powerSGD_iter": 2} if "sgd" in hook else {}
            DistributedDataParallelKwargs(
                comm_hook=hook,  # type: ignore[arg-type]
                comm_wrapper=wrapper,  # type: ignore[arg-type]
                comm_state_option=option,
            ).register_comm_hook(model)
            model(torch.full((1, 4), 1.0 + dist.get_rank() + 2**-13)).sum().backward()
            found[f"{hook}+{wrapper}"] = model.module.weight.grad.flatten().tolist()
    finally:
        dist.destroy_process_group()
    return found


@pytest.mark.multiprocess
def test_communication_hooks_compress_real_gradients() -> None:
    first, second = run_group(_gradients_with_hooks, 2, start_method="spawn")
    assert first == second
    exact = 1.5 + 2**-13
    assert first["no+no"] == pytest.approx([exact] * 16, abs=1e-7)
    # fp16 keeps 10 bits after the first, so the small part is lost: the hook was really there.
    assert first["fp16+no"] == [1.5] * 16
    # PowerSGD sends plain gradients in its first steps, here rounded by the wrapper or not.
    assert first["power_sgd+no"] == pytest.approx([exact] * 16, abs=1e-7)
    assert first["power_sgd+fp16"] == [1.5] * 16
    assert first["batched_power_sgd+no"] == pytest.approx([exact] * 16, abs=1e-7)


def test_msamp_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MSAMPRecipeKwargs().opt_level == "O2"
    monkeypatch.setenv("ACCELERATE_FP8_OPT_LEVEL", "O1")
    assert MSAMPRecipeKwargs().opt_level == "O1"
    with pytest.raises(ConfigurationError, match=r"opt_level='O3'.*'O1', 'O2'"):
        MSAMPRecipeKwargs(opt_level="O3")  # type: ignore[arg-type]


@pytest.mark.skipif(is_torchao_available(), reason="torchao is installed")
def test_torchao_recipe_names_its_package() -> None:
    with pytest.raises(MissingPackageError, match="torchao"):
        AORecipeKwargs()


def test_torchao_recipe_is_made_from_the_options() -> None:
    made = AORecipeKwargs(pad_inner_dim=False).config
    assert (made.pad_inner_dim, made.enable_fsdp_float8_all_gather) == (False, True)
    given: Any = object()
    assert AORecipeKwargs(config=given).config is given


@pytest.mark.skipif(is_transformer_engine_available(), reason="TransformerEngine is installed")
def test_the_old_recipe_needs_the_package_of_its_backend() -> None:
    reset_warnings()
    with (
        pytest.warns(FutureWarning, match="FP8RecipeKwargs is deprecated"),
        pytest.raises(MissingPackageError, match=r"FP8RecipeKwargs\(\) needs the package 'transformer_engine'"),
    ):
        FP8RecipeKwargs(backend="TE")


@pytest.mark.skipif(is_transformer_engine_available(), reason="TransformerEngine is installed")
def test_transformer_engine_recipe_names_its_package() -> None:
    with pytest.raises(MissingPackageError, match="transformer_engine"):
        TERecipeKwargs()


def test_the_old_recipe_still_reads_every_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    reset_warnings()
    for name, value in {
        "BACKEND": "msamp",
        "FORMAT": "e4m3",
        "MARGIN": "2",
        "AMAX_COMPUTE_ALGO": "max",
        "OVERRIDE_DGRAD": "true",
        "USE_AUTOCAST_DURING_EVAL": "1",
    }.items():
        monkeypatch.setenv("ACCELERATE_FP8_" + name, value)
    with pytest.warns(FutureWarning, match="FP8RecipeKwargs is deprecated"):
        recipe = FP8RecipeKwargs(fp8_format="hybrid")  # type: ignore[arg-type]
    assert (recipe.backend, recipe.fp8_format, recipe.margin) == ("MSAMP", "HYBRID", 2)
    assert recipe.override_linear_precision == (False, True, False)
    assert (recipe.amax_compute_algo, recipe.amax_history_len, recipe.interval) == ("max", 1024, 1)
    assert recipe.use_autocast_during_eval is True
    with pytest.raises(ConfigurationError, match=r"fp8_format='E9M9'.*'HYBRID'"):
        FP8RecipeKwargs(fp8_format="e9m9")  # type: ignore[arg-type]


def test_options_load_without_torch() -> None:
    code = (
        "import sys, accelerate, accelerate.utils.dataclasses, accelerate.utils.imports, accelerate.utils.environment\n"
        "from accelerate import DataLoaderConfiguration\n"
        "from accelerate.utils import GradientAccumulationPlugin, is_transformers_available\n"
        "GradientAccumulationPlugin(num_steps=2).to_kwargs()\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
