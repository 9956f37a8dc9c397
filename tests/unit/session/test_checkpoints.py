from __future__ import annotations

import json
import logging
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.support.processes import forget_inherited_state
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate._base.errors import CheckpointError, ConfigurationError, UsageError
from accelerate.checkpointing.catalog import catalog
from accelerate.utils import GradientAccumulationPlugin, ProjectConfiguration, set_seed

ROWS = 22
BATCH = 2


def make(**options: Any) -> Accelerator:
    forget_inherited_state()
    set_seed(0)
    return Accelerator(cpu=True, **options)


class Run:
    """A small training run with dropout, a scheduler and a shuffled loader, which can stop and save at any batch."""

    def __init__(self, accumulation: int = 1, workers: int = 0, items: bool = False, **options: Any) -> None:
        plugin = GradientAccumulationPlugin(num_steps=accumulation, normalize="window")
        self.accelerator = make(gradient_accumulation_plugin=plugin, **options)
        self.items = items
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters())
        self.schedule: Any = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, gamma=0.9)
        rows = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1))
        self.loader: Any = DataLoader(rows, batch_size=BATCH, shuffle=True, num_workers=workers)
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            self.model, self.optimizer, self.schedule, self.loader
        )
        self.seen: list[list[float]] = []

    def train(self, epochs: int = 3, stop: int | None = None) -> None:
        count = 0
        for _ in self.accelerator.epochs(epochs):
            for batch in self.loader:
                self.step(batch)
                count += 1
                if count == stop:
                    return

    def step(self, batch: torch.Tensor) -> None:
        self.seen.append(batch[:, 0].tolist())
        with self.accelerator.accumulate(self.model):
            output = self.model(batch)
            if self.items:
                self.accelerator.backward(output.sum(), num_items=len(batch) + int(batch[0, 0] > 0))
            else:
                self.accelerator.backward(output.mean())
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    def outcome(self) -> dict[str, Any]:
        """Return everything that a resumed run must have in common with one that was never stopped."""
        progress = self.accelerator.progress
        return {
            "weights": torch.cat([weight.detach().flatten() for weight in self.model.parameters()]).tolist(),
            "rate": self.schedule.get_last_lr(),
            "draws": (torch.rand(2).tolist(), random.random(), numpy.random.rand()),
            "progress": (progress.epoch, progress.step, progress.samples),
            "micro-batch": self.accelerator.step,
        }


@pytest.mark.parametrize("stop", [1, 11, 14, 25])
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulation": 3}, {"accumulation": 3, "items": True}, {"accumulation": 4, "workers": 1}],
    ids=["plain", "window", "items", "workers"],
)
def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path: Path, options: dict[str, Any], stop: int) -> None:
    whole = Run(**options)
    whole.train()
    expected = whole.outcome()
    stopped = Run(**options)
    stopped.train(stop=stop)
    stopped.accelerator.save_state(tmp_path / "state")
    resumed = Run(**options)
    torch.rand(7)
    resumed.accelerator.load_state(tmp_path / "state")
    resumed.train()
    assert stopped.seen + resumed.seen == whole.seen
    assert resumed.outcome() == expected


@pytest.mark.parametrize("blocking", [True, False])
def test_saving_changes_nothing_and_a_background_save_holds_the_moment_of_the_call(
    tmp_path: Path, blocking: bool
) -> None:
    whole = Run(accumulation=3)
    whole.train()
    expected = whole.outcome()
    run = Run(accumulation=3)
    run.train(epochs=1, stop=4)
    run.accelerator.save_state(tmp_path / "state", blocking=blocking)
    for batch in list(run.loader)[4:]:
        run.step(batch)
    run.accelerator.wait_for_save()
    resumed = Run(accumulation=3)
    resumed.accelerator.load_state(tmp_path / "state")
    resumed.train()
    assert resumed.outcome() == expected


