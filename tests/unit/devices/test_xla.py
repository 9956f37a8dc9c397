"""What is said of XLA devices without them, and what is asked of torch_xla's runtime, recorded by a stand-in."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from accelerate.devices import xla
from accelerate.devices.machine import tpu_chips
from accelerate.devices.xla import XLA, asked_kind, uses_spmd


def chip(root: Path, slot: str, vendor: str, device: str) -> None:
    folder = root / "sys/bus/pci/devices" / slot
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(vendor + "\n")
    (folder / "device").write_text(device + "\n")


def test_chips_are_known_by_their_numbers(tmp_path: Path) -> None:
    chip(tmp_path, "0000:00:04.0", "0x1ae0", "0x0063")
    chip(tmp_path, "0000:00:05.0", "0x1ae0", "0x0027")
    chip(tmp_path, "0000:00:06.0", "0x1ae0", "0x0042")  # a network card of the same vendor
    chip(tmp_path, "0000:00:07.0", "0x10de", "0x0063")
    (tmp_path / "sys/bus/pci/devices/0000:00:08.0").mkdir()
    assert tpu_chips(tmp_path) == (1, 2)
    assert asked_kind({}, tmp_path) == "TPU"
    assert asked_kind({"PJRT_DEVICE": "CPU"}, tmp_path) == "CPU"


@pytest.mark.parametrize(
    ("given", "kind"), [("CPU", "CPU"), ("tpu", "TPU"), ("TPU_C_API", "TPU"), (None, ""), ("", "")]
)
def test_what_is_asked_for(tmp_path: Path, given: str | None, kind: str) -> None:
    assert asked_kind({} if given is None else {"PJRT_DEVICE": given}, tmp_path / "empty") == kind


def test_a_plugin_adds_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="PJRT_DEVICE='LOOM' names no device of torch_xla"):
        asked_kind({"PJRT_DEVICE": "LOOM"}, tmp_path)
    monkeypatch.setattr(xla, "_plugin_kinds", lambda: ("LOOM",))
    assert asked_kind({"PJRT_DEVICE": "loom"}, tmp_path) == "LOOM"


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_the_switch_of_spmd(value: str, expected: bool) -> None:
    assert uses_spmd({"XLA_USE_SPMD": value}) is expected


def test_it_is_not_there_without_torch_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.delenv("USE_TORCH_XLA", raising=False)
    monkeypatch.setattr(xla, "is_package_available", lambda name: False)
    assert not XLA.is_available()
    monkeypatch.setattr(xla, "is_package_available", lambda name: True)
    assert XLA.is_available()
    monkeypatch.setenv("USE_TORCH_XLA", "0")
    assert not XLA.is_available()


class Recorded:
    """torch_xla as a process of a TPU machine would see it."""

    def __init__(self, world_size: int = 1, ordinal: int = 0, devices: int = 1, processes: int = 1) -> None:
        self.calls: list[str] = []
        self.locked = False
        package, runtime = ModuleType("torch_xla"), ModuleType("torch_xla.runtime")
        internal, pjrt = ModuleType("torch_xla._internal"), ModuleType("torch_xla._internal.pjrt")
        facts = {
            "world_size": world_size,
            "global_ordinal": ordinal,
            "local_ordinal": ordinal % 4,
            "local_device_count": 4,
            "addressable_device_count": devices,
            "global_runtime_device_count": 8,
            "process_count": processes,
            "process_index": processes - 1,
        }
        for name, value in facts.items():
            setattr(runtime, name, lambda value=value: value)
        runtime.use_spmd = lambda: self.calls.append("use_spmd")  # type: ignore[attr-defined]
        pjrt.initialize_multiprocess = lambda *ranks: self.calls.append(f"initialize {ranks}")  # type: ignore[attr-defined]
        internal.pjrt = pjrt  # type: ignore[attr-defined]
        package.runtime, package._internal = runtime, internal  # type: ignore[attr-defined]
        package.device = lambda: __import__("torch").device("meta")  # type: ignore[attr-defined]
        package._XLAC = self  # type: ignore[attr-defined]
        names = ("torch_xla", "torch_xla.runtime", "torch_xla._internal", "torch_xla._internal.pjrt")
        self.modules = dict(zip(names, (package, runtime, internal, pjrt), strict=True))

    def _xla_get_spmd_config_is_locked(self) -> bool:
        return self.locked


@pytest.fixture
def on_tpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(**facts: int) -> Recorded:
        recorded = Recorded(**facts)
        for name, module in recorded.modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setenv("PJRT_DEVICE", "TPU")
        monkeypatch.delenv("USE_TORCH_XLA", raising=False)
        monkeypatch.setattr(xla, "is_package_available", lambda name: True)
        return recorded

    return install


def test_ranks_are_those_of_the_runtime(on_tpu: Any) -> None:
    on_tpu(world_size=8, ordinal=6)
    assert XLA.ranks(0, 1) == (6, 8, 2, 4)


def test_one_process_has_no_ranks(on_tpu: Any) -> None:
    on_tpu(devices=4)
    assert XLA.ranks(0, 1) is None


def test_a_thread_for_each_device_is_refused(on_tpu: Any) -> None:
    on_tpu(world_size=8, devices=2)
    with pytest.raises(ValueError, match=r"2 XLA devices and a thread for each.*XLA_USE_SPMD=1"):
        XLA.ranks(0, 1)


def test_torchrun_gives_each_process_its_chip(on_tpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = on_tpu(world_size=4, ordinal=1)
    assert XLA.ranks(1, 4) == (1, 4, 1, 4)
    assert recorded.calls == ["initialize (1, 4)"]
    monkeypatch.setenv("PJRT_LOCAL_PROCESS_COUNT", "4")  # torch_xla's own launcher has done so
    recorded.calls.clear()
    XLA.ranks(1, 4)
    assert recorded.calls == []


def test_machines_are_the_ranks_under_spmd(on_tpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on_tpu(processes=3)
    monkeypatch.setenv("XLA_USE_SPMD", "1")
    assert XLA.ranks(0, 1) == (2, 3, 0, 1)
    assert XLA.device_count() == 8


def test_devices_are_used_together_only_from_the_start(on_tpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = on_tpu()
    XLA.use_together()
    assert recorded.calls == ["use_spmd"]
    recorded.locked = True
    with pytest.raises(ValueError, match="has used its device already"):
        XLA.use_together()
    monkeypatch.setenv("XLA_USE_SPMD", "1")
    XLA.use_together()
    assert recorded.calls == ["use_spmd"]


def test_the_reason_counts_nothing(on_tpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on_tpu()
    assert XLA.found() == "PJRT_DEVICE is 'TPU'"
    monkeypatch.delenv("PJRT_DEVICE")
    assert XLA.found() == "this machine has a TPU"
