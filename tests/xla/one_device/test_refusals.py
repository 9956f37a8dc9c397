"""What cannot run on XLA devices is said in one sentence, before anything is done."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin, is_bf16_available, is_torch_xla_available


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mixed_precision": "fp16"}, "'xla' devices here cannot compute in float16"),
        ({"fsdp_plugin": FullyShardedDataParallelPlugin()}, "engine 'fsdp'.*dp_shard_size"),
        ({"parallelism_config": ParallelismConfig(cp_size=2)}, "cp_size=2.*Use dp_replicate_size"),
        ({"parallelism_config": ParallelismConfig(pp_size=2)}, "pp_size=2"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Accelerator(**options)


def test_a_layout_after_the_device_was_used() -> None:
    torch.ones(1, device="xla").cpu()
    with pytest.raises(ValueError, match=r"has used its device already.*XLA_USE_SPMD=1"):
        Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2))


def test_an_unknown_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "ABACUS")
    with pytest.raises(ValueError, match=r"PJRT_DEVICE='ABACUS' names no device of torch_xla.*TPU, CPU"):
        Accelerator()


def test_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_torch_xla_available()
    assert not is_torch_xla_available(check_is_tpu=True)
    assert is_bf16_available()
    with pytest.raises(ValueError, match="two kinds of hardware"):
        is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)


def test_the_cpu_can_be_asked_for() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.device.type == "cpu"


def test_an_optimizer_of_parameters_that_were_replaced() -> None:
    accelerator = Accelerator()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.prepare(model)
    with pytest.raises(ValueError, match="Pass both to one prepare"):
        accelerator.prepare(optimizer)
