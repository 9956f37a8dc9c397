"""The schedules of the learning rate and of weight decay, in steps of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate._base.errors import ConfigurationError


def _steps(values: Mapping[str, Any], prefix: str) -> int | None:
    """Return a number of steps of the optimizer, which may be given in samples."""
    steps, samples = values.get(f"{prefix}_iters"), values.get(f"{prefix}_samples")
    if steps is not None or samples is None:
        return steps
    if values.get("global_batch_size") is None:
        raise ConfigurationError(
            f"MegatronLMPlugin({prefix}_samples={samples!r}) counts samples, and nothing says how many a step takes. "
            f"Prepare a data loader too, or give {prefix}_iters."
        )
    return int(samples // values["global_batch_size"])


def schedule_of(values: Mapping[str, Any], *, needed: bool) -> dict[str, Any] | None:
    """Return the arguments of megatron-core's `OptimizerParamScheduler` beside the optimizer.

    Args:
        values: The arguments under megatron-core's names.
        needed: There must be a schedule; else None stands for a program that says nothing of one.

    Raises:
        ConfigurationError: The numbers contradict each other, or one is missing.
    """
    train, decay = _steps(values, "train"), _steps(values, "lr_decay")
    decay = train if decay is None else decay
    if decay is None and not needed:
        return None
    if not decay:
        raise ConfigurationError(
            f"A schedule of {decay or 'no'} steps was asked for, and a learning rate needs some to change in. Write "
            "MegatronLMDummyScheduler(optimizer, total_num_steps=...) or MegatronLMPlugin(train_iters=...)."
        )
    fraction = values["lr_warmup_fraction"]
    warmup = int(fraction * decay) if fraction is not None else _steps(values, "lr_warmup") or 0
    start, end = (
        values["weight_decay"] if values[name] is None else values[name]
        for name in ("start_weight_decay", "end_weight_decay")
    )
    style = values["weight_decay_incr_style"]
    for wrong, what, right in (
        (warmup >= decay, f"warmup of {warmup} steps within {decay}", f"a warmup of at most {decay - 1} steps"),
        (not 0 <= values["min_lr"] <= values["lr"], f"min_lr={values['min_lr']}", f"one from 0 to {values['lr']}"),
        (start > end, f"weight decay from {start} to {end}", "an end_weight_decay that is not smaller"),
        (start != end and style == "constant", f"constant weight decay from {start} to {end}", "'linear' or 'cosine'"),
    ):
        if wrong:
            raise ConfigurationError(f"The schedules of megatron-core have no {what}. Write {right}.")
    # A checkpoint's numbers win, as they do with torch's schedulers.
    override = values.get("override_opt_param_scheduler", False)
    schedule = {
        "init_lr": values.get("lr_warmup_init", 0.0),
        "max_lr": values["lr"],
        "min_lr": values["min_lr"],
        "lr_warmup_steps": warmup,
        "lr_decay_steps": decay,
        "lr_decay_style": values["lr_decay_style"],
        "start_wd": start,
        "end_wd": end,
        "wd_incr_steps": train or decay,
        "wd_incr_style": style,
        "use_checkpoint_opt_param_scheduler": values.get("use_checkpoint_opt_param_scheduler", not override),
        "override_opt_param_scheduler": override,
    }
    if schedule["lr_decay_style"] == "WSD":
        falling = _steps(values, "lr_wsd_decay")
        if falling is None:
            raise ConfigurationError(
                "MegatronLMPlugin(lr_decay_style='WSD') does not say in how many of the last steps the learning rate "
                "falls. Write other_megatron_args={'lr_wsd_decay_iters': ...} too."
            )
        schedule |= {"wsd_decay_steps": falling, "lr_wsd_decay_style": values.get("lr_wsd_decay_style", "exponential")}
    return schedule
