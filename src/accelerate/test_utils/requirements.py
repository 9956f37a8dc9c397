"""Decorators that skip a test where what it needs is missing."""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from accelerate._base import imports
from accelerate._base.constants import FSDP2_PYTORCH_VERSION
from accelerate._base.errors import ConfigurationError
from accelerate._base.imports import has_package
from accelerate.config import env
from accelerate.devices import nvidia, registry
from accelerate.runtime.availability import is_torch_xla_available

T = TypeVar("T")


class Requirement(Protocol):
    """A decorator of test functions and test classes."""

    def __call__(self, test_case: T) -> T:
        """Return the test, or one that is skipped."""
        ...


def _needs(what: str, condition: Callable[[], bool]) -> Requirement:
    """Make a decorator; the condition is asked when it is applied."""

    def require(test_case: T) -> T:
        return unittest.skipUnless(condition(), f"needs {what}")(test_case)  # type: ignore[type-var]

    require.__doc__ = f"Skip a test that needs {what} where that is missing."
    return require


@functools.cache
def backend() -> tuple[str, int]:
    """Return the device type that a run here would use and how many of them there are, at least one."""
    chosen = registry.default().value
    return chosen.type, max(1, chosen.device_count())


def _kind() -> str:
    return backend()[0]


def _count() -> int:
    return backend()[1]


def _cuda() -> bool:
    return registry.is_cuda_available() and not is_torch_xla_available()


def _xpu() -> bool:
    return registry.is_xpu_available()


def _fp8() -> bool:
    return imports.is_fp8_available() and nvidia.check_cuda_fp8_capability() and not registry.is_habana_gaudi1()


def _tracker() -> bool:
    names = ("wandb", "tensorboard", "tensorboardX", "trackio", "swanlab")
    return has_package(*names) and not imports.is_comet_ml_available()


