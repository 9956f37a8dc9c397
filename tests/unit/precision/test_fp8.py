"""Training in 8-bit floats: torchao by itself, TransformerEngine and MS-AMP by stand-ins with their interfaces."""

from __future__ import annotations

import copy
import importlib
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.packages import installed
from torch import nn

from accelerate import Accelerator
from accelerate._base.enums import FP8BackendType
from accelerate._base.errors import ConfigurationError, MissingPackageError
from accelerate.devices.registry import CpuBackend
from accelerate.precision import fp8
from accelerate.utils import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    FullyShardedDataParallelPlugin,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
    convert_model_to_fp8_ao,
    has_ao_layers,
)

pytest.importorskip("torchao.float8", reason="torchao is not installed")

INPUTS = torch.randn(16, 16, generator=torch.Generator().manual_seed(1))


def make_model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(16, 3)
        )


def train(model: nn.Module, optimizer: Any, backward: Any, steps: int = 5) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(INPUTS).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class TestTorchao:
    def test_a_prepared_loop_gives_the_losses_of_one_by_hand(self) -> None:
        by_hand = make_model()
        convert_model_to_fp8_ao(by_hand)
        by_hand_forward = torch.autocast("cpu", torch.bfloat16)(by_hand.forward)
        optimizer = sgd(by_hand)
        expected = train(
            lambda inputs: by_hand_forward(inputs).float(),  # type: ignore[arg-type]
            optimizer,
            lambda loss: loss.backward(),
        )
        accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()], cpu=True)
        model = make_model()
        model, optimizer = accelerator.prepare(model, sgd(model))
        assert train(model, optimizer, accelerator.backward) == expected
        assert expected[-1] < expected[0]

    def test_what_the_accelerator_says(self) -> None:
        recipe = AORecipeKwargs()
        accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe], cpu=True)
        assert (accelerator.mixed_precision, accelerator.fp8_enabled, accelerator.has_fp8_handler) == (
            "fp8",
            True,
            True,
        )
        assert accelerator.fp8_backend is FP8BackendType.AO
        assert accelerator.ao_recipe_handler is recipe
        assert (accelerator.native_amp, accelerator.scaler, accelerator.delayed_fp8_autocast) == (True, None, False)
        with accelerator.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16

    def test_an_optimizer_that_was_made_before_trains_every_layer(self) -> None:
        accelerator = Accelerator(mixed_precision="fp8", cpu=True)
        plain = make_model()
        parameters = list(plain.parameters())
        model, optimizer = accelerator.prepare(plain, sgd(plain))
        assert [type(layer).__name__ for layer in model] == ["Linear", "LayerNorm", *["Float8Linear"] * 2, "Linear"]
        assert all(old is new for old, new in zip(parameters, model.parameters(), strict=True))
        before = [parameter.detach().clone() for parameter in parameters]
        train(model, optimizer, accelerator.backward, steps=1)
        assert not any(old.equal(new) for old, new in zip(before, parameters, strict=True))

    def test_the_recipe_selects_layers_and_scales(self) -> None:
        float8 = importlib.import_module("torchao.float8")
        config = float8.Float8LinearConfig(emulate=True)
        recipe = AORecipeKwargs(config=config, module_filter_func=lambda module, name: name == "0")
        model = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe], cpu=True).prepare(make_model())
        assert type(model[0]).__name__ == "Float8Linear"
        assert model[0].config.emulate
        assert type(model[2]) is nn.Linear
        assert config.enable_fsdp_float8_all_gather == recipe.config.enable_fsdp_float8_all_gather

    def test_evaluation_keeps_the_layers(self) -> None:
        accelerator = Accelerator(mixed_precision="fp8", cpu=True)
        assert not has_ao_layers(accelerator.prepare_model(make_model(), evaluation_mode=True))

    def test_a_converted_model_is_not_converted_again(self) -> None:
        model = make_model()
        convert_model_to_fp8_ao(model, module_filter_func=lambda module, name: name == "2")
        prepared = Accelerator(mixed_precision="fp8", cpu=True).prepare(model)
        assert [type(layer).__name__ for layer in prepared].count("Float8Linear") == 1

    def test_states_come_back(self, tmp_path: Path) -> None:
        accelerator = Accelerator(mixed_precision="fp8", cpu=True)
        model = make_model()
        model, optimizer = accelerator.prepare(model, sgd(model))
        train(model, optimizer, accelerator.backward)
        accelerator.save_state(tmp_path / "state")
        expected = train(model, optimizer, accelerator.backward)
        accelerator.load_state(tmp_path / "state")
        assert train(model, optimizer, accelerator.backward) == expected
        accelerator.save_model(model, tmp_path / "model")
        plain = make_model()
        plain.load_state_dict(accelerator.get_state_dict(model))
        assert {type(value) for value in plain.state_dict().values()} == {torch.Tensor}

    def test_the_plain_forward_comes_back(self) -> None:
        accelerator = Accelerator(mixed_precision="fp8", cpu=True)
        model = accelerator.prepare(make_model())
        assert model(INPUTS).dtype == torch.float32
        assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
        assert "forward" not in vars(model)


