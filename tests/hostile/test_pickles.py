"""Files of checkpoints that would run code are refused, by what they would run; who asks for it by name may read them."""

from __future__ import annotations

import logging
import os
import pickle
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.training import fresh_accelerator
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate._base.errors import CheckpointError
from accelerate._base.helpers import reset_warnings
from accelerate.checkpointing.parts import LoadOptions
from accelerate.checkpointing.sharded import ShardFolder, merge_fsdp_weights, without_warnings_of_torch
from accelerate.checkpointing.torch_files import load
from accelerate.strategies.deepspeed.checkpoint import EnginePart
from accelerate.utils import ProjectConfiguration

ALLOW_PICKLE = "ACCELERATE_ALLOW_PICKLE"


class Malicious:
    """What makes a folder when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = str(target)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.target,)


class Meter:
    """A registered object whose state is what the test says."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def make_run(project: Path | None = None, state: Any = None) -> tuple[Accelerator, Meter]:
    """A run with one object of every kind."""
    options = {}
    if project is not None:
        options["project_config"] = ProjectConfiguration(project_dir=str(project), automatic_checkpoint_naming=True)
    accelerator = fresh_accelerator(gradient_accumulation_steps=2, mixed_precision="fp16", **options)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    prepared: Any = accelerator.prepare(model, optimizer, schedule, DataLoader(torch.ones(8, 2), batch_size=2))
    meter = Meter({"best": 1.5} if state is None else state)
    accelerator.register_for_checkpointing(meter)
    model, optimizer, _, loader = prepared
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
        break  # in the middle of a window
    return accelerator, meter


TORCH_FILES = [
    "custom_checkpoint_0.pkl",
    "optimizer.bin",
    "scheduler.bin",
    "loader.bin",
    "random_states_0.pkl",
    "scaler.pt",
]


