"""Metrics on one process: padding is cut, nothing else changes, and means are weighted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.collectives import ops
from accelerate.collectives.metrics import gather_for_metrics_rows, weighted_mean


@dataclass
class Share:
    rows: int | None
    real: int | None
    full: int | None = None


def test_without_padding_the_value_is_returned() -> None:
    for data in (torch.tensor(1.0), {"a": ["x"]}, ["a", "b"], 5):
        for share in (None, Share(None, None), Share(4, 4)):
            assert gather_for_metrics_rows(data, share) is data


def test_every_leaf_is_cut_to_the_real_rows() -> None:
    data = {
        "logits": torch.arange(8).reshape(4, 2),
        "tokens": torch.arange(12),
        "names": ["a", "b", "c", "d"],
        "boxes": [{"i": 0}, {"i": 1}, {"i": 2}, {"i": 3}],
        "pair": (torch.arange(4), np.arange(4)),
        "collated": ("a", "b", "c", "d"),
        "heads": [{"h": torch.arange(4)} for _ in range(4)],
        "scored": [torch.arange(4), {"h": torch.arange(4)}],
    }
    cut = gather_for_metrics_rows(data, Share(4, 3))
    assert cut["logits"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert cut["tokens"].tolist() == list(range(9))
    assert cut["names"] == ["a", "b", "c"]
    assert cut["boxes"] == [{"i": 0}, {"i": 1}, {"i": 2}]
    assert cut["pair"][0].tolist() == cut["pair"][1].tolist() == [0, 1, 2]
    assert cut["collated"] == ("a", "b", "c")
    assert [head["h"].tolist() for head in cut["heads"]] == [[0, 1, 2]] * 4
    assert cut["scored"][0].tolist() == cut["scored"][1]["h"].tolist() == [0, 1, 2]


def test_a_leaf_that_does_not_fit_is_kept_and_named_once() -> None:
    data = {"odd": torch.arange(5)}
    message = r"\['odd'\], of size 5, belong to the 1 padded samples of this batch of 4"
    with pytest.warns(UserWarning, match=message) as caught:
        assert gather_for_metrics_rows(data, Share(4, 3))["odd"].tolist() == [0, 1, 2, 3, 4]
    assert caught[0].filename == __file__
    assert len(gather_for_metrics_rows(data, Share(4, 3))["odd"]) == 5


def test_a_value_made_for_a_full_batch_stands_for_the_rows_of_a_short_one() -> None:
    share = Share(2, 2, 3)
    data = {"repeated": torch.ones(3), "rows": torch.arange(2), "pairs": torch.arange(4), "names": ["a", "b", "c"]}
    found = gather_for_metrics_rows(data, share)
    assert found["repeated"].tolist() == [1, 1]
    assert found["rows"].tolist() == [0, 1]
    assert found["pairs"].tolist() == [0, 1, 2, 3]
    assert found["names"] == ["a", "b"]
    assert gather_for_metrics_rows(torch.ones(3), Share(3, 3, 3)).tolist() == [1, 1, 1]
    assert gather_for_metrics_rows(torch.ones(4), Share(2, 1, 4)).tolist() == [1]


@pytest.mark.parametrize("options", [{}, {"dispatch_batches": True}, {"split_batches": True}])
def test_losses_repeated_for_every_sample_count_each_once(options: dict[str, bool]) -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    loader: Any = accelerator.prepare(DataLoader(torch.arange(7.0), batch_size=3))
    losses = [accelerator.gather_for_metrics(batch.mean().repeat(3)).tolist() for batch in loader]
    assert losses == [[1, 1, 1], [4, 4, 4], [6]]


def test_weighted_mean_of_one_process_is_its_value() -> None:
    found = weighted_mean({"loss": torch.tensor(3.0, dtype=torch.float64), "n": 2, "v": [torch.ones(2).half()]}, 5)
    assert (found["loss"].dtype, found["loss"].item()) == (torch.float64, 3.0)
    assert (found["n"].dtype, found["n"].item()) == (torch.float32, 2.0)
    assert (found["v"][0].dtype, found["v"][0].tolist()) == (torch.float16, [1.0, 1.0])
    assert math.isnan(weighted_mean(torch.tensor(3.0), 0).item())
    with pytest.raises(TypeError):
        weighted_mean("text", 1)


def test_operations_on_one_process() -> None:
    data: Any = {"a": torch.ones(2), "b": [torch.tensor(1)]}
    assert ops.gather(data) is data
    assert ops.gather_object(data) is data
    assert ops.broadcast(data) is data
    assert ops.pad_across_processes(data) is data
    listed = [1]
    assert ops.broadcast_object_list(listed) is listed
    reduced = ops.reduce(data)
    assert reduced["a"] is not data["a"]
    assert reduced["a"].tolist() == [1.0, 1.0]
    assert ops.copy_tensor_to_devices(data["a"]).tolist() == [1.0, 1.0]
    shape, code = ops.gather_tensor_shape(torch.ones(2, 3).half())
    assert (shape.tolist(), ops.TENSOR_INT_TO_DTYPE[code]) == ([2, 3], torch.float16)


def test_a_gradient_flows_through_a_reduction() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    ops.reduce(weight * 3).backward()
    assert weight.grad is not None
    assert weight.grad.item() == 3.0


@pytest.mark.parametrize("value", ["text", 5, None, [1, "a"], {"a": torch.ones(1), "b": 1}, np.arange(3)], ids=repr)
def test_one_process_exchanges_nothing_and_takes_any_value(value: Any) -> None:
    assert ops.broadcast(value) is value
    assert ops.gather(value) is value
    assert ops.broadcast_object_list(value) is value


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_each_nested_tensor_given_for_padding_warns() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for data in (nested, {"a": nested, "b": torch.ones(1)}, nested):
        with pytest.warns(ops.CannotPadNestedTensorWarning) as caught:
            assert ops.pad_across_processes(data) is data
        assert caught[0].filename == __file__


def test_wrong_input_is_named() -> None:
    with pytest.raises(TypeError, match=r"reduce was given 'x' of type <class 'str'> at \['a'\]\[0\]"):
        ops.reduce({"a": ["x"]})
    with pytest.raises(TypeError, match="pad_across_processes was given 'x'"):
        ops.pad_across_processes("x")
    with pytest.raises(ValueError, match="reduction='median' is not known"):
        ops.reduce(torch.ones(1), "median")
    with pytest.raises(RuntimeError, match="every process passed None"):
        ops.copy_tensor_to_devices(None)
    with pytest.warns(UserWarning, match=r"scale=2.0\) has no effect"):
        ops.reduce(torch.ones(1), scale=2.0)


def test_gathered_parameters_leaves_plain_parameters_alone() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with ops.GatheredParameters(weight, modifier_rank=0):
        assert weight.tolist() == [1.0, 1.0]
    with ops.GatheredParameters([weight], enabled=False):
        pass
