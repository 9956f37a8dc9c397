"""Start a function on several processes of this machine."""

from __future__ import annotations

from accelerate.launchers.debug import debug_launcher
from accelerate.launchers.notebook import notebook_launcher, test_launch

__all__ = ["debug_launcher", "notebook_launcher", "test_launch"]
