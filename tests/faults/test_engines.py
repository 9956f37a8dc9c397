"""Every fault of a disk, under every engine that writes checkpoints in its own way."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.support.disks import contents, fill_up, flip, mounted, read_only, truncate
from tests.support.processes import run_group
from tests.support.training import fresh_accelerator
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate._base.errors import CheckpointError
from accelerate.checkpointing.files import FolderWriter
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration

pytestmark = pytest.mark.multiprocess

Step = Callable[[], object]
Make = Callable[[ProjectConfiguration], tuple[Accelerator, Step]]


def make_replicas(project: ProjectConfiguration) -> tuple[Accelerator, Step]:
    """Rank 0 reads the batches of all ranks from the worker of a loader."""
    config = DataLoaderConfiguration(dispatch_batches=True)
    accelerator = fresh_accelerator(project_config=project, dataloader_config=config, cpu=True)
    model = torch.nn.Linear(4, 4)
    loader = DataLoader(torch.randn(400, 4), batch_size=2, num_workers=1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    batches = iter(loader)

    def step() -> None:
        accelerator.backward(model(next(batches)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return accelerator, step


def make_shards(version: int, project: ProjectConfiguration) -> tuple[Accelerator, Step]:
    from tests.support.sharding import BY_CLASS, make_words

    from accelerate.utils import FullyShardedDataParallelPlugin

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first version is deprecated
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type="SHARDED_STATE_DICT", **BY_CLASS)
    accelerator = fresh_accelerator(project_config=project, fsdp_plugin=plugin, cpu=True)
    model = make_words(torch.float32)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    def step() -> None:
        accelerator.backward(model(torch.zeros(2, 3, dtype=torch.int64)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return accelerator, step


def make_deepspeed(stage: int, project: ProjectConfiguration) -> tuple[Accelerator, Step]:
    from tests.support.zero import Case, prepare, train

    case = Case(stage, options={"project_config": project})
    run = prepare(case)
    return run.accelerator, lambda: train(run, case, stop=1)


def make_megatron(project: ProjectConfiguration) -> tuple[Accelerator, Step]:
    from tests.support.megatron import case, prepare, train

    run = prepare(case("gpt2", tp_degree=2), project_config=project)
    return run.accelerator, lambda: train(run, run.accelerator.progress.step + 1)


ENGINES: dict[str, tuple[Make, str | None]] = {
    "replicas": (make_replicas, None),
    "fsdp1": (lambda project: make_shards(1, project), None),
    "fsdp2": (lambda project: make_shards(2, project), None),
    "zero 2": (lambda project: make_deepspeed(2, project), "deepspeed"),
    "zero 3": (lambda project: make_deepspeed(3, project), "deepspeed"),
    "megatron": (make_megatron, "megatron"),
}


TOGETHER = ("fsdp1", "fsdp2", "megatron")
"""Engines whose ranks wait for each other while they write."""


def require_package_of(name: str) -> None:
    """Skip a test whose engine is not installed; it is not imported here, because Megatron changes what torch trusts."""
    package = ENGINES[name][1]
    if package is not None and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


class Remover:
    """An object that removes what is being written when it is asked for its state."""

    def __init__(self, project: Path) -> None:
        self.project = project

    def state_dict(self) -> dict[str, Any]:
        for stage in self.project.rglob(".*.partial-*"):
            shutil.rmtree(stage, ignore_errors=True)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def own_weights(accelerator: Accelerator) -> list[torch.Tensor]:
    """Return a copy of what this rank holds of each parameter."""
    parameters = [parameter for model in accelerator._models for parameter in model.parameters()]
    held = [getattr(parameter, "ds_tensor", parameter) for parameter in parameters]  # the shard of ZeRO 3
    return [getattr(tensor, "_local_tensor", tensor).detach().clone() for tensor in held]


class Faults:
    """What happens to one run of two processes, on a small disk or in a folder."""

    def __init__(self, make: Make, disk: Path) -> None:
        self.disk, self.project = disk, disk / "project"
        configuration = ProjectConfiguration(project_dir=str(self.project), automatic_checkpoint_naming=True)
        self.accelerator, self.step = make(configuration)
        self.found: dict[str, Any] = {}

    def on_one_rank(self, action: Callable[[], object]) -> None:
        """Do something to the disk once, while nobody uses it."""
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            action()
        self.accelerator.wait_for_everyone()

    def save(self) -> Path:
        self.step()
        return self.accelerator.save_state()

    def refused_save(self, **options: Any) -> str:
        """Return what a save said that could not be made; training goes on."""
        before = contents(self.project)
        with pytest.raises(CheckpointError) as caught:
            self.accelerator.save_state(**options)
            self.accelerator.wait_for_save()
        self.accelerator.wait_for_everyone()
        assert contents(self.project) == before
        self.step()
        return str(caught.value)

    def refused_load(self, folder: Path) -> str:
        """Return what a load said that could not be made; it changes nothing."""
        weights, step = own_weights(self.accelerator), self.accelerator.progress.step
        with pytest.raises(CheckpointError) as caught:
            self.accelerator.load_state(folder)
        for held, before in zip(own_weights(self.accelerator), weights, strict=True):
            assert torch.equal(held, before)
        assert self.accelerator.progress.step == step
        return str(caught.value)

    def full_disk(self) -> None:
        self.on_one_rank(lambda: fill_up(self.disk))
        self.found["full"] = [self.refused_save(), self.refused_save(blocking=False)]
        self.on_one_rank((self.disk / "filler").unlink)

    def read_only_disk(self) -> None:
        step = self.accelerator.progress.step
        block = read_only(self.disk)
        self.on_one_rank(block.__enter__)
        self.found["read-only"] = [self.refused_save()]
        self.accelerator.load_state()
        assert self.accelerator.progress.step < step
        self.on_one_rank(lambda: block.__exit__(None, None, None))

    def vanishing_stage(self) -> None:
        """Somebody removes what is being written, when all ranks have begun."""

        self.accelerator.register_for_checkpointing(Remover(self.project))
        self.found["vanished"] = [self.refused_save()]
        self.accelerator._custom_objects.pop()

    def damaged_files(self, last: Path) -> None:
        """Cut each file of a checkpoint, and flip one of its bits."""
        names = sorted(str(file.relative_to(last)) for file in last.rglob("*") if file.is_file())
        self.found["files"] = {}
        for name in names:
            file = last / name
            kept = file.read_bytes()
            for damage in (truncate, flip):
                self.on_one_rank(lambda damage=damage, file=file: damage(file))
                self.found["files"][f"{damage.__name__} {name}"] = self.refused_load(last)
                self.on_one_rank(lambda file=file, kept=kept: file.write_bytes(kept))
        # The weights are others than those of the checkpoint: what a load takes over is seen.
        kept_weights = own_weights(self.accelerator)
        self.on_one_rank(lambda: truncate(last / names[0]))
        self.accelerator.load_state()
        pairs = zip(own_weights(self.accelerator), kept_weights, strict=True)
        self.found["a load changes weights"] = not all(torch.equal(held, before) for held, before in pairs)

    def failing_rank(self) -> None:
        """One rank cannot read its shards of the model back, before all of them write those of the optimizer."""

        def fail(*_: Any) -> None:
            raise OSError("no answer")

        is_victim = self.accelerator.process_index == 1
        with patch.object(FolderWriter, "add_written", fail) if is_victim else nullcontext():
            self.found["one rank"] = [self.refused_save(), self.refused_save(blocking=False)]

    def wrong_values(self, *, shapes: bool) -> None:
        """Load a learning rate and, if the engine leaves the optimizer's state to us, a shape that no step can use."""
        optimizer = self.accelerator._optimizers[0]
        self.step()
        places = [(optimizer.param_groups[0], "lr", "fast")]
        if shapes:
            places.append((next(iter(optimizer.optimizer.state.values())), "exp_avg", torch.zeros(3, 1, 7)))
        self.found["wrong"] = []
        for entry, name, value in places:
            right, entry[name] = entry[name], value
            folder = self.accelerator.save_state()
            entry[name] = right
            self.found["wrong"].append(self.refused_load(folder))

    def vanished_folder(self) -> None:
        self.on_one_rank(lambda: shutil.rmtree(self.project))
        self.found["after it vanished"] = self.save().name


