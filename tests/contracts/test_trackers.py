"""Every registered tracker passes the same checks; one whose package is installed records a whole run."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.processes import run_group
from tests.support.trackers import INIT_KWARGS, PROJECT, offline_variables, read

from accelerate import Accelerator
from accelerate._base.errors import ConfigurationError
from accelerate._base.imports import is_package_available
from accelerate.errors import MissingPackageError
from accelerate.tracking import GeneralTracker
from accelerate.tracking.registry import LOGGER_TYPE_TO_CLASS, filter_trackers

# What is imported for a tracker, where it is not a module of the tracker's name.
MODULES = {"tensorboard": ("tensorboard", "tensorboardX", "torch.utils.tensorboard")}
LOSSES = [1.0, 0.5, 0.25]


def make(tracker: type[GeneralTracker], folder: Path) -> GeneralTracker:
    arguments = (PROJECT, str(folder)) if tracker.requires_logging_directory else (PROJECT,)
    return tracker(*arguments)  # type: ignore[arg-type]


def record_a_run(folder: Path) -> dict[str, Any]:
    """Record a run with every installed package, offline; return what can be read back from the files of each."""
    os.chdir(folder)
    accelerator = Accelerator(log_with="all", project_dir=folder / "project")
    accelerator.init_trackers(PROJECT, config={"lr": 0.1, "kind": "tiny"}, init_kwargs=INIT_KWARGS)
    names = [tracker.name for tracker in accelerator.trackers]
    assert all(accelerator.get_tracker(name, unwrap=True) is not None for name in names)
    for step, loss in enumerate(LOSSES):
        accelerator.log({"loss": loss, "eval_loss": 2 * loss}, step=step)
    accelerator.end_training()
    return {name: read(name, folder).only(["lr", "kind"], ["loss", "eval_loss"]) for name in names}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the packages wrote, in a process that was not forked: ClearML waits five minutes at the end of such a one."""
    folder = tmp_path_factory.mktemp("trackers")
    (found,) = run_group(record_a_run, 1, folder, env=offline_variables(folder), start_method="spawn")
    return found


@pytest.fixture
def hide_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Make the package of a tracker one that cannot be imported."""

    def hide(name: str) -> None:
        for module in MODULES.get(name, (name,)):
            monkeypatch.setitem(sys.modules, module, None)
        is_package_available.cache_clear()

    yield hide
    is_package_available.cache_clear()


@pytest.mark.parametrize("name", LOGGER_TYPE_TO_CLASS)
class TestTracker:
    def test_it_is_whole(self, name: str) -> None:
        tracker = LOGGER_TYPE_TO_CLASS[name]
        assert issubclass(tracker, GeneralTracker)
        assert str(tracker.name) == name
        assert isinstance(tracker.requires_logging_directory, bool)
        assert isinstance(inspect.getattr_static(tracker, "tracker"), property)

    def test_it_is_called_as_its_base_is(self, name: str) -> None:
        tracker = LOGGER_TYPE_TO_CLASS[name]
        for method in ("start", "store_init_configuration", "log", "finish"):
            assert getattr(tracker, method) is not getattr(GeneralTracker, method), method
        inspect.signature(tracker.log).bind(None, {"loss": 0.5}, step=3)
        inspect.signature(tracker.store_init_configuration).bind(None, {"lr": 0.1})

    def test_it_records_a_run(self, name: str, recorded: dict[str, Any], tmp_path: Path) -> None:
        if name not in recorded:
            pytest.skip(f"the package of the tracker {name!r} is not installed")
        assert [str(chosen) for chosen in filter_trackers(name, tmp_path)] == [name]
        if LOGGER_TYPE_TO_CLASS[name].requires_logging_directory:
            with pytest.raises(ConfigurationError, match="writes to a folder"):
                filter_trackers(name)
        assert recorded[name] == {
            "settings": {"lr": "0.1", "kind": "tiny"},
            "curves": {
                "loss": [[step, loss] for step, loss in enumerate(LOSSES)],
                "eval_loss": [[step, 2 * loss] for step, loss in enumerate(LOSSES)],
            },
        }

    def test_it_names_what_to_install(
        self, name: str, hide_package: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        hide_package(name)
        with pytest.warns(UserWarning, match=f"log_with has '{name}'.*pip install"):
            assert filter_trackers(name, tmp_path) == []
        with pytest.raises(MissingPackageError, match=rf"'{name}' needs the package .*pip install"):
            make(LOGGER_TYPE_TO_CLASS[name], tmp_path).start()
        assert list(tmp_path.iterdir()) == []


def silent_on_other_ranks(folder: str) -> list[str]:
    """Call every tracker that acts on the main process alone; return those that did something elsewhere."""
    accelerator = Accelerator(cpu=True)
    acted = []
    for name, tracker_class in LOGGER_TYPE_TO_CLASS.items():
        if accelerator.is_main_process or not tracker_class.main_process_only:
            continue
        tracker = make(tracker_class, Path(folder))
        tracker.start()
        tracker.store_init_configuration({"lr": 0.1})
        tracker.log({"loss": 0.5}, step=1)
        tracker.finish()
        if any(Path(folder).iterdir()):
            acted.append(name)
    accelerator.wait_for_everyone()
    return acted


@pytest.mark.multiprocess
def test_only_the_main_process_acts(tmp_path: Path) -> None:
    assert run_group(silent_on_other_ranks, 2, str(tmp_path)) == [[], []]
