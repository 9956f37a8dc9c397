"""Names in files of others: what they name lies in the folder, and nothing outside of it is read, written or removed."""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.tensor_fragment import fragment_address
from safetensors.torch import save_file
from tests.support.checkpoints import write_checkpoint
from torch import nn

from accelerate import Accelerator, disk_offload, dispatch_model, load_checkpoint_and_dispatch, load_checkpoint_in_model
from accelerate._base.errors import AccelerateError, CheckpointError, ConfigurationError
from accelerate.checkpointing.catalog import catalog, inspect, newest_valid
from accelerate.checkpointing.files import FileRecord
from accelerate.checkpointing.manifest import Manifest, finish_publish
from accelerate.checkpointing.state_folder import save_accelerator_state, save_custom_state
from accelerate.commands.checkpoints import checkpoints_command_parser
from accelerate.commands.estimate_source import find_model
from accelerate.offload.store import OffloadedWeightsLoader, offload_state_dict, offload_weight
from accelerate.offload.weight_files import checkpoint_files, find_weight_files, save_offload_index
from accelerate.strategies.deepspeed.checkpoint import _Reader, _to_universal

OUTSIDE = ["../x", "a/../../x", "/x", "//server/x", "..\\x", "a\\..\\..\\x", "C:\\x", "C:x", "\\x", "..", "sub/.."]
NO_NAMES = ["", ".", "./", "a\0b", "\ud800", None, 3, ["a"], {}]


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return everything below a folder: paths, times of change and contents."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def surroundings(tmp_path: Path) -> Path:
    """A folder `inside` that hostile files are put into, among others whose files nobody may touch."""
    for name in ("x", "x.dat", "x.safetensors", "other/x", "other/manifest.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / "inside").mkdir()
    return tmp_path


class TestWeightIndexes:
    def write(self, folder: Path, name: str) -> Path:
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"weight": name, "bias": name}}))
        return index

    @pytest.mark.parametrize("name", OUTSIDE)
    def test_an_index_cannot_name_files_elsewhere(self, name: str, surroundings: Path) -> None:
        index = self.write(surroundings / "inside", name)
        for read in (checkpoint_files, find_weight_files, lambda path: find_model(str(path))):
            for path in (index, index.parent):
                with pytest.raises(ConfigurationError, match=r"index\.json' names the file"):
                    read(path)
        with pytest.raises(ConfigurationError, match=r"index\.json' names the file"):
            load_checkpoint_in_model(nn.Linear(2, 2), index.parent)

    def test_an_absolute_path_into_the_folder_is_refused_too(self, surroundings: Path) -> None:
        index = self.write(surroundings / "inside", str(surroundings / "inside" / "a.safetensors"))
        with pytest.raises(ConfigurationError, match="begins at the root of a disk"):
            checkpoint_files(index)

    def test_links_of_the_users_own_are_followed(self, surroundings: Path) -> None:
        # As the cache of the Hub is made.
        model = nn.Linear(2, 2)
        (surroundings / "blobs").mkdir()
        save_file(model.state_dict(), surroundings / "blobs" / "123")
        (surroundings / "inside" / "w.safetensors").symlink_to("../blobs/123")
        index = self.write(surroundings / "inside", "w.safetensors")
        loaded = nn.Linear(2, 2)
        load_checkpoint_in_model(loaded, index)
        assert torch.equal(loaded.weight, model.weight)


