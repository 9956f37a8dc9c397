"""The package that teaches torch the device type "toy"; torch imports it by itself where it is installed."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import _toy
import torch
import torch.distributed as dist


def _index(device: int | str | torch.device | None) -> int:
    index = device if isinstance(device, int) else torch.device(device or "toy").index
    return torch.accelerator.current_device_index() if index is None else index


class ToyModule:
    """What stands at `torch.toy`: a plain object, as torch's own helper for such devices registers one."""

    Stream = torch.Stream
    Event = torch.Event

    def __init__(self) -> None:
        self.device_count = _toy.device_count
        self.set_memory_limit = _toy.set_memory_limit
        self.num_waiting = _toy.num_waiting
        self.set_device = torch.accelerator.set_device_index
        self.current_device = torch.accelerator.current_device_index
        self.current_stream = torch.accelerator.current_stream
        self.synchronize = torch.accelerator.synchronize
        self.mem_get_info = torch.accelerator.get_memory_info
        self.memory_allocated = torch.accelerator.memory_allocated
        self.max_memory_allocated = torch.accelerator.max_memory_allocated
        self.memory_reserved = torch.accelerator.memory_reserved
        self.reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats
        self.empty_cache = torch.accelerator.empty_cache

    def is_available(self) -> bool:
        return self.device_count() > 0

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device(self, device: int | str | torch.device) -> AbstractContextManager[Any]:
        return torch.accelerator.device_index(_index(device))

    def stream(self, stream: torch.Stream) -> AbstractContextManager[Any]:
        return stream

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def default_generator(self, device: int | str | torch.device | None = None) -> torch.Generator:
        generator: torch.Generator = _toy.default_generator(_index(device))
        return generator

    def get_rng_state(self, device: int | str | torch.device = "toy") -> torch.Tensor:
        return self.default_generator(device).get_state()

    def set_rng_state(self, new_state: torch.Tensor, device: int | str | torch.device = "toy") -> None:
        self.default_generator(device).set_state(new_state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.get_rng_state(index) for index in range(self.device_count())]

    def set_rng_state_all(self, new_states: list[torch.Tensor]) -> None:
        for index, state in enumerate(new_states):
            self.set_rng_state(state, index)

    def manual_seed(self, seed: int) -> None:
        self.default_generator().manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for index in range(self.device_count()):
            self.default_generator(index).manual_seed(seed)


def make_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return _toy.group_over(dist.ProcessGroupGloo(store, rank, size, timeout))


def register() -> None:
    """Register the device; a process does it once."""
    torch.utils.rename_privateuse1_backend("toy")
    torch._register_device_module("toy", ToyModule())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("toy", make_group, devices=["toy"])
