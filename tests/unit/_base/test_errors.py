"""Every error belongs to the tree and to the built-in class that users catch."""

from __future__ import annotations

import pytest

from accelerate._base import errors


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ConfigurationError, ValueError),
        (errors.WrongTypeError, TypeError),
        (errors.UsageError, RuntimeError),
        (errors.MissingPackageError, ImportError),
        (errors.UnsupportedTorchError, RuntimeError),
        (errors.DistributedOperationException, RuntimeError),
    ],
)
def test_an_error_is_caught_by_its_builtin_and_by_the_root(error: type[Exception], builtin: type[Exception]) -> None:
    for caught in (builtin, errors.AccelerateError):
        with pytest.raises(caught, match="given"):
            raise error("given")


def test_every_message_can_be_printed() -> None:
    assert str(errors.ConfigurationError("a name \ud800")).encode() == rb"a name \ud800"
