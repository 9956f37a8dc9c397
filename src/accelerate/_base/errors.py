"""The tree of exceptions that users can meet.

```text
AccelerateError
├── ConfigurationError (ValueError)              wrong arguments, contradictory settings
│   ├── WeightsMismatchError (RuntimeError)      weights that do not fit the model
│   └── MissingWeightsError (FileNotFoundError)  a weights file that does not exist
├── WrongTypeError (TypeError)                   an object of a type that cannot work
│   └── WrongHandlerError (AssertionError)       an entry of `kwargs_handlers` that is not a known handler
├── UsageError (RuntimeError)                    right arguments, wrong moment
├── MissingPackageError (ImportError)            an optional package is needed and absent
├── UnsupportedTorchError (RuntimeError)         the installed torch lacks something that a feature needs
├── CheckpointError (RuntimeError)               a checkpoint cannot be written or read
│   └── MissingFileError (FileNotFoundError)     a file of a checkpoint does not exist
└── DistributedOperationException (RuntimeError) checked mode: the ranks disagree about a collective
```
"""

from __future__ import annotations


def printable(text: object, keep: str = "") -> str:
    r"""Return text in which a terminal or a log finds nothing to act on: `\x1b` in place of an escape character.

    File names and the names in pickles may hold escape sequences, line breaks and lone surrogates.

    Args:
        keep: Characters to leave as they are.
    """
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode() for char in str(text)
    )


class AccelerateError(Exception):
    """Catch every error that the library raises on purpose."""

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n\t")


class ConfigurationError(AccelerateError, ValueError):
    """Report arguments or settings that cannot work, alone or together."""


class WrongTypeError(AccelerateError, TypeError):
    """Report an object of a type that the operation cannot handle."""


class WeightsMismatchError(ConfigurationError, RuntimeError):
    """Report weights whose names or shapes do not fit the model."""


class MissingWeightsError(ConfigurationError, FileNotFoundError):
    """Report a weights file that does not exist."""


class WrongHandlerError(WrongTypeError, AssertionError):
    """Report an entry of `kwargs_handlers` that is not an instance of a known handler."""


class UsageError(AccelerateError, RuntimeError):
    """Report a call that is right in itself but comes at the wrong moment."""


class MissingPackageError(AccelerateError, ImportError):
    """Report an optional package that is needed and cannot be imported."""


class UnsupportedTorchError(AccelerateError, RuntimeError):
    """Report a feature that needs something the installed torch does not have."""


class CheckpointError(AccelerateError, RuntimeError):
    """Report a checkpoint that could not be written, or one that is broken or of another run."""


class MissingFileError(CheckpointError, FileNotFoundError):
    """Report a file of a checkpoint that does not exist."""


class DistributedOperationException(AccelerateError, RuntimeError):
    """Report that the ranks disagree about a collective, found by the checked mode."""
