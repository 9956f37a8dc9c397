"""The tree of exceptions that users can meet.

```text
AccelerateError
├── ConfigurationError (ValueError)              wrong arguments, contradictory settings
├── WrongTypeError (TypeError)                   an object of a type that cannot work
├── UsageError (RuntimeError)                    right arguments, wrong moment
├── MissingPackageError (ImportError)            an optional package is needed and absent
├── UnsupportedTorchError (RuntimeError)         the installed torch lacks something that a feature needs
├── CheckpointError (RuntimeError)               a checkpoint cannot be written or read
└── DistributedOperationException (RuntimeError) checked mode: the ranks disagree about a collective
```
"""

from __future__ import annotations


class AccelerateError(Exception):
    """Catch every error that the library raises on purpose."""

    def __str__(self) -> str:
        # What was given may hold halves of characters, of a file or a variable, that no terminal and no log can take.
        return super().__str__().encode(errors="backslashreplace").decode()


class ConfigurationError(AccelerateError, ValueError):
    """Report arguments or settings that cannot work, alone or together."""


class WrongTypeError(AccelerateError, TypeError):
    """Report an object of a type that the operation cannot handle."""


class UsageError(AccelerateError, RuntimeError):
    """Report a call that is right in itself but comes at the wrong moment."""


class MissingPackageError(AccelerateError, ImportError):
    """Report an optional package that is needed and cannot be imported."""


class UnsupportedTorchError(AccelerateError, RuntimeError):
    """Report a feature that needs something the installed torch does not have."""


class CheckpointError(AccelerateError, RuntimeError):
    """Report a checkpoint that could not be written, or one that is broken or of another run."""


class DistributedOperationException(AccelerateError, RuntimeError):
    """Report that the ranks disagree about a collective, found by the checked mode."""
