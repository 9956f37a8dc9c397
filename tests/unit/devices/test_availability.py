"""Hardware questions answer without an error on a machine that has none of it."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from accelerate._base.enums import DistributedType
from accelerate._base.errors import ConfigurationError, UsageError
from accelerate.devices import nvidia, registry
from accelerate.devices.base import DeviceBackend
from accelerate.devices.machine import Machine, link_variables
from accelerate.runtime.availability import is_bf16_available, is_torch_xla_available

CHECKS = [value for name, value in vars(registry).items() if name.startswith("is_")]


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_answers_with_a_bool(check: object) -> None:
    assert callable(check)
    assert isinstance(check(), bool)
    if "check_device" in inspect.signature(check).parameters:
        assert isinstance(check(check_device=True), bool)


def test_checks_agree_with_torch() -> None:
    assert registry.is_cuda_available() == torch.cuda.is_available()
    assert registry.is_mps_available() == torch.backends.mps.is_available()
    assert registry.is_xpu_available() == torch.xpu.is_available()
    assert not registry.is_mps_available(min_version="1000.0")


def test_an_unknown_package_is_no_device() -> None:
    assert not DeviceBackend(
        "nonsense", DistributedType.NO, "gloo", package="a_package_that_nobody_wrote"
    ).is_available()
    assert not DeviceBackend("nonsense", DistributedType.NO, "gloo").is_available()


def test_bf16_on_the_hardware_at_hand() -> None:
    assert is_bf16_available() is True


def test_xla() -> None:
    assert isinstance(is_torch_xla_available(), bool)
    with pytest.raises(ConfigurationError, match="two kinds of hardware"):
        is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)


def test_importing_the_checks_imports_no_torch() -> None:
    code = "import sys, accelerate.devices.registry, accelerate.devices.nvidia; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a real program called nvidia-smi first in the path; it answers with the lines of two files."""
    script = tmp_path / "nvidia-smi"
    script.write_text(
        '#!/bin/sh\ncase "$1" in\n--query-gpu=name) cat "$0.names";;\n--query-gpu=driver_version) cat "$0.versions";;\n'
        "*) exit 2;;\nesac\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return script


def _answers(driver: Path, names: list[str], version: str) -> None:
    Path(f"{driver}.names").write_text("\n".join(names) + "\n")
    Path(f"{driver}.versions").write_text(f"{version}\n" * len(names))


def test_driver_facts(driver: Path) -> None:
    _answers(driver, ["NVIDIA A100", "NVIDIA A100"], "535.54.03")
    assert nvidia.get_gpu_info() == (["NVIDIA A100", "NVIDIA A100"], 2)
    assert nvidia.get_driver_version() == "535.54.03"


@pytest.mark.parametrize(
    ("names", "version", "supported"),
    [
        (["NVIDIA GeForce RTX 4090"] * 2, "535.54.03", False),
        (["NVIDIA GeForce RTX 4090"] * 2, "550.40.07", True),
        (["NVIDIA GeForce RTX 4090"], "535.54.03", True),
        (["NVIDIA A100"] * 2, "535.54.03", True),
    ],
)
def test_old_drivers_of_some_boards_cannot_talk_peer_to_peer(
    driver: Path, names: list[str], version: str, supported: bool
) -> None:
    _answers(driver, names, version)
    assert nvidia.check_cuda_p2p_ib_support() is supported
    wanted = {} if supported else {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    assert link_variables(Machine("cuda", len(names))) == wanted
    assert link_variables(Machine("cuda", 1)) == link_variables(Machine()) == {}


def test_without_a_driver_peer_to_peer_is_assumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvidia.check_cuda_p2p_ib_support() is True


def test_current_device_type_without_an_accelerator() -> None:
    if torch.accelerator.is_available():
        assert registry.get_current_device_type()[0] == torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
    else:
        assert registry.get_current_device_type() == ("cuda", "MULTI_GPU")


def test_cores_of_a_memory_node(tmp_path: Path) -> None:
    listing = tmp_path / "cpulist"
    assert nvidia._cores_of_node(listing) == []
    listing.write_text("0-3,8,10-11\n")
    assert nvidia._cores_of_node(listing) == [0, 1, 2, 3, 8, 10, 11]


def test_fp8_capability_follows_the_device() -> None:
    assert nvidia.check_cuda_fp8_capability() is (
        torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    )


# --- cores near a device ----------------------------------------------------------------------------------------------


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Note the cores that this process would be pinned to."""
    seen: list[list[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: seen.append(list(cores)), raising=False)
    return seen


@pytest.mark.parametrize("uuid", ["4f1a", "GPU-4f1a"])
def test_a_process_is_pinned_to_the_cores_near_its_nvidia_device(
    pinned: list[list[int]], monkeypatch: pytest.MonkeyPatch, uuid: str, caplog: pytest.LogCaptureFixture
) -> None:
    nvml = Mock()
    nvml.nvmlDeviceGetCpuAffinity.return_value = [0b1010, 0b1]
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuid, index=index))
    nvidia.set_numa_affinity.cache_clear()
    with caplog.at_level("INFO"):
        nvidia.set_numa_affinity(1, verbose=True)
        nvidia.set_numa_affinity(1, verbose=True)  # once is enough
    assert pinned == [[1, 3, 64]]
    nvml.nvmlDeviceGetHandleByUUID.assert_called_once_with("GPU-4f1a")
    nvml.nvmlShutdown.assert_called_once_with()
    assert "Process 1 is pinned to the cores" in caplog.text
    nvidia.set_numa_affinity.cache_clear()


def test_a_driver_that_names_no_core_changes_nothing(pinned: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    smi = Mock()
    smi.amdsmi_get_processor_handles.return_value = ["first", "second"]
    smi.amdsmi_topo_get_numa_node_number.return_value = 4096  # a node that no machine has
    monkeypatch.setitem(sys.modules, "amdsmi", smi)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    nvidia.override_numa_affinity(1)
    smi.amdsmi_topo_get_numa_node_number.assert_called_once_with("second")
    smi.amdsmi_shut_down.assert_called_once_with()
    assert pinned == []


def test_a_driver_without_devices_has_no_version(driver: Path) -> None:
    Path(f"{driver}.versions").write_text("\n")
    with pytest.raises(UsageError, match=r"`nvidia-smi` lists no device.*Install the driver"):
        nvidia.get_driver_version()


# --- Gaudi ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gaudi(DeviceBackend):
    """One Gaudi, whose driver fails where `count` is below zero."""

    count: int = 1

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        if self.count < 0:
            raise RuntimeError("synInitialize failed")
        return self.count


@pytest.fixture
def gaudi(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(registry._BACKENDS, "hpu", Gaudi("hpu", DistributedType.MULTI_HPU, "hccl"))
    monkeypatch.setitem(registry._BACKENDS, "npu", Gaudi("npu", DistributedType.MULTI_NPU, "hccl", count=-1))
    registry._is_available.cache_clear()
    yield
    registry._is_available.cache_clear()


@pytest.mark.parametrize(("device_type", "first"), [("synDeviceGaudi", True), ("synDeviceGaudi2", False)])
def test_the_first_gaudi_has_no_fp16(
    gaudi: None, monkeypatch: pytest.MonkeyPatch, device_type: str, first: bool
) -> None:
    names = SimpleNamespace(synDeviceGaudi="synDeviceGaudi")
    experimental = SimpleNamespace(_get_device_type=lambda: device_type, synDeviceType=names)
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch.utils.experimental", experimental)
    assert registry.is_habana_gaudi1() is first
    assert registry.is_fp16_available() is not first


def test_the_collectives_of_a_gaudi_are_loaded_where_they_are_asked_for(
    gaudi: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert registry.is_hpu_available()
    with pytest.raises(ModuleNotFoundError, match="habana_frameworks"):
        registry.is_hpu_available(init_hccl=True)
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch.distributed.hccl", Mock())
    assert registry.is_hpu_available(init_hccl=True)


def test_a_driver_that_fails_has_no_device(gaudi: None) -> None:
    assert registry.is_npu_available()
    assert not registry.is_npu_available(check_device=True)
