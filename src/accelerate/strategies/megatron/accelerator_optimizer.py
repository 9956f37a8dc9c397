"""Megatron's own optimizers in the place of torch's: the groups of a program, its steps and its clipping."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

from accelerate._base.errors import ConfigurationError, UsageError
from accelerate.strategies.megatron.accelerator_passes import MegatronPasses
from accelerate.strategies.megatron.configs import MegatronConfigs

_GROUP = "given_group"
"""The entry of Megatron's groups that has the number of the program's group."""
_OF_ALL_GROUPS = ("betas", "eps", "momentum", "dampening", "nesterov", "amsgrad", "maximize")


def freeze_others(module: torch.nn.Module, given: torch.optim.Optimizer) -> None:
    """Freeze what an optimizer does not train: Megatron's trains all that is not frozen. Before it is wrapped."""
    trained = {id(parameter) for group in given.param_groups for parameter in group["params"]}
    for parameter in module.parameters():
        if id(parameter) not in trained:
            parameter.requires_grad_(False)


def make_optimizer(configs: MegatronConfigs, passes: MegatronPasses, given: torch.optim.Optimizer) -> EngineOptimizer:
    """Make Megatron's optimizer of a model, with the groups of torch's; all ranks call it.

    Args:
        given: torch's optimizer, with Megatron's parameters in its groups.

    Raises:
        ConfigurationError: Its groups differ in what Megatron's optimizers have once.
    """
    assert configs.optimizer is not None
    made = get_megatron_optimizer(
        config=configs.optimizer,
        model_chunks=passes.chunks,
        config_overrides=group_overrides(given),
        use_gloo_process_groups=False,  # only formats of checkpoints that are not written here need them
    )
    passes.attach_optimizer(made)
    return EngineOptimizer(made, passes, given)


def group_overrides(given: torch.optim.Optimizer) -> dict[ParamKey, dict[str, Any]]:
    """Return how the parameters of each group are told from others, and what the group has of its own.

    Raises:
        ConfigurationError: A group has what Megatron's optimizers have once.
    """
    name = type(given).__name__
    found: dict[ParamKey, dict[str, Any]] = {}
    for index, group in enumerate(given.param_groups):
        for entry in _OF_ALL_GROUPS:
            if entry in group and group[entry] != given.defaults[entry]:
                raise ConfigurationError(
                    f"Group {index} of this {name} has {entry}={group[entry]!r}, but Megatron's optimizers have one value for "
                    f"all groups, {given.defaults[entry]!r} here. Give {entry} to {name}(...) itself; lr and weight_decay "
                    "may be a group's own."
                )
        key = ParamKey(predicate=ParamPredicate(name=f"group {index}", fn=_is_one_of(group["params"])))
        rate = float(group["lr"])
        found[key] = {
            _GROUP: index,
            "lr": rate,
            "max_lr": rate,
            "weight_decay": float(group["weight_decay"]),
            # In a checkpoint Megatron tells groups from each other by this number. Its schedules do not read it.
            "lr_mult": float(index + 1),
        }
    return found


def _is_one_of(parameters: list[torch.nn.Parameter]) -> Callable[[torch.nn.Parameter], bool]:
    known = {id(parameter) for parameter in parameters}
    # Weights that are sharded are others, which know what they are of.
    return lambda parameter: id(getattr(parameter, "orig_param", parameter)) in known


