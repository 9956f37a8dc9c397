from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from tests.support.checkpoints import load_part as load
from tests.support.checkpoints import save_part as save

from accelerate.checkpointing.manifest import Manifest
from accelerate.checkpointing.run_parts import RandomPart
from accelerate.devices import registry

CPU = registry.get("cpu")


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
