"""What XLA runs on."""


def device_type() -> str:
    """Return the kind of device."""
    return "CPU"
