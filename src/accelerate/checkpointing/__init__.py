"""Write and read the state of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate._base.lazy import attach, by_home

if TYPE_CHECKING:
    from accelerate.checkpointing.state_folder import load_accelerator_state as load_accelerator_state
    from accelerate.checkpointing.state_folder import load_custom_state as load_custom_state
    from accelerate.checkpointing.state_folder import save_accelerator_state as save_accelerator_state
    from accelerate.checkpointing.state_folder import save_custom_state as save_custom_state
else:
    _HOMES = {
        "accelerate.checkpointing.state_folder": (
            "load_accelerator_state load_custom_state save_accelerator_state save_custom_state"
        )
    }
    __getattr__, __dir__ = attach(__name__, by_home(_HOMES))
