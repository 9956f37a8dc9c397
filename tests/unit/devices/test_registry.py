"""The table of hardware, and a kind of hardware that only the test knows."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from accelerate import Accelerator, PartialState
from accelerate._base.enums import DistributedType
from accelerate._base.errors import ConfigurationError
from accelerate.collectives.rng import set_seed, synchronize_rng_state
from accelerate.config.env import patch_environment
from accelerate.devices import registry
from accelerate.devices.base import DeviceBackend
from accelerate.runtime.memory import clear_device_cache

ORDER = ["xla", "mps", "mlu", "sdaa", "musa", "npu", "hpu", "cuda", "xpu", "neuron", "cpu"]


@dataclass(frozen=True)
class FakeBackend(DeviceBackend):
    """Hardware without data: real tensors of type "meta", and a note of every call."""

    calls: Counter[Any] = field(default_factory=Counter)

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def set_device(self, device: torch.device) -> None:
        self.calls["set_device", str(device)] += 1

    def synchronize(self) -> None:
        self.calls["synchronize"] += 1

    def empty_cache(self) -> None:
        self.calls["empty_cache"] += 1

    def manual_seed_all(self, seed: int) -> None:
        self.calls["manual_seed_all", seed] += 1

    def get_rng_state(self) -> Any:
        self.calls["get_rng_state"] += 1
        return torch.tensor([4, 2], dtype=torch.uint8)

    def set_rng_state(self, state: Any) -> None:
        self.calls["set_rng_state", tuple(state.tolist())] += 1

    def supports_autocast(self, dtype: str) -> bool:
        self.calls["supports_autocast", dtype] += 1
        return super().supports_autocast(dtype)


@pytest.fixture
def fake() -> Iterator[FakeBackend]:
    backend = FakeBackend(
        type="meta",
        label=DistributedType.MULTI_SDAA,
        group_backend="fake",
        priority=1000,
        rng_key="torch_fake_manual_seed",
        autocast_dtypes=frozenset({"bfloat16"}),
    )
    registry.register(backend)
    yield backend
    registry.unregister("meta")


def test_the_preferred_come_first() -> None:
    assert [backend.type for backend in registry.all_backends()] == ORDER


@pytest.mark.parametrize("device_type", ORDER)
def test_an_entry_is_whole(device_type: str) -> None:
    backend = registry.get(device_type)
    assert backend is registry.get(f"{device_type}:0")
    assert backend.type == device_type
    assert isinstance(backend.label, DistributedType)
    assert backend.group_backend
    assert backend.rng_key == {"cpu": "", "xla": "xm_seed"}.get(device_type, f"torch_{device_type}_manual_seed")
    assert backend.autocast_dtypes <= {"float16", "bfloat16"}
    assert backend.is_available() is (device_type == "cpu")
    assert isinstance(backend.device_count(), int)  # also where the hardware is absent


def test_names_of_entries_are_their_own() -> None:
    backends = registry.all_backends()
    for attribute in ("priority", "rng_key"):
        assert len({getattr(backend, attribute) for backend in backends}) == len(backends)
    variables = [backend.visible_devices_variable for backend in backends if backend.visible_devices_variable]
    assert len(set(variables)) == len(variables)
    labels = [backend.label for backend in backends if backend.label is not DistributedType.NO]
    assert len(set(labels)) == len(labels)


def test_the_choice_gives_its_reason(fake: FakeBackend) -> None:
    choice = registry.default()
    assert choice.value is fake
    assert choice.reason == "2 device(s) of type 'meta' found"
    registry.unregister("meta")
    assert registry.default().value.type == "cpu"
    assert registry.default().reason == "no accelerator found"


def test_an_unknown_device() -> None:
    with pytest.raises(ConfigurationError, match=r"no device 'warp:1'.*Write one of cpu, cuda"):
        registry.get("warp:1")


def test_a_device_that_only_torch_knows_is_described_by_defaults() -> None:
    backend = registry.get(torch.device("meta"))
    assert (backend.type, backend.is_available(), backend.device_count()) == ("meta", False, 0)
    assert backend.device(3) == torch.device("meta:0")


def test_an_index_beyond_the_devices_wraps_around(fake: FakeBackend) -> None:
    assert [fake.device(index) for index in (None, 0, 1, 2)] == [
        torch.device("meta"),
        torch.device("meta:0"),
        torch.device("meta:1"),
        torch.device("meta:0"),
    ]
    assert fake.ddp_device_ids(fake.device(1)) == [1]
    assert registry.get("cpu").ddp_device_ids(torch.device("cpu")) is None
    assert fake.barrier_device_ids(fake.device(1)) == [1]
    assert registry.get("cpu").barrier_device_ids(torch.device("cpu")) is None


def test_training_happens_on_the_hardware_that_was_registered(fake: FakeBackend) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    assert accelerator.device == torch.device("meta")
    assert fake.calls["set_device", "meta"] == 1
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader([{"x": torch.ones(4), "name": "n"}] * 8, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    places = {value.device.type for value in (*model.parameters(), *model.buffers())}
    assert places == {"meta"}
    steps = 0
    for batch in loader:
        assert batch["x"].device.type == "meta"
        assert batch["name"] == ["n", "n"]
        with accelerator.accumulate(model):
            loss = model(batch["x"]).mean()
            assert loss.device.type == "meta"
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            steps += accelerator.sync_gradients
    assert steps == 2
    own = {id(parameter) for parameter in model.parameters()}
    assert {id(parameter) for group in optimizer.param_groups for parameter in group["params"]} == own
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    assert len(states) == 2 * len(own)
    assert {value.device.type for value in states} == {"meta"}


def test_the_state_of_an_optimizer_moves_with_its_parameters(fake: FakeBackend) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model, prepared = Accelerator().prepare(model, optimizer)
    assert {id(parameter) for parameter in prepared.state} == {id(parameter) for parameter in model.parameters()}
    assert {state["momentum_buffer"].device.type for state in prepared.state.values()} == {"meta"}


def test_placement_can_be_refused(fake: FakeBackend) -> None:
    accelerator = Accelerator(device_placement=False)
    model = torch.nn.Linear(4, 1)
    loader = torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2)
    model, loader = accelerator.prepare(model, loader)
    assert (model.weight.device.type, next(iter(loader)).device.type) == ("cpu", "cpu")
    other = accelerator.prepare(torch.nn.Linear(4, 1), device_placement=[True])
    assert other.weight.device.type == "meta"


def test_cpu_can_be_asked_for(fake: FakeBackend) -> None:
    assert Accelerator(cpu=True).device == torch.device("cpu")
    assert not fake.calls["set_device", "meta"]


def test_seeds_states_and_caches_reach_it(fake: FakeBackend) -> None:
    set_seed(11)  # also before a process was started
    Accelerator()
    set_seed(12)
    assert (fake.calls["manual_seed_all", 11], fake.calls["manual_seed_all", 12]) == (1, 1)
    before = fake.calls["empty_cache"]
    clear_device_cache()
    assert fake.calls["empty_cache"] == before + 1
    Accelerator().free_memory()
    assert fake.calls["empty_cache"] == before + 2


def test_a_random_state_is_read_from_and_written_to_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeBackend("npu", DistributedType.MULTI_NPU, "hccl", rng_key="torch_npu_manual_seed")
    monkeypatch.setitem(registry._BACKENDS, "npu", fake)
    PartialState(cpu=True)
    synchronize_rng_state("npu")
    assert (fake.calls["get_rng_state"], fake.calls["set_rng_state", (4, 2)]) == (1, 1)


def test_mixed_precision_asks_the_hardware(fake: FakeBackend) -> None:
    with pytest.raises(ConfigurationError, match="'fp16' was asked for, but 'meta' devices here cannot compute"):
        Accelerator(mixed_precision="fp16")
    assert fake.calls["supports_autocast", "float16"] == 1


def test_autocast_names_the_hardware(fake: FakeBackend) -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    assert fake.calls["supports_autocast", "bfloat16"] == 1
    # torch has no autocast for this device type and says so: the request reached it under the right name.
    with pytest.raises(RuntimeError, match="meta"), accelerator.autocast():
        pass


def test_the_environment_chooses_a_device(fake: FakeBackend) -> None:
    with patch_environment(accelerate_torch_device="meta:1"):
        assert PartialState().device == torch.device("meta:1")
    assert fake.calls["set_device", "meta:1"] == 1


@pytest.fixture
def installed_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a real distribution with a real entry point on the path of this process."""
    (tmp_path / "warp_drive.py").write_text(
        "from accelerate.devices.registry import CpuBackend\n"
        "from accelerate._base.enums import DistributedType\n"
        "BACKEND = CpuBackend('warp', DistributedType.MULTI_MUSA, 'gloo', priority=500)\n"
    )
    info = tmp_path / "warp_drive-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: warp-drive\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[accelerate.devices]\nwarp = warp_drive:BACKEND\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._load_plugins.cache_clear()
    yield
    registry.unregister("warp")
    sys.modules.pop("warp_drive", None)
    registry._load_plugins.cache_clear()