class TestEveryFile:
    def refused(self, folder: Path, name: str, **options: Any) -> CheckpointError:
        accelerator, meter = make_run()
        before = meter.state
        with pytest.raises(CheckpointError) as caught:
            accelerator.load_state(folder, **options)
        assert meter.state is before
        assert name in str(caught.value)
        return caught.value

    @pytest.mark.parametrize("name", [*TORCH_FILES, "window_0.bin", "pytorch_model.bin"])
    def test_with_code_in_it_is_refused_by_name(self, tmp_path: Path, name: str) -> None:
        accelerator, _ = make_run()
        folder, target = tmp_path / "state", tmp_path / "made by a pickle"
        accelerator.save_state(folder, safe_serialization=False)
        assert (folder / name).is_file()
        (folder / "manifest.json").unlink()  # a checkpoint from elsewhere: whoever wrote it also wrote its checksums
        content = load(folder / name, weights_only=False)
        torch.save({**content, "evil": Malicious(target)}, folder / name)
        if name == "random_states_0.pkl":  # another library's generators are no reason to refuse all the rest
            accelerator.load_state(folder)
        else:
            error = self.refused(folder, name)
            for part in ("mkdir", "load_kwargs={'weights_only': False}", f"{ALLOW_PICKLE}=1"):
                assert part in str(error)
        assert not target.exists()

    @pytest.mark.parametrize("name", ["custom_checkpoint_0.pkl", "optimizer.bin", "loader.bin"])
    def test_is_read_where_somebody_asked_for_it(
        self, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        accelerator, _ = make_run()
        accelerator.save_state(tmp_path / "state")
        (tmp_path / "state" / "manifest.json").unlink()
        content = load(tmp_path / "state" / name, weights_only=False)
        for number, way in enumerate(("argument", "variable")):
            target = tmp_path / way
            torch.save({**content, "evil": Malicious(target)}, tmp_path / "state" / name)
            if number:
                monkeypatch.setenv(ALLOW_PICKLE, "1")
            accelerator, _ = make_run()
            accelerator.load_state(tmp_path / "state", load_kwargs={} if number else {"weights_only": False})
            assert target.is_dir()

    def test_what_the_program_says_comes_before_the_variable(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        accelerator, _ = make_run(state={"evil": Malicious(tmp_path / "x")})
        accelerator.save_state(tmp_path / "state")
        monkeypatch.setenv(ALLOW_PICKLE, "1")
        self.refused(tmp_path / "state", "custom_checkpoint_0.pkl", load_kwargs={"weights_only": True})
        assert not (tmp_path / "x").exists()

    @pytest.mark.parametrize(
        "content",
        [
            pickle.dumps({"a": 1}),  # no torch file
            pickle.dumps({"a": 1}, protocol=0),
            b"",
            b"PK\x03\x04 no zip",
            bytes(range(256)) * 9,
        ],
    )
    def test_that_is_no_torch_file_is_an_error(self, tmp_path: Path, content: bytes) -> None:
        accelerator, _ = make_run()
        accelerator.save_state(tmp_path / "state")
        (tmp_path / "state" / "manifest.json").unlink()
        for name in TORCH_FILES[:4]:
            good = (tmp_path / "state" / name).read_bytes()
            (tmp_path / "state" / name).write_bytes(content)
            self.refused(tmp_path / "state", name)
            (tmp_path / "state" / name).write_bytes(good)


class TestSaving:
    @pytest.fixture(autouse=True)
    def _forget_what_was_said(self) -> None:
        reset_warnings()

    def said(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

    @pytest.mark.parametrize("blocking", [True, False])
    def test_an_object_that_needs_more_is_told_so_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, blocking: bool
    ) -> None:
        accelerator, _ = make_run(state={"counts": defaultdict(int)})
        for number in range(2):
            accelerator.save_state(tmp_path / str(number), blocking=blocking)
        accelerator.wait_for_save()
        (said,) = self.said(caplog)
        for part in (
            "Meter (registered object 0)",
            "collections.defaultdict",
            "load_kwargs={'weights_only': False}",
            f"{ALLOW_PICKLE}=1",
        ):
            assert part in said

    @pytest.mark.parametrize(
        "make",
        [
            lambda: {"a": [1, 2.5, "text", None, True, b"bytes", (1, 2), {3}, frozenset({4}), 2**200, float("nan")]},
            lambda: {"numpy": __import__("numpy").arange(3.0), "number": __import__("numpy").float32(1.5)},
            lambda: {"tensor": torch.ones(2), "half": torch.ones(2).bfloat16(), "dtype": torch.float16},
            lambda: torch.optim.lr_scheduler.LambdaLR(
                torch.optim.SGD([torch.ones(1)], lr=0.1), lambda step: 1.0
            ).state_dict(),
            lambda: _cycle(),
        ],
    )
    def test_data_comes_back_and_nothing_is_said(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[], Any]
    ) -> None:
        accelerator, meter = make_run(state=make())
        accelerator.save_state(tmp_path / "state")
        assert self.said(caplog) == []
        saved, meter.state = meter.state, None
        accelerator.load_state(tmp_path / "state")
        assert repr(meter.state) == repr(saved)

    def test_auto_resume_names_the_variable_and_goes_on_with_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        accelerator, _ = make_run(tmp_path, state={"counts": defaultdict(int, a=3)})
        accelerator.save_state()
        accelerator, meter = make_run(tmp_path)
        with pytest.raises(CheckpointError, match=f"collections.defaultdict.*{ALLOW_PICKLE}=1"):
            accelerator.resume()
        monkeypatch.setenv(ALLOW_PICKLE, "1")
        accelerator, meter = make_run(tmp_path)
        assert accelerator.resume()
        assert meter.state == {"counts": {"a": 3}}


def _cycle() -> dict[str, Any]:
    """A state that holds itself, as torch can save it."""
    state: dict[str, Any] = {"a": 1}
    state["self"] = state
    return state


class TestShards:
    """Folders of torch's distributed checkpoint, whose description torch unpickles."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        state = {"model": {"weight": torch.arange(6.0).reshape(2, 3), "steps": 5, "names": ["a", "b"]}}
        with without_warnings_of_torch():
            save_shards(state, storage_writer=FileSystemWriter(tmp_path / "shards"))
        return tmp_path / "shards"

    def describe(self, folder: Path, change: Callable[[Metadata], Any]) -> None:
        file = folder / ".metadata"
        metadata = pickle.loads(file.read_bytes())
        file.write_bytes(pickle.dumps(change(metadata) or metadata))

    def test_what_torch_wrote_is_read(self, folder: Path) -> None:
        found = ShardFolder(folder).read_whole()
        assert torch.equal(found["model"].pop("weight"), torch.arange(6.0).reshape(2, 3))
        assert found == {"model": {"steps": 5, "names": ["a", "b"]}}

    def test_a_description_with_code_is_refused(self, folder: Path, tmp_path: Path) -> None:
        target = tmp_path / "made by a pickle"
        original = (folder / ".metadata").read_bytes()
        for change in (lambda _: Malicious(target), lambda metadata: setattr(metadata, "version", Malicious(target))):
            (folder / ".metadata").write_bytes(original)
            self.describe(folder, change)
            with pytest.raises(CheckpointError, match=r"\.metadata' is not read.*mkdir"):
                _ = ShardFolder(folder).metadata
            with pytest.raises(CheckpointError, match="mkdir"):
                merge_fsdp_weights(folder, tmp_path / "merged")
            # Nobody needs code here, so nobody can ask for it.
            with pytest.raises(CheckpointError, match="mkdir"):
                ShardFolder(folder, allows_pickle=True).read_whole()
            assert not target.exists()

    def test_a_description_cannot_change_classes_of_torch(self, folder: Path) -> None:
        # A class, and a state for its attributes: pickle sets them where the reader lets it have the class itself.
        text = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}X\x05\x00\x00\x00spoilI1\nstb."
        (folder / ".metadata").write_bytes(text)
        with pytest.raises(CheckpointError, match=r"\.metadata' cannot be read"):
            _ = ShardFolder(folder).metadata
        assert not hasattr(Metadata, "spoil")

    @pytest.mark.parametrize("name", ["../other.distcp", "/etc/passwd", "..", "", "a/../../b", "..\\b", "a\0b"])
    def test_a_description_names_files_of_its_folder(self, folder: Path, name: str) -> None:
        def change(metadata: Metadata) -> None:
            for place in metadata.storage_data.values():
                place.relative_path = name

        self.describe(folder, change)
        with pytest.raises(CheckpointError, match=r"\.metadata' (cannot be read|is not read)"):
            ShardFolder(folder).read_whole()

    def test_a_value_with_code_is_refused_and_read_on_request(self, tmp_path: Path) -> None:
        folder, target = tmp_path / "shards", tmp_path / "made by a pickle"
        with without_warnings_of_torch():
            state = {"optimizer": {"groups": [{"lr": Malicious(target)}]}}
            save_shards(state, storage_writer=FileSystemWriter(folder))
        with pytest.raises(CheckpointError, match=r"optimizer\.groups.*mkdir"):
            ShardFolder(folder).read_whole()
        with pytest.raises(CheckpointError, match="mkdir"):
            ShardFolder(folder).load_into({"optimizer": {"groups": [{"lr": 0.1}]}})
        assert not target.exists()
        ShardFolder(folder, allows_pickle=True).read_whole()
        assert target.is_dir()

    @pytest.mark.parametrize(
        "change",
        [
            lambda metadata: 5,
            lambda metadata: {"state_dict_metadata": {}},
            lambda metadata: setattr(metadata, "state_dict_metadata", [1]),
            lambda metadata: setattr(metadata, "state_dict_metadata", {1: 2}),
            lambda metadata: setattr(metadata, "storage_data", None),
            lambda metadata: setattr(metadata, "storage_data", {1: 2}),
            lambda metadata: setattr(metadata, "planner_data", {"model.weight": [{}]}),
            lambda metadata: setattr(metadata.state_dict_metadata["model.weight"], "size", torch.Size([2**62, 8])),
            lambda metadata: setattr(metadata.state_dict_metadata["model.weight"], "size", (-1, 3)),
            lambda metadata: setattr(metadata.state_dict_metadata["model.weight"], "size", ("a",)),
            lambda metadata: setattr(metadata.state_dict_metadata["model.weight"], "chunks", None),
            lambda metadata: setattr(next(iter(metadata.storage_data.values())), "length", -7),
            lambda metadata: setattr(next(iter(metadata.storage_data.values())), "offset", 2**70),
            lambda metadata: setattr(next(iter(metadata.storage_data.values())), "transform_descriptors", ["zip"]),
        ],
    )
    def test_a_wrong_description_is_a_clear_error(self, folder: Path, change: Callable[[Metadata], Any]) -> None:
        self.describe(folder, change)
        with pytest.raises(CheckpointError, match="shards"):
            ShardFolder(folder).read_whole()

    @pytest.mark.parametrize("size", [0, 1, 10, 100, -1])
    def test_a_cut_description_is_a_clear_error(self, folder: Path, size: int) -> None:
        content = (folder / ".metadata").read_bytes()
        (folder / ".metadata").write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"\.metadata"):
            _ = ShardFolder(folder).metadata


class TestDeepSpeed:
    """The files of an engine, read before the engine sees them."""

    def part(self, folder: Path, tag: str, states: dict[str, Any]) -> EnginePart:
        own = folder / "pytorch_model"
        own.mkdir()
        (own / "latest").write_text(tag)
        (own / "step1").mkdir()
        torch.save(states, own / "step1" / "mp_rank_00_model_states.pt")
        return EnginePart(SimpleNamespace(zero_optimization_stage=lambda: 0, seq_dp_world_size=1))

    def test_a_file_with_code_is_refused_and_read_on_request(self, tmp_path: Path) -> None:
        target = tmp_path / "made by a pickle"
        part = self.part(tmp_path, "step1", {"ds_config": {}, "evil": Malicious(target)})
        with pytest.raises(CheckpointError, match=r"model_states\.pt' is not read.*mkdir"):
            part.read(tmp_path, LoadOptions())
        assert not target.exists()
        part.read(tmp_path, LoadOptions(load_kwargs={"weights_only": False}))
        assert target.is_dir()

    @pytest.mark.parametrize(
        "name", ["a/mp_rank_00_model_states.pt", "a/zero_pp_rank_0_mp_rank_00_optim_states.pt", "layer_a.pt"]
    )
    def test_files_that_deepspeed_would_find_by_itself_are_not_read(self, tmp_path: Path, name: str) -> None:
        target = tmp_path / "made by a pickle"
        usual = {"ds_config": {"zero_optimization": {"stage": 1}}, "dp_world_size": 2}
        part = self.part(tmp_path, "step1", usual)
        part.engine.zero_optimization_stage = lambda: 1
        source = tmp_path / "pytorch_model" / "step1"
        torch.save({"optimizer_state_dict": {}}, source / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
        (source / name).parent.mkdir(exist_ok=True)
        torch.save({"evil": Malicious(target)}, source / name)
        Accelerator(cpu=True)
        with pytest.raises(CheckpointError, match="DeepSpeed cannot convert it"):
            part.read(tmp_path, LoadOptions())
        assert not target.exists()
        assert sorted(path.name for path in tmp_path.parent.iterdir() if path.name.startswith(".universal-")) == []

    @pytest.mark.parametrize(
        "states", [5, {"ds_config": 5}, {"ds_config": {"zero_optimization": {"stage": "x"}}, "dp_world_size": 2}]
    )
    def test_files_that_say_nothing_are_a_clear_error(self, tmp_path: Path, states: Any) -> None:
        part = self.part(tmp_path, "step1", states)
        with pytest.raises(CheckpointError, match="does not say which stage of ZeRO"):
            part.read(tmp_path, LoadOptions())

    @pytest.mark.parametrize("tag", ["../elsewhere", "/etc", "..", "", "step1/../../elsewhere"])
    def test_the_latest_files_are_beside_the_name_of_them(self, tmp_path: Path, tag: str) -> None:
        part = self.part(tmp_path, tag, {"ds_config": {}})
        with pytest.raises(CheckpointError, match="latest' names"):
            part.read(tmp_path, LoadOptions())
