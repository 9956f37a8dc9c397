from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from tests.support.checkpoints import load_part as load
from tests.support.checkpoints import save_part as save
from torch.utils.data import DataLoader

from accelerate._base.errors import CheckpointError
from accelerate.checkpointing.manifest import Manifest
from accelerate.checkpointing.parts import LoadOptions, read_torch
from accelerate.checkpointing.run_parts import LoaderPart, RandomPart, _window_files, read_window
from accelerate.data_loader import prepare_data_loader
from accelerate.devices import registry
from accelerate.session.stepper import AccumulationWindow

CPU = registry.get("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class TestLoaders:
    def loader(self, stateful: bool) -> Any:
        base: Any = DataLoader(range(12), batch_size=2)  # type: ignore[arg-type]
        return prepare_data_loader(base, use_stateful_dataloader=stateful)

    @pytest.mark.parametrize("after", [True, False])
    @pytest.mark.parametrize("before", [True, False])
    def test_a_position_means_the_same_to_both_kinds(self, tmp_path: Path, before: bool, after: bool) -> None:
        first = self.loader(before)
        for _, _batch in zip(range(2), first, strict=False):
            pass
        save(LoaderPart(first), tmp_path)
        assert [file.name for file in tmp_path.iterdir()] == ["dl_state_dict.bin" if before else "loader.bin"]
        second = self.loader(after)
        load(LoaderPart(second), tmp_path)
        assert [batch.tolist() for batch in second] == [[4, 5], [6, 7], [8, 9], [10, 11]]

    def test_a_loader_without_a_state_is_passed_over(self, tmp_path: Path) -> None:
        plain: Any = DataLoader(range(4))  # type: ignore[arg-type]
        save(LoaderPart(plain), tmp_path)
        assert list(tmp_path.iterdir()) == []
        load(LoaderPart(plain), tmp_path)

    def test_each_rank_writes_what_is_its_own(self, tmp_path: Path) -> None:
        part = LoaderPart(self.loader(True), 1, rank=3)
        assert part.everywhere
        assert not LoaderPart(self.loader(False)).everywhere
        save(part, tmp_path)
        assert [file.name for file in tmp_path.iterdir()] == ["dl_state_dict_1_rank3.bin"]


class TestRandom:
    def saved(self, folder: Path, seeds: list[int]) -> None:
        for rank, seed in enumerate(seeds):
            torch.manual_seed(seed)
            random.seed(seed)
            numpy.random.seed(seed)
            save(RandomPart(SimpleNamespace(step=3), rank, CPU), folder)

    def draws(self, folder: Path, rank: int, ranks: int, saved: int) -> list[float]:
        counter = SimpleNamespace(step=0)
        manifest = Manifest((), world_size=saved)
        load(RandomPart(counter, rank, CPU), folder, rank=rank, world_size=ranks, manifest=manifest)
        assert counter.step == 3
        return [torch.rand(1).item(), random.random(), numpy.random.rand()]

    def test_every_rank_takes_its_own(self, tmp_path: Path) -> None:
        self.saved(tmp_path, [1, 2])
        torch.manual_seed(2)
        random.seed(2)
        numpy.random.seed(2)
        expected = [torch.rand(1).item(), random.random(), numpy.random.rand()]
        assert self.draws(tmp_path, 1, 2, 2) == expected

    def test_a_rank_more_draws_its_own_numbers_and_says_so(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.saved(tmp_path, [1, 2])
        drawn = [self.draws(tmp_path, rank, 4, 2) for rank in range(4)]
        assert len({tuple(numbers) for numbers in drawn}) == 4
        assert self.draws(tmp_path, 3, 4, 2) == drawn[3]
        assert "rank 3 has no random states" in caplog.text

    def test_a_rank_more_draws_as_the_others_where_all_draw_alike(self, tmp_path: Path) -> None:
        self.saved(tmp_path, [5, 5])
        assert self.draws(tmp_path, 2, 3, 2) == self.draws(tmp_path, 0, 3, 2)

    def test_the_numbers_of_the_hardware_are_saved_too(self, tmp_path: Path) -> None:
        restored: list[torch.Tensor] = []
        state = torch.arange(5, dtype=torch.uint8)
        hardware = SimpleNamespace(
            rng_key="torch_fake_manual_seed", get_rng_states=lambda: [state], set_rng_states=restored.extend
        )
        save(RandomPart(SimpleNamespace(step=1), 0, hardware), tmp_path)
        manifest = Manifest((), world_size=1)
        load(RandomPart(SimpleNamespace(step=0), 0, hardware), tmp_path, rank=0, world_size=1, manifest=manifest)
        assert [value.tolist() for value in restored] == [state.tolist()]

    def test_what_another_library_wrote_is_restored_if_it_can_be(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        torch.save({"odd": SimpleNamespace()}, tmp_path / "random_states_0.pkl")
        load(RandomPart(SimpleNamespace(step=1), 0, CPU), tmp_path)
        assert "Random states are not restored" in caplog.text

    @pytest.mark.parametrize("rank", [0, 1])
    @pytest.mark.parametrize(
        "change",
        [
            {"numpy_random_seed": ("MT19937", numpy.zeros(624, numpy.uint32), 2**31 - 2, 0, 0.0)},
            {"torch_manual_seed": torch.zeros(3)},
            {"random_state": None},
            {"step": "x"},
            {"step": -1},
        ],
    )
    def test_states_that_cannot_be_are_refused_before_anything_changes(
        self, tmp_path: Path, rank: int, change: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        self.saved(tmp_path, [1])
        path = tmp_path / "random_states_0.pkl"
        hostile = {**read_torch(path, LoadOptions()), **change}
        torch.save(hostile, path)
        before = torch.get_rng_state()
        part = RandomPart(SimpleNamespace(step=0), rank, CPU)
        with pytest.raises(CheckpointError, match=r"random_states_0\.pkl' holds"):
            part.read(tmp_path, LoadOptions(rank=rank, world_size=2, manifest=Manifest((), world_size=2)))
        # Of another library nobody knows what it should hold.
        load(part, tmp_path, rank=rank, world_size=2)
        assert "Random states are not restored" in caplog.text
        assert torch.equal(torch.get_rng_state(), before)


class TestWindow:
    USUAL: dict[str, Any] = {
        "window": {"length": 1, "_items": None, "_unit": 2.0, "_factor": None, "_backwards": 1},
        "is_open": True,
        "gradients": {"0.weight": torch.ones(2)},
        "share": {"index": 0, "count": 1},
    }

    @pytest.mark.parametrize(
        "change",
        [
            {"window": 5},
            {"window": {"advance": 5}},
            {"window": {"length": "x"}},
            {"is_open": "x"},
            {"gradients": 5},
            {"gradients": {"0.weight": 1}},
            {"gradients": {1: torch.ones(1)}},
            {"share": None},
            {"share": {"index": 0}},
            {"share": {"index": 0, "count": 0}},
            {"share": {"index": 0, "count": 1, "other": 1}},
        ],
    )
    def test_what_no_window_has_is_refused(self, tmp_path: Path, change: dict[str, Any]) -> None:
        torch.save(self.USUAL, tmp_path / "window_0.bin")
        accepts = AccumulationWindow().accepts
        assert read_window(tmp_path / "window_0.bin", LoadOptions(), accepts)["is_open"]
        for hostile in ({**self.USUAL, **change}, 5):
            torch.save(hostile, tmp_path / "window_0.bin")
            with pytest.raises(CheckpointError, match=r"window_0\.bin' holds .*which no accumulation window has"):
                read_window(tmp_path / "window_0.bin", LoadOptions(), accepts)

    def test_files_of_windows_are_found_however_many_processes_a_manifest_names(self, tmp_path: Path) -> None:
        for name in ("window_0.bin", "window_2.bin", "window_10.bin", "window_1x.bin", f"window_{'9' * 99}.bin"):
            (tmp_path / name).touch()
        found = [path.name for path in _window_files(tmp_path, 2**62)]
        assert found == ["window_0.bin", "window_2.bin", "window_10.bin"]
        assert [path.name for path in _window_files(tmp_path, 3)] == found[:2]
