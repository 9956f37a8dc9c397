"""Single steps of what `prepare` does under Megatron-LM, for programs that call them by name."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from accelerate._base.errors import ConfigurationError
from accelerate.config.plugins.megatron import MegatronLMPlugin
from accelerate.runtime import current
from accelerate.strategies.megatron.configs import MegatronConfigs, check_options, degrees_of, translate
from accelerate.strategies.megatron.datasets import MegatronLMDummyDataLoader, plugin_of
from accelerate.strategies.megatron.groups import make_groups
from accelerate.strategies.megatron.options import quiet_imports
from accelerate.strategies.megatron.wrappers import MegatronLMSchedulerWrapper, make_schedule


def initialize(
    accelerator: Any,
    extra_args_provider: Callable[[argparse.ArgumentParser], Any] | None = None,
    args_defaults: dict[str, Any] | None = None,
) -> None:
    """Check the arguments of Megatron, and make its groups of ranks.

    Args:
        extra_args_provider: Adds arguments to a parser; their defaults join those of the plugin.
        args_defaults: More arguments, by name.

    Raises:
        ConfigurationError: If megatron-core has no such argument, or a value cannot be.
    """
    plugin = plugin_of(accelerator)
    if extra_args_provider is not None:
        parser = argparse.ArgumentParser()
        extra_args_provider(parser)
        plugin.megatron_lm_default_args.update(vars(parser.parse_args([])))
    plugin.megatron_lm_default_args.update(args_defaults or {})
    check_options(plugin)
    finish_mpu_init()


def finish_mpu_init() -> None:
    """Make the groups of ranks that the plugin of this run says."""
    make_groups(degrees_of(_plugin()), current.runtime())


def _plugin() -> MegatronLMPlugin:
    plugin: MegatronLMPlugin | None = current.ACCELERATOR.get("megatron_lm_plugin")
    if plugin is None:
        raise ConfigurationError(
            "This process has no settings of Megatron-LM. Make an Accelerator(megatron_lm_plugin=MegatronLMPlugin(...)) first."
        )
    return plugin


def _configs() -> MegatronConfigs:
    """Return what the arguments that the plugin has by now say."""
    runtime = current.runtime()
    return translate(
        _plugin(),
        None,
        device_type=runtime.device.type,
        mixed_precision=current.ACCELERATOR["_mixed_precision"],
        world_size=runtime.world_size,
    )


def model_provider_func(
    pre_process: bool = True, post_process: bool = True, add_encoder: bool = True, add_decoder: bool = True
) -> torch.nn.Module:
    """Build the model that the plugin's arguments describe, with weights that Megatron draws.

    Args:
        pre_process: Begin with the embeddings.
        post_process: End with the words.
        add_encoder: T5 has an encoder; it has both or it is no T5 here.
        add_decoder: T5 has a decoder.

    Raises:
        ConfigurationError: If the arguments do not describe a model.
    """
    if not (add_encoder and add_decoder):
        raise ConfigurationError(
            f"model_provider_func(add_encoder={add_encoder!r}, add_decoder={add_decoder!r}) was called, but megatron-core 0.16 "
            "has no pipelines whose stages hold one of them. Leave both out."
        )
    configs = _configs()
    make_groups(configs.degrees, current.runtime())
    with quiet_imports():
        from accelerate.strategies.megatron.models import build
    return build(configs, current.runtime().device, pre_process=pre_process, post_process=post_process)


def prepare_data_loader(accelerator: Any, dataloader: Any) -> Any:
    """Return a prepared loader; for Megatron's own data the three endless ones."""
    if isinstance(dataloader, MegatronLMDummyDataLoader):
        return dataloader.build_train_valid_test_data_iterators(accelerator)
    return accelerator.prepare_data_loader(dataloader)


def prepare_optimizer(accelerator: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that the plugin's arguments describe, for all parameters of a model.

    Raises:
        ConfigurationError: If they describe none.
    """
    arguments = plugin_of(accelerator).megatron_lm_default_args
    kind = arguments.get("optimizer")
    values = {name: arguments[name] for name in ("lr", "weight_decay") if name in arguments}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if kind == "adam":
        beta1, beta2 = arguments["adam_beta1"], arguments["adam_beta2"]
        adam = torch.optim.AdamW if arguments.get("decoupled_weight_decay", True) else torch.optim.Adam
        return adam(parameters, betas=(beta1, beta2), eps=arguments["adam_eps"], **values)
    if kind == "sgd":
        return torch.optim.SGD(parameters, momentum=arguments["sgd_momentum"], **values)
    raise ConfigurationError(
        f"The arguments of Megatron say optimizer={kind!r}, which is none that it has. Call plugin.set_optimizer_type(optimizer) "
        "with an Adam, AdamW or SGD first."
    )


def prepare_scheduler(accelerator: Any, optimizer: Any, scheduler: Any) -> MegatronLMSchedulerWrapper:
    """Return Megatron's schedule of an optimizer.

    Args:
        scheduler: A `MegatronLMDummyScheduler`, or None where the plugin's arguments say the steps.
    """
    plugin, runtime = plugin_of(accelerator), current.runtime()
    inner = getattr(optimizer, "optimizer", optimizer)
    configs = translate(
        plugin,
        None,
        device_type=runtime.device.type,
        mixed_precision=current.ACCELERATOR["_mixed_precision"],
        world_size=runtime.world_size,
        optimizer=inner,
        scheduler=scheduler,
    )
    if configs.schedule is None:
        raise ConfigurationError(
            "Nobody says how many steps the schedule has. Pass a MegatronLMDummyScheduler(total_num_steps=...), or write "
            "MegatronLMPlugin(train_iters=...)."
        )
    return MegatronLMSchedulerWrapper(make_schedule(inner, configs.schedule), optimizer)


def prepare_model_optimizer_scheduler(accelerator: Any) -> tuple[Any, ...]:
    """Return a model, its optimizer and its schedule, all as the plugin's arguments describe them.

    The model is this rank's part, with weights that Megatron draws: pass a Transformers model to `prepare` to train that.
    """
    model = model_provider_func()
    optimizer = prepare_optimizer(accelerator, model)
    return model, optimizer, prepare_scheduler(accelerator, optimizer, None)
