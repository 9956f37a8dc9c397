"""Judge the arguments of `Accelerator` before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from accelerate._base.errors import ConfigurationError, WrongTypeError
from accelerate._base.helpers import warn_once
from accelerate.config import env
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
    TorchDynamoPlugin,
)

H = TypeVar("H", bound=KwargsHandler)

HANDLERS: dict[str, type[KwargsHandler]] = {
    "ddp_handler": DistributedDataParallelKwargs,
    "scaler_handler": GradScalerKwargs,
    "init_handler": InitProcessGroupKwargs,
    "autocast_handler": AutocastKwargs,
    "profile_handler": ProfileKwargs,
    "fp8_recipe_handler": FP8RecipeKwargs,
    "ao_recipe_handler": AORecipeKwargs,
    "te_recipe_handler": TERecipeKwargs,
    "msamp_recipe_handler": MSAMPRecipeKwargs,
}
"""Attribute of the `Accelerator` -> the class of options it holds."""
_FP8 = ("fp8_recipe_handler", "ao_recipe_handler", "te_recipe_handler", "msamp_recipe_handler")


def sort_handlers(handlers: Sequence[KwargsHandler] | None, mixed_precision: str) -> dict[str, Any]:
    """Return the options by the attribute that holds them, None where none were given.

    Raises:
        WrongTypeError: If an entry is no object of options.
        ConfigurationError: If a class was given twice, or an fp8 recipe without fp8.
    """
    found: dict[str, Any] = dict.fromkeys(HANDLERS)
    for handler in handlers or ():
        # The most derived class first: a union of two recipes is not also one of them.
        name = next((name for name, known in HANDLERS.items() if type(handler) is known), None)
        name = name or next((name for name, known in HANDLERS.items() if isinstance(handler, known)), None)
        if name is None:
            raise WrongTypeError(
                f"kwargs_handlers holds {handler!r}, which is not one of "
                f"{', '.join(known.__name__ for known in HANDLERS.values())}. Pass instances of these."
            )
        if found[name] is not None:
            raise ConfigurationError(
                f"kwargs_handlers holds two {HANDLERS[name].__name__}, and only one can be in force. Merge them."
            )
        found[name] = handler
    recipe = next((name for name in _FP8 if found[name] is not None), None)
    if recipe is not None and mixed_precision != "fp8":
        raise ConfigurationError(
            f"A {HANDLERS[recipe].__name__} was given with mixed_precision={mixed_precision!r}, which does not use it. "
            "Write mixed_precision='fp8' or leave the recipe out."
        )
    return found


def judge_accumulation(
    steps: int, plugin: GradientAccumulationPlugin | None, global_batch_size: int | None
) -> GradientAccumulationPlugin:
    """Return the accumulation settings in force.

    Raises:
        ConfigurationError: If steps and plugin, or steps and a global batch size, contradict each other.
    """
    if steps < 1:
        raise ConfigurationError(
            f"gradient_accumulation_steps={steps!r} cannot work: a window has at least one batch. Write 1 or more."
        )
    if plugin is not None:
        if steps != 1:
            raise ConfigurationError(
                f"gradient_accumulation_steps={steps!r} and a gradient_accumulation_plugin were both given. "
                "Write GradientAccumulationPlugin(num_steps=...) alone."
            )
        if global_batch_size is not None and (plugin.num_steps or 1) > 1:
            steps = plugin.num_steps or 1
    else:
        told = env.integer("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", steps)
        if told != steps != 1:
            warn_once(
                f"gradient_accumulation_steps={steps} was given, but ACCELERATE_GRADIENT_ACCUMULATION_STEPS={told} "
                "is set by the launcher and wins."
            )
        steps = told
        plugin = GradientAccumulationPlugin(num_steps=steps)
    if global_batch_size is not None and steps > 1:
        raise ConfigurationError(
            f"global_batch_size={global_batch_size!r} and {steps} accumulation steps were both given, but the first "
            "says how many batches make a step: as many as fill it. Leave the accumulation steps out."
        )
    return plugin


def judge_loaders(
    config: DataLoaderConfiguration | None, split_batches: bool | None, global_batch_size: int | None
) -> DataLoaderConfiguration:
    """Return the loader settings in force.

    Raises:
        ConfigurationError: If the arguments contradict each other.
    """
    if config is None:
        config = DataLoaderConfiguration(split_batches=bool(split_batches))
    elif split_batches is not None and split_batches != config.split_batches:
        raise ConfigurationError(
            f"split_batches={split_batches!r} was given with a dataloader_config that says {config.split_batches!r}. "
            "Write DataLoaderConfiguration(split_batches=...) alone."
        )
    if global_batch_size is None:
        return config
    if isinstance(global_batch_size, bool) or not isinstance(global_batch_size, int) or global_batch_size < 1:
        raise ConfigurationError(
            f"global_batch_size={global_batch_size!r} is not a number of samples. Write a whole number from 1 on."
        )
    for option in ("split_batches", "dispatch_batches"):
        if getattr(config, option):
            raise ConfigurationError(
                f"global_batch_size={global_batch_size!r} was given with {option}=True, and both say how a batch is "
                f"shared between processes. Leave {option} out."
            )
    return config


def judge_dynamo(backend: Any, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """Return the compile settings in force.

    Raises:
        ConfigurationError: If a backend and a plugin were both given.
    """
    if backend is not None and plugin is not None:
        raise ConfigurationError(
            f"dynamo_backend={backend!r} and a dynamo_plugin were both given. "
            "Write TorchDynamoPlugin(backend=...) alone."
        )
    return plugin if plugin is not None else TorchDynamoPlugin(backend=backend)
