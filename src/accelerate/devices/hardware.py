"""Facts by which a kind of accelerator is recognised without loading torch."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate._base.enums import DistributedType

AMD_NODES = "sys/class/kfd/kfd/topology/nodes"
"""Where AMD's driver lists what can compute, the CPU too."""


@dataclass(frozen=True)
class Hardware:
    """One kind of accelerator, as it shows on a machine.

    Args:
        type: The device type of torch.
        label: The regime of several of them.
        variable: The variable that limits which ones a process sees.
        files: Patterns of device files below the root, one file each; the first pattern with a hit counts.
        tool: A program that lists them, one line each, for machines that have no device files (WSL).
    """

    type: str
    label: DistributedType
    variable: str | None = None
    files: tuple[str, ...] = ()
    tool: tuple[str, ...] = ()


KNOWN: tuple[Hardware, ...] = (
    Hardware("hpu", DistributedType.MULTI_HPU, "HABANA_VISIBLE_MODULES", ("dev/hl[0-9]*",)),
    Hardware("neuron", DistributedType.MULTI_NEURON, "NEURON_RT_VISIBLE_CORES", ("dev/neuron[0-9]*",)),
    Hardware("npu", DistributedType.MULTI_NPU, "ASCEND_RT_VISIBLE_DEVICES", ("dev/davinci[0-9]*",)),
    Hardware("mlu", DistributedType.MULTI_MLU, "MLU_VISIBLE_DEVICES", ("dev/cambricon_dev[0-9]*",)),
    Hardware("musa", DistributedType.MULTI_MUSA, "MUSA_VISIBLE_DEVICES", ("dev/mtgpu.[0-9]*",)),
    Hardware("sdaa", DistributedType.MULTI_SDAA, "SDAA_VISIBLE_DEVICES", ("dev/tcaicard[0-9]*",)),
    Hardware(
        "cuda",
        DistributedType.MULTI_GPU,
        "CUDA_VISIBLE_DEVICES",
        ("dev/nvidia[0-9]*", "proc/driver/nvidia/gpus/*"),
        ("nvidia-smi", "--list-gpus"),
    ),
    # The GPUs of AMD answer to the same device type.
    Hardware("cuda", DistributedType.MULTI_GPU, "CUDA_VISIBLE_DEVICES", (f"{AMD_NODES}/[0-9]*/properties",)),
    Hardware("xpu", DistributedType.MULTI_XPU, "ZE_AFFINITY_MASK", (), ("xpu-smi", "discovery", "--dump", "1")),
    Hardware("xla", DistributedType.XLA, "TPU_VISIBLE_DEVICES", ("dev/accel[0-9]*",)),
)
APPLE = Hardware("mps", DistributedType.NO)
CPU = Hardware("cpu", DistributedType.MULTI_CPU)