def test_a_package_brings_its_hardware_by_an_entry_point(installed_plugin: None) -> None:
    assert registry.all_backends()[0].type == "warp"
    assert registry.get("warp").label is DistributedType.MULTI_MUSA
    assert registry.default().value is registry.get("warp")


# --- the defaults, which go through `torch.<type>` --------------------------------------------------------------------


@pytest.fixture
def warp_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Give torch a module for a device type, as a vendor's package does."""
    module = ModuleType("torch.warp")
    monkeypatch.setattr(torch, "warp", module, raising=False)
    return module


WARP = DeviceBackend("warp", DistributedType.MULTI_MUSA, "gloo")


def test_the_module_of_a_device_does_the_work(warp_module: ModuleType) -> None:
    vendor = Mock()
    vendor.device_count.return_value = 2
    vendor.get_rng_state.return_value = "state"
    vendor.is_initialized.return_value = True
    names = "device_count is_initialized set_device synchronize empty_cache get_rng_state set_rng_state manual_seed_all"
    vars(warp_module).update({name: getattr(vendor, name) for name in names.split()})
    assert (WARP.device_count(), WARP.context_exists(), WARP.is_fork_safe()) == (2, True, True)
    vendor.reset_mock()
    device = torch.device("meta:1")
    WARP.set_device(device)
    WARP.set_device(torch.device("meta"))  # no index, nothing to choose
    WARP.synchronize()
    WARP.empty_cache()
    WARP.manual_seed_all(3)
    assert WARP.get_rng_states() == "state"  # the vendor has no call for all devices
    WARP.set_rng_states("saved")
    assert vendor.mock_calls == [
        call.set_device(device),
        call.synchronize(),
        call.empty_cache(),
        call.manual_seed_all(3),
        call.get_rng_state(),
        call.set_rng_state("saved"),
    ]


