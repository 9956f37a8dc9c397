"""Tests on torch_xla's CPU runtime, in an environment of their own: `make test-xla`."""

from __future__ import annotations

import importlib.util
import os

collect_ignore_glob: list[str] = []
if importlib.util.find_spec("torch_xla") is None:
    collect_ignore_glob.append("*")
else:
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.environ.setdefault("CPU_NUM_DEVICES", "2" if os.environ.get("XLA_USE_SPMD") == "1" else "1")
    # torch_xla sets it itself when its runtime begins, inside of some test.
    os.environ.setdefault("SKIP_MEGASCALE_PJRT_CLIENT", "true")
    import torch_xla  # noqa: F401 - it sets variables, for which no test can be blamed