def test_the_documented_idiom_of_skipping_lands_on_the_same_batch(tmp_path: Path) -> None:
    whole = Run()
    whole.train()
    expected = whole.outcome()
    stopped = Run()
    stopped.train(stop=4)
    stopped.accelerator.save_state(tmp_path / "state")
    resumed = Run()
    resumed.accelerator.load_state(tmp_path / "state")
    for batch in resumed.accelerator.skip_first_batches(resumed.loader, 4):
        resumed.step(batch)
    for _ in range(2):
        for batch in resumed.loader:
            resumed.step(batch)
    assert stopped.seen + resumed.seen == whole.seen
    assert resumed.outcome()["weights"] == expected["weights"]


def test_positions_are_not_restored_on_request(tmp_path: Path) -> None:
    run = Run()
    run.train(stop=4)
    run.accelerator.save_state(tmp_path / "state")
    other = Run(dataloader_config=DataLoaderConfiguration(restore_position=False))
    other.accelerator.load_state(tmp_path / "state")
    assert len(list(other.loader)) == ROWS // BATCH


def test_the_layout_is_that_of_other_libraries(tmp_path: Path) -> None:
    accelerator = make()
    models = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)]
    optimizers: list[Any] = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers]
    loaders = [DataLoader(TensorDataset(torch.ones(4, 2))), DataLoader(TensorDataset(torch.ones(4, 2)))]
    accelerator.prepare(*models, *optimizers, *schedules, *loaders)
    accelerator.register_for_checkpointing(Counter(1), Counter(2))
    assert accelerator.save_state(tmp_path / "safe") == tmp_path / "safe"
    accelerator.save_state(tmp_path / "plain", safe_serialization=False)
    common = {
        *("optimizer.bin", "optimizer_1.bin", "scheduler.bin", "scheduler_1.bin", "loader.bin", "loader_1.bin"),
        *(
            "custom_checkpoint_0.pkl",
            "custom_checkpoint_1.pkl",
            "random_states_0.pkl",
            "progress.json",
            "manifest.json",
        ),
    }
    assert files(tmp_path / "safe") == common | {"model.safetensors", "model_1.safetensors"}
    assert files(tmp_path / "plain") == common | {"pytorch_model.bin", "pytorch_model_1.bin"}
    accelerator.load_state(tmp_path / "plain")
    accelerator.load_state(tmp_path / "safe")


def files(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


class Counter:
    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "kind": "counter"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["kind"] == "counter"
        self.value = state["value"]


def test_registered_objects_come_back_in_order_and_in_number(tmp_path: Path) -> None:
    accelerator = make()
    counters = Counter(3), Counter(4)
    accelerator.register_for_checkpointing(*counters)
    accelerator.save_state(tmp_path / "state")
    counters[0].value = counters[1].value = 0
    accelerator.load_state(tmp_path / "state")
    assert [counter.value for counter in counters] == [3, 4]
    accelerator.register_for_checkpointing(Counter())
    with pytest.raises(RuntimeError, match=r"holds 2 registered object\(s\), and this run has 3"):
        accelerator.load_state(tmp_path / "state")
    with pytest.raises(ValueError, match="state_dict"):
        accelerator.register_for_checkpointing(Counter(), 5)


def test_the_scaler_of_half_precision_is_saved(tmp_path: Path) -> None:
    accelerator = make(mixed_precision="fp16")
    scaler = accelerator.scaler
    assert scaler is not None
    model, optimizer = accelerator.prepare(model := torch.nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.full((1, 2), float("inf"))).sum())
    optimizer.step()
    lowered = scaler.get_scale()
    accelerator.save_state(tmp_path / "state")
    assert "scaler.pt" in files(tmp_path / "state")
    scaler.update(8.0)
    accelerator.load_state(tmp_path / "state")
    assert scaler.get_scale() == lowered


