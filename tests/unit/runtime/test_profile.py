"""Profiles of a block, and the traces that ranks write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.support.processes import run_group

from accelerate import Accelerator, ProfileKwargs
from accelerate._base.errors import ConfigurationError


def operations(path: Path) -> set[str]:
    return {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}


def test_a_profile_without_a_folder_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator()
    with accelerator.profile(ProfileKwargs(activities=["cpu"])) as profiler:
        torch.ones(8, 8) @ torch.ones(8, 8)
    assert "aten::mm" in {event.key for event in profiler.key_averages()}
    assert list(tmp_path.iterdir()) == []


def test_the_handler_of_the_accelerator_is_used_unless_another_is_given(tmp_path: Path) -> None:
    given = ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path / "own"), record_shapes=True)
    accelerator = Accelerator(kwargs_handlers=[given])
    with accelerator.profile():
        torch.ones(8, 8) @ torch.ones(8, 8)
    assert "aten::mm" in operations(tmp_path / "own" / "profile_0.json")
    with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path / "other"))):
        torch.ones(8)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["profile_0.json"]


def test_a_schedule_records_the_steps_it_names(tmp_path: Path) -> None:
    ready: list[int] = []
    options = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 1},
        on_trace_ready=lambda profiler: ready.append(profiler.step_num),
        output_trace_dir=str(tmp_path),
    )
    with Accelerator().profile(options) as profiler:
        for step in range(6):
            (torch.sin if step in (2, 3) else torch.cos)(torch.ones(2))
            profiler.step()
    assert ready == [4]
    assert {"aten::sin", "aten::cos"} & operations(tmp_path / "profile_0.json") == {"aten::sin"}


def test_an_unknown_activity() -> None:
    options = ProfileKwargs(activities=["gpu9"])  # type: ignore[list-item]
    with (
        pytest.raises(ConfigurationError, match=r"activities=\['gpu9'\].*Write some of cpu"),
        Accelerator().profile(options),
    ):
        pass


def test_an_error_in_the_block_comes_out(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="inside"),
        Accelerator().profile(ProfileKwargs(output_trace_dir=str(tmp_path))),
    ):
        raise ValueError("inside")


def profile_ranks(folder: str) -> list[str]:
    accelerator = Accelerator()
    with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=folder)):
        for _ in range(accelerator.process_index + 1):
            torch.ones(4, 4) @ torch.ones(4, 4)
    return sorted(path.name for path in Path(folder).iterdir())  # all are there when the block ends


def test_every_rank_writes_its_trace(tmp_path: Path) -> None:
    assert run_group(profile_ranks, 2, str(tmp_path)) == [["profile_0.json", "profile_1.json"]] * 2
    for rank in range(2):
        events = json.loads((tmp_path / f"profile_{rank}.json").read_text())["traceEvents"]
        assert sum(event.get("name") == "aten::mm" for event in events) == rank + 1
