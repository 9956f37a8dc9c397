"""What a program holds in the place of an optimizer or a schedule under Megatron, and how the given ones get there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from accelerate._base.errors import ConfigurationError
from accelerate.config.plugins.megatron import MegatronLMPlugin
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler, SteppingOptimizer


class MegatronLMDummyScheduler:
    """Stand for the schedule that the plugin describes.

    Args:
        optimizer: The optimizer that it is for.
        total_num_steps: Steps of the training, as a program for one process counts them.
        warmup_num_steps: Steps in which the learning rate rises.
        kwargs: What else the program wants to keep with it.
    """

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs


class MegatronLMOptimizerWrapper(AcceleratedOptimizer):
    """An optimizer of a model that Megatron trains: a step clips gradients first, as the plugin says.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self.before_step: Callable[[], object] | None = None
        """What clips the gradients; nothing where the loop has done so."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Clip gradients and step, if the window is complete."""
        if self.gradient_state.sync_gradients and self.before_step is not None:
            self.before_step()
        return super().step(closure)

    @property
    def step_was_skipped(self) -> bool:
        """Return whether the last step was skipped because a gradient overflowed."""
        return bool(getattr(self.optimizer, "skipped_iter", False))


class MegatronLMSchedulerWrapper(AcceleratedScheduler):
    """A schedule of Megatron's, which counts the steps of the optimizer.

    Args:
        scheduler: Megatron's schedule.
        optimizers: The prepared optimizer or optimizers it belongs to.
    """

    scheduler: Any

    def __init__(self, scheduler: Any, optimizers: SteppingOptimizer | Sequence[SteppingOptimizer]) -> None:
        super().__init__(scheduler, optimizers, steps_per_update=1)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, if the optimizer has stepped."""
        if not self.gradient_state.sync_gradients:
            return
        if any(getattr(optimizer, "step_was_skipped", False) for optimizer in self.optimizers):
            return
        self.scheduler.step(increment=1)

    def get_last_lr(self) -> list[Any]:
        """Return the learning rates that the last step set."""
        return [group["lr"] for group in self.scheduler.optimizer.param_groups]

    def get_lr(self) -> list[Any]:
        """Return the learning rates that the schedule computes now."""
        return [self.scheduler.get_lr(group) for group in self.scheduler.optimizer.param_groups]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with a schedule that was saved; Megatron adds its steps to those that were made (megatron-core 0.16.1)."""
        self.scheduler.num_steps = 0
        super().load_state_dict(state_dict)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose update of a weight needs more than the part that a rank holds.

    Raises:
        ConfigurationError: If it is of another kind than Adam, AdamW or SGD.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        raise ConfigurationError(
            f"{type(optimizer).__name__} was given as the optimizer, but Megatron cuts weights into parts, and knows how to "
            "update the parts with Adam, AdamW and SGD of torch.optim. Use one of these."
        )


def carry_optimizer(
    optimizer: torch.optim.Optimizer,
    replaced: Mapping[torch.nn.Parameter, Sequence[torch.nn.Parameter]],
    parameters: Mapping[str, torch.nn.Parameter],
    plugin: MegatronLMPlugin,
) -> None:
    """Let an optimizer train Megatron's parameters: those of each group are the ones that its own became.

    Args:
        replaced: Parameter that the optimizer has -> the ones that have it or parts of it; none on another stage.
        parameters: Megatron's parameters, by name.

    Raises:
        ConfigurationError: If parameters of two groups became one, or ones with a state.
    """
    if optimizer.state:
        raise ConfigurationError(
            f"This {type(optimizer).__name__} has stepped already, and Megatron fuses and cuts the parameters that its states are "
            "of. Prepare it before its first step, and restore its state with load_state()."
        )
    names = {id(parameter): name for name, parameter in parameters.items()}
    if not replaced:
        # Nobody knows which parameter of the program's own model is which of the given one: all of them are trained.
        if len(optimizer.param_groups) > 1:
            raise ConfigurationError(
                f"This {type(optimizer).__name__} has {len(optimizer.param_groups)} groups of parameters of a model whose weights "
                "are not carried, so nobody knows which of the new ones belong to which. Give it one group, and write "
                "MegatronLMPlugin(no_wd_decay_cond=..., scale_lr_cond=...) for others."
            )
        every = [parameter for parameter in parameters.values() if parameter.requires_grad]
        replaced = dict.fromkeys(optimizer.param_groups[0]["params"], every)
    sources: dict[torch.nn.Parameter, list[torch.nn.Parameter]] = {}
    for old, several in replaced.items():
        for new in several:
            sources.setdefault(new, []).append(old)
    for group in optimizer.param_groups:
        own = set(group["params"])
        follow = {new: None for old in group["params"] for new in replaced.get(old, (old,))}
        for new in follow:
            if not own.issuperset(sources.get(new, ())):
                raise ConfigurationError(
                    f"This {type(optimizer).__name__} has a group with some of the parameters that Megatron fuses into "
                    f"{names.get(id(new), 'one')!r}, and not the others, but one parameter has one learning rate. Put queries, "
                    "keys and values of a layer into one group, and gate and up projections as well."
                )
        group["params"] = list(follow)
    if plugin.no_wd_decay_cond is None and plugin.scale_lr_cond is None:
        return
    groups = list(optimizer.param_groups)
    optimizer.param_groups.clear()
    for group in groups:
        for values in _split(group, names, plugin):
            optimizer.add_param_group(values)


def _split(group: dict[str, Any], names: Mapping[int, str], plugin: MegatronLMPlugin) -> Iterable[dict[str, Any]]:
    """Return a group in as many as the plugin's conditions ask for."""
    found: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    for parameter in group["params"]:
        name = names[id(parameter)]
        decays = plugin.no_wd_decay_cond is None or not plugin.no_wd_decay_cond(name, parameter)
        scales = plugin.scale_lr_cond is not None and bool(plugin.scale_lr_cond(name, parameter))
        found.setdefault((decays, scales), []).append(parameter)
    for (decays, scales), parameters in found.items():
        changes = {} if decays else {"weight_decay": 0.0}
        if scales:
            changes["lr"] = group["lr"] * plugin.lr_mult
        yield {**group, "params": parameters, **changes}


def make_schedule(optimizer: Any, arguments: Mapping[str, Any]) -> Any:
    """Return Megatron's schedule of an optimizer; each of its groups keeps its own learning rate and weight decay.

    Args:
        arguments: Those of `OptimizerParamScheduler`.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    for group in optimizer.param_groups:
        group.setdefault("max_lr", group["lr"])
        if arguments["wd_incr_style"] == "constant":
            group["start_wd"] = group["end_wd"] = group["weight_decay"]
    return OptimizerParamScheduler(optimizer, **arguments)