class TestNaming:
    def project(self, folder: Path, **options: Any) -> Accelerator:
        config = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, **options)
        return make(project_config=config)

    def test_checkpoints_are_numbered_and_the_oldest_go_after_the_newest_is_there(self, tmp_path: Path) -> None:
        accelerator = self.project(tmp_path, total_limit=2)
        assert accelerator.save_state("ignored") == tmp_path / "checkpoints" / "checkpoint_0"
        for _ in range(3):
            accelerator.save_state()
        assert [info.name for info in accelerator.checkpoints()] == ["checkpoint_2", "checkpoint_3"]
        assert accelerator.save_iteration == 4
        assert sorted(entry.name for entry in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_2", "checkpoint_3"]

    def test_a_load_goes_on_counting(self, tmp_path: Path) -> None:
        accelerator = self.project(tmp_path)
        for _ in range(3):
            accelerator.save_state()
        later = self.project(tmp_path)
        later.load_state()
        assert later.save_iteration == 3
        earlier = self.project(tmp_path)
        earlier.load_state(tmp_path / "checkpoints" / "checkpoint_0")
        assert earlier.save_state() == tmp_path / "checkpoints" / "checkpoint_3"

    def test_a_checkpoint_of_another_run_is_not_overwritten(self, tmp_path: Path) -> None:
        self.project(tmp_path).save_state()
        with pytest.raises(ValueError, match="there is a checkpoint already"):
            self.project(tmp_path).save_state()

    def test_a_broken_checkpoint_in_the_way_is_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "checkpoints" / "checkpoint_0").mkdir(parents=True)
        (tmp_path / "checkpoints" / "checkpoint_0" / "optimizer.bin").write_bytes(b"half")
        accelerator = self.project(tmp_path)
        accelerator.save_state()
        assert [info.is_valid for info in accelerator.checkpoints()] == [True]

    @pytest.mark.parametrize("latest", [None, "latest"])
    def test_a_load_takes_the_newest_valid_one_and_says_why(
        self, tmp_path: Path, latest: str | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        accelerator = self.project(tmp_path)
        model = accelerator.prepare(torch.nn.Linear(2, 1))
        for value in range(4):
            torch.nn.init.constant_(model.weight, value)
            accelerator.save_state()
        folder = tmp_path / "checkpoints"
        (folder / "checkpoint_3" / "model.safetensors").unlink()
        weights = folder / "checkpoint_2" / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-3] ^= 1
        weights.write_bytes(content)
        accelerator.load_state(latest)
        assert model.weight.tolist() == [[1.0, 1.0]]
        said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(said) == 2
        assert "checkpoint_3 was passed over (model.safetensors: it is missing)" in said[0]
        assert said[1].startswith(f"Loading {folder / 'checkpoint_1'}: checkpoint_1 is the newest valid checkpoint")
        assert "checkpoint_3 was passed over (model.safetensors: it is missing)" in said[1]
        assert "checkpoint_2 was passed over (model.safetensors: its bytes have changed" in said[1]

    @pytest.mark.parametrize("is_cut", [True, False])
    def test_without_a_valid_one_no_run_starts_over_unnoticed(self, tmp_path: Path, is_cut: bool) -> None:
        accelerator = self.project(tmp_path)
        accelerator.prepare(torch.nn.Linear(2, 1))
        assert accelerator.resume() is False
        accelerator.save_state()
        weights = tmp_path / "checkpoints" / "checkpoint_0" / "model.safetensors"
        content = weights.read_bytes()
        weights.write_bytes(content[:-3] if is_cut else content[:-3] + b"new")
        with pytest.raises(CheckpointError, match=r"checkpoint_0 was passed over \(model\.safetensors: it"):
            accelerator.resume()

    def test_without_a_valid_one_nothing_is_loaded(self, tmp_path: Path) -> None:
        accelerator = self.project(tmp_path)
        with pytest.raises(CheckpointError, match="there is no valid checkpoint"):
            accelerator.load_state()
        with pytest.raises(ConfigurationError, match="there is no such folder"):
            accelerator.load_state(tmp_path / "nowhere")
        with pytest.raises(ConfigurationError, match="has none"):
            make().load_state()
        with pytest.raises(ConfigurationError, match="no output_dir"):
            make().save_state()

    def test_an_address_is_refused_and_no_folder_of_its_name_is_made(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ConfigurationError, match=r"address 's3://bucket/run'"):
            make().save_state("s3://bucket/run")
        assert list(tmp_path.iterdir()) == []


