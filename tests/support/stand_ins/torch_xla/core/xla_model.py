"""The devices of XLA."""

import torch


def xla_device() -> torch.device:
    """Return the device that XLA computes on."""
    return torch.device("xla")
