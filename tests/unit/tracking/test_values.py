"""What users log becomes what packages take."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from accelerate.tracking.values import numbers, plain


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (torch.tensor(0.25), 0.25),
        (torch.tensor([0.25], requires_grad=True), 0.25),
        (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.float32(1.5), 1.5),
        (np.array([[7]]), 7),
        ({"a": torch.tensor(1), "b": {"c": np.int64(2)}}, {"a": 1, "b": {"c": 2}}),
        ("text", "text"),
        ([1, 2], [1, 2]),
        (None, None),
    ],
)
def test_tensors_and_arrays_become_numbers_or_lists(given: object, expected: object) -> None:
    found = plain(given)
    assert found == expected
    assert type(found) is type(expected)


def test_what_is_not_a_number_is_left_out_with_one_warning() -> None:
    values = {"loss": torch.tensor(0.5), "flag": True, "note": "hello"}
    with pytest.warns(UserWarning, match=r"'note' is of type 'str' and the tracker 'mlflow' records only numbers"):
        assert numbers(values, "mlflow") == {"loss": 0.5, "flag": True}
    assert numbers(values, "mlflow") == {"loss": 0.5, "flag": True}  # a second warning would be an error here
