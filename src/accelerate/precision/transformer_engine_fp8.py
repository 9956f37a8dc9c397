"""Layers that TransformerEngine trains in 8-bit floats, and forward passes that tell them how to scale."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

from torch import nn

from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import warn_once
from accelerate._base.imports import (
    is_package_available,
    is_transformer_engine_mxfp8_available,
    require,
    transformer_engine_required,
)
from accelerate.config.plugins.quantization import TERecipeKwargs

_PACKAGE, _GAUDI_PACKAGE = "transformer_engine", "intel_transformer_engine"
_TILE = 16
"""The matrix units that multiply 8-bit floats take sizes that are multiples of this."""
# Options of the handlers that are not of a recipe.
_OTHER_OPTIONS = ("use_autocast_during_eval", "use_mxfp8_block_scaling", "backend", "opt_level")


def _engine(part: str = "pytorch") -> ModuleType:
    """Return the layers, or the recipes by `part="common.recipe"`; the package for Gaudi devices has no middle part."""
    if is_package_available(_PACKAGE):
        name = f"{_PACKAGE}.{part}"
    else:
        name = ".".join([_GAUDI_PACKAGE, *part.split(".")[1:]])
    return require(name, why="Training in 8-bit floats by TransformerEngine")


def _accepted(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a function of the installed release takes."""
    parameters = inspect.signature(function).parameters
    if any(entry.kind is entry.VAR_KEYWORD for entry in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}


# --- layers -----------------------------------------------------------------------------------------------------------


@transformer_engine_required
def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Return whether a model has layers of TransformerEngine."""
    return any(_is_of_the_engine(module) for module in model.modules())


def _is_of_the_engine(module: nn.Module) -> bool:
    packages = (base.__module__.partition(".")[0] for base in type(module).__mro__)
    return any(package in (_PACKAGE, _GAUDI_PACKAGE) for package in packages)


@transformer_engine_required
def convert_model(
    model: nn.Module,
    to_transformer_engine: bool = True,
    _convert_linear: bool = True,
    _convert_ln: bool = True,
    *,
    stop_at_misfit: bool = True,
) -> None:
    """Replace linear and normalising layers inside a model by TransformerEngine's, or back; parameters stay the same.

    Args:
        to_transformer_engine: False turns TransformerEngine's layers into torch's.
        stop_at_misfit: A linear layer with a size that is no multiple of 16 stays, and so does all that comes after it
            in its parent, with a warning. False converts what comes after it.
    """
    engine = _engine()
    # The package for Gaudi devices normalises by torch's layer.
    asked = {"Linear": _convert_linear, "LayerNorm": _convert_ln and hasattr(engine, "LayerNorm")}
    kinds = [name for name, is_asked in asked.items() if is_asked]
    source, target = (nn, engine) if to_transformer_engine else (engine, nn)
    made: dict[nn.Module, nn.Module] = {}

    def convert_children(parent: nn.Module, path: str) -> None:
        children = [(name, child) for name, child in parent._modules.items() if child is not None]
        for index, (name, child) in enumerate(children):
            kind = next((name for name in kinds if isinstance(child, getattr(source, name))), None)
            if kind is None:
                # What is inside of a block of the engine is its own matter.
                if not _is_of_the_engine(child):
                    convert_children(child, f"{path}{name}.")
            elif not to_transformer_engine or _fits(kind, child):
                if child not in made:  # a layer that stands in two places stays one
                    made[child] = _twin(kind, child, getattr(target, kind))
                setattr(parent, name, made[child])
            elif kind == "Linear" and stop_at_misfit:
                _warn_of_misfit(f"{path}{name}", child, [f"{path}{later}" for later, _ in children[index + 1 :]])
                return

    convert_children(model, "")


def _fits(kind: str, layer: nn.Module) -> bool:
    """Return whether the engine has a layer that computes the same."""
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    if weight is None or not weight.is_floating_point():
        return False
    return bias is not None if kind == "LayerNorm" else all(size % _TILE == 0 for size in weight.shape)


def _twin(kind: str, layer: nn.Module, wanted: type[nn.Module]) -> nn.Module:
    """Return a layer of another class with the very parameters of `layer`: optimizers and ties hold."""
    weight, bias = layer.get_parameter("weight"), layer._parameters.get("bias")
    options: dict[str, Any] = {"params_dtype": weight.dtype, "device": weight.device}
    if wanted.__module__.partition(".")[0] == "torch":
        options = {"dtype": weight.dtype, "device": "meta"}  # no first weights are drawn
    if kind == "Linear":
        options |= {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": bias is not None}
        twin = wanted(**_accepted(wanted, options))
    else:
        shape = tuple(weight.shape)
        twin = wanted(shape if len(shape) > 1 else shape[0], **_accepted(wanted, {**options, "eps": layer.eps}))
    for name, parameter in layer.named_parameters(recurse=False):
        setattr(twin, name, parameter)
    return twin.train(layer.training)


def _warn_of_misfit(name: str, layer: nn.Module, later: list[str]) -> None:
    if later:
        warn_once(
            f"The layer {name!r} ({layer}) has a size that is no multiple of {_TILE}, so it is not computed in 8-bit "
            f"floats, and neither are {later!r} after it. Give it such sizes, or convert the model before it is "
            "prepared by accelerate.utils.convert_model(model, stop_at_misfit=False), which passes over this layer alone."
        )


# --- forward passes ---------------------------------------------------------------------------------------------------


def make_recipe(handler: TERecipeKwargs | None) -> Any:
    """Return TransformerEngine's recipe for the options of a handler; what is left at its default is up to the engine.

    Raises:
        ConfigurationError: If scaling in blocks was asked for on a device that does not do it.
    """
    recipes = _engine("common.recipe")
    options = handler.to_kwargs() if handler is not None else {}
    in_blocks = options.get("use_mxfp8_block_scaling", False)
    if in_blocks and not is_transformer_engine_mxfp8_available():
        raise ConfigurationError(
            "use_mxfp8_block_scaling=True was given, but TransformerEngine says that this device does not scale in "
            "blocks. Leave it out."
        )
    kind = recipes.MXFP8BlockScaling if in_blocks else recipes.DelayedScaling
    given = {name: value for name, value in options.items() if name not in _OTHER_OPTIONS}
    if "fp8_format" in given:
        given["fp8_format"] = getattr(recipes.Format, given["fp8_format"])
    taken = _accepted(kind, given)
    if len(taken) < len(given):
        warn_once(
            f"{sorted(given.keys() - taken.keys())!r} of {type(handler).__name__} mean nothing to {kind.__name__} of the "
            "installed TransformerEngine. Leave them out."
        )
    return kind(**taken)


def fp8_region(recipe: Any, enabled: bool = True) -> AbstractContextManager[Any]:
    """Return a context in which TransformerEngine's layers compute in 8-bit floats."""
    engine = _engine()
    region: AbstractContextManager[Any] = (
        engine.autocast(enabled=enabled, recipe=recipe)
        if hasattr(engine, "autocast")
        else engine.fp8_autocast(enabled=enabled, fp8_recipe=recipe)  # before release 2.9
    )
    return region


