"""What the `distributed_type` of a file stands for."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate._base.enums import DistributedType


@dataclass(frozen=True)
class Kind:
    """A kind of run.

    Args:
        turns_on: The launch option that it stands for.
        num_processes: How many processes it has where the file does not say; None leaves that open.
    """

    turns_on: str | None = "multi_gpu"
    num_processes: int | None = None


_KINDS: dict[str, Kind] = {
    DistributedType.NO.value: Kind(turns_on=None, num_processes=1),
    DistributedType.MULTI_CPU.value: Kind("cpu"),
    DistributedType.DEEPSPEED.value: Kind("use_deepspeed"),
    DistributedType.FSDP.value: Kind("use_fsdp"),
    DistributedType.MEGATRON_LM.value: Kind("use_megatron_lm"),
    DistributedType.XLA.value: Kind("tpu"),
}
# All others are one process for each of several accelerators, whatever the vendor.
_SEVERAL_ACCELERATORS = Kind()


def kind_of(distributed_type: str) -> Kind:
    """Return what a `distributed_type` stands for."""
    return _KINDS.get(distributed_type, _SEVERAL_ACCELERATORS)
