"""Tests of a process that drives two devices together, which has to be said before its first tensor: XLA_USE_SPMD=1."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("XLA_USE_SPMD") == "1" else ["*"]
