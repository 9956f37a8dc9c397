"""`accelerate estimate-memory` on folders, files and configurations, as a program and as functions."""

from __future__ import annotations

import argparse
import http.server
import importlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.processes import script_environment
from torch import nn

from accelerate._base.errors import ConfigurationError, MissingPackageError
from accelerate._base.imports import is_package_available
from accelerate.commands import estimate
from accelerate.commands.accelerate_cli import run
from accelerate.commands.estimate_source import find_model
from accelerate.devices.machine import get_free_port

transformers = pytest.importorskip("transformers")

SMALL: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50},
    "BertModel": {
        "model_type": "bert",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "vocab_size": 40,
    },
}


def write_config(folder: Path, architecture: str) -> Path:
    (folder / "config.json").write_text(json.dumps({**SMALL[architecture], "architectures": [architecture]}))
    return folder


def real_model(folder: Path, architecture: str) -> nn.Module:
    model: nn.Module = getattr(transformers, architecture)(transformers.AutoConfig.from_pretrained(folder))
    return model


def report(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert run(["estimate-memory", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("architecture", list(SMALL))
@pytest.mark.parametrize("as_file", [False, True])
def test_a_configuration_gives_the_sizes_of_the_real_model(
    tmp_path: Path, architecture: str, as_file: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_config(tmp_path, architecture)
    real = real_model(folder, architecture)
    # Tied weights are one parameter of the real model.
    count = sum(parameter.numel() for parameter in real.parameters())
    floats = sum(buffer.numel() for buffer in real.buffers() if buffer.is_floating_point())
    fixed = sum(buffer.nbytes for buffer in real.buffers() if not buffer.is_floating_point())
    seen = report(capsys, str(folder / "config.json" if as_file else folder))
    assert seen["parameters"] == count
    assert seen["dtypes"]["float32"]["total"] == 4 * (count + floats) + fixed
    assert seen["dtypes"]["float16"]["total"] == 2 * (count + floats) + fixed
    assert seen["dtypes"]["int8"]["total"] == count + floats + fixed
    assert seen["dtypes"]["float32"]["training"]["total"] == 16 * count + 4 * floats + fixed
    assert seen["dtypes"]["int4"]["training"] is None


def test_a_layer_that_stays_whole_is_the_largest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_config(tmp_path, "GPT2LMHeadModel")
    real = real_model(folder, "GPT2LMHeadModel")
    embedding = real.get_submodule("transformer.wpe").weight.nbytes  # type: ignore[union-attr]
    assert report(capsys, str(folder))["dtypes"]["float32"]["largest_layer"] == {
        "name": "transformer.wpe",
        "bytes": embedding,
    }


def test_weights_come_before_the_configuration_unless_a_library_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_config(tmp_path, "BertModel")
    save_file({"a.weight": torch.zeros(3, 2)}, folder / "model.safetensors")
    assert report(capsys, str(folder))["parameters"] == 6
    assert report(capsys, str(folder), "--library_name", "transformers")["parameters"] > 6


def test_saved_weights_and_their_configuration_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_config(tmp_path, "GPT2LMHeadModel")
    built = report(capsys, str(folder))
    real_model(folder, "GPT2LMHeadModel").save_pretrained(folder, max_shard_size="20KB")  # type: ignore[operator]
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert report(capsys, str(folder))["parameters"] == built["parameters"]


def test_each_process_is_shown_for_each_way_of_sharing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a.weight": torch.zeros(8, 2)}, tmp_path / "model.safetensors")
    seen = report(capsys, str(tmp_path), "--num-processes", "4", "--dtypes", "bfloat16", "int8")
    assert seen["num_processes"] == 4
    assert list(seen["per_rank"]) == ["bfloat16"]
    assert seen["per_rank"]["bfloat16"]["ZeRO-3"] == {
        "weights": 8,
        "gradients": 8,
        "optimizer": 48,
        "working": 64,
        "total": 128,
    }


def test_the_tables_show_every_dtype_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a.weight": torch.zeros(256, 256)}, tmp_path / "model.safetensors")
    words = ["estimate-memory", str(tmp_path), "--num_processes", "2", "--dtypes", "float16", "bfloat16", "int4"]
    assert run(words) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith("│ float16/bfloat16")]
    assert row.split("│")[2:5] == ["      128.0 KB ", "   128.0 KB ", "            1.12 MB "]
    assert sum("ZeRO-3" in line for line in lines) == 1
    assert any("65,536 parameters" in line for line in lines)


def test_quantised_weights_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"a.weight": torch.zeros(64, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    run(["estimate-memory", str(tmp_path)])
    assert "64 bytes are integers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{tmp}/nothing"], "nothing at"),
        (["./nothing"], "nothing at"),
        (["{tmp}"], "neither weights nor a config.json"),
        (["{tmp}/notes.txt"], "'.txt'"),
        (["{tmp}/plain.json"], "does not say what it configures"),
        (["{tmp}/broken.json"], "cannot be read"),
        (["{tmp}/unknown.json"], "transformers cannot build"),
        (["{tmp}/timm.json"], "timm"),
        (["nobody/no-such-model"], "Pass a folder or file with weights"),
        (["not a name"], "Pass a folder or file with weights"),
        (["{tmp}", "--num_processes", "0"], "--num_processes 0"),
        (["{tmp}", "--tp", "0"], "--tp 0"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "plain.json").write_text("{}")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "unknown.json").write_text('{"model_type": "nobody-knows"}')
    (tmp_path / "timm.json").write_text('{"architecture": "no-such-architecture"}')
    assert run(["estimate-memory", *(word.format(tmp=tmp_path) for word in words)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1


def test_a_layout_that_does_not_fill_the_processes_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"a.weight": torch.zeros(3, 2)}, tmp_path / "model.safetensors")
    assert run(["estimate-memory", str(tmp_path), "--num_processes", "6", "--fsdp", "2", "--tp", "2"]) == 2
    assert "Give a multiple of 4" in capsys.readouterr().err


def test_a_folder_of_safetensors_needs_no_torch(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(3, 2)}, tmp_path / "model.safetensors")
    program = (
        "import sys\n"
        "from accelerate.commands.accelerate_cli import run\n"
        f"assert run(['estimate-memory', {str(tmp_path)!r}, '--num_processes', '2']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], env=script_environment(), check=True, capture_output=True)


def cached_snapshot(cache: Path) -> Path:
    """Make the folder of a model, "owner/tiny", in a cache of the Hub."""
    home = cache / "models--owner--tiny"
    snapshot = home / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(snapshot.name)
    return snapshot


def estimate_cached(cache: Path) -> subprocess.CompletedProcess[str]:
    """Ask for that model without a connection."""
    return subprocess.run(
        [sys.executable, "-m", "accelerate.commands.estimate", "owner/tiny", "--json"],
        env=script_environment({"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}),
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_model_in_the_cache_is_found_without_a_connection(tmp_path: Path) -> None:
    snapshot = cached_snapshot(tmp_path)
    write_config(snapshot, "BertModel")
    done = estimate_cached(tmp_path)
    assert done.returncode == 0, done.stderr
    expected = sum(parameter.numel() for parameter in real_model(snapshot, "BertModel").parameters())
    assert json.loads(done.stdout)["parameters"] == expected


class Hub(http.server.BaseHTTPRequestHandler):
    """A Hub with one model, one that is gated, and one without a configuration."""

    config = json.dumps({**SMALL["BertModel"], "architectures": ["BertModel"]}).encode()

    def answer(self, code: int, body: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self) -> None:
        commit = "0123456789abcdef0123456789abcdef01234567"
        match self.path.split("?")[0]:
            case "/api/models/owner/tiny" | "/api/models/owner/bare":
                self.answer(200, json.dumps({"id": "owner/tiny", "sha": commit, "siblings": []}).encode())
            case "/owner/tiny/resolve/main/config.json":
                self.answer(200, self.config, X_Repo_Commit=commit, ETag='"0123"')
            case "/owner/bare/resolve/main/config.json":
                self.answer(404, b"", X_Repo_Commit=commit, X_Error_Code="EntryNotFound")
            case "/api/models/owner/gated":
                self.answer(403, b"{}", X_Error_Code="GatedRepo")
            case _:
                self.answer(404, b"{}", X_Error_Code="RepoNotFound")

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def ask(endpoint: str, cache: Path, name: str) -> subprocess.CompletedProcess[str]:
    env = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(cache), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-m", "accelerate.commands.estimate", name, "--json"]
    return subprocess.run(command, env=script_environment(env), capture_output=True, text=True, check=False)


def test_a_name_on_the_hub_is_asked_for_its_configuration(hub: str, tmp_path: Path) -> None:
    done = ask(hub, tmp_path, "owner/tiny")
    assert done.returncode == 0, done.stderr
    real = real_model(write_config(tmp_path, "BertModel"), "BertModel")
    assert json.loads(done.stdout)["parameters"] == sum(parameter.numel() for parameter in real.parameters())


@pytest.mark.parametrize(
    ("name", "message"),
    [("owner/gated", "is gated"), ("owner/missing", "is not there"), ("owner/bare", "has no config.json")],
)
def test_what_the_hub_refuses_is_one_line(hub: str, tmp_path: Path, name: str, message: str) -> None:
    done = ask(hub, tmp_path, name)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert message in done.stderr


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path) -> None:
    done = ask(f"http://127.0.0.1:{get_free_port()}", tmp_path, "owner/tiny")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "the Hub cannot be asked" in done.stderr


def test_configurations_of_timm_are_built(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    (tmp_path / "config.json").write_text('{"architecture": "resnet18", "num_classes": 10}')
    real = timm.create_model("resnet18", num_classes=10)
    expected = sum(parameter.numel() for parameter in real.parameters())
    assert find_model(str(tmp_path)).model.parameters == expected
    assert find_model("resnet18").model.parameters > expected


TIMM = """
from torch import nn

def is_model(name):
    return name == "resnet18"

def create_model(architecture, pretrained, num_classes=1000, width=4):
    if not is_model(architecture):
        raise RuntimeError(f"Unknown model ({architecture})")
    assert not pretrained
    return nn.Linear(width, num_classes, bias=False)
"""


@pytest.fixture
def timm(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Put a package of that name first on the path, with one architecture."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "timm.py").write_text(TIMM)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    is_package_available.cache_clear()
    yield folder / "timm.py"
    sys.modules.pop("timm", None)
    is_package_available.cache_clear()


def test_an_architecture_of_timm_is_known_by_its_name(timm: Path) -> None:
    found = find_model("resnet18")
    assert (found.model.parameters, found.source) == (4000, "the architecture, built by timm without weights")
    assert find_model("resnet18", "timm") == found


def test_a_configuration_of_timm_may_have_arguments(timm: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architecture": "resnet18", "num_classes": 10, "model_args": {"width": 8}}')
    for path in (tmp_path, tmp_path / "config.json"):
        found = find_model(str(path))
        assert (found.model.parameters, found.source) == (80, "the configuration, built by timm without weights")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigurationError, match=r"names no 'architecture'.*Pass --library_name transformers"):
        find_model(str(tmp_path), "timm")


def test_an_architecture_that_timm_does_not_know_is_told(timm: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"timm cannot build 'resnet0' \(Unknown model \(resnet0\)\)"
    ) as caught:
        find_model("resnet0", "timm")
    cause = caught.value.__cause__
    assert isinstance(cause, RuntimeError)
    assert estimate.check_has_model(cause) == "timm"


def test_a_timm_that_fails_to_import_is_told(timm: Path) -> None:
    timm.write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    with pytest.raises(
        MissingPackageError, match=r"fails to import \(operator torchvision::nms .*Install a torchvision"
    ):
        find_model("resnet18", "timm")
    # As a name alone it may be one on the Hub.
    with pytest.raises(ConfigurationError, match="the Hub cannot be asked"):
        find_model("resnet18")


def test_a_configuration_without_an_architecture_is_built_by_its_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL["BertModel"]))
    expected = sum(parameter.numel() for parameter in real_model(tmp_path, "BertModel").parameters())
    assert find_model(str(tmp_path)).model.parameters == expected


def test_code_that_comes_with_a_configuration_is_not_run_unasked(tmp_path: Path) -> None:
    (tmp_path / "modeling.py").write_text("raise AssertionError('it was run')\n")
    described = {"model_type": "own", "auto_map": {"AutoConfig": "modeling.OwnConfig", "AutoModel": "modeling.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(
        ConfigurationError, match=r"transformers cannot build .*Pass --trust_remote_code if you have read"
    ):
        find_model(str(tmp_path))


def test_a_cache_with_some_shards_only_is_not_enough(tmp_path: Path) -> None:
    snapshot = cached_snapshot(tmp_path)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"a": torch.zeros(3)}, snapshot / "model-00001-of-00002.safetensors")
    done = estimate_cached(tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "the Hub cannot be asked" in done.stderr


def test_the_parser_fits_under_another_one() -> None:
    above = argparse.ArgumentParser()
    estimate.estimate_command_parser(above.add_subparsers())
    args = above.parse_args(["estimate-memory", "model"])
    assert args.dtypes == ["float32", "float16", "int8", "int4"]
    assert args.func is estimate.estimate_command


def test_rows_are_there_for_programs(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(3, 2), "b": torch.zeros(2)}, tmp_path / "model.safetensors")
    args = estimate.estimate_command_parser().parse_args([str(tmp_path), "--dtypes", "float16", "int8"])
    assert estimate.gather_data(args) == [
        ["float16", 12, 16, {"model": 32, "optimizer": 64, "gradients": 48, "step": 64}],
        ["int8", 6, 8, {"model": -1, "optimizer": -1, "gradients": -1, "step": -1}],
    ]


def test_old_table_is_drawn_as_before() -> None:
    table = estimate.create_ascii_table(["dtype", "b"], [["float32", "1 KB"]], "title x")
    assert table.splitlines() == [
        "┌────────────┐",
        "│  title x   │",
        "├───────┬────┤",
        "│ dtype │ b  │",
        "├───────┼────┤",
        "│float32│1 KB│",
        "└───────┴────┘",
    ]


def test_names_of_timm_on_the_hub() -> None:
    assert estimate.add_timm_hub_prefix("owner/model") == "hf-hub:owner/model"
    assert estimate.add_timm_hub_prefix("hf-hub:owner/model") == "hf-hub:owner/model"
    assert estimate.add_timm_hub_prefix("resnet18") == "resnet18"


def test_errors_of_libraries_are_told_apart() -> None:
    missing = OSError("owner/model does not appear to have a file named config.json")
    assert estimate.check_has_model(missing) == "transformers"
    assert estimate.check_has_model(ValueError("anything")) == "unknown"


def test_an_unknown_library_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'keras'"):
        estimate.create_empty_model("model", "keras")


def test_a_model_is_built_without_memory(tmp_path: Path) -> None:
    model = estimate.create_empty_model(str(write_config(tmp_path, "BertModel")), "transformers")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def blocks(folder: Path, count: int = 6) -> Path:
    """Write a file of equal blocks, 4000 bytes each, between an embedding and a head that are as large."""
    names = ["embed.weight", *(f"layers.{index}.fc.weight" for index in range(count)), "head.weight"]
    save_file({name: torch.zeros(1000) for name in names}, folder / "model.safetensors")
    return folder


def test_a_plan_fills_the_places_in_order_and_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = report(capsys, str(blocks(tmp_path)), "--plan", "--max_memory", "0=10000", "cpu=14000")["plan"]
    assert plan["memory"] == {"0": 10000, "cpu": 14000}
    found = {part["modules"]: (part["place"], part["bytes"]) for part in plan["parts"]}
    # The accelerator and the CPU keep room for a layer that visits them.
    assert found["embed"] == (0, 4000)
    assert [place for place, _ in found.values()] == sorted(
        [place for place, _ in found.values()], key=lambda place: [0, "cpu", "disk"].index(place)
    )
    assert sum(size for _, size in found.values()) == 8 * 4000
    assert plan["parts"][-1]["place"] == "disk"
    assert plan["parts"][0]["reason"] == "3.91 KB fit in 5.86 KB"
    assert plan["parts"][-1]["reason"] == "3.91 KB do not fit in 1.95 KB on cpu"


def test_a_plan_in_a_smaller_dtype_needs_less_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(blocks(tmp_path))
    for options, places in (((), {"cpu", "disk"}), (("float16",), {"cpu"})):
        plan = report(capsys, folder, "--plan", *options, "--max-memory", "cpu=20000")["plan"]
        assert {part["place"] for part in plan["parts"]} == places


def test_a_plan_of_this_machine_is_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate-memory", str(blocks(tmp_path)), "--plan"]) == 0
    printed = capsys.readouterr().out
    assert "Places of the weights as stored, with room on " in printed
    for words in ("module", "size", "place", "why", "layers", "23.44 KB", "fit in"):
        assert words in printed


def test_blocks_of_one_place_are_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = report(capsys, str(blocks(tmp_path)), "--plan", "--max-memory", "cpu=0KB")["plan"]
    assert [part["modules"] for part in plan["parts"]] in (["embed", "head", "layers"], ["embed", "layers", "head"])
    split = report(capsys, str(blocks(tmp_path)), "--plan", "--max-memory", "cpu=20KB")["plan"]
    rows = {part["modules"]: part for part in split["parts"]}
    joined = [name for name in rows if name.startswith("layers.") and "-" in name]
    assert len(joined) == 2
    assert sum(rows[name]["bytes"] for name in joined) == 6 * 4000


def test_a_plan_follows_the_blocks_of_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_config(tmp_path, "GPT2LMHeadModel")
    plan = report(capsys, str(folder), "--plan", "--max-memory", "cpu=40KB")["plan"]
    whole = {f"transformer.h.{index}" for index in (0, 1)}
    named = {name for part in plan["parts"] for name in [part["modules"]] if name.startswith("transformer.h.")}
    assert named <= whole | {"transformer.h.0-1"}


def test_memory_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    args = estimate.estimate_command_parser().parse_args([str(blocks(tmp_path)), "--plan", "--max-memory", "cpu"])
    with pytest.raises(ConfigurationError, match="0=10GB or cpu=32GB"):
        estimate.estimate_command(args)
