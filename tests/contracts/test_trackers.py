"""Every registered tracker passes the same checks; one whose package is installed records a whole run."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import pytest
from tests.support.processes import run_group

from accelerate import Accelerator
from accelerate._base.errors import ConfigurationError
from accelerate.errors import MissingPackageError
from accelerate.tracking import GeneralTracker
from accelerate.tracking.registry import LOGGER_TYPE_TO_CLASS, filter_trackers, get_available_trackers

INSTALLED = {str(name) for name in get_available_trackers()}
# What a run needs to be recorded on this machine, without an account or a server.
OFFLINE: dict[str, dict[str, object]] = {"wandb": {"mode": "offline"}, "swanlab": {"mode": "local"}}


def make(tracker: type[GeneralTracker], folder: Path) -> GeneralTracker:
    options = OFFLINE.get(tracker.name, {})
    arguments = ("run", str(folder)) if tracker.requires_logging_directory else ("run",)
    return tracker(*arguments, **options)  # type: ignore[arg-type]


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

    def test_it_records_a_run_or_names_what_to_install(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        if name in INSTALLED:
            self.records_a_run(name, tmp_path)
            assert [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]
        else:
            self.names_what_to_install(name, tmp_path)
            assert list(tmp_path.iterdir()) == []

    def records_a_run(self, name: str, folder: Path) -> None:
        assert [str(chosen) for chosen in filter_trackers(name, folder)] == [name]
        if LOGGER_TYPE_TO_CLASS[name].requires_logging_directory:
            with pytest.raises(ConfigurationError, match="writes to a folder"):
                filter_trackers(name)
        accelerator = Accelerator(log_with=name, project_dir=folder / "project")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the other package
            accelerator.init_trackers("run", config={"lr": 0.1}, init_kwargs={name: OFFLINE.get(name, {})})
            assert accelerator.get_tracker(name).name == name
            assert accelerator.get_tracker(name, unwrap=True) is not None
            for step in range(3):
                accelerator.log({"loss": 1.0 / (step + 1)}, step=step)
            accelerator.end_training()

    def names_what_to_install(self, name: str, folder: Path) -> None:
        with pytest.warns(UserWarning, match=f"log_with has '{name}'.*pip install"):
            assert filter_trackers(name, folder) == []
        with pytest.raises(MissingPackageError, match=rf"'{name}' needs the package .*pip install"):
            make(LOGGER_TYPE_TO_CLASS[name], folder).start()


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
