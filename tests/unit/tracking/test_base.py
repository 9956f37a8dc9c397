"""The interface of a tracker, the stand-in where nothing is recorded, and which process acts."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.logs import logged
from tests.support.processes import run_group

from accelerate._base.errors import AccelerateError
from accelerate.tracking import GeneralTracker, IncompleteTrackerError, on_main_process
from accelerate.tracking.base import BlankTracker, numbers, plain


class Recorder(GeneralTracker):
    name = "recorder"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    @property
    def tracker(self) -> list[Any]:
        return self.calls

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.calls.append((values, step))


class RecorderEverywhere(Recorder):
    main_process_only = False


def test_a_complete_class_is_made_without_running_its_property() -> None:
    class Fragile(GeneralTracker):
        name = "fragile"
        requires_logging_directory = False

        @property
        def tracker(self) -> Any:
            raise RuntimeError("not started")

    assert Fragile().name == "fragile"


def test_missing_attributes_are_all_named() -> None:
    class Nameless(GeneralTracker):
        requires_logging_directory = True

    with pytest.raises(NotImplementedError, match=r"Nameless' does not define 'name', 'tracker', and") as caught:
        Nameless()
    assert isinstance(caught.value, IncompleteTrackerError)
    assert isinstance(caught.value, AccelerateError)


def test_an_attribute_set_in_the_constructor_counts() -> None:
    class Late(GeneralTracker):
        requires_logging_directory = False

        def __init__(self) -> None:
            self.name = "late"
            self.tracker = object()  # type: ignore[misc]
            super().__init__()

    assert Late().name == "late"


def test_the_base_itself_can_be_blank_and_does_nothing() -> None:
    blank = GeneralTracker(_blank=True)
    blank.start()
    blank.store_init_configuration({"lr": 1})
    blank.log({"loss": 1.0}, step=1, any_option=True)
    blank.finish()
    assert not hasattr(blank, "tracker")


def test_the_stand_in_takes_every_call_and_does_nothing() -> None:
    blank = BlankTracker("wandb")
    assert isinstance(blank, GeneralTracker)
    assert blank.name == "wandb"
    assert blank.log_images({"x": [1]}, step=3) is None
    assert blank.tracker.log_artifact("file") is None
    with pytest.raises(AttributeError):
        blank._private  # noqa: B018
    assert copy.copy(blank).name == "wandb"
    assert pickle.loads(pickle.dumps(blank)).name == "wandb"


def test_a_method_keeps_its_name_and_acts_on_a_process_alone() -> None:
    assert Recorder.log.__name__ == "log"
    recorder = Recorder()
    recorder.log({"loss": 1.0}, step=2)
    assert recorder.calls == [({"loss": 1.0}, 2)]


def _log_on_this_rank() -> tuple[list[Any], list[Any]]:
    main_only, everywhere = Recorder(), RecorderEverywhere()
    main_only.log({"loss": 1.0})
    everywhere.log({"loss": 1.0})
    return main_only.calls, everywhere.calls


@pytest.mark.multiprocess
def test_only_the_main_process_acts_unless_the_class_says_otherwise() -> None:
    entry = [({"loss": 1.0}, None)]
    assert run_group(_log_on_this_rank, 2) == [(entry, entry), ([], entry)]


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
    with logged(r"'note' is of type 'str' and the tracker 'mlflow' records only numbers"):
        for _ in range(2):
            assert numbers(values, "mlflow") == {"loss": 0.5, "flag": True}