class TestHooks:
    def test_a_save_hook_takes_weights_over_and_writes_into_the_checkpoint(self, tmp_path: Path) -> None:
        accelerator = make()
        first, second = accelerator.prepare(torch.nn.Linear(2, 1), torch.nn.Linear(3, 1))
        calls: list[Any] = []

        def hook(models: list[torch.nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
            calls.append((models == [first, second], [set(entry) for entry in weights]))
            weights.pop(0)
            Path(folder, "own").mkdir()
            Path(folder, "own", "weights.txt").write_text("first")

        handle = accelerator.register_save_state_pre_hook(hook)
        accelerator.save_state(tmp_path / "state")
        assert calls == [(True, [{"weight", "bias"}] * 2)]
        manifest = json.loads((tmp_path / "state" / "manifest.json").read_text())
        assert "own/weights.txt" in {record["name"] for record in manifest["files"]}
        assert "model_1.safetensors" not in files(tmp_path / "state")

        loaded: list[str] = []

        def load_hook(models: list[torch.nn.Module], folder: str) -> None:
            models.pop(0)
            loaded.append(Path(folder, "own", "weights.txt").read_text())

        accelerator.register_load_state_pre_hook(load_hook)
        torch.nn.init.zeros_(second.weight)
        torch.nn.init.zeros_(first.weight)
        accelerator.load_state(tmp_path / "state")
        assert loaded == ["first"]
        assert second.weight.any()
        assert not first.weight.any()
        handle.remove()
        accelerator.save_state(tmp_path / "other")
        assert len(calls) == 1

    def test_a_broken_checkpoint_is_refused_before_hooks_see_it(self, tmp_path: Path) -> None:
        accelerator = make()
        accelerator.save_state(tmp_path / "state")
        (tmp_path / "state" / "random_states_0.pkl").write_bytes(b"")
        accelerator.register_load_state_pre_hook(lambda models, folder: pytest.fail("called"))
        with pytest.raises(CheckpointError, match=r"random_states_0\.pkl: it has 0 bytes"):
            accelerator.load_state(tmp_path / "state")

    def test_a_failing_hook_leaves_no_trace(self, tmp_path: Path) -> None:
        accelerator = make()

        def hook(models: list[torch.nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
            raise UsageError("not now")

        accelerator.register_save_state_pre_hook(hook)
        with pytest.raises(CheckpointError, match="UsageError: not now") as caught:
            accelerator.save_state(tmp_path / "state")
        assert isinstance(caught.value.__cause__, UsageError)
        accelerator.end_training()
        assert list(tmp_path.iterdir()) == []


class TestLoading:
    """What does not fit is refused as a whole."""

    def saved(self, folder: Path, model: torch.nn.Module) -> Path:
        accelerator = make()
        optimizer = torch.optim.AdamW(model.parameters())
        model, _ = accelerator.prepare(model, optimizer)
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        return accelerator.save_state(folder / "state")

    def test_another_model_is_refused_and_nothing_is_changed(self, tmp_path: Path) -> None:
        state = self.saved(tmp_path, torch.nn.Linear(2, 1))
        accelerator = make()
        model = torch.nn.Sequential(torch.nn.Linear(2, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        accelerator.prepare(model, optimizer)
        before = model[0].weight.clone()
        with pytest.raises(CheckpointError, match=r"'0\.weight' is missing") as caught:
            accelerator.load_state(state)
        assert "Sequential" in str(caught.value)
        assert torch.equal(before, model[0].weight)
        assert not optimizer.state
        with pytest.raises(CheckpointError, match=r"shape \(1, 2\) instead of \(3, 2\)"):
            self.load_into(state, torch.nn.Linear(2, 3))

    def load_into(self, state: Path, model: torch.nn.Module, **options: Any) -> torch.nn.Module:
        accelerator = make()
        model = accelerator.prepare(model)
        accelerator.load_state(state, **options)
        return model

    def test_what_fits_can_be_taken_over(self, tmp_path: Path) -> None:
        state = self.saved(tmp_path, torch.nn.Linear(2, 1))
        bare = torch.nn.Linear(2, 1, bias=False)
        with pytest.raises(CheckpointError, match="'bias' is not in the model"):
            self.load_into(state, bare)
        assert self.load_into(state, bare, strict=False).weight is not None

    @pytest.mark.parametrize("strict", [True, False])
    @pytest.mark.parametrize("content", [{"weight": "heavy", "bias": torch.ones(1)}, ["heavy"]])
    def test_values_that_are_not_tensors_are_refused(self, tmp_path: Path, strict: bool, content: Any) -> None:
        state = self.saved(tmp_path, torch.nn.Linear(2, 1))
        (state / "manifest.json").unlink()
        (state / "model.safetensors").unlink()
        torch.save(content, state / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match="heavy"):
            self.load_into(state, torch.nn.Linear(2, 1), strict=strict)

    def test_an_optimizer_with_other_groups_is_refused(self, tmp_path: Path) -> None:
        state = self.saved(tmp_path, model := torch.nn.Linear(2, 1))
        accelerator = make()
        accelerator.prepare(model, torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias]}]))
        with pytest.raises(CheckpointError, match=r"\[2\] parameters in its groups, and the one here has \[1, 1\]"):
            accelerator.load_state(state)

    def test_more_objects_than_saved_are_refused(self, tmp_path: Path) -> None:
        state = self.saved(tmp_path, model := torch.nn.Linear(2, 1))
        accelerator = make()
        accelerator.prepare(model, *(torch.optim.AdamW(model.parameters()) for _ in range(2)))
        with pytest.raises(CheckpointError, match=r"optimizer_1\.bin' is missing") as caught:
            accelerator.load_state(state)
        assert isinstance(caught.value, FileNotFoundError)

    @pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin"])
    def test_a_missing_file_is_also_a_file_not_found_error(self, tmp_path: Path, name: str) -> None:
        state = self.saved(tmp_path, model := torch.nn.Linear(2, 1))
        Path(state, name).unlink()
        with pytest.raises(FileNotFoundError, match=name) as caught:
            self.load_into(state, model)
        assert isinstance(caught.value, CheckpointError)

    def test_a_place_must_be_known(self, tmp_path: Path) -> None:
        state = self.saved(tmp_path, model := torch.nn.Linear(2, 1))
        with pytest.raises(TypeError, match="map_location"):
            self.load_into(state, model, map_location="moon")
        self.load_into(state, model, map_location="on_device")

    @pytest.mark.parametrize("safe", [True, False])
    def test_tied_weights_stay_tied(self, tmp_path: Path, safe: bool) -> None:
        accelerator = make()
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        model[1].weight = model[0].weight
        model = accelerator.prepare(model)
        expected = model[0].weight.detach().clone()
        accelerator.save_state(tmp_path / "state", safe_serialization=safe)
        torch.nn.init.zeros_(model[0].weight)
        accelerator.load_state(tmp_path / "state")
        assert torch.equal(model[0].weight, expected)
        assert model[1].weight is model[0].weight


def test_links_of_a_hook_are_saved_and_their_targets_keep_their_mode(tmp_path: Path) -> None:
    folder, target = tmp_path / "state", tmp_path / "target"
    folder.mkdir(mode=0o700)
    target.write_text("x")
    target.chmod(0o644)

    def link(models: Any, weights: Any, output: str) -> None:
        Path(output, "link").symlink_to(target)
        Path(output, "broken").symlink_to(tmp_path / "nothing")

    accelerator = make()
    accelerator.prepare(torch.nn.Linear(2, 1))
    accelerator.register_save_state_pre_hook(link)
    accelerator.save_state(folder)
    assert target.stat().st_mode & 0o777 == 0o644
    accelerator.load_state(folder)


@pytest.mark.parametrize("blocking", [True, False])
def test_an_existing_folder_stays_the_same_and_as_private_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocking: bool
) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(0o2700)
    before = folder.stat()
    monkeypatch.chdir(folder)
    accelerator = make()
    accelerator.prepare(torch.nn.Linear(2, 1))
    for _ in range(2):
        accelerator.save_state(folder, blocking=blocking)
        accelerator.wait_for_save()
    after = folder.stat()
    assert (after.st_ino, after.st_mode, after.st_uid, after.st_gid) == (
        before.st_ino,
        before.st_mode,
        before.st_uid,
        before.st_gid,
    )
    files = list(Path().iterdir())
    assert Path("manifest.json") in files
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    accelerator.load_state(folder)


class TestBackground:
    def test_a_failure_surfaces_at_the_next_save_and_only_once(self, tmp_path: Path) -> None:
        accelerator = make()
        accelerator.register_for_checkpointing(Broken())
        accelerator.save_state(tmp_path / "state", blocking=False)
        with pytest.raises(CheckpointError, match="cannot be written"):
            accelerator.save_state(tmp_path / "state")
        accelerator._custom_objects.clear()
        accelerator.save_state(tmp_path / "state", blocking=False)
        accelerator.wait_for_save()
        assert [info.is_valid for info in catalog(tmp_path)] == [True]

    @pytest.mark.parametrize("end", ["wait_for_save", "end_training", "load_state"])
    def test_a_failure_surfaces_wherever_the_program_waits(self, tmp_path: Path, end: str) -> None:
        accelerator = make(project_dir=tmp_path)
        accelerator.register_for_checkpointing(Broken())
        accelerator.save_state(tmp_path / "state", blocking=False)
        with pytest.raises(CheckpointError, match="cannot be written"):
            getattr(accelerator, end)()

    def test_an_accelerator_can_be_pickled_while_it_saves(self, tmp_path: Path) -> None:
        accelerator = make()
        accelerator.prepare(torch.nn.Linear(300, 300))
        accelerator.save_state(tmp_path / "state", blocking=False)
        copied = pickle.loads(pickle.dumps(accelerator))
        copied.wait_for_save()
        accelerator.wait_for_save()
        assert catalog(tmp_path)[0].is_valid


class Broken:
    def state_dict(self) -> dict[str, Callable[[], None]]:
        return {"value": Unpicklable()}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Unpicklable:
    def __deepcopy__(self, memo: dict[int, Any]) -> Unpicklable:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise ValueError("it cannot be written")

    def __call__(self) -> None: ...


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_folder_can_be_saved_to_again_and_keeps_what_is_not_ours(tmp_path: Path, rounds: int) -> None:
    accelerator = make()
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    target = tmp_path / "state"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    (target / "logs").mkdir()
    (target / "logs" / "events").write_text("mine too")
    for value in range(rounds):
        torch.nn.init.constant_(model.weight, value)
        accelerator.save_state(target, safe_serialization=value % 2 == 0)
    accelerator.load_state(target)
    assert model.weight[0, 0].item() == rounds - 1
    weights = "model.safetensors" if rounds % 2 else "pytorch_model.bin"
    own = {"manifest.json", "progress.json", "random_states_0.pkl", weights}
    assert files(target) == own | {"notes.txt", "logs/events"}
    accelerator.end_training()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["state"]
