"""The description of one kind of hardware, with defaults that go through `torch.accelerator`."""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accelerate._base.enums import DistributedType

if TYPE_CHECKING:
    import torch

    from accelerate.devices.copy_lane import CopyLane


@dataclass(frozen=True)
class DeviceBackend:
    """Facts about one device type, and the few operations that differ between types.

    A new vendor is usually only data: an instance of this class. Where `torch.accelerator` and the device module
    `torch.<type>` do not do the right thing, a subclass overrides the method. Facts are known without torch.

    Args:
        type: The string of `torch.device(...)`.
        label: How a data-parallel run on this hardware is called in `DistributedType`.
        group_backend: The backend of `torch.distributed` for tensors on this hardware.
        package: The package whose import teaches torch this device type, if torch does not know it by itself.
        visible_devices_variable: The environment variable that limits which devices a process sees.
        priority: Backends with a higher number are preferred when several are available.
        rng_key: The name of this hardware's random state in a checkpoint.
        autocast_dtypes: Names of the dtypes that autocast supports here without asking the hardware.
        needs_device_ids: Whether `DistributedDataParallel` wants the device index.
        process_variables: Environment variables that a process must have before it uses this hardware.
        records_operations: Whether operations are recorded, and compiled and run at the end of a step (`end_step`).
        splits_attention: Whether torch's own context parallelism has attention kernels for this hardware.
        can_fork: Whether a forked process may use this hardware.
        device_files: Patterns of device files below the root, one file each; the first pattern with a hit counts.
        listing_command: A program that lists them, one line each, for machines that have no device files (WSL).
    """

    type: str
    label: DistributedType
    group_backend: str
    package: str | None = None
    visible_devices_variable: str | None = None
    priority: int = 0
    rng_key: str = "torch_{type}_manual_seed"
    autocast_dtypes: frozenset[str] = field(default_factory=frozenset)
    needs_device_ids: bool = True
    process_variables: tuple[tuple[str, str], ...] = ()
    records_operations: bool = False
    splits_attention: bool = False
    can_fork: bool = True
    device_files: tuple[str, ...] = ()
    listing_command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rng_key", self.rng_key.format(type=self.type))

    def load(self) -> bool:
        """Import the vendor's package, if it has one, and return whether torch can know this device type now."""
        if self.package is None:
            return True
        with suppress(ImportError, ValueError):
            if importlib.util.find_spec(self.package) is not None:
                importlib.import_module(self.package)
                return True
        return False

    @property
    def module(self) -> Any:
        """Return `torch.<type>`, or None where torch has none; a vendor may register any object there, not only a module."""
        import torch

        return getattr(torch, self.type, None)

    def is_available(self) -> bool:
        """Return whether a device of this type can be used now."""
        if not self.load():
            return False
        check = getattr(self.module, "is_available", None)
        return bool(check()) if check is not None else False

    def found(self) -> str:
        """Say what was found of this hardware, for the reason why it was chosen."""
        return f"{self.device_count()} device(s) of type {self.type!r} found"

    def device_count(self) -> int:
        """Return how many devices of this type the process sees."""
        count = getattr(self.module, "device_count", None)
        return int(count()) if count is not None else 0

    def device(self, index: int | None = None) -> torch.device:
        """Return the torch device; an index beyond the number of devices wraps around."""
        import torch

        if index is None:
            return torch.device(self.type)
        return torch.device(self.type, index % max(self.device_count(), 1))

    def set_device(self, device: torch.device) -> None:
        """Make `device` the current one of this process."""
        if device.index is None:
            return
        select = getattr(self.module, "set_device", None)
        if select is not None:
            select(device)
        else:
            import torch

            torch.accelerator.set_device_index(device.index)

    def is_fork_safe(self) -> bool:
        """Return whether a forked process may use this hardware."""
        return self.can_fork

    def context_exists(self) -> bool:
        """Return whether this process holds a context on a device, which a forked one could not use."""
        check = getattr(self.module, "is_initialized", None)
        return bool(check()) if check is not None else False

    def use_together(self) -> None:
        """Let this process drive all devices together, where the hardware has that; else each process has its own."""

    def ranks(self, local_rank: int, local_world_size: int) -> tuple[int, int, int, int] | None:
        """Return rank and number of processes, over all machines and on this one, as the hardware's runtime has them.

        None where it has none, or this process alone.

        Args:
            local_rank: The place of this process on its machine, by the launcher's variables.
            local_world_size: The processes of this machine, by the same.
        """
        return None

    def end_step(self) -> None:
        """Start what was recorded since the last step, on hardware that records operations."""

    def synchronize(self) -> None:
        """Wait until the device has done all work that was queued."""
        wait = getattr(self.module, "synchronize", None)
        if wait is not None:
            wait()

    def empty_cache(self) -> None:
        """Give cached memory of the device back."""
        release = getattr(self.module, "empty_cache", None)
        if release is not None:
            release()

    @property
    def has_streams(self) -> bool:
        """Return whether work is queued in streams, so that copies can run beside it."""
        return getattr(self.module, "Stream", None) is not None

    def copy_lane(self, device: torch.device) -> CopyLane | None:
        """Return a way to bring tensors to a device beside its work, or None where it has no streams."""
        from accelerate.devices.copy_lane import CopyLane

        return CopyLane(device) if self.has_streams else None

    def identity(self, tensor: torch.Tensor) -> int:
        """Return a number that names of one tensor have in common, on hardware whose memory has no addresses here."""
        return id(tensor)

    def get_rng_state(self) -> Any:
        """Return the random state of the device, or None where there is none apart from torch's own."""
        getter = getattr(self.module, "get_rng_state", None)
        return getter() if getter is not None else None

    def set_rng_state(self, state: Any) -> None:
        """Restore a random state that `get_rng_state` returned."""
        setter = getattr(self.module, "set_rng_state", None)
        if setter is not None:
            setter(state)

    def get_rng_states(self) -> Any:
        """Return the random states of all devices of this type, as a checkpoint holds them."""
        getter = getattr(self.module, "get_rng_state_all", None)
        return getter() if getter is not None else self.get_rng_state()

    def set_rng_states(self, states: Any) -> None:
        """Restore what `get_rng_states` returned, perhaps where there were more or fewer devices."""
        if not isinstance(states, list):
            self.set_rng_state(states)
        elif len(states) == self.device_count() and (setter := getattr(self.module, "set_rng_state_all", None)):
            setter(states)
        elif states:
            self.set_rng_state(states[0])

    def manual_seed_all(self, seed: int) -> None:
        """Seed the random generators of all devices of this type."""
        seeder = getattr(self.module, "manual_seed_all", None)
        if seeder is not None:
            seeder(seed)

    def supports_autocast(self, dtype: str) -> bool:
        """Return whether autocast to `dtype` ("float16" or "bfloat16") works on this hardware."""
        if dtype in self.autocast_dtypes:
            return True
        if dtype == "bfloat16" and (check := getattr(self.module, "is_bf16_supported", None)):
            return bool(check())
        # What torch's own autocast asks of a device type that was registered from outside.
        listing = getattr(self.module, "get_amp_supported_dtype", None)
        return listing is not None and dtype in {str(known).removeprefix("torch.") for known in listing()}

    def instead_of_fp8(self) -> str | None:
        """Return the number format for devices of this type that do not compute in 8-bit floats; None if they do."""
        return None

    def ddp_device_ids(self, device: torch.device) -> list[int] | None:
        """Return the `device_ids` argument of `DistributedDataParallel` for a model on `device`."""
        return [device.index] if self.needs_device_ids and device.index is not None else None

    def barrier_device_ids(self, device: torch.device) -> list[int] | None:
        """Return the `device_ids` argument of `torch.distributed.barrier` for a group that reaches this hardware.

        Without it torch takes the current device, and warns that this may be another one.
        """
        return self.ddp_device_ids(device)
