"""Programs that check an installation; `accelerate test` launches `test_script`."""

from __future__ import annotations

from accelerate._base.lazy import attach

__getattr__, __dir__ = attach(__name__, {"test_script": "accelerate.test_utils.scripts.test_script"})
