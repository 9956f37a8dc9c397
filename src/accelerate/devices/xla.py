"""XLA devices through torch_xla: TPUs, the CPU where `PJRT_DEVICE=CPU` asks for it, and what plugins of PJRT add.

What a launcher asks is answered without loading torch: from the environment and from what the kernel lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate._base.enums import DistributedType
from accelerate._base.errors import ConfigurationError
from accelerate._base.imports import is_package_available
from accelerate.config import env
from accelerate.devices.base import DeviceBackend

if TYPE_CHECKING:
    import torch

PJRT_DEVICE = "PJRT_DEVICE"
"""The variable that says what torch_xla computes on."""
USE_SPMD = "XLA_USE_SPMD"
"""The variable by which one process drives all devices together; `torch_xla.runtime.use_spmd()` sets it too."""
_BUILT_IN = ("TPU", "CPU")
_PLUGINS = "torch_xla.plugins"


def asked_kind(environ: Mapping[str, str], root: Path = Path("/")) -> str:
    """Return what torch_xla is to compute on, such as "TPU"; empty where neither a variable nor a TPU says it.

    Raises:
        ConfigurationError: If `PJRT_DEVICE` names something that nothing here knows.
    """
    from accelerate.devices.machine import tpu_chips  # it reads the table of vendors, in which this file stands

    given = environ.get(PJRT_DEVICE)
    if not given:
        return "TPU" if tpu_chips(root) else ""
    # "TPU_C_API" and the like name a way to the same device.
    kind = given.upper().partition("_")[0]
    if kind not in _BUILT_IN and kind not in _plugin_kinds():
        known = ", ".join((*_BUILT_IN, *_plugin_kinds()))
        raise ConfigurationError(
            f"{PJRT_DEVICE}={given!r} names no device of torch_xla: no plugin of that name is installed. Write one of "
            f"{known}, or unset it."
        )
    return kind


@cache
def _plugin_kinds() -> tuple[str, ...]:
    from importlib.metadata import entry_points  # slow to load, and few ask

    return tuple(sorted(entry.name.upper() for entry in entry_points(group=_PLUGINS)))


def uses_spmd(environ: Mapping[str, str]) -> bool:
    """Return whether one process is to drive all devices together, as torch_xla reads its variable."""
    return environ.get(USE_SPMD, "0").lower() in ("1", "true", "yes")


class XlaBackend(DeviceBackend):
    """Devices behind torch_xla's runtime."""

    def is_available(self) -> bool:
        """Return whether torch_xla is installed, and a TPU or `PJRT_DEVICE` says what it computes on."""
        is_usable = env.flag("USE_TORCH_XLA", default=True) and is_package_available("torch_xla")
        return is_usable and bool(asked_kind(env.items()))

    def found(self) -> str:
        """Say what asks for XLA; the devices are not counted, because that begins to use them."""
        given = env.get(PJRT_DEVICE)
        return f"{PJRT_DEVICE} is {given!r}" if given else "this machine has a TPU"

    @property
    def runtime(self) -> Any:
        """Return torch_xla's runtime module; it begins to use the device when it is asked for one."""
        self.load()
        import torch_xla.runtime

        return torch_xla.runtime

    @property
    def model(self) -> Any:
        """Return the module with torch_xla's operations."""
        self.load()
        import torch_xla.core.xla_model

        return torch_xla.core.xla_model

    @property
    def kind(self) -> str:
        """Return what torch_xla computes on, such as "TPU"."""
        return asked_kind(env.items())

    @property
    def is_spmd(self) -> bool:
        """Return whether this process drives all devices together."""
        return uses_spmd(env.items())

    def device_count(self) -> int:
        """Return the devices that work together under SPMD, else those that this process can compute on."""
        if not self.is_available():
            return 0
        if self.is_spmd:
            return int(self.runtime.global_runtime_device_count())
        return int(self.runtime.addressable_device_count())

    def load(self) -> bool:
        """Import torch_xla, told before what it reads once: what it computes on, and in how many bits."""
        if self.kind and not env.get(PJRT_DEVICE):
            env.put(PJRT_DEVICE, self.kind)  # it would choose by itself, with a warning
        if env.flag("ACCELERATE_DOWNCAST_BF16"):
            env.put("XLA_DOWNCAST_BF16", "1")
        return super().load()

    def device(self, index: int | None = None) -> torch.device:
        """Return the device of this process; under SPMD the one that stands for all."""
        import torch

        if not (self.is_available() and self.load()):
            return torch.device(self.type)
        import torch_xla

        found: torch.device = torch_xla.device()
        return torch.device(found.type, found.index or 0)

    def set_device(self, device: torch.device) -> None:
        """Do nothing: a process computes on its own device."""

    def use_together(self) -> None:
        """Let this process drive all devices together (SPMD).

        Raises:
            ConfigurationError: If the device was used without it before.
        """
        if self.is_spmd:
            return
        runtime = self.runtime
        import torch_xla

        if torch_xla._XLAC._xla_get_spmd_config_is_locked():
            raise ConfigurationError(
                "A ParallelismConfig was given, which lets one process drive all XLA devices together (SPMD), but this "
                "process has used its device already: a tensor, a model or another Accelerator is on it. Make the "
                f"Accelerator before them, or start the program with {USE_SPMD}=1."
            )
        runtime.use_spmd()

    def ranks(self, local_rank: int, local_world_size: int) -> tuple[int, int, int, int] | None:
        """Return the ranks of torch_xla itself: its collectives order values by them.

        Nothing ties them to the place of a process on its machine.

        Raises:
            ConfigurationError: If several devices of this process are driven by a thread each.
        """
        runtime = self.runtime
        if self.is_spmd:
            count = int(runtime.process_count())
            return (int(runtime.process_index()), count, 0, 1) if count > 1 else None
        if local_world_size > 1 and self.kind != "CPU" and not env.get("PJRT_LOCAL_PROCESS_COUNT"):
            from torch_xla._internal import pjrt

            # Started by torchrun and not by torch_xla: each process takes its chip before the runtime begins.
            pjrt.initialize_multiprocess(local_rank, local_world_size)
        self.device()
        count = int(runtime.world_size())
        if count == 1:
            return None
        if runtime.addressable_device_count() > 1:
            raise ConfigurationError(
                f"This process was given {runtime.addressable_device_count()} XLA devices and a thread for each, and an "
                f"Accelerator belongs to one process. Set {USE_SPMD}=1 and start one process: it drives all of them."
            )
        return int(runtime.global_ordinal()), count, int(runtime.local_ordinal()), int(runtime.local_device_count())

    def end_step(self) -> None:
        """Compile and start what was recorded since the last step."""
        self._sync(wait=False)

    def synchronize(self) -> None:
        """Run what was recorded, and wait until the device has done it."""
        self._sync(wait=True)

    def _sync(self, *, wait: bool) -> None:
        """Run what was recorded; the seed goes on from what was drawn.

        torch_xla makes a new seed at every end of a step: what is drawn after a checkpoint would depend on how many ends
        there were between the checkpoint and the draw.
        """
        import torch_xla

        seed = self.model.get_rng_state()
        torch_xla.sync(wait=wait)
        self.model.set_rng_state(seed)

    def identity(self, tensor: torch.Tensor) -> int:
        """Return torch_xla's number of the tensor, which a detached one shares."""
        import torch_xla

        return int(torch_xla._XLAC._xla_get_tensor_id(tensor))

    def get_rng_state(self) -> Any:
        """Return the seed of the device as a tensor, so that ranks can exchange it."""
        import torch

        return torch.tensor([self.model.get_rng_state()], dtype=torch.int64)

    def set_rng_state(self, state: Any) -> None:
        """Take over a seed, given as a number or as a tensor."""
        self.model.set_rng_state(int(state))

    def get_rng_states(self) -> Any:
        """Return the seed of the device, a whole number."""
        return int(self.model.get_rng_state())

    def manual_seed_all(self, seed: int) -> None:
        """Seed the device."""
        self.model.set_rng_state(int(seed))

    def supports_autocast(self, dtype: str) -> bool:
        """Return whether it is bfloat16: without a scaler for its gradients, float16 is of no use in training."""
        return dtype == "bfloat16"


XLA = XlaBackend(
    "xla",
    DistributedType.XLA,
    "gloo",
    package="torch_xla",
    visible_devices_variable="TPU_VISIBLE_CHIPS",
    priority=100,
    rng_key="xm_seed",
    autocast_dtypes=frozenset({"bfloat16"}),
    needs_device_ids=False,
    records_operations=True,
    device_files=("dev/accel[0-9]*",),
)
