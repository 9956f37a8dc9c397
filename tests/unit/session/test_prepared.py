"""The arguments of one `prepare`, sorted by kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate._base.errors import ConfigurationError
from accelerate.session.prepared import Bundle, ObjectKind


def parts() -> list[Any]:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = torch.utils.data.DataLoader(torch.ones(2, 1))
    return [model, optimizer, scheduler, loader, "text"]


def test_kinds_and_order() -> None:
    given = parts()
    bundle = Bundle(given)
    assert [slot.kind for slot in bundle.arguments] == [
        ObjectKind.MODEL,
        ObjectKind.OPTIMIZER,
        ObjectKind.SCHEDULER,
        ObjectKind.LOADER,
        ObjectKind.OTHER,
    ]
    assert [slot.given for slot in bundle.of(ObjectKind.LOADER, ObjectKind.MODEL)] == [given[0], given[3]]
    assert bundle.results() == tuple(given)
    assert Bundle(given[:1]).results() is given[0]


def test_flags_of_placement() -> None:
    given = parts()
    assert [slot.device_placement for slot in Bundle(given, [True, False, None, None, None]).arguments][:2] == [
        True,
        False,
    ]
    with pytest.raises(ConfigurationError, match="2 entries for 5"):
        Bundle(given, [True, False])


@pytest.mark.parametrize("index", range(4))
def test_an_object_given_twice(index: int) -> None:
    given = parts()
    with pytest.raises(ConfigurationError, match="given twice"):
        Bundle([*given, given[index]])


def test_other_objects_may_come_twice() -> None:
    assert Bundle(["text", "text", None, None]).results() == ("text", "text", None, None)


def test_classes_of_loaders() -> None:
    class Own: ...

    own = Own()
    assert Bundle([own]).arguments[0].kind is ObjectKind.OTHER
    assert Bundle([own], loader_classes=(Own,)).arguments[0].kind is ObjectKind.LOADER
