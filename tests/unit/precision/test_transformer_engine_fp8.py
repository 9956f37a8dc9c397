"""Layers and forward passes of TransformerEngine, by a stand-in that has its documented interface."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from tests.support.packages import installed
from torch import nn

from accelerate._base.errors import ConfigurationError, MissingPackageError
from accelerate.utils import (
    TERecipeKwargs,
    apply_fp8_autowrap,
    contextual_fp8_autocast,
    convert_model,
    has_transformer_engine_layers,
)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Any]:
    with installed(tmp_path, "transformer_engine"):
        yield importlib.import_module("transformer_engine.pytorch")


def kinds(model: nn.Module) -> list[str]:
    return [f"{type(child).__module__.partition('.')[0]}.{type(child).__name__}" for child in model.children()]


@pytest.mark.parametrize(
    "call",
    [
        lambda model: convert_model(model),
        lambda model: has_transformer_engine_layers(model),
        lambda model: apply_fp8_autowrap(model, None),
        lambda model: contextual_fp8_autocast(model.forward, None),
        lambda model: TERecipeKwargs(),
    ],
    ids=["convert_model", "has_layers", "apply", "contextual", "recipe"],
)
def test_without_the_package_each_says_what_to_install(call: Any) -> None:
    with pytest.raises(MissingPackageError, match=r"transformer_engine.*pip install"):
        call(nn.Sequential(nn.Linear(16, 16)))


class TestLayers:
    def test_layers_are_converted_with_the_very_parameters(self, engine: Any) -> None:
        model = nn.Sequential(
            nn.Linear(16, 32), nn.LayerNorm(32, eps=0.1), nn.Sequential(nn.Linear(32, 16, bias=False))
        )
        model[0].weight.requires_grad_(False)
        before, inputs = dict(model.named_parameters()), torch.randn(4, 16)
        expected = model(inputs)
        assert not has_transformer_engine_layers(model)
        convert_model(model)
        assert has_transformer_engine_layers(model)
        assert kinds(model) == ["transformer_engine.Linear", "transformer_engine.LayerNorm", "torch.Sequential"]
        assert kinds(model[2]) == ["transformer_engine.Linear"]
        after = dict(model.named_parameters())
        assert before.keys() == after.keys()
        assert all(before[name] is after[name] for name in before)
        assert model(inputs).equal(expected)

    def test_and_back(self, engine: Any) -> None:
        model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm((4, 8), eps=0.1), nn.Linear(32, 16, bias=False)).eval()
        before, state = dict(model.named_parameters()), torch.random.get_rng_state()
        convert_model(model)
        convert_model(model, to_transformer_engine=False)
        assert kinds(model) == ["torch.Linear", "torch.LayerNorm", "torch.Linear"]
        assert all(before[name] is value for name, value in model.named_parameters())
        assert (model[1].eps, model[1].normalized_shape, model[2].bias) == (0.1, (4, 8), None)
        assert not any(module.training for module in model)
        assert torch.random.get_rng_state().equal(state)

    def test_each_kind_can_be_left_out(self, engine: Any) -> None:
        model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
        convert_model(model, _convert_linear=False)
        assert kinds(model) == ["torch.Linear", "transformer_engine.LayerNorm"]
        convert_model(model, _convert_ln=False)
        assert kinds(model) == ["transformer_engine.Linear", "transformer_engine.LayerNorm"]
        convert_model(model, to_transformer_engine=False, _convert_ln=False)
        assert kinds(model) == ["torch.Linear", "transformer_engine.LayerNorm"]

    def test_types_of_numbers_stay(self, engine: Any) -> None:
        model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)).bfloat16()
        convert_model(model)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}

    def test_a_layer_that_stands_in_two_places_stays_one(self, engine: Any) -> None:
        layer = nn.Linear(16, 16)
        model = nn.Sequential(layer, nn.Sequential(layer))
        convert_model(model)
        assert model[0] is model[1][0]
        assert kinds(model)[0] == "transformer_engine.Linear"

    def test_what_the_engine_cannot_compute_stays(self, engine: Any) -> None:
        model = nn.Sequential(
            nn.LayerNorm(16, elementwise_affine=False), nn.LayerNorm(16, bias=False), nn.Linear(16, 16)
        )
        convert_model(model)
        assert kinds(model) == ["torch.LayerNorm", "torch.LayerNorm", "transformer_engine.Linear"]

    def test_blocks_of_the_engine_stay_whole(self, engine: Any) -> None:
        model = nn.Sequential(engine.TransformerLayer(16, device="cpu"))
        convert_model(model, to_transformer_engine=False)
        assert kinds(model[0]) == ["transformer_engine.LayerNorm", "transformer_engine.Linear"]

    def test_a_size_that_is_no_multiple_of_16_ends_the_conversion_beside_it_and_says_so(self, engine: Any) -> None:
        inner = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 24), nn.Linear(24, 16), nn.Sequential(nn.Linear(16, 16)))
        model = nn.Sequential(inner, nn.Linear(16, 16))
        with pytest.warns(UserWarning, match=r"'0\.1'.*24.*'0\.2', '0\.3'.*stop_at_misfit=False"):
            convert_model(model)
        assert kinds(model) == ["torch.Sequential", "transformer_engine.Linear"]
        assert kinds(inner) == ["transformer_engine.Linear", "torch.Linear", "torch.Linear", "torch.Sequential"]
        convert_model(model, stop_at_misfit=False)
        assert kinds(inner[3]) == ["transformer_engine.Linear"]

    def test_a_misfit_at_the_end_is_no_news(self, engine: Any) -> None:
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 10))
        convert_model(model)
        assert kinds(model) == ["transformer_engine.Linear", "torch.Linear"]


class Watched(nn.Module):
    """A model that notes which recipe is in force in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.seen: list[Any] = []

    def forward(self, inputs: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        self.seen.append(importlib.import_module("transformer_engine.pytorch")._recipes[-1])
        result: torch.Tensor = self.layer(inputs) * factor
        return result


def recipes_in_force(model: Watched) -> list[Any]:
    """Return what is in force in training and in evaluation."""
    model.seen.clear()
    model.train()(torch.ones(1, 16))
    model.eval()(torch.ones(1, 16))
    return list(model.seen)


class TestForward:
    def test_a_model_that_trains_computes_by_the_recipe(self, engine: Any) -> None:
        from transformer_engine.common.recipe import DelayedScaling, Format

        model = Watched()
        assert apply_fp8_autowrap(model, TERecipeKwargs(fp8_format="E4M3", amax_history_len=5)) is model
        assert recipes_in_force(model) == [DelayedScaling(fp8_format=Format.E4M3, amax_history_len=5), None]

    def test_in_evaluation_too_if_asked(self, engine: Any) -> None:
        model = Watched()
        apply_fp8_autowrap(model, TERecipeKwargs(use_autocast_during_eval=True))
        first, second = recipes_in_force(model)
        assert first is second
        assert first is not None

    def test_defaults_are_those_of_the_engine(self, engine: Any) -> None:
        from transformer_engine.common.recipe import DelayedScaling

        for handler in (None, TERecipeKwargs()):
            model = Watched()
            apply_fp8_autowrap(model, handler)
            assert recipes_in_force(model)[0] == DelayedScaling()

    def test_scaling_in_blocks(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from transformer_engine.common.recipe import Format, MXFP8BlockScaling

        handler = TERecipeKwargs(use_mxfp8_block_scaling=True, fp8_format="E4M3")
        model = Watched()
        apply_fp8_autowrap(model, handler)
        assert recipes_in_force(model)[0] == MXFP8BlockScaling(fp8_format=Format.E4M3)
        monkeypatch.setattr(engine, "is_mxfp8_available", lambda: False)
        with pytest.raises(ConfigurationError, match=r"use_mxfp8_block_scaling=True.*Leave it out"):
            apply_fp8_autowrap(model, handler)

    def test_options_that_the_release_does_not_have_are_named(self, engine: Any) -> None:
        with pytest.warns(UserWarning, match=r"\['interval', 'override_linear_precision'\] of TERecipeKwargs"):
            apply_fp8_autowrap(Watched(), TERecipeKwargs(interval=3, override_linear_precision=(True, False, False)))

    def test_an_older_release_has_its_options_and_its_context(
        self, engine: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        recipe = importlib.import_module("transformer_engine.common.recipe")

        @dataclass
        class OlderScaling:
            margin: int = 0
            interval: int = 1

        monkeypatch.setattr(recipe, "DelayedScaling", OlderScaling)
        newer = engine.autocast
        monkeypatch.setattr(engine, "fp8_autocast", lambda enabled, fp8_recipe: newer(enabled, recipe=fp8_recipe))
        monkeypatch.delattr(engine, "autocast")
        model = Watched()
        apply_fp8_autowrap(model, TERecipeKwargs(interval=3))
        assert recipes_in_force(model) == [OlderScaling(interval=3), None]

    def test_signature_copies_and_pickles_hold(self, engine: Any) -> None:
        model, plain = Watched(), Watched.forward
        apply_fp8_autowrap(model, TERecipeKwargs(margin=1))
        assert list(inspect.signature(model.forward).parameters) == ["inputs", "factor"]
        assert model.forward.__wrapped__.__func__ is plain
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            first, second = recipes_in_force(twin)
            assert (first.margin, second) == (1, None)
            assert twin.forward.model is twin

    def test_by_hand(self, engine: Any) -> None:
        model = Watched()
        forward = contextual_fp8_autocast(model.forward, "a recipe")
        assert forward.__name__ == "forward"
        model.forward = MethodType(forward, model)  # type: ignore[method-assign]
        assert recipes_in_force(model) == ["a recipe", None]
        always = contextual_fp8_autocast(Watched.forward.__get__(model), "another", use_during_eval=True)
        model.forward = MethodType(always, model)  # type: ignore[method-assign]
        assert recipes_in_force(model) == ["another", "another"]

    def test_converted_layers_compute_in_eight_bits(self, engine: Any) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16))
        inputs = torch.randn(8, 16)
        exact = model(inputs)
        convert_model(model)
        apply_fp8_autowrap(model, None)
        assert 0 < (model(inputs) - exact).abs().max() < 0.2
        assert model.eval()(inputs).equal(exact)
