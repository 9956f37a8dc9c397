"""What a server imports once for the processes that are forked from it: each would take seconds for it."""

from __future__ import annotations

import importlib

NAMES = (
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor.parallel",
    "tests.support.gpt",
    "tests.support.launching",
    "tests.support.toy_device",
    "tests.support.training",
)

for name in NAMES:
    importlib.import_module(name)
importlib.import_module("accelerate.strategies.registry").all_strategies()