class TestChoice:
    def test_the_first_that_is_installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with installed(tmp_path, "msamp", "transformer_engine"):
            assert isinstance(fp8.choose_recipe(), AORecipeKwargs)
            monkeypatch.setattr(fp8, "_LIBRARIES", dict(list(fp8._LIBRARIES.items())[1:]))
            assert isinstance(fp8.choose_recipe(), TERecipeKwargs)
            monkeypatch.setattr(fp8, "_LIBRARIES", dict(list(fp8._LIBRARIES.items())[1:]))
            assert isinstance(fp8.choose_recipe(), MSAMPRecipeKwargs)

    @pytest.mark.parametrize(
        ("name", "kind"), [("AO", AORecipeKwargs), ("te", TERecipeKwargs), ("msamp", MSAMPRecipeKwargs)]
    )
    def test_the_one_that_the_launcher_names(
        self, name: str, kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
        monkeypatch.setenv("ACCELERATE_FP8_BACKEND", name)
        with installed(tmp_path, "msamp", "transformer_engine"):
            accelerator = Accelerator(cpu=True)
            assert accelerator.fp8_backend is FP8BackendType(name.upper())
            recipes = (accelerator.ao_recipe_handler, accelerator.te_recipe_handler, accelerator.msamp_recipe_handler)
            assert [type(recipe) for recipe in recipes if recipe is not None] == [kind]

    def test_another_accelerator_of_the_process_computes_so_too(self) -> None:
        Accelerator(mixed_precision="fp8", cpu=True)
        second = Accelerator()
        assert (second.mixed_precision, second.fp8_enabled, second.fp8_backend) == ("fp8", True, FP8BackendType.AO)

    def test_a_name_that_nobody_knows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "apex")
        with pytest.raises(ConfigurationError, match=r"ACCELERATE_FP8_BACKEND='APEX'.*AO, TE, MSAMP"):
            Accelerator(mixed_precision="fp8", cpu=True)

    def test_one_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "te")
        with pytest.raises(MissingPackageError, match='pip install "transformer_engine'):
            Accelerator(mixed_precision="fp8", cpu=True)
        monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "msamp")
        with pytest.raises(MissingPackageError, match="pip install msamp"):
            Accelerator(mixed_precision="fp8", cpu=True)

    def test_none_is_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fp8, "_LIBRARIES", {})
        with pytest.raises(ConfigurationError, match=r"no library.*accelerate\[quantization\]"):
            Accelerator(mixed_precision="fp8", cpu=True)

    def test_a_recipe_beside_another_format(self) -> None:
        with pytest.raises(ConfigurationError, match=r"AORecipeKwargs was given with mixed_precision='bf16'"):
            Accelerator(mixed_precision="bf16", kwargs_handlers=[AORecipeKwargs()], cpu=True)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        accelerator = Accelerator(
            mixed_precision="bf16", kwargs_handlers=[AORecipeKwargs()], cpu=True, fsdp_plugin=plugin
        )
        assert (accelerator.mixed_precision, accelerator.fp8_enabled) == ("bf16", True)
        assert has_ao_layers(accelerator.prepare(make_model()))
        accelerator.reset()

    def test_devices_that_do_not_compute_so_take_the_next_format(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(CpuBackend, "instead_of_fp8", lambda self: "bf16")
        with caplog.at_level(logging.WARNING):
            accelerator = Accelerator(mixed_precision="fp8", cpu=True)
        assert "cpu does not compute in 8-bit floats: mixed_precision is 'bf16'." in caplog.text
        assert (accelerator.mixed_precision, accelerator.fp8_enabled) == ("bf16", False)
        assert not has_ao_layers(accelerator.prepare(make_model()))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Any]:
    with installed(tmp_path, "transformer_engine"):
        yield importlib.import_module("transformer_engine.pytorch")


