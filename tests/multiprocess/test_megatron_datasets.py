"""Processes that build Megatron's datasets together write their order once, and read each its own share of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.indexed_data import texts, word_tokenizer, write
from tests.support.processes import run_group
from tests.support.training import fresh_accelerator

from accelerate.config.plugins.megatron import MegatronLMPlugin
from accelerate.strategies.megatron.datasets import MegatronLMDummyDataLoader

pytestmark = pytest.mark.multiprocess

KEYS = {"gpt": "tokens", "bert": "text"}


def read(family: str, folder: Path, dataset: dict[str, Any], num_steps: int, resumes: bool = False) -> list[Any]:
    """Return the rows of each step; with `resumes`, those after a checkpoint of the middle that was loaded again."""
    accelerator = fresh_accelerator(cpu=True)
    plugin = MegatronLMPlugin(train_iters=8, eval_iters=2, eval_interval=4, num_micro_batches=2)
    plugin.megatron_lm_default_args["model_type_name"] = family
    accelerator.state.megatron_lm_plugin = plugin
    given = {"seq_length": 24, "micro_batch_size": 2, "seed": 5, "num_workers": 0, "tokenizer": word_tokenizer()}
    dummy = MegatronLMDummyDataLoader(**given, data_cache_path=folder / "cache", **dataset)
    train, valid, test = dummy.build_train_valid_test_data_iterators(accelerator)
    assert train is not None
    assert valid is not None
    assert test is None

    def steps(count: int) -> list[Any]:
        return [next(train)[KEYS[family]].tolist() for _ in range(count)]

    if not resumes:
        return steps(num_steps)
    half = num_steps // 2
    steps(half)
    accelerator.save_state(folder / "state")
    steps(3)
    next(valid)
    accelerator.load_state(folder / "state")
    return steps(num_steps - half)


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_two_processes_write_the_order_once(family: str, tmp_path: Path) -> None:
    paths = [write(tmp_path / name, texts(30, sentences=4, seed=seed)) for seed, name in enumerate(("a", "b"))]
    dataset = {"data_path": [0.6, paths[0], 0.4, paths[1]], "split": "8,2,0"}
    shared = run_group(read, 2, family, tmp_path, dataset, 8)
    written = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    again = run_group(read, 2, family, tmp_path, dataset, 8)
    assert again == shared
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == written
    assert all(len(step) == 4 for rank in shared for step in rank)
    assert len({tuple(row) for rank in shared for step in rank for row in step}) == 64


def test_two_processes_read_every_sample_of_a_step_once(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a", texts(30, sentences=4))
    dataset = {"data_path": prefix, "split": "8,2,0"}
    first, second = run_group(read, 2, "gpt", tmp_path, dataset, 8)
    whole = run_group(in_order, 1, prefix, tmp_path)[0]
    assert [row for step in zip(first, second, strict=True) for rows in step for row in rows] == whole[:64]


def in_order(prefix: str, folder: Path) -> list[Any]:
    """Return the rows of the data set itself, as long as two replicas ask for it."""
    accelerator = fresh_accelerator(cpu=True)
    plugin = MegatronLMPlugin(train_iters=8, eval_iters=2, eval_interval=4)
    plugin.megatron_lm_default_args["model_type_name"] = "gpt"
    accelerator.state.megatron_lm_plugin = plugin
    dummy = MegatronLMDummyDataLoader(data_path=prefix, split="8,2,0", seq_length=24, seed=5)
    train, _, _ = dummy.get_train_valid_test_datasets_provider(accelerator)((64, 0, 0))
    return [train[index]["tokens"].tolist() for index in range(64)]


def test_a_checkpoint_goes_on_with_the_next_step(tmp_path: Path) -> None:
    dataset = {"data_path": write(tmp_path / "a", texts(30, sentences=4)), "split": "8,2,0"}
    whole = run_group(read, 2, "gpt", tmp_path, dataset, 8)
    rest = run_group(read, 2, "gpt", tmp_path, dataset, 8, True)
    assert rest == [steps[4:] for steps in whole]


def refused(dataset: dict[str, Any], folder: Path) -> str:
    try:
        read("gpt", folder, dataset, 1)
    except ValueError as error:
        return str(error)
    return ""


def test_all_processes_refuse_what_rank_0_could_not_write(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    dataset = {"data_path": write(tmp_path / "a", texts(30, sentences=4)), "split": "8,2,0"}
    messages = run_group(refused, 2, dataset, tmp_path, timeout=60)
    assert all("cannot be written to" in message for message in messages)
