"""What earlier releases wrote keeps working, with one warning that names the line and says what to write."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.logs import logged

from accelerate import Accelerator
from accelerate.utils import (
    FP8RecipeKwargs,
    FullyShardedDataParallelPlugin,
    TorchTensorParallelPlugin,
)


def older_memory_helpers() -> Any:
    sys.modules.pop("accelerate.memory_utils", None)
    from accelerate.memory_utils import find_executable_batch_size

    return find_executable_batch_size(starting_batch_size=3)(lambda batch_size: batch_size)()


def tensor_parallelism_by_plugin() -> Any:
    config = Accelerator(torch_tp_plugin=TorchTensorParallelPlugin(tp_size=1)).parallelism_config
    return config is not None and config.tp_size


# Each idiom, what it gives, and what its warning says to write.
WARNED: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "memory_utils": (older_memory_helpers, 3, "Write `from accelerate.utils import find_executable_batch_size`"),
    "FP8RecipeKwargs": (
        lambda: FP8RecipeKwargs(backend="MSAMP").backend,
        "MSAMP",
        "Write TERecipeKwargs, MSAMPRecipeKwargs or AORecipeKwargs",
    ),
    "torch_tp_plugin": (tensor_parallelism_by_plugin, 1, "Write parallelism_config=ParallelismConfig(tp_size=1)"),
    "split_batches": (
        lambda: Accelerator(split_batches=True).split_batches,
        True,
        "Write dataloader_config=DataLoaderConfiguration(split_batches=True)",
    ),
}


@pytest.mark.parametrize("idiom", WARNED)
def test_an_old_idiom_works_and_warns_once(idiom: str) -> None:
    use, expected, told = WARNED[idiom]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert use() == expected
    assert [warning.category for warning in caught] == [FutureWarning]
    assert told in str(caught[0].message)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("idiom", [idiom for idiom in WARNED if idiom != "memory_utils"])
def test_the_second_use_in_a_program_does_not_warn(idiom: str) -> None:
    use, expected, _ = WARNED[idiom]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [use(), use()] == [expected, expected]
    assert len(caught) == 1


def test_no_arguments_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Accelerator().split_batches is False


@pytest.mark.parametrize(
    ("version", "told"),
    [
        (1, r"is the old name of reshard_after_forward\. Write reshard_after_forward='SHARD_GRAD_OP'\."),
        (2, r"Write reshard_after_forward=True for FULL_SHARD, False for SHARD_GRAD_OP, or set fsdp_version=1\."),
    ],
)
def test_the_old_name_of_how_weights_are_sharded_is_logged_once(version: int, told: str) -> None:
    """It is a log record, as in release 1.15: the launcher gives it too, to programs that stop at warnings."""
    with logged(told) as messages:
        for _ in range(2):
            plugin = FullyShardedDataParallelPlugin(fsdp_version=version, sharding_strategy="SHARD_GRAD_OP")
    assert len(messages) == 1
    assert getattr(plugin.sharding_strategy, "name", None) == ("SHARD_GRAD_OP" if version == 1 else None)