class TestTransformerEngine:
    @pytest.mark.parametrize("kind", [TERecipeKwargs, FP8RecipeKwargs])
    @pytest.mark.filterwarnings("ignore:FP8RecipeKwargs is deprecated:FutureWarning")
    def test_a_prepared_model_trains_by_the_recipe(self, engine: Any, kind: Any) -> None:
        recipe = kind(margin=1) if kind is TERecipeKwargs else kind(margin=1, backend="TE")
        accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe], cpu=True)
        assert (accelerator.fp8_backend, accelerator.scaler) == (FP8BackendType.TE, None)
        plain = make_model()
        exact = plain(INPUTS)
        seen: list[Any] = []
        parameters = list(plain.parameters())
        model, optimizer = accelerator.prepare(plain, sgd(plain))
        assert [type(layer).__module__.split(".")[0] for layer in model] == [*["transformer_engine"] * 4, "torch"]
        assert all(old is new for old, new in zip(parameters, model.parameters(), strict=True))
        model[0].register_forward_hook(lambda *_: seen.append((engine._recipes[-1], torch.is_autocast_enabled("cpu"))))
        outputs = model(INPUTS)
        assert outputs.dtype == torch.float32
        assert 0 < (outputs - exact).abs().max() < 0.5
        model.eval()(INPUTS)
        assert [(getattr(entry, "margin", None), cast) for entry, cast in seen] == [(1, True), (None, True)]
        losses = train(model.train(), optimizer, accelerator.backward)
        assert losses[-1] < losses[0]

    def test_it_is_wrapped_once_copied_pickled_and_unwrapped(self, engine: Any) -> None:
        accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs()], cpu=True)
        model = accelerator.prepare(make_model())
        forward = model.forward
        assert accelerator.precision.wrap_forward(model).forward is forward
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert twin(INPUTS).equal(model(INPUTS))
        assert accelerator.unwrap_model(model).forward is forward
        assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
        assert "forward" not in vars(model)

    def test_a_model_of_its_own_layers_stays(self, engine: Any) -> None:
        model = nn.Sequential(engine.Linear(16, 16, device="cpu"), nn.Linear(16, 16))
        prepared = Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs()], cpu=True).prepare(model)
        assert type(prepared[1]) is nn.Linear

    def test_evaluation_keeps_the_layers(self, engine: Any) -> None:
        accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs()], cpu=True)
        assert type(accelerator.prepare_model(make_model(), evaluation_mode=True)[0]) is nn.Linear


@pytest.fixture
def msamp(tmp_path: Path) -> Iterator[Any]:
    with installed(tmp_path, "msamp"):
        yield importlib.import_module("msamp")


class TestMSAMP:
    def test_model_and_optimizer_are_replaced_together(self, msamp: Any) -> None:
        recipe = MSAMPRecipeKwargs(opt_level="O1")
        accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe], cpu=True)
        assert (accelerator.fp8_backend, accelerator.msamp_recipe_handler) == (FP8BackendType.MSAMP, recipe)
        assert accelerator.scaler is not None
        plain = make_model()
        given = torch.optim.AdamW(plain.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(given, 1, gamma=0.5)
        model, optimizer, schedule = accelerator.prepare(plain, given, schedule)
        assert isinstance(model[0], msamp.FP8Linear)
        assert isinstance(optimizer.optimizer, msamp.LBAdamW)
        assert optimizer.optimizer.opt_level == "O1"
        losses = train(model, optimizer, accelerator.backward)
        assert losses[-1] < losses[0]
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0] == 0.005

    def test_one_of_each_is_needed(self, msamp: Any) -> None:
        accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[MSAMPRecipeKwargs()], cpu=True)
        with pytest.raises(ConfigurationError, match=r"1 model\(s\) and 0 optimizer\(s\).*one prepare"):
            accelerator.prepare(make_model())
        first, second = make_model(), make_model()
        with pytest.raises(ConfigurationError, match=r"2 model\(s\) and 1 optimizer\(s\)"):
            accelerator.prepare(first, second, sgd(first))

    def test_the_rest_is_prepared_as_ever(self, msamp: Any) -> None:
        accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[MSAMPRecipeKwargs()], cpu=True)
        model = make_model()
        prepared = accelerator.prepare(model, sgd(model))
        assert accelerator.prepare(*prepared) == prepared
        loader = accelerator.prepare(torch.utils.data.DataLoader(INPUTS, batch_size=4))
        assert len(list(loader)) == 4
