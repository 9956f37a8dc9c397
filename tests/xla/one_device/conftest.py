"""Tests of a process that computes on one device: not in a process that drives several."""

from __future__ import annotations

import os

collect_ignore_glob = ["*"] if os.environ.get("XLA_USE_SPMD") == "1" else []
