"""Saving and loading under FSDP, under its public path."""

from __future__ import annotations

from accelerate.config.ram_efficient_loading import (
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
)
from accelerate.config.ram_efficient_loading import (
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
)
from accelerate.strategies.fsdp.state_files import load_fsdp_model as load_fsdp_model
from accelerate.strategies.fsdp.state_files import load_fsdp_optimizer as load_fsdp_optimizer
from accelerate.strategies.fsdp.state_files import save_fsdp_model as save_fsdp_model
from accelerate.strategies.fsdp.state_files import save_fsdp_optimizer as save_fsdp_optimizer
