"""The weights of PEFT adapters under the names that PEFT saves."""

from __future__ import annotations

from typing import Any

from torch import nn

from accelerate._base.imports import require
from accelerate.parallel.unwrap import extract_model_from_parallel


def adapter_state_dict(model: nn.Module, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the adapter's part of a state dict, under the names that PEFT gives it in a file."""
    peft = require("peft", why="to save adapters under the names that it reads")
    peft_model: Any = extract_model_from_parallel(model)
    found: dict[str, Any] = peft.get_peft_model_state_dict(
        peft_model, state_dict=state_dict, adapter_name=peft_model.active_adapter
    )
    return found


def model_names(model: nn.Module, state_dict: dict[str, Any]) -> dict[str, str]:
    """Return the name in the model of every name in an adapter file.

    PEFT renames without a way back, so the entries are followed by their identity.
    """
    names = {id(value): name for name, value in state_dict.items()}
    saved = adapter_state_dict(model, state_dict)
    return {name: names[id(value)] for name, value in saved.items() if id(value) in names}