def skip(test_case: T) -> T:
    """Skip a test, always."""
    return unittest.skip("skipped on purpose")(test_case)  # type: ignore[type-var]


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return a variable as a yes or no, or `default` where it is not set.

    Raises:
        ConfigurationError: (a `ValueError`) It holds another word.
    """
    return env.flag(key, default)


def run_first(test_case: Any) -> Any:
    """Let pytest-order run a test before the others, where pytest is installed."""
    if not imports.is_pytest_available():
        return test_case
    import pytest

    return pytest.mark.order(1)(test_case)


def require_torch_min_version(test_case: Any = None, version: str | None = None) -> Any:
    """Skip a test where torch is older than `version`; use as `@require_torch_min_version(version="2.9")`.

    Raises:
        ConfigurationError: If no version was given.
    """
    if version is None:
        raise ConfigurationError(
            "require_torch_min_version was given no version, so there is nothing to compare with. "
            'Write `@require_torch_min_version(version="2.9")`.'
        )
    if test_case is None:
        return functools.partial(require_torch_min_version, version=version)
    return unittest.skipUnless(has_package("torch", minimum=version), f"needs torch {version}")(test_case)


slow = _needs("RUN_SLOW=1", lambda: env.flag("RUN_SLOW"))

# Packages.
require_aim = _needs("aim", imports.is_aim_available)
require_bnb = _needs("bitsandbytes", imports.is_bnb_available)
require_clearml = _needs("clearml", imports.is_clearml_available)
require_comet_ml = _needs("comet_ml", imports.is_comet_ml_available)
require_datasets = _needs("datasets", imports.is_datasets_available)
require_deepspeed = _needs("deepspeed", imports.is_deepspeed_available)
require_dvclive = _needs("dvclive", imports.is_dvclive_available)
require_fsdp2 = _needs("a torch with FSDP2", lambda: has_package("torch", minimum=FSDP2_PYTORCH_VERSION))
require_huggingface_suite = _needs(
    "transformers and datasets", lambda: imports.is_transformers_available() and imports.is_datasets_available()
)
require_import_timer = _needs("import_timer", imports.is_import_timer_available)
require_matplotlib = _needs("matplotlib", imports.is_matplotlib_available)
require_mlflow = _needs("mlflow", imports.is_mlflow_available)
require_non_torch_xla = _needs("a torch without XLA", lambda: not is_torch_xla_available())
require_pandas = _needs("pandas", imports.is_pandas_available)
require_peft = _needs("peft", imports.is_peft_available)
require_pippy = _needs("pipeline parallelism", lambda: imports.is_pippy_available() and not registry.is_habana_gaudi1())
require_schedulefree = _needs("schedulefree", imports.is_schedulefree_available)
require_swanlab = _needs("swanlab", imports.is_swanlab_available)
require_tensorboard = _needs("tensorboard", imports.is_tensorboard_available)
require_timm = _needs("timm", imports.is_timm_available)
require_torchao = _needs("torchao", imports.is_torchao_available)
require_torchdata_stateful_dataloader = _needs(
    "torchdata with StatefulDataLoader", imports.is_torchdata_stateful_dataloader_available
)
require_torchvision = _needs("torchvision", imports.is_torchvision_available)
require_tp = _needs(
    "torch 2.3 and transformers 4.52",
    lambda: has_package("torch", minimum="2.3.0") and has_package("transformers", minimum="4.52.0"),
)
require_trackers = _needs("a tracker, without comet_ml", _tracker)
require_trackio = _needs("trackio", imports.is_trackio_available)
require_transformer_engine = _needs("transformer_engine", imports.is_transformer_engine_available)
require_transformer_engine_mxfp8 = _needs(
    "transformer_engine with MXFP8", imports.is_transformer_engine_mxfp8_available
)
require_transformers = _needs("transformers", imports.is_transformers_available)
require_triton = _needs("triton", imports.is_triton_available)
require_wandb = _needs("wandb", imports.is_wandb_available)

# Devices.
require_cpu = _needs("a machine without accelerator", lambda: _kind() == "cpu")
require_cuda = _needs("CUDA", _cuda)
require_cuda_or_hpu = _needs("CUDA or HPU", lambda: _cuda() or registry.is_hpu_available())
require_cuda_or_xpu = _needs("CUDA or XPU", lambda: _cuda() or _xpu())
require_fp16 = _needs("a device that computes in fp16", registry.is_fp16_available)
require_fp8 = _needs("a device and a package for FP8", _fp8)
require_mlu = _needs("MLU", registry.is_mlu_available)
require_mps = _needs("MPS", registry.is_mps_available)
require_multi_device = _needs("several accelerators", lambda: _count() > 1)
require_multi_gpu = _needs("several CUDA GPUs", lambda: _cuda() and _count() > 1)
require_multi_gpu_or_xpu = _needs("several CUDA GPUs or XPUs", lambda: (_cuda() or _xpu()) and _count() > 1)
require_multi_xpu = _needs("several XPUs", lambda: _xpu() and _count() > 1)
require_musa = _needs("MUSA", registry.is_musa_available)
require_neuron = _needs("Neuron", registry.is_neuron_available)
require_non_cpu = _needs("an accelerator", lambda: _kind() != "cpu")
require_non_hpu = _needs("a machine without HPU", lambda: not registry.is_hpu_available())
require_non_xpu = _needs("a machine without XPU", lambda: not _xpu())
require_npu = _needs("NPU", registry.is_npu_available)
require_sdaa = _needs("SDAA", registry.is_sdaa_available)
require_single_device = _needs("one accelerator", lambda: _kind() != "cpu" and _count() == 1)
require_single_gpu = _needs("one CUDA GPU", lambda: _cuda() and _count() == 1)
require_single_xpu = _needs("one XPU", lambda: _xpu() and _count() == 1)
require_tpu = _needs("a TPU", lambda: is_torch_xla_available(check_is_tpu=True))
require_xpu = _needs("XPU", _xpu)
