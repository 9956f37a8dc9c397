"""The machine is recognised by its device files and variables, without torch."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from accelerate.devices import registry
from accelerate.devices.machine import SlurmJob, detect, get_free_port, is_port_in_use, tpu_cores


def make(root: Path, *files: str) -> Path:
    for name in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


def test_device_files_are_counted(tmp_path: Path) -> None:
    found = detect({}, root=make(tmp_path, "dev/nvidia0", "dev/nvidia1", "dev/nvidiactl", "dev/nvidia-uvm"))
    assert (found.device_type, found.device_count, found.visible_devices_variable) == (
        "cuda",
        2,
        "CUDA_VISIBLE_DEVICES",
    )
    assert str(found) == f"2 of type cuda and {found.cpu_count} CPU cores"


@pytest.mark.parametrize(("limit", "count"), [("0", 1), ("0,1", 2), ("", 0), ("-1", 0), ("1,-1,0", 1), ("0,1,2,3", 2)])
def test_the_variable_of_the_vendor_limits_what_counts(tmp_path: Path, limit: str, count: int) -> None:
    root = make(tmp_path, "dev/nvidia0", "dev/nvidia1")
    assert detect({"CUDA_VISIBLE_DEVICES": limit}, root=root).device_count == count


def test_a_machine_with_nothing_has_its_processors(tmp_path: Path) -> None:
    found = detect({}, root=tmp_path)
    if found.device_type == "mps":
        pytest.skip("the accelerator of Apple has no device file")
    assert (found.device_type, found.device_count, found.has_accelerator) == ("cpu", 0, False)
    assert found.label is registry.get("cpu").label
    assert found.cpu_count >= 1
    assert str(found).startswith("no accelerator and ")


def test_the_processor_in_amds_list_does_not_count(tmp_path: Path) -> None:
    for node, simd in (("0", "0"), ("1", "480"), ("2", "480")):
        folder = tmp_path / "sys/class/kfd/kfd/topology/nodes" / node
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"cpu_cores_count 0\nsimd_count {simd}\n")
    assert (detect({}, root=tmp_path).device_type, detect({}, root=tmp_path).device_count) == ("cuda", 2)


def test_a_node_in_amds_list_that_cannot_be_read_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "sys/class/kfd/kfd/topology/nodes/0/properties").mkdir(parents=True)
    assert detect({}, root=tmp_path).device_type != "cuda"


def test_the_accelerator_of_apple_is_known_by_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="arm64"))
    assert (detect({}, root=tmp_path).device_type, detect({}, root=tmp_path).device_count) == ("mps", 1)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="x86_64"))
    assert detect({}, root=tmp_path).device_type == "cpu"


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="device files go before the tool")
@pytest.mark.parametrize(
    ("commands", "count"), [("echo 'GPU 0: A'\necho 'GPU 1: A'", 2), ("echo 'GPU 0: A'\nexit 9", 0), ("kill $$", 0)]
)
def test_a_vendors_tool_is_asked_where_there_are_no_device_files(tmp_path: Path, commands: str, count: int) -> None:
    program = make(tmp_path, "nvidia-smi") / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{commands}\n")
    program.chmod(0o755)
    found = detect({"PATH": str(tmp_path)})
    assert found.device_count == count
    assert (found.device_type == "cuda") is bool(count)


@pytest.mark.parametrize(
    ("path", "device"),
    [
        ("dev/davinci0", "npu"),
        ("dev/cambricon_dev0", "mlu"),
        ("dev/mtgpu.0", "musa"),
        ("dev/tcaicard0", "sdaa"),
        ("dev/hl0", "hpu"),
        ("dev/neuron0", "neuron"),
        ("dev/accel0", "xla"),
    ],
)
def test_every_vendor_is_known_by_its_files(tmp_path: Path, path: str, device: str) -> None:
    found = detect({}, root=make(tmp_path, path))
    assert found.device_type == device
    vendor = registry.get(device)
    assert (found.label, found.visible_devices_variable) == (vendor.label, vendor.visible_devices_variable)


def add_chip(root: Path, place: str, device: str, vendor: str = "0x1ae0") -> None:
    folder = root / "sys/bus/pci/devices" / place
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "device").write_text(f"{device}\n")


@pytest.mark.parametrize(
    ("device", "cores"), [("0x0027", 2), ("0x005e", 1), ("0x0063", 1), ("0x006f", 1), ("0x0076", 1)]
)
def test_a_tpu_is_known_by_its_chips(tmp_path: Path, device: str, cores: int) -> None:
    for place in ("0000:00:04.0", "0000:00:05.0"):
        add_chip(tmp_path, place, device)
    add_chip(tmp_path, "0000:00:06.0", "0x0042")  # a network board of the same maker
    add_chip(tmp_path, "0000:00:07.0", device, vendor="0x8086")
    (tmp_path / "sys/bus/pci/devices/0000:00:08.0").mkdir()
    found = detect({}, root=tmp_path)
    assert (found.device_type, found.device_count) == ("xla", 2 * cores)
    assert tpu_cores({}, tmp_path) == [cores] * 2
    # Device files say no more than the chips do.
    assert detect({}, root=make(tmp_path, "dev/accel0", "dev/accel1")).device_count == 2 * cores
    # The variable counts chips.
    assert tpu_cores({"TPU_VISIBLE_CHIPS": "1"}, tmp_path) == [cores]
    assert detect({"TPU_VISIBLE_CHIPS": "0"}, root=tmp_path).device_count == cores
    assert detect({"TPU_VISIBLE_CHIPS": ""}, root=tmp_path).device_type != "xla"


@pytest.mark.parametrize(
    ("kind", "cores"), [("", 1), ("v3-8", 2), ("V2-8", 2), ("v5litepod-4", 1), ("v4-8", 1), ("v6e-4", 1)]
)
def test_where_the_chips_are_not_listed_their_kind_is_in_a_variable(tmp_path: Path, kind: str, cores: int) -> None:
    root = make(tmp_path, "dev/accel0", "dev/accel1", "dev/accel2", "dev/accel3")
    assert tpu_cores({"TPU_ACCELERATOR_TYPE": kind}, root) == [cores] * 4
    assert detect({"TPU_ACCELERATOR_TYPE": kind}, root=root).device_count == 4 * cores
    assert tpu_cores({}, tmp_path / "elsewhere") == []


def test_slurm_is_read_from_its_variables(tmp_path: Path) -> None:
    environ = {"SLURM_JOB_ID": "17", "SLURM_NNODES": "2", "SLURM_NTASKS": "8", "SLURM_NODEID": "1"}
    assert detect(environ, root=tmp_path).slurm == SlurmJob("17", 2, 8, 1)
    assert detect({}, root=tmp_path).slurm is None


def test_mpirun_is_looked_for_on_the_path(tmp_path: Path) -> None:
    program = make(tmp_path, "bin/mpirun") / "bin" / "mpirun"
    program.chmod(0o755)
    assert detect({"PATH": str(program.parent)}, root=tmp_path).has_mpirun
    assert not detect({"PATH": str(tmp_path)}, root=tmp_path).has_mpirun


def test_ports() -> None:
    port = get_free_port()
    assert not is_port_in_use(port)
    assert port < 32_768, "the system hands out the ports from there on to any connection"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert is_port_in_use(listener.getsockname()[1])


def test_the_system_picks_a_port_where_those_that_were_drawn_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("", get_free_port()))
        taken = listener.getsockname()[1]
        monkeypatch.setattr(os, "urandom", lambda count: (taken - 20_000).to_bytes(count, "big"))
        port = get_free_port()
        assert port != taken
        assert not is_port_in_use(port)