class EngineOptimizer:
    """Megatron's optimizer with the face of torch's, for the wrapper that a program holds.

    A schedule sets the numbers of the groups that the program has given; each step takes them over.

    Args:
        megatron: Megatron's optimizer.
        passes: What computes its gradients.
        given: torch's optimizer, which has the groups and takes no steps.
    """

    def __init__(self, megatron: Any, passes: MegatronPasses, given: torch.optim.Optimizer) -> None:
        self.megatron = megatron
        self.passes = passes
        self.given = given
        self.skipped_iter = False
        """Whether the last step was skipped because a gradient overflowed."""
        self.num_updates = 0
        """Steps that were not skipped."""
        self._max_norm: float | None = None
        self._ready: tuple[int, bool] | None = None
        """Which gradients Megatron has taken over, by their version, and whether one overflowed."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups of the program."""
        return self.given.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.given.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the numbers that groups have unless they say otherwise."""
        return self.given.defaults

    @property
    def state(self) -> Any:
        """Return the states of Megatron's parameters on this rank."""
        return self.megatron.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse another group."""
        raise UsageError(
            f"A group of {len(param_group['params'])} parameter(s) was added after prepare(), when the buffers of Megatron "
            "are made already. Add it before prepare()."
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.passes.gradients.zero()

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Return the norm of all gradients; the next step scales them down to `max_norm`.

        Raises:
            ConfigurationError: Another norm was asked for.
        """
        if norm_type != 2.0:
            raise ConfigurationError(
                f"clip_grad_norm_(norm_type={norm_type!r}) was called, but Megatron's optimizers clip by the 2-norm. Leave "
                "norm_type out."
            )
        if not self.passes.gradients.are_there:
            return torch.zeros(())
        # Zero means no clipping to Megatron.
        self._max_norm = max(float(max_norm), sys.float_info.min)
        overflowed = self._take_over_gradients()
        return torch.as_tensor(float("inf") if overflowed else self.megatron.get_grad_norm(), dtype=torch.float32)

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Step, unless a gradient overflowed; without gradients nothing happens.

        Raises:
            UsageError: A closure was given.
        """
        if closure is not None:
            raise UsageError(
                "step() was called with a closure, but Megatron computes gradients when the model is called. Call the model, "
                "backward() and step() one after another."
            )
        self.given._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look for it
        self.skipped_iter = False
        gradients = self.passes.gradients
        if not gradients.are_there:
            return
        gradients.settle()
        self._follow_groups()
        try:
            if self._ready is not None and self._ready[0] == gradients.version:
                succeeded = not self._ready[1] and self._step_with_ready_gradients()
            else:
                succeeded = self._step()
        finally:
            self._ready = self._max_norm = None
        self.skipped_iter = not succeeded
        self.num_updates += int(succeeded)

    def _step(self) -> bool:
        with self._clipping():
            succeeded, _, _ = self.megatron.step()
        return bool(succeeded)

    def _step_with_ready_gradients(self) -> bool:
        # To take them over again would divide them by the scale of the loss twice.
        self.megatron.prepare_grads = lambda: False
        try:
            return self._step()
        finally:
            del self.megatron.prepare_grads

    def _take_over_gradients(self) -> bool:
        """Copy gradients to where Megatron scales them back; return whether one overflowed."""
        gradients = self.passes.gradients
        gradients.settle()
        if self._ready is None or self._ready[0] != gradients.version:
            self._ready = (gradients.version, bool(self.megatron.prepare_grads()))
        return self._ready[1]

    @contextmanager
    def _clipping(self) -> Iterator[None]:
        """Clip by the norm of the loop, if it has named one."""
        configs = [optimizer.config for optimizer in self._each()]
        before = [config.clip_grad for config in configs]
        try:
            for config in configs if self._max_norm is not None else ():
                config.clip_grad = self._max_norm
            yield
        finally:
            for config, value in zip(configs, before, strict=True):
                config.clip_grad = value

    def _each(self) -> list[Any]:
        """Return the optimizers that Megatron's may consist of: experts have their own."""
        return list(getattr(self.megatron, "chained_optimizers", [self.megatron]))

    def _follow_groups(self) -> None:
        for group in self.megatron.param_groups:
            own = self.given.param_groups[group[_GROUP]]
            group["lr"], group["weight_decay"] = own["lr"], own["weight_decay"]

    # --- state -------------------------------------------------------------------------------------------------------

    def sharded_state(self, model_state: Mapping[str, Any], metadata: dict[str, Any], *, loads: bool) -> Any:
        """Return the state as Megatron's checkpoints describe it; all ranks call it.

        Args:
            model_state: The weights of the model, described so.
            loads: It is to be filled from a checkpoint.
        """
        self._follow_groups()
        for optimizer in self._each() if loads else ():
            _give_state(optimizer)
        return self.megatron.sharded_state_dict(model_state, is_loading=loads, metadata=metadata)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank."""
        found: dict[str, Any] = self.megatron.state_dict()
        return found

    def load_state_dict(self, state_dict: Any) -> None:
        """Take over a state that `sharded_state` described, with the numbers of its groups."""
        each = self._each()
        states = [state_dict] if len(each) == 1 else [state_dict[index] for index in range(len(each))]
        shards = [state.pop("param_state", None) for state in states]
        self.megatron.load_state_dict(state_dict)
        for optimizer, shard in zip(each, shards, strict=True):
            if shard is not None:
                _load_shards(optimizer, shard)
        for group in self.megatron.param_groups:
            own = self.given.param_groups[group[_GROUP]]
            own["lr"], own["weight_decay"] = group["lr"], group["weight_decay"]

    def take_over_weights(self) -> None:
        """Go on from the weights that the model has now; a step would overwrite them with copies of the former ones."""
        self.megatron.reload_model_params()

    def forget_state(self) -> None:
        """Begin as an optimizer that has taken no step."""
        for optimizer in self._each():
            if optimizer.optimizer is not None:
                optimizer.optimizer.state.clear()
        self.num_updates = 0
        self.take_over_weights()


def _give_state(optimizer: Any) -> None:
    """Give one of torch's optimizers inside one of Megatron's a state to load into, which Megatron forgets a part of."""
    inner = optimizer.optimizer
    if optimizer.init_state_fn is None:
        optimizer.init_state_fn = lambda *_: None
    if not isinstance(inner, torch.optim.Adam | torch.optim.AdamW | torch.optim.SGD) or inner.state:
        return
    for group in inner.param_groups:
        names = ("exp_avg", "exp_avg_sq") if "betas" in group else ("momentum_buffer",) if group["momentum"] else ()
        for parameter in group["params"] if names else ():
            inner.state[parameter] = {name: torch.zeros_like(parameter) for name in names}
            if "betas" in group:
                inner.state[parameter]["step"] = torch.zeros(())


def _load_shards(optimizer: Any, shards: Any) -> None:
    """Fill the states of a distributed optimizer.

    megatron-core 0.16.1 looks for the counts of steps of torch's Adam among the shards, and lets all parameters share one
    count, which each of them then advances.
    """
    states = optimizer.optimizer.state
    steps = {parameter: entry.pop("step") for parameter, entry in states.items() if "step" in entry}
    optimizer.load_parameter_state_from_fully_reshardable(shards)
    for parameter, step in steps.items():
        states[parameter]["step"] = step.clone() if isinstance(step, torch.Tensor) else step
