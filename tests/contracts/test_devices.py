"""Every registered device passes the same checks; those that need the hardware run where it is."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec

import pytest
import torch

from accelerate._base.enums import DistributedType
from accelerate._base.errors import ConfigurationError
from accelerate.devices import registry
from accelerate.devices.base import DeviceBackend
from accelerate.devices.xla import XLA
from accelerate.runtime import current
from accelerate.strategies.registry import all_strategies

DEVICES = [pytest.param(backend, id=backend.type) for backend in registry.all_backends()]
PRESENT = [param for param in DEVICES if param.values[0].is_available()]


def known_to_torch(backend: DeviceBackend) -> bool:
    """Whether torch can name the device now: some types exist once the vendor's package is imported."""
    try:
        torch.device(backend.type)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("backend", DEVICES)
class TestDescription:
    def test_it_is_found_by_its_type_with_and_without_an_index(self, backend: DeviceBackend) -> None:
        assert registry.get(backend.type) is backend
        assert registry.get(f"{backend.type}:3") is backend
        if known_to_torch(backend):
            assert registry.get(torch.device(backend.type)) is backend

    def test_torch_knows_the_type_or_a_package_teaches_it(self, backend: DeviceBackend) -> None:
        assert known_to_torch(backend) or backend.package
        if backend is XLA and find_spec("torch_xla") is not None:
            pytest.skip("torch_xla sets variables of the process; tests/xla loads it")
        assert backend.load() is (backend.package is None or backend.module is not None)

    def test_it_is_a_value(self, backend: DeviceBackend) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            backend.priority = 1000  # type: ignore[misc]

    def test_it_answers_where_the_hardware_is_absent(self, backend: DeviceBackend) -> None:
        count = backend.device_count()
        assert count >= int(backend.is_available())
        assert isinstance(backend.context_exists(), bool)
        if known_to_torch(backend):
            assert backend.device() == torch.device(backend.type)
            assert backend.device(count) == backend.device(0)  # an index beyond the last wraps around

    def test_autocast_is_what_it_says_and_nothing_unknown(self, backend: DeviceBackend) -> None:
        for dtype in backend.autocast_dtypes:
            assert isinstance(getattr(torch, dtype), torch.dtype)
            assert backend.supports_autocast(dtype)
        assert not backend.supports_autocast("float4")

    def test_every_strategy_has_a_label_for_it(self, backend: DeviceBackend) -> None:
        runtime = dataclasses.replace(current.runtime(), backend=backend)
        labels = {strategy.name: strategy.label(runtime) for strategy in all_strategies()}
        assert set(labels.values()) <= set(DistributedType)
        assert labels["single"] is DistributedType.NO
        assert labels["ddp"] is backend.label


def test_no_two_devices_share_what_tells_them_apart() -> None:
    backends = registry.all_backends()
    for attribute in ("type", "priority", "rng_key", "visible_devices_variable"):
        values = [getattr(backend, attribute) for backend in backends]
        given = [value for value in values if value is not None]
        assert len(given) == len(set(given)), attribute
    assert [backend.priority for backend in backends] == sorted((b.priority for b in backends), reverse=True)


@pytest.mark.parametrize("backend", PRESENT)
class TestHardware:
    def test_tensors_are_made_and_computed_there(self, backend: DeviceBackend) -> None:
        device = backend.device(0)
        backend.set_device(device)
        value = torch.arange(6.0, device=device).reshape(2, 3)
        backend.synchronize()
        assert value.device.type == backend.type
        assert (value @ value.t()).cpu().tolist() == [[5.0, 14.0], [14.0, 50.0]]
        backend.empty_cache()

    def test_a_random_state_brings_the_same_numbers_back(self, backend: DeviceBackend) -> None:
        backend.manual_seed_all(5)
        torch.manual_seed(5)  # a device without a generator of its own draws from torch's
        state, shared = backend.get_rng_states(), torch.get_rng_state()
        first = torch.rand(4, device=backend.device(0))
        assert not torch.rand(4, device=backend.device(0)).equal(first)
        backend.set_rng_states(state)
        torch.set_rng_state(shared)
        assert torch.rand(4, device=backend.device(0)).equal(first)


@pytest.mark.parametrize("backend", DEVICES)
def test_a_device_can_be_replaced_and_put_back(backend: DeviceBackend) -> None:
    first = dataclasses.replace(backend, priority=10_000)
    registry.register(first)
    try:
        assert registry.all_backends()[0] is first
        assert registry.get(backend.type) is first
    finally:
        registry.register(backend)
    assert registry.get(backend.type) is backend


def test_a_device_from_outside_is_listed_and_forgotten() -> None:
    outside = DeviceBackend(type="warp", label=DistributedType.MULTI_GPU, group_backend="gloo", priority=-5)
    with pytest.raises(ConfigurationError, match="no device 'warp'"):
        registry.get("warp")
    registry.register(outside)
    try:
        assert registry.get("warp:1") is outside
        assert outside in registry.all_backends()
    finally:
        registry.unregister("warp")
    assert outside not in registry.all_backends()
