"""Options, weights and variables of others are data: none of them runs code."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate._base.errors import ConfigurationError
from accelerate.config import deepspeed
from accelerate.config.file_text import load_text
from accelerate.config.files import read_config_file
from accelerate.config.sections.registry import options
from accelerate.offload.estimate import read_tensors
from accelerate.offload.store import OffloadedWeightsLoader, load_state_dict

TAGS = [
    "!!python/object/apply:os.system ['touch marker']",
    "!!python/object/new:os.system ['touch marker']",
    "!!python/object/apply:subprocess.check_call [[touch, marker]]",
    "!!python/name:os.system",
    "!!python/module:os",
    "!!python/tuple [1]",
    "!!python/object:pathlib.Path {}",
    "!python/object/apply:os.system ['touch marker']",
]
TEXTS = [
    "__import__('os').system('touch marker')",
    "$(touch marker)",
    "`touch marker`",
    "{0.__class__}",
    "%(x)s",
    "; touch marker",
]


class Runs:
    """What leaves a file behind when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch marker",)


@pytest.fixture(autouse=True)
def nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize(
    "place", ["{}", "distributed_type: {}", "distributed_type: NO\nfsdp_config:\n  x: {}", "? {}\n: 1"]
)
def test_tags_of_yaml_are_refused(tag: str, place: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(place.replace("{}", tag, 1))
    with pytest.raises(ConfigurationError, match="is not YAML: could not determine a constructor for the tag"):
        load_text(path)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_stay_texts(text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"distributed_type": "NO", "main_process_ip": text}))
    assert read_config_file(path).values["main_process_ip"].value == text
    path.write_text(json.dumps({"distributed_type": "NO", "num_processes": text}))
    with pytest.raises(ConfigurationError, match="which is not a whole number"):
        read_config_file(path)
    for option in options().values():
        if option.knob.env:
            try:
                option.knob.decode(dict.fromkeys(option.knob.env.split(","), text))
            except ConfigurationError:
                continue
    with pytest.raises(ConfigurationError):
        deepspeed.read(text)


def test_pickles_are_refused_wherever_weights_are_read(tmp_path: Path) -> None:
    for new in (True, False):
        torch.save({"a": Runs(), "b": torch.ones(1)}, tmp_path / "w.bin", _use_new_zipfile_serialization=new)
        for read in (load_state_dict, lambda path: read_tensors([path])):
            with pytest.raises(ConfigurationError, match=r"w\.bin' cannot be read as weights that torch saved"):
                read(tmp_path / "w.bin")


def test_a_dtype_is_no_way_to_other_names_of_torch(tmp_path: Path) -> None:
    (tmp_path / "a.dat").write_bytes(bytes(4))
    for name in ("load", "hub.load", "__builtins__", "ops", "torch.save"):
        (tmp_path / "index.json").write_text(json.dumps({"a": {"dtype": name, "shape": [1]}}))
        with pytest.raises(ConfigurationError, match="There is no dtype"):
            OffloadedWeightsLoader(save_folder=tmp_path)["a"]
