"""Lazy modules import a name when it is first read, and keep it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from accelerate._base.lazy import attach, by_home

NAME = "lazy_module_of_a_test"


@pytest.fixture
def module() -> Iterator[ModuleType]:
    made = ModuleType(NAME)
    made.__getattr__, made.__dir__ = attach(  # type: ignore[method-assign, assignment]
        NAME, {**by_home({"json": "dumps loads"}), "path_join": "os.path:join"}
    )
    made.__dict__["__all__"] = ["dumps", "loads", "path_join"]
    sys.modules[NAME] = made
    yield made
    del sys.modules[NAME]


def test_names_come_from_their_homes_and_stay(module: ModuleType) -> None:
    import json
    import os.path

    assert "dumps" not in vars(module)
    assert module.dumps is json.dumps
    assert vars(module)["dumps"] is json.dumps
    assert module.path_join is os.path.join
    assert "loads" not in vars(module)


def test_a_name_that_is_a_submodule_gives_the_module() -> None:
    resolve, _ = attach("accelerate", {"logging_helpers": "json", "config": "accelerate.config"})
    import accelerate.config

    assert resolve("config") is accelerate.config


def test_an_unknown_name_is_an_attribute_error(module: ModuleType) -> None:
    with pytest.raises(AttributeError, match=r"lazy_module_of_a_test.*nonsense"):
        _ = module.nonsense
    assert not hasattr(module, "nonsense")


def test_dir_lists_what_was_not_yet_read(module: ModuleType) -> None:
    assert {"dumps", "loads", "path_join"} <= set(module.__dir__())


def test_a_star_import_reads_every_public_name(module: ModuleType) -> None:
    import json
    import os.path

    namespace: dict[str, object] = {}
    exec(f"from {NAME} import *", namespace)
    del namespace["__builtins__"]
    assert namespace == {"dumps": json.dumps, "loads": json.loads, "path_join": os.path.join}
