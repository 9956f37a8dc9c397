"""The small option classes of quantization and parallelism, and how the plugins load."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from accelerate._base.enums import CustomDtype
from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import reset_warnings
from accelerate.config.plugins import parallelism
from accelerate.utils import (
    BnbQuantizationConfig,
    DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)


@pytest.fixture(autouse=True)
def clean() -> None:
    reset_warnings()


def test_8_bits() -> None:
    config = BnbQuantizationConfig(load_in_8bit=True)
    assert (config.torch_dtype, config.target_dtype) == (torch.float16, torch.int8)
    assert BnbQuantizationConfig(load_in_8bit=True, torch_dtype=torch.bfloat16).torch_dtype is torch.bfloat16


def test_4_bits() -> None:
    config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16", bnb_4bit_quant_type="nf4")
    assert (config.bnb_4bit_compute_dtype, config.torch_dtype) == (torch.bfloat16, torch.bfloat16)
    assert config.target_dtype is CustomDtype.INT4
    assert BnbQuantizationConfig(load_in_4bit=True, torch_dtype="fp32").torch_dtype is torch.float32
    with pytest.warns(UserWarning, match=r"llm_int8_threshold=3.0\) means nothing to 4 bits") as seen:
        BnbQuantizationConfig(load_in_4bit=True, llm_int8_threshold=3.0)
    assert seen[0].filename == __file__


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"load_in_8bit=False, load_in_4bit=False\) does not say"),
        ({"load_in_8bit": True, "load_in_4bit": True}, r"load_in_8bit=True, load_in_4bit=True"),
        ({"load_in_8bit": 1}, r"load_in_8bit=1\) cannot be used. Write a bool"),
        ({"load_in_8bit": True, "llm_int8_threshold": "x"}, r"llm_int8_threshold='x'.*float"),
        ({"load_in_8bit": True, "skip_modules": "head"}, r"skip_modules='head'.*list of names"),
        ({"load_in_8bit": True, "keep_in_fp32_modules": "head"}, r"keep_in_fp32_modules='head'"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, r"bnb_4bit_quant_type='int4'.*'fp4', 'nf4'"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp64"}, r"bnb_4bit_compute_dtype='fp64'.*fp32, fp16, bf16"),
        ({"load_in_8bit": True, "torch_dtype": "fp64"}, r"torch_dtype='fp64'"),
    ],
)
def test_quantization_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        BnbQuantizationConfig(**options)


def test_context_parallel_strategy_is_checked() -> None:
    with pytest.raises(ConfigurationError, match=r"cp_comm_strategy='ring'.*'allgather', 'alltoall'"):
        TorchContextParallelConfig("ring")


@pytest.mark.parametrize("attention", ["eager", "flex_attention", "flash", "owner/other", "/flash-attn"])
def test_attention_that_cannot_be_split_is_refused(attention: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"'{attention}'\) cannot be split along the sequence"):
        DeepSpeedSequenceParallelConfig(sp_attn_implementation=attention)


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_3", "kernels-community/flash-attn2"])
def test_attention_that_can_be_split(attention: str) -> None:
    assert DeepSpeedSequenceParallelConfig(sp_attn_implementation=attention).sp_attn_implementation == attention


def test_one_length_must_be_given() -> None:
    with pytest.raises(ConfigurationError, match=r"Set sp_seq_length"):
        DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False)
    assert DeepSpeedSequenceParallelConfig(64, sp_seq_length_is_variable=False).sp_seq_length == 64


def test_tensor_parallel_options() -> None:
    assert TorchTensorParallelConfig().enable_async_tp is False
    with pytest.warns(UserWarning, match=r"enable_async_tp=True\) has no effect yet") as seen:
        TorchTensorParallelConfig(enable_async_tp=True)
    assert seen[0].filename == __file__
    assert (TorchTensorParallelPlugin().tp_size, TorchTensorParallelPlugin().torch_device_mesh) == (1, None)


def test_the_declarations_load_without_torch() -> None:
    names = ("deepspeed", "fsdp", "megatron", "parallelism", "quantization", "training")
    imports = "; ".join(f"import accelerate.config.plugins.{name}" for name in names)
    source = f"import sys; {imports}; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_an_old_transformers_cannot_split_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(parallelism, "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION", "1000.0")
    with pytest.raises(ConfigurationError, match=r"transformers 1000.0 or later, but an older one.*or set tp_size=1"):
        TorchTensorParallelConfig()
