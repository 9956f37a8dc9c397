"""Training in 8-bit floats: which library computes, and what it does to models and optimizers.

The layers that a library does not replace compute in bfloat16, by autocast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from accelerate._base.enums import FP8BackendType
from accelerate._base.errors import ConfigurationError
from accelerate._base.imports import (
    is_msamp_available,
    is_torchao_available,
    is_transformer_engine_available,
    require,
)
from accelerate.config import env
from accelerate.config.knob import KwargsHandler
from accelerate.config.plugins.quantization import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accelerate.config.plugins.training import AutocastKwargs, GradScalerKwargs
from accelerate.devices.base import DeviceBackend
from accelerate.precision.formats import MixedPrecision, Place

BACKEND_VARIABLE = "ACCELERATE_FP8_BACKEND"


class Float8(MixedPrecision):
    """Autocast to bfloat16, around layers that compute in 8-bit floats.

    Args:
        recipe: The options of the library that computes.
    """

    fp8_enabled = True

    def __init__(
        self,
        backend: DeviceBackend,
        autocast: AutocastKwargs | None,
        scaler: GradScalerKwargs | None,
        recipe: Any,
    ) -> None:
        super().__init__("fp8", backend, autocast, scaler)
        self.recipe = recipe


class TorchaoFloat8(Float8):
    """torchao's linear layers."""

    recipe: AORecipeKwargs

    def convert(self, model: torch.nn.Module, *, gathered: bool = False) -> torch.nn.Module:
        """Replace the linear layers that the recipe selects; the parameters of layers that are not sharded stay."""
        from accelerate.precision.torchao_fp8 import convert_model_to_fp8_ao, has_ao_layers

        config = self.recipe.config
        if config is not None and config.enable_fsdp_float8_all_gather and not gathered:
            # For weights that travel in 8 bits torchao makes other parameters, which optimizers do not know.
            config = dataclasses.replace(config, enable_fsdp_float8_all_gather=False)
        if not has_ao_layers(model):
            convert_model_to_fp8_ao(model, config, self.recipe.module_filter_func)
        return model


class TransformerEngineFloat8(Float8):
    """TransformerEngine's linear and normalising layers, in a forward pass that tells them how to scale."""

    recipe: TERecipeKwargs

    def convert(self, model: torch.nn.Module, *, gathered: bool = False) -> torch.nn.Module:
        """Replace layers; a model that was built from TransformerEngine's stays as it is."""
        from accelerate.precision.transformer_engine_fp8 import convert_model, has_transformer_engine_layers

        if not has_transformer_engine_layers(model):
            convert_model(model)
        return model

    def wrap_forward(self, model: torch.nn.Module) -> torch.nn.Module:
        """Run every forward pass of `model` in autocast, and that of a model that trains by the recipe."""
        from accelerate.precision.transformer_engine_fp8 import Float8Forward, make_recipe

        if not isinstance(model.__dict__.get("forward"), Float8Forward):
            super().wrap_forward(model)
            inner = model.__dict__["forward"]
            in_evaluation = bool(self.recipe.use_autocast_during_eval)
            model.__dict__["forward"] = Float8Forward(model, make_recipe(self.recipe), in_evaluation, inner=inner)
        return model


class MSAMPFloat8(Float8):
    """MS-AMP, which replaces a model and its optimizer together; losses are scaled."""

    recipe: MSAMPRecipeKwargs
    joins_optimizer = True
    scales_losses = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.package = require("msamp", why="Training in 8-bit floats by MS-AMP")

    def join(
        self, models: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer], place: Place
    ) -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
        """Replace one model and its one optimizer.

        Raises:
            ConfigurationError: If there are more, or one without the other.
        """
        if not models and not optimizers:
            return models, optimizers
        if len(models) != 1 or len(optimizers) != 1:
            raise ConfigurationError(
                f"prepare() was given {len(models)} model(s) and {len(optimizers)} optimizer(s), but MS-AMP replaces one "
                "model and its optimizer together. Give both, and no other, to one prepare()."
            )
        model, optimizer = self.package.initialize(place(models[0]), optimizers[0], opt_level=self.recipe.opt_level)
        return [model], [optimizer]


@dataclasses.dataclass(frozen=True)
class _Library:
    is_installed: Callable[[], bool]
    recipe: Callable[[], KwargsHandler]
    make: Callable[..., Float8]


_LIBRARIES = {
    FP8BackendType.AO: _Library(is_torchao_available, AORecipeKwargs, TorchaoFloat8),
    FP8BackendType.TE: _Library(is_transformer_engine_available, TERecipeKwargs, TransformerEngineFloat8),
    FP8BackendType.MSAMP: _Library(is_msamp_available, MSAMPRecipeKwargs, MSAMPFloat8),
}
"""In the order in which they are chosen."""


def backend_of(recipe: KwargsHandler | None) -> FP8BackendType:
    """Return which library a recipe is for; without one, that which the launcher names."""
    if isinstance(recipe, FP8RecipeKwargs):
        return FP8BackendType(recipe.backend)
    kinds = {
        AORecipeKwargs: FP8BackendType.AO,
        TERecipeKwargs: FP8BackendType.TE,
        MSAMPRecipeKwargs: FP8BackendType.MSAMP,
    }
    found = next((backend for kind, backend in kinds.items() if isinstance(recipe, kind)), None)
    if found is not None:
        return found
    named = (env.get(BACKEND_VARIABLE) or FP8BackendType.NO.value).upper()
    try:
        return FP8BackendType(named)
    except ValueError as error:
        raise ConfigurationError(
            f"{BACKEND_VARIABLE}={named!r} is no library for 8-bit floats. Write one of "
            f"{', '.join(backend.value for backend in _LIBRARIES)}, or leave it out."
        ) from error


def choose_recipe() -> KwargsHandler:
    """Return the recipe of the library that the launcher names, else of the first that is installed.

    Raises:
        ConfigurationError: If none is installed.
        MissingPackageError: If the one that is named is not.
    """
    named = backend_of(None)
    if named in _LIBRARIES:
        return _LIBRARIES[named].recipe()
    library = next((library for library in _LIBRARIES.values() if library.is_installed()), None)
    if library is None:
        raise ConfigurationError(
            "mixed_precision='fp8' was asked for, but no library that trains in 8-bit floats is installed. Install "
            'torchao with `pip install "accelerate[quantization]"`, or TransformerEngine with '
            "`pip install 'transformer_engine[pytorch]'`, or write mixed_precision='bf16'."
        )
    return library.recipe()


def make(
    backend: DeviceBackend,
    autocast: AutocastKwargs | None,
    scaler: GradScalerKwargs | None,
    recipe: KwargsHandler | None,
) -> Float8:
    """Make the number format for the library that a recipe is for."""
    recipe = recipe if recipe is not None else choose_recipe()
    return _LIBRARIES[backend_of(recipe)].make(backend, autocast, scaler, recipe)