def suffer(name: str, disk: str, is_small: bool) -> dict[str, Any]:
    """Let a run meet all faults, one after another; a folder that is no disk of its own cannot be full."""
    make, _ = ENGINES[name]
    faults = Faults(make, Path(disk))
    first = faults.save()
    if is_small:
        faults.full_disk()
        faults.read_only_disk()
    faults.vanishing_stage()
    if name in TOGETHER:
        faults.failing_rank()
    last = faults.save()
    faults.step()
    faults.damaged_files(last)
    faults.found["loaded"] = faults.accelerator.progress.step
    faults.found["valid"] = {info.name: info.is_valid for info in faults.accelerator.checkpoints()}
    faults.found["names"] = [first.name, last.name]
    faults.vanished_folder()
    faults.accelerator.load_state()
    faults.wrong_values(shapes=name in ("replicas", "fsdp2", "megatron"))
    faults.accelerator.end_training()
    return faults.found


@pytest.fixture(scope="module", params=ENGINES)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what a run of an engine met: on a small disk where one can be mounted, in a folder elsewhere."""
    require_package_of(request.param)
    disk = tmp_path_factory.mktemp("disk")
    with ExitStack() as mounts:
        is_small = True
        try:
            mounts.enter_context(mounted(disk, "size=24m"))
        except pytest.skip.Exception:
            is_small = False
        found, other = run_group(suffer, 2, request.param, str(disk), is_small, timeout=240)
        assert other == found, "the same on all ranks"
        # torch's distributed checkpoint has a hidden file of its own.
        found["left"] = {path.name for path in disk.rglob(".*")} - {".metadata"}
    return found


def test_a_damaged_checkpoint_is_named_and_passed_over_and_changes_nothing(found: dict[str, Any]) -> None:
    assert len(found["files"]) > 10
    for damaged, text in found["files"].items():
        assert damaged.split(" ", 1)[1] in text
    assert found["loaded"] == 1
    assert found["a load changes weights"]
    first, last = found["names"]
    assert found["valid"] == {first: True, last: False}


def test_a_rank_that_fails_between_two_parts_is_the_error_of_all(found: dict[str, Any]) -> None:
    assert all("Rank 1: OSError: no answer" in text for text in found.get("one rank", ()))


def test_values_that_no_step_can_use_are_refused_before_anything_changes(found: dict[str, Any]) -> None:
    assert "lr='fast'" in found["wrong"][0]
    assert all("(3, 1, 7)" in text for text in found["wrong"][1:])
    assert not any("half restored" in text for text in found["wrong"])


def test_what_somebody_removes_costs_the_save_at_most(found: dict[str, Any]) -> None:
    assert all("removed" in text or "not there any more" in text for text in found["vanished"])
    assert found["after it vanished"] not in found["names"]
    assert not found["left"], "a run that ends well leaves nothing"


def test_a_disk_that_is_full_or_read_only_costs_the_save(found: dict[str, Any]) -> None:
    if "full" not in found:
        pytest.skip("a small disk cannot be mounted here")
    assert len(found["full"]) == 2
    assert all("No space left on device" in text for text in found["full"])
    assert all("Read-only file system" in text for text in found["read-only"])