@transformer_engine_required
def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """Return a function of a model and its inputs that runs a forward pass in 8-bit floats while the model trains.

    Args:
        model_forward: The bound `forward` of the model.
        fp8_recipe: A recipe of TransformerEngine.
        use_during_eval: Do so too while the model is evaluated.
    """

    @functools.wraps(model_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with fp8_region(fp8_recipe, enabled=use_during_eval or self.training):
            return model_forward(*args, **kwargs)

    return forward


class Float8Forward:
    """The forward of one model, in 8-bit floats while it trains.

    It stands in the instance's `forward` and keeps the one before under `__wrapped__`, so signatures stay readable and
    the model can be pickled, copied and unwrapped.

    Args:
        recipe: A recipe of TransformerEngine.
        use_during_eval: Use it too while the model is evaluated.
        inner: What runs by the recipe: autocast around the model's original forward. By default its forward as it is.
    """

    __wrapped__: Callable[..., Any]

    def __init__(
        self, model: nn.Module, recipe: Any, use_during_eval: bool, inner: Callable[..., Any] | None = None
    ) -> None:
        self.model, self.recipe, self.use_during_eval = model, recipe, use_during_eval
        before = model.forward if inner is None else model.__dict__["_original_forward"]
        self.inner: Callable[..., Any] = before if inner is None else inner
        functools.update_wrapper(self, before)
        self.__dict__.pop("__annotations__", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with fp8_region(self.recipe, enabled=self.use_during_eval or self.model.training):
            return self.inner(*args, **kwargs)


@transformer_engine_required
def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: TERecipeKwargs | None) -> nn.Module:
    """Run every forward pass of a model in 8-bit floats while it trains; returns the same model.

    Args:
        fp8_recipe_handler: How to scale, and whether to do so in evaluation; None is TransformerEngine's own choice.
    """
    in_evaluation = bool(fp8_recipe_handler is not None and fp8_recipe_handler.use_autocast_during_eval)
    model.__dict__["forward"] = Float8Forward(model, make_recipe(fp8_recipe_handler), in_evaluation)
    return model
