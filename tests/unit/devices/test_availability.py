"""Hardware questions answer without an error on a machine that has none of it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accelerate._base.enums import DistributedType
from accelerate._base.errors import ConfigurationError
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
