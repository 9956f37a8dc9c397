"""The memory of a process that runs a model from the disk, as the system counts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys
import torch
from safetensors.torch import save_file
from torch import nn
from accelerate import init_empty_weights, load_checkpoint_and_dispatch

torch.set_num_threads(1)
folder, memory, stored, used, place = sys.argv[1:]
WIDTH, DEPTH = 1024, 24  # 4 MiB a layer in float32


def status():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return {key: int(lines[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile")}


layers = {f"{i}.{kind}": torch.full(shape, 1e-3, dtype=getattr(torch, stored))
          for i in range(DEPTH) for kind, shape in (("weight", (WIDTH, WIDTH)), ("bias", (WIDTH,)))}
save_file(layers, f"{folder}/model.safetensors")
del layers


def empty(depth):
    with init_empty_weights():
        return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(depth)])


# Code and buffers that a first product needs are not of interest.
save_file(empty(1)[0].to_empty(device="cpu").state_dict(), f"{folder}/warm.safetensors")
x = torch.ones(4, WIDTH)
with torch.no_grad():
    nn.Linear(WIDTH, WIDTH)(x)
    before = status()
    model = load_checkpoint_and_dispatch(
        empty(DEPTH).to(getattr(torch, used)), f"{folder}/model.safetensors", device_map={"": place},
        offload_folder=f"{folder}/offload", offload_memory=None if memory == "None" else int(memory),
    )
    seen = []
    for layer in model:
        layer.register_forward_hook(lambda *_: seen.append(status()))
    for _ in range(2):
        y = model(x.to(getattr(torch, used)))
peak = {key: max(each[key] for each in seen) - before[key] for key in before}
print(json.dumps({**peak, "total": DEPTH * WIDTH * WIDTH * 4}))
"""

MIB = 2**20


def peak(folder: Path, memory: int | None, stored: str = "float32", used: str = "float32", place: str = "disk") -> dict:
    command = [sys.executable, "-c", PROGRAM, str(folder), str(memory), stored, used, place]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system counts memory elsewhere")


def test_weights_on_the_disk_take_no_memory_of_the_process(tmp_path: Path) -> None:
    found = peak(tmp_path, None)
    assert found["total"] == 96 * MIB
    assert found["RssAnon"] < 12 * MIB  # three layers, of 24


def test_weights_on_the_cpu_are_pages_of_the_file_too(tmp_path: Path) -> None:
    assert peak(tmp_path, None, place="cpu")["RssAnon"] < 12 * MIB


def test_pages_stay_within_the_budget(tmp_path: Path) -> None:
    whole = peak(tmp_path, None)["RssFile"]
    limited = peak(tmp_path, 24 * MIB)["RssFile"]
    assert whole > 80 * MIB
    assert limited < 24 * MIB + 16 * MIB  # libraries that are read for the first time count as pages of files too


def test_copies_stay_within_the_budget(tmp_path: Path) -> None:
    found = peak(tmp_path, 24 * MIB, stored="bfloat16", used="float32")
    assert 8 * MIB < found["RssAnon"] < 24 * MIB + 16 * MIB
