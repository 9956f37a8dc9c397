"""The support matrix, device x strategy x number format, made from the registries."""

from __future__ import annotations

from accelerate._base.enums import DistributedType, PrecisionType
from accelerate.devices import registry as devices
from accelerate.devices.base import DeviceBackend
from accelerate.precision import formats as precisions
from accelerate.strategies import registry as strategies

# The contract test of the strategies trains on the CPU under every strategy in every number format; tests/xla train on
# torch_xla's CPU runtime.
RUN_IN_TESTS = frozenset({"cpu", "xla"})
# Of these devices and no others.
XLA_STRATEGIES = frozenset({"xla", "xla-spmd"})
# The devices that libraries for 8-bit floats name.
FP8_DEVICES = frozenset({"cpu", "cuda", "hpu", "xpu"})
# Number formats that an engine takes on other devices only.
REFUSED = {
    ("deepspeed", "cpu"): ("fp16",),
    ("megatron", "cpu"): ("fp16", "fp8"),
    ("megatron", "*"): ("fp8",),  # Transformer Engine decides on the format there, by an option of its own
    ("presharded", "*"): ("fp8",),  # layers that are sharded already cannot be replaced
    ("xla", "xla"): ("fp16",),
    ("xla-spmd", "xla"): ("fp16",),
}
NOT_THERE = "-"

_DEVICE_TITLES = {"neuron": "Neuron", "xla": "XLA (TPU)"}
# In the order of the rows; a strategy from outside comes after them under its own name.
_STRATEGY_TITLES = {
    "single": "one process",
    "ddp": "DDP",
    "fsdp1": "FSDP 1",
    "fsdp2": "FSDP 2",
    "parallel": "tensor, context, pipeline parallel",
    "presharded": "models sharded at load",
    "deepspeed": "DeepSpeed",
    "megatron": "Megatron-LM",
    "xla": "XLA, a process for each device",
    "xla-spmd": "XLA, one process for all devices (SPMD)",
}


def render() -> str:
    """Return the matrix as a table, with what its marks mean."""
    built = {strategy.name for strategy in strategies.all_strategies()}
    order = list(_STRATEGY_TITLES)
    rows = sorted(built, key=lambda name: (order.index(name) if name in order else len(order), name))
    columns: dict[tuple[str, ...], list[str]] = {}
    for device, backend in _devices().items():
        cells = tuple(_cell(backend, name) for name in rows)
        # Devices that differ in nothing but their name share a column.
        columns.setdefault(cells, []).append(_DEVICE_TITLES.get(device, device.upper()))
    lines = ["| | " + " | ".join(", ".join(titles) for titles in columns.values()) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for number, name in enumerate(rows):
        cells = tuple(column[number] for column in columns)
        lines.append(f"| {_STRATEGY_TITLES.get(name, name)} | {' | '.join(cells)} |")
    lines += ["", f"**Bold**: run in the tests. Plain: built, not run here. `{NOT_THERE}`: not there."]
    missing = [name for name in PrecisionType.list() if name not in precisions.FORMATS]
    if missing:
        lines.append(f"The number format {', '.join(missing)} is not there on any device.")
    return "\n".join(lines)


def _devices() -> dict[str, DeviceBackend]:
    """Return every device by its type, those that the tests run on first."""
    backends = sorted(devices.all_backends(), key=lambda backend: (backend.type not in RUN_IN_TESTS, backend.type))
    return {backend.type: backend for backend in backends}


def _cell(backend: DeviceBackend, strategy: str) -> str:
    # Devices without a label for several processes form no group.
    alone = backend.label is DistributedType.NO
    is_of_device = (backend.type == "xla") == (strategy in XLA_STRATEGIES)
    if not is_of_device or (alone and strategy != "single"):
        return NOT_THERE
    refused = REFUSED.get((strategy, backend.type), ()) + REFUSED.get((strategy, "*"), ())
    listed = [name for name in PrecisionType.list() if name in precisions.FORMATS and name not in refused]
    # Rarest last.
    shown = sorted((name for name in listed if name != "fp8" or backend.type in FP8_DEVICES), key="fp8".__eq__)
    names = ", ".join("fp32" if name == "no" else name for name in shown)
    return f"**{names}**" if backend.type in RUN_IN_TESTS else names