def test_what_stands_at_the_name_of_a_device_need_not_be_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    # As torch registers it for a device type from outside.
    from torch.utils.backend_registration import _DummyBackendModule

    monkeypatch.setattr(torch, "warp", _DummyBackendModule(), raising=False)
    assert (WARP.is_available(), WARP.device_count(), WARP.context_exists()) == (True, 1, True)


def test_a_device_from_outside_says_itself_what_its_autocast_can(warp_module: ModuleType) -> None:
    assert not WARP.supports_autocast("float16")
    vars(warp_module)["get_amp_supported_dtype"] = lambda: [torch.float16]
    assert (WARP.supports_autocast("float16"), WARP.supports_autocast("bfloat16")) == (True, False)
    vars(warp_module)["is_bf16_supported"] = lambda: True
    assert WARP.supports_autocast("bfloat16")


def test_random_states_of_all_devices_fit_another_number_of_devices(warp_module: ModuleType) -> None:
    vendor = Mock()
    vendor.device_count.return_value = 2
    for name in ("device_count", "get_rng_state_all", "set_rng_state_all", "set_rng_state"):
        vars(warp_module)[name] = getattr(vendor, name)
    assert WARP.get_rng_states() is vendor.get_rng_state_all.return_value
    for states in (["a", "b"], ["a", "b", "c"], []):
        WARP.set_rng_states(states)
    assert vendor.set_rng_state_all.mock_calls == [call(["a", "b"])]
    assert vendor.set_rng_state.mock_calls == [call("a")]


def test_what_a_module_lacks_is_left_out(warp_module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Mock()
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen)
    WARP.set_device(torch.device("meta:1"))
    chosen.assert_called_once_with(1)
    WARP.synchronize()
    WARP.empty_cache()
    WARP.manual_seed_all(3)
    WARP.set_rng_states("saved")
    assert (WARP.get_rng_states(), WARP.context_exists(), WARP.is_available()) == (None, False, False)


def test_the_package_of_a_vendor_is_imported_and_teaches_torch(
    warp_module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch, "warp")
    (tmp_path / "torch_warp.py").write_text(
        "import sys, torch\ntorch.warp = type(sys)('torch.warp')\ntorch.warp.is_available = lambda: True\n"
    )
    backend = DeviceBackend("warp", DistributedType.MULTI_MUSA, "gloo", package="torch_warp")
    assert not backend.is_available()
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert backend.is_available()
    sys.modules.pop("torch_warp")


def test_metal_has_a_generator_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = Mock()
    monkeypatch.setattr(torch.mps, "manual_seed", seeded)
    metal = registry.get("mps")
    metal.manual_seed_all(5)
    seeded.assert_called_once_with(5)
    assert (metal.device_count(), metal.device(3)) == (1, torch.device("mps"))


def test_amds_runtime_does_not_survive_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, safe in ((None, True), ("6.4", False)):
        monkeypatch.setattr(torch.version, "hip", version)
        assert registry.get("cuda").is_fork_safe() is safe


def test_hardware_that_only_torch_knows_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("meta"))
    choice = registry.default()
    assert (choice.value.type, choice.reason) == ("meta", "torch.accelerator reports 'meta'")
