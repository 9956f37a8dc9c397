"""Members and values of the public enums are frozen: programs and files hold them."""

from __future__ import annotations

import pickle
from enum import Enum

import pytest

from accelerate.utils import dataclasses as public

SAME = {
    "DistributedType": (
        "NO MULTI_CPU MULTI_GPU MULTI_NPU MULTI_MLU MULTI_SDAA MULTI_MUSA MULTI_XPU DEEPSPEED FSDP XLA MEGATRON_LM "
        "MULTI_HPU MULTI_NEURON"
    ),
    "SageMakerDistributedType": "NO DATA_PARALLEL MODEL_PARALLEL",
    "ComputeEnvironment": "LOCAL_MACHINE AMAZON_SAGEMAKER",
    "FP8BackendType": "NO TE MSAMP AO",
    "DynamoBackend": (
        "NO EAGER AOT_EAGER INDUCTOR AOT_TS_NVFUSER NVPRIMS_NVFUSER CUDAGRAPHS OFI FX2TRT ONNXRT TENSORRT "
        "AOT_TORCHXLA_TRACE_ONCE TORCHXLA_TRACE_ONCE TVM HPU_BACKEND NEURON"
    ),
}
LOWER = {
    "PrecisionType": "NO FP8 FP16 BF16",
    "RNGType": "TORCH CUDA MLU SDAA MUSA NPU XLA XPU HPU NEURON GENERATOR",
    "CustomDtype": "FP8 INT4 INT2",
    "DDPCommunicationHookType": "NO FP16 BF16 POWER_SGD BATCHED_POWER_SGD",
}
FROZEN: dict[str, dict[str, str]] = {
    **{enum: {name: name for name in names.split()} for enum, names in SAME.items()},
    **{enum: {name: name.lower() for name in names.split()} for enum, names in LOWER.items()},
    "LoggerType": {
        "ALL": "all",
        "AIM": "aim",
        "TENSORBOARD": "tensorboard",
        "WANDB": "wandb",
        "TRACKIO": "trackio",
        "COMETML": "comet_ml",
        "MLFLOW": "mlflow",
        "CLEARML": "clearml",
        "DVCLIVE": "dvclive",
        "SWANLAB": "swanlab",
    },
}


@pytest.mark.parametrize("name", FROZEN)
def test_members_values_and_order(name: str) -> None:
    enum: type[Enum] = getattr(public, name)
    assert [(member.name, member.value) for member in enum] == list(FROZEN[name].items())


@pytest.mark.parametrize(
    "name", ["DistributedType", "ComputeEnvironment", "PrecisionType", "DynamoBackend", "FP8BackendType"]
)
def test_text_enums_equal_their_value(name: str) -> None:
    for member in getattr(public, name):
        assert member == member.value
        assert hash(member) == hash(member.value)


@pytest.mark.parametrize(
    "name", ["PrecisionType", "RNGType", "LoggerType", "DynamoBackend", "DDPCommunicationHookType"]
)
def test_base_enums_know_plain_values(name: str) -> None:
    enum = getattr(public, name)
    for member in enum:
        assert member in enum
        assert member.value in enum
        assert str(member) == member.value
    assert "nonsense" not in enum
    assert enum.list() == [member.value for member in enum]


@pytest.mark.parametrize("name", FROZEN)
def test_members_survive_pickling(name: str) -> None:
    for member in getattr(public, name):
        assert pickle.loads(pickle.dumps(member)) is member
