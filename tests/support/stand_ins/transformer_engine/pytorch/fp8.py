"""The older home of the questions about the device."""


def check_mxfp8_support() -> tuple[bool, str]:
    """Say whether the device scales in blocks."""
    return True, ""