class TestOffloadFolders:
    @pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "..\\x", "C:x", "a\0b"])
    def test_a_weight_cannot_be_written_elsewhere(self, name: str, surroundings: Path) -> None:
        before = tree(surroundings)
        with pytest.raises(ConfigurationError, match=r"^The weight .* names the file"):
            offload_weight(torch.ones(2), name, surroundings / "inside", {})
        with pytest.raises(ConfigurationError, match=r"^The weight .* names the file"):
            offload_state_dict(surroundings / "inside", {name: torch.ones(2)})
        assert tree(surroundings) == before

    def test_names_of_an_index_cannot_lead_to_raw_files_elsewhere(self, surroundings: Path) -> None:
        entry = {"dtype": "uint8", "shape": [4]}
        (surroundings / "inside" / "index.json").write_text(json.dumps({"../x": entry}))
        weights = OffloadedWeightsLoader(save_folder=surroundings / "inside")
        with pytest.raises(ConfigurationError, match=r"'\.\./x\.dat', which leads out of the folder"):
            weights["../x"]

    @pytest.mark.parametrize(
        "name", ["/elsewhere.safetensors", "../x.safetensors", "C:\\x.safetensors", "a\0b", "/dev/zero"]
    )
    def test_an_index_that_was_not_written_here_cannot_point_elsewhere(self, name: str, tmp_path: Path) -> None:
        folder = tmp_path / "inside"
        folder.mkdir()
        (folder / "index.json").write_text(json.dumps({"a": {"safetensors_file": name, "weight_name": "a"}}))
        with pytest.raises(ConfigurationError, match=r"outside of its folder.*pass index="):
            OffloadedWeightsLoader(save_folder=folder)
        with pytest.raises(ConfigurationError, match="outside of its folder"):
            disk_offload(nn.Linear(2, 2), folder)
        with pytest.raises(ConfigurationError, match="outside of its folder"):
            dispatch_model(nn.Linear(2, 2), {"": "disk"}, offload_dir=folder, main_device="cpu")

    def test_who_has_not_seen_a_file_cannot_point_at_it(self, tmp_path: Path) -> None:
        save_file({"a": torch.ones(2)}, tmp_path / "secret.safetensors")
        folder = tmp_path / "inside"
        folder.mkdir()
        entry = {"safetensors_file": str(tmp_path / "secret.safetensors"), "weight_name": "a", "dtype": "float32"}
        (folder / "index.json").write_text(json.dumps({"a": {**entry, "size": 88, "modified": 1}}))
        with pytest.raises(
            ConfigurationError, match="is not the one that the index of the offload folder was written for"
        ):
            OffloadedWeightsLoader(save_folder=folder)["a"]
        # The program's own index, in memory, is its own matter.
        assert OffloadedWeightsLoader(index={"a": entry})["a"].tolist() == [1, 1]

    def test_what_the_library_wrote_is_read_again(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        save_file(model.state_dict(), tmp_path / "w.safetensors")
        expected = model(torch.ones(1, 2))
        for _ in range(2):
            made = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).to("meta")
            load_checkpoint_and_dispatch(
                made, tmp_path / "w.safetensors", {"0": "cpu", "1": "disk"}, offload_folder=tmp_path / "folder"
            )
            assert torch.equal(made(torch.ones(1, 2)), expected)
        weights = OffloadedWeightsLoader(save_folder=tmp_path / "folder")
        assert torch.equal(weights["1.weight"], model[1].weight)
        # Another file under its name is noticed, and loading again is the remedy.
        save_file({name: value + 1 for name, value in model.state_dict().items()}, tmp_path / "w.safetensors")
        with pytest.raises(ConfigurationError, match="Load the checkpoint again with this offload_folder"):
            OffloadedWeightsLoader(save_folder=tmp_path / "folder")["1.weight"]
        made = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).to("meta")
        load_checkpoint_in_model(made, tmp_path / "w.safetensors", {"": "disk"}, offload_folder=tmp_path / "folder")
        weights = OffloadedWeightsLoader(save_folder=tmp_path / "folder")
        assert torch.equal(weights["1.weight"], model[1].weight + 1)

    def test_files_in_the_folder_may_be_named_either_way(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save_file({"a": torch.ones(2)}, tmp_path / "w.safetensors")
        for name in ("w.safetensors", str(tmp_path / "w.safetensors")):
            (tmp_path / "index.json").write_text(json.dumps({"a": {"safetensors_file": name}}))
            assert OffloadedWeightsLoader(save_folder=tmp_path)["a"].tolist() == [1, 1]
        # What a program says by a path from where it is, stays that file wherever it is read from.
        monkeypatch.chdir(tmp_path)
        (tmp_path / "folder").mkdir()
        save_offload_index({"a": {"safetensors_file": "w.safetensors", "weight_name": "a"}}, "folder")
        monkeypatch.chdir("/")
        assert OffloadedWeightsLoader(save_folder=tmp_path / "folder")["a"].tolist() == [1, 1]

    @pytest.mark.parametrize(
        "entry", [3, None, {}, {"dtype": "float32"}, {"dtype": 1, "shape": []}, {"dtype": "int8", "shape": [-1]}]
    )
    def test_an_entry_that_is_none_is_told(self, entry: Any, tmp_path: Path) -> None:
        (tmp_path / "index.json").write_text(json.dumps({"a": entry}))
        with pytest.raises(ConfigurationError, match=r"index\.json' says .* of 'a'"):
            OffloadedWeightsLoader(save_folder=tmp_path)


class TestManifests:
    def hostile(self, folder: Path, name: str, *, pending: bool) -> None:
        """Let the manifest of a checkpoint, or of one that is decided, list a file elsewhere."""
        write_checkpoint(folder, {"a": "one"})
        content = json.loads((folder / "manifest.json").read_text())
        del content["checksum"]  # whoever changes a manifest would make it anew
        content["files"][0]["name"] = name
        if pending:
            (folder / ".sealed").mkdir()
            (folder / ".sealed" / "a").write_text("new")
        ((folder / ".sealed" if pending else folder) / "manifest.json").write_text(json.dumps(content))

    @pytest.mark.parametrize("name", [*OUTSIDE, *NO_NAMES])
    def test_a_record_cannot_be_of_a_file_elsewhere(self, name: Any) -> None:
        with pytest.raises(ValueError, match="A manifest names the file"):
            FileRecord(name, 1, "x")

    @pytest.mark.parametrize("name", OUTSIDE)
    @pytest.mark.parametrize("pending", [True, False])
    def test_nothing_outside_of_the_folder_is_moved_or_removed(
        self, name: str, pending: bool, surroundings: Path
    ) -> None:
        folder = surroundings / "inside" / "checkpoint_1"
        write_checkpoint(surroundings / "inside" / "checkpoint_0", {"a": "good"})
        self.hostile(folder, name, pending=pending)
        before = {path: entry for path, entry in tree(surroundings).items() if "checkpoint_1" not in path}
        assert not inspect(folder).is_valid
        chosen = newest_valid(surroundings / "inside")
        assert chosen.value is not None
        assert chosen.value.name == "checkpoint_0"
        assert "checkpoint_1 was passed over" in chosen.reason
        with pytest.raises(CheckpointError, match="A manifest names the file"):
            finish_publish(folder) if pending else Manifest.read(folder)
        after = {path: entry for path, entry in tree(surroundings).items() if "checkpoint_1" not in path}
        assert after == before

    @pytest.mark.parametrize("side", ["old", "new", "source", "pending", "pending without files"])
    def test_files_are_not_moved_or_removed_through_links(self, side: str, surroundings: Path) -> None:
        folder = surroundings / "inside" / "state"
        write_checkpoint(folder, {"a": "one"})
        content = json.loads((folder / "manifest.json").read_text())
        del content["checksum"]  # whoever changes a manifest would make it anew
        hostile = {**content, "files": [{"name": "link/x", "size": 4, "checksum": "x"}]}
        if side.startswith("pending"):
            listed = content["files"] if side == "pending" else []
            (surroundings / "other" / "manifest.json").write_text(json.dumps({**content, "files": listed}))
            (surroundings / "other" / "a").write_text("mine")
            (folder / ".sealed").symlink_to(surroundings / "other")
        else:
            (folder / ".sealed").mkdir()
            source = folder if side == "old" else folder / ".sealed"
            (folder / ".sealed" / "manifest.json").write_text(json.dumps(content))
            (source / "manifest.json").write_text(json.dumps(hostile))
            linked = folder / ".sealed" if side == "source" else folder
            (linked / "link").symlink_to(surroundings / "other")
            if side == "new":
                (folder / ".sealed" / "link").mkdir()
                (folder / ".sealed" / "link" / "x").write_text("hostile")
        before = tree(surroundings / "other")
        with pytest.raises(CheckpointError, match="is a link out of the checkpoint"):
            finish_publish(folder)
        assert not inspect(folder).is_valid
        assert tree(surroundings / "other") == before

    def test_a_file_that_cannot_be_moved_stops_no_other_checkpoint(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path / "checkpoint_0", {"a": "good"})
        broken = write_checkpoint(tmp_path / "checkpoint_1", {"a": "one"})
        (broken / ".sealed").mkdir()
        shutil.copy(broken / "manifest.json", broken / ".sealed")
        (broken / ".sealed" / "a").write_text("new")
        (broken / "a").unlink()
        (broken / "a" / "sub").mkdir(parents=True)
        assert [info.is_valid for info in catalog(tmp_path)] == [True, False]


class TestEscapes:
    """Names that a terminal would act on, or that would look like other lines of a log."""

    NAME = "a\x1b[31m\x07\nFAKE: b\x9b31m"

    def saved(self, folder: Path) -> Accelerator:
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model := nn.Linear(2, 2), torch.optim.SGD(model.parameters()))
        accelerator.save_state(folder)
        return accelerator

    def test_names_in_pickles_are_escaped(self, tmp_path: Path) -> None:
        accelerator = self.saved(tmp_path / "state")
        (tmp_path / "state" / "manifest.json").unlink()
        module, name = self.NAME.encode(), b"system"
        old = b"\x80\x02c" + module.replace(b"\n", b"") + b"\n" + name + b"\n)R."
        new = b"\x80\x04\x8c" + bytes([len(module)]) + module + b"\x8c\x06" + name + b"\x93)R."
        for pickled in (old, new):
            for file in ("optimizer.bin", "w.bin"):
                with zipfile.ZipFile(tmp_path / "state" / file, "w") as archive:
                    archive.writestr("archive/data.pkl", pickled)
                    archive.writestr("archive/version", "3")
            with pytest.raises(CheckpointError) as caught:
                accelerator.load_state(tmp_path / "state")
            with pytest.raises(ConfigurationError) as other:
                load_checkpoint_in_model(nn.Linear(2, 2), tmp_path / "state" / "w.bin")
            for error in (caught.value, other.value):
                text = "".join(traceback.format_exception(error))
                assert not any(sign in text for sign in ("\x1b", "\x07", "\x9b", "\nFAKE"))

    def test_names_of_folders_are_escaped(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = tmp_path / self.NAME
        accelerator = self.saved(folder)
        (folder / "random_states_0.pkl").unlink()
        with pytest.raises(CheckpointError) as caught:
            accelerator.load_state(folder)
        arguments = checkpoints_command_parser().parse_args([str(tmp_path)])
        arguments.func(arguments)
        reason = newest_valid(tmp_path).reason
        (folder / "manifest.json").unlink()
        accelerator.load_state(folder)  # which logs that there are no random states
        for shown in (str(caught.value), caplog.text, capsys.readouterr().out, reason):
            assert "\\x1b" in shown
            assert not any(sign in shown for sign in ("\x1b", "\x07", "\x9b", "\nFAKE"))


@pytest.mark.skipif(sys.platform != "linux", reason="names are text elsewhere")
@pytest.mark.parametrize("safe", [True, False])
def test_paths_that_are_not_utf8_are_saved_and_loaded(safe: bool, tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"f\xfcr")
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    weight = model.weight.detach().clone()
    accelerator.save_state(folder / "state", safe_serialization=safe)
    accelerator.save_model(model, folder / "weights", safe_serialization=safe)
    (folder / "state" / "manifest.json").unlink()
    assert inspect(folder / "state").is_valid
    for load in (
        lambda: accelerator.load_state(folder / "state"),
        lambda: load_checkpoint_in_model(model, folder / "weights"),
    ):
        nn.init.zeros_(model.weight)
        load()
        assert torch.equal(model.weight, weight)


class TestDirectWriters:
    def test_files_are_not_written_through_links(self, surroundings: Path) -> None:
        inside = surroundings / "inside"
        (inside / "custom_checkpoint_0.pkl").symlink_to(surroundings / "x")
        (inside / "random_states_0.pkl").symlink_to(surroundings / "new")
        before = {path: entry for path, entry in tree(surroundings).items() if not path.startswith("inside")}
        Accelerator(cpu=True)
        save_custom_state(torch.optim.SGD([torch.ones(1)], lr=1.0), inside)
        save_accelerator_state(inside, [], [], [], [], 0, 0)
        assert {path: entry for path, entry in tree(surroundings).items() if not path.startswith("inside")} == before


class TestWeightsOfDeepSpeed:
    """DeepSpeed makes paths and patterns of the names of weights when it converts files."""

    PLACES = ("module", "param_shapes", "groups of param_shapes", "param_slice_mappings")

    def files(self, folder: Path, name: str, place: str, **more: Any) -> Path:
        """Write the files of an engine, with one weight of this name."""
        usual = {where: name if where == place else "weight" for where in self.PLACES}
        values, shape = torch.zeros(4), torch.Size([4])
        # A list of groups, as ZeRO 1 to 3 write it; and the one group of older ones.
        shapes: Any = [{usual["groups of param_shapes"]: shape}]
        if place == "param_shapes":
            shapes = {name: shape}
        source = folder / "step1"
        source.mkdir()
        torch.save(
            {
                "ds_config": {"zero_optimization": {"stage": 1}},
                "dp_world_size": 1,
                "iteration": 1,
                "param_shapes": shapes,
                "module": {usual["module"]: values},
                **more,
            },
            source / "mp_rank_00_model_states.pt",
        )
        adam = {"exp_avg": values, "exp_avg_sq": values, "step": 1}
        optimizer = {
            "zero_stage": 1,
            "partition_count": [1],
            "group_paddings": [0],
            "param_slice_mappings": [{usual["param_slice_mappings"]: fragment_address(start=0, numel=4)}],
            "base_optimizer_state": {"state": {0: adam}, "param_groups": [{}]},
            "single_partition_of_fp32_groups": [values],
        }
        torch.save({"optimizer_state_dict": optimizer}, source / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
        return source

    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize("name", ["../../other/x", "{outside}", "a\\..\\..\\x", "", 3, ".*.*.*.*.*x", "a[b]"])
    def test_they_stay_in_the_folder_of_the_conversion(self, place: str, name: Any, surroundings: Path) -> None:
        if name == "{outside}":
            name = str(surroundings / "other" / "x")
        source = self.files(surroundings / "inside", name, place)
        before = tree(surroundings)
        with pytest.raises(CheckpointError, match=r"_states\.pt' names the (file|weight)"):
            _to_universal(source, surroundings / "out", _Reader())
        shutil.rmtree(surroundings / "out")
        assert tree(surroundings) == before

    def test_others_are_converted(self, tmp_path: Path) -> None:
        _to_universal(self.files(tmp_path, "", "nowhere"), tmp_path / "out", _Reader())
        assert (tmp_path / "out" / "universal" / "zero" / "weight" / "exp_avg.pt").is_file()
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["latest_universal", "universal"]

    @pytest.mark.parametrize("pattern", ["(a+)+b", ".*.*.*x"])
    def test_patterns_that_take_for_ever_are_refused(self, pattern: str, tmp_path: Path) -> None:
        info: dict[str, Any] = {"tp_replicated_parameter_patterns": [pattern]}
        info["itself"] = info
        source = self.files(tmp_path, "", "nowhere", universal_checkpoint_info=info)
        with pytest.raises(CheckpointError, match="may take for ever"):
            _to_universal(source, tmp_path / "out", _Reader())

    def test_experts_whose_files_are_named_in_files_are_refused(self, tmp_path: Path) -> None:
        source = self.files(tmp_path, "", "nowhere", ds_autoep_layers=[{"moe_layer_id": "/../../x"}])
        with pytest.raises(CheckpointError, match="AutoEP"):
            _to_universal(source, tmp_path / "out", _Reader())


def test_hostile_folders_leave_their_surroundings_as_they_were(surroundings: Path) -> None:
    """Let everything that reads a folder read one in which every file is hostile."""
    inside = surroundings / "inside"
    outside = ["../x", str(surroundings / "x"), "../other/x", "../x.safetensors"]
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(enumerate(outside))}))
    (inside / "index.json").write_text(json.dumps({name: {"dtype": "uint8", "shape": [4]} for name in outside}))
    records = [{"name": name, "size": 4, "checksum": "x"} for name in outside]
    manifest = {"version": 1, "files": records, "world_size": 1, "facts": {}, "created": 0, "versions": {}}
    (inside / "manifest.json").write_text(json.dumps(manifest))
    (inside / ".sealed").mkdir()
    (inside / ".sealed" / "manifest.json").write_text(json.dumps(manifest))
    before = {path: entry for path, entry in tree(surroundings).items() if not path.startswith("inside")}
    reads: list[Any] = [
        lambda: inspect(inside, checksums=True),
        lambda: newest_valid(surroundings),
        lambda: finish_publish(inside),
        lambda: checkpoint_files(inside),
        lambda: find_model(str(inside)),
        lambda: [OffloadedWeightsLoader(save_folder=inside)[name] for name in outside],
        lambda: load_checkpoint_in_model(nn.Linear(2, 2), inside, {"": "disk"}, offload_folder=inside),
        lambda: offload_state_dict(inside, {name: torch.ones(2) for name in outside}),
    ]
    refused = 0
    for read in reads:
        try:
            read()
        except AccelerateError:
            refused += 1
    assert refused == 6  # all but those that list what is there
    assert {path: entry for path, entry in tree(surroundings).items() if not path.startswith("inside")} == before
    assert {path.name for path in surroundings.iterdir()} == {"inside", "other", "x", "x.dat", "x.safetensors"}
