"""Switches of memory-saving loading under FSDP, under their public path."""

from __future__ import annotations

from accelerate.config.ram_efficient_loading import (
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
)
from accelerate.config.ram_efficient_loading import (
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
)
