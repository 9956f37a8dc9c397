"""Optional packages: whether one is installed, in which version, and the one way to import it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from packaging.version import Version, parse

from accelerate._base.constants import STR_OPERATION_TO_FUNC
from accelerate._base.errors import ConfigurationError, MissingPackageError

if TYPE_CHECKING:
    torch_version: Version

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def is_package_available(name: str) -> bool:
    """Say whether a package can be imported, without importing it (remembered per process)."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a parent that is missing; a module put in place without a spec
        return name in sys.modules
    if spec is None:
        return False
    # A plain folder of that name in the working directory (trackers leave such) also has a spec, but no file.
    return spec.origin is not None or _distribution_version(name) is not None


@functools.cache
def _distribution_version(name: str) -> str | None:
    """Return the version of the distribution that brings the package `name`, or None."""
    spellings = dict.fromkeys((name, name.replace("_", "-").replace(".", "-")))
    for candidate in itertools.chain(spellings, _distributions_of(name)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(candidate)
    return None


def _distributions_of(name: str) -> Iterator[str]:
    # Reading the files of every installed distribution takes long, so it comes last and only when it is reached.
    yield from importlib.metadata.packages_distributions().get(name, ())


def has_package(*names: str, minimum: str | None = None, below: str | None = None) -> bool:
    """Say whether one of `names` can be imported, in a version that is at least `minimum` and less than `below`."""
    return any(is_package_available(name) and _version_fits(name, minimum, below) for name in names)


def _version_fits(name: str, minimum: str | None, below: str | None) -> bool:
    if minimum is None and below is None:
        return True
    found = _distribution_version(name)
    if found is None:
        return False
    version = parse(found)
    return (minimum is None or version >= parse(minimum)) and (below is None or version < parse(below))


def require(package: str, *, why: str, extra: str | None = None) -> ModuleType:
    """Import an optional package at the place that needs it.

    Args:
        package: The name to import.
        why: What needs it, as the start of a sentence: "Saving in the safetensors format".
        extra: The extra of this library that brings it, if there is one.

    Raises:
        MissingPackageError: It is not installed, or its own import fails.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        hint = f'pip install "accelerate[{extra}]"' if extra else f"pip install {package.partition('.')[0]}"
        problem = "is not installed" if not is_package_available(package) else f"fails to import ({error})"
        raise MissingPackageError(
            f"{why} needs the package {package!r}, which {problem}. Install it with `{hint}`.", name=package
        ) from error


@functools.cache
def installed_version(distribution: str) -> Version:
    """Return the version of an installed distribution.

    Raises:
        MissingPackageError: The distribution is not installed.
    """
    try:
        return parse(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingPackageError(
            f"The version of {distribution!r} was asked for, but it is not installed in this environment. "
            f"Install it with `pip install {distribution}`."
        ) from error


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Compare an installed library (by name) or a version with a required one.

    Args:
        operation: One of `>`, `>=`, `==`, `!=`, `<=`, `<`.

    Raises:
        ConfigurationError: The operation is none of these.
        MissingPackageError: The library is not installed.
    """
    compare = STR_OPERATION_TO_FUNC.get(operation)
    if compare is None:
        raise ConfigurationError(
            f"operation={operation!r} is not a comparison of versions. Write one of {list(STR_OPERATION_TO_FUNC)}."
        )
    ours = installed_version(library_or_version) if isinstance(library_or_version, str) else library_or_version
    return compare(ours, parse(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the installed torch with `version`, without importing torch."""
    return compare_versions("torch", operation, version)


def deepspeed_required(func: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise a clear error where DeepSpeed is not installed."""
    return _requires(func, is_deepspeed_available, "'deepspeed'", '"accelerate[deepspeed]"')


def torchao_required(func: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise a clear error where torchao is not installed."""
    return _requires(func, is_torchao_available, "'torchao' in version 0.6.1 or later", "torchao")


def transformer_engine_required(func: Callable[P, R]) -> Callable[P, R]:
    """Make a function raise a clear error where TransformerEngine is not installed."""
    return _requires(func, is_transformer_engine_available, "'transformer_engine'", '"transformer_engine[pytorch]"')


def _requires(func: Callable[P, R], is_available: Callable[[], bool], package: str, install: str) -> Callable[P, R]:
    @functools.wraps(func)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not is_available():
            raise MissingPackageError(
                f"{func.__qualname__} needs the package {package}, which is not installed. "
                f"Install it with `pip install {install}`."
            )
        return func(*args, **kwargs)

    return checked


# One line per package: programs import these names. Checks that ask for a device are in `devices.registry`, those that
# also read a variable in `runtime.availability`.


def is_aim_available() -> bool:
    """Say whether aim, before its incompatible release 4 is installed."""
    return has_package("aim", below="4.0.0")


def is_amdsmi_available() -> bool:
    """Say whether amdsmi is installed."""
    return has_package("amdsmi")


def is_boto3_available() -> bool:
    """Say whether boto3 is installed."""
    return has_package("boto3")


def is_clearml_available() -> bool:
    """Say whether clearml is installed."""
    return has_package("clearml")


def is_comet_ml_available() -> bool:
    """Say whether comet_ml is installed."""
    return has_package("comet_ml")


def is_datasets_available() -> bool:
    """Say whether datasets is installed."""
    return has_package("datasets")


def is_deepspeed_available() -> bool:
    """Say whether deepspeed is installed."""
    return has_package("deepspeed")


def is_dvclive_available() -> bool:
    """Say whether dvclive is installed."""
    return has_package("dvclive")


def is_import_timer_available() -> bool:
    """Say whether import_timer is installed."""
    return has_package("import_timer")


def is_lomo_available() -> bool:
    """Say whether lomo_optim is installed."""
    return has_package("lomo_optim")


def is_matplotlib_available() -> bool:
    """Say whether matplotlib is installed."""
    return has_package("matplotlib")


def is_mlflow_available() -> bool:
    """Say whether mlflow, the full or the skinny one, is installed."""
    return has_package("mlflow")


def is_msamp_available() -> bool:
    """Say whether msamp is installed."""
    return has_package("msamp")


def is_pandas_available() -> bool:
    """Say whether pandas is installed."""
    return has_package("pandas")


def is_peft_available() -> bool:
    """Say whether peft is installed."""
    return has_package("peft")


def is_pippy_available() -> bool:
    """Say whether a torch with pipeline parallelism is installed."""
    return has_package("torch", minimum="2.4.0")


def is_pynvml_available() -> bool:
    """Say whether pynvml is installed."""
    return has_package("pynvml")


def is_pytest_available() -> bool:
    """Say whether pytest is installed."""
    return has_package("pytest")


def is_sagemaker_available() -> bool:
    """Say whether sagemaker is installed."""
    return has_package("sagemaker")


def is_schedulefree_available() -> bool:
    """Say whether schedulefree is installed."""
    return has_package("schedulefree")


def is_swanlab_available() -> bool:
    """Say whether swanlab is installed."""
    return has_package("swanlab")


def is_tensorboard_available() -> bool:
    """Say whether tensorboard or tensorboardX is installed."""
    return has_package("tensorboard", "tensorboardX")


def is_timm_available() -> bool:
    """Say whether timm is installed."""
    return has_package("timm")


def is_torchao_available() -> bool:
    """Say whether torchao 0.6.1 or later is installed."""
    return has_package("torchao", minimum="0.6.1")


def is_torchdata_available() -> bool:
    """Say whether torchdata is installed."""
    return has_package("torchdata")


def is_torchdata_stateful_dataloader_available() -> bool:
    """Say whether a torchdata with StatefulDataLoader is installed."""
    return has_package("torchdata", minimum="0.8.0")


def is_torchvision_available() -> bool:
    """Say whether torchvision is installed."""
    return has_package("torchvision")


def is_tqdm_available() -> bool:
    """Say whether tqdm is installed."""
    return has_package("tqdm")


def is_trackio_available() -> bool:
    """Say whether trackio is installed."""
    return has_package("trackio")


def is_transformers_available() -> bool:
    """Say whether transformers is installed."""
    return has_package("transformers")


def is_wandb_available() -> bool:
    """Say whether wandb is installed."""
    return has_package("wandb")


def is_4bit_bnb_available() -> bool:
    """Say whether a bitsandbytes with 4-bit layers is installed."""
    return has_package("bitsandbytes", minimum="0.39.0")


def is_8bit_bnb_available() -> bool:
    """Say whether a bitsandbytes with 8-bit layers is installed."""
    return has_package("bitsandbytes", minimum="0.37.2")


def is_weights_only_available() -> bool:
    """Say whether a torch whose `load` can be limited to weights is installed."""
    return has_package("torch", minimum="2.4.0")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Say whether bitsandbytes is installed, in at least `min_version` if one is given."""
    return has_package("bitsandbytes", minimum=min_version)


def is_bitsandbytes_multi_backend_available() -> bool:
    """Say whether bitsandbytes is installed with support for several kinds of devices."""
    if not is_bnb_available():
        return False
    return "multi_backend" in getattr(importlib.import_module("bitsandbytes"), "features", ())


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Say whether numpy is installed in at least `min_version`."""
    return has_package("numpy", minimum=min_version)


def is_transformer_engine_available() -> bool:
    """Say whether TransformerEngine, of NVIDIA or of Intel, is installed."""
    return has_package("transformer_engine", "intel_transformer_engine")


def is_transformer_engine_mxfp8_available() -> bool:
    """Say whether TransformerEngine can scale in blocks (MXFP8) on this hardware."""
    if not is_package_available("transformer_engine"):
        return False
    check = getattr(importlib.import_module("transformer_engine.pytorch"), "is_mxfp8_available", None)
    if check is not None:
        return bool(check())
    # Before 2.9 the question stood elsewhere, and before 2.0 there were no such formats.
    check = getattr(importlib.import_module("transformer_engine.pytorch.fp8"), "check_mxfp8_support", None)
    return bool(check()[0]) if check is not None else False


def is_fp8_available() -> bool:
    """Say whether a library for training in 8-bit floats is installed."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


def is_triton_available() -> bool:
    """Say whether triton is installed, also by the name of its Intel build."""
    return has_package("triton", "pytorch_triton_xpu")


def is_torch_distributed_available() -> bool:
    """Say whether torch was built with its distributed package."""
    import torch.distributed

    return torch.distributed.is_available()


def __getattr__(name: str) -> Version:
    # `torch_version` is read on demand, so that this module loads where torch is not installed.
    if name == "torch_version":
        return installed_version("torch")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
