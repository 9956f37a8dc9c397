"""How tensors are spread over a mesh of XLA devices: tables, without torch_xla."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate.strategies.xla.layout import batch_spec, split_dimensions, tensors_of, weight_spec


@pytest.mark.parametrize(
    ("axes", "num_dims", "expected"),
    [
        (("dp_replicate",), 1, (("dp_replicate",),)),
        (("dp_replicate", "dp_shard"), 3, (("dp_replicate", "dp_shard"), None, None)),
        (("dp_shard", "tp"), 2, (("dp_shard",), None)),
        (("tp",), 2, (None, None)),
        (("dp_shard",), 0, ()),
    ],
)
def test_batches_are_spread_by_rows(axes: tuple[str, ...], num_dims: int, expected: Any) -> None:
    assert batch_spec(axes, num_dims) == expected


@pytest.mark.parametrize(
    ("shape", "shards", "split", "expected"),
    [
        ((16, 8), 2, None, ("dp_shard", None)),
        ((3, 8), 2, None, (None, "dp_shard")),
        ((3, 5), 2, None, (None, "dp_shard")),  # nothing divides evenly: the longest
        ((1, 1), 2, None, (None, None)),
        ((16,), 4, None, ("dp_shard",)),
        ((2,), 4, None, (None,)),
        ((), 4, None, ()),
        ((16, 8), 1, None, (None, None)),
        ((16, 8), 1, 0, ("tp", None)),
        ((16, 8), 2, 0, ("tp", "dp_shard")),
        ((16, 8), 2, 1, ("dp_shard", "tp")),
        ((16,), 2, 0, ("tp",)),
    ],
)
def test_weights(shape: tuple[int, ...], shards: int, split: int | None, expected: Any) -> None:
    assert weight_spec(shape, shards, split) == expected


def blocks() -> torch.nn.Module:
    block = torch.nn.ModuleDict({"up": torch.nn.Linear(2, 4), "down": torch.nn.Linear(4, 2, bias=True)})
    return torch.nn.ModuleDict({"embedding": torch.nn.Embedding(6, 2), "layers": torch.nn.ModuleList([block])})


def test_a_plan_names_dimensions() -> None:
    plan = {
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
        "embedding": "embedding_rowwise",
        "layers": "replicate",
    }
    assert split_dimensions(blocks(), plan) == {
        "layers.0.up.weight": 0,
        "layers.0.up.bias": 0,
        "layers.0.down.weight": 1,
        "embedding.weight": 0,
    }


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"layers.*.up": "diagonal"}, "'diagonal'"),
        ({"layers.*.up": object()}, "style"),
        ({"no.*": "colwise"}, "no such module"),
    ],
)
def test_plans_that_cannot_work(plan: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        split_dimensions(blocks(), plan)


def test_outputs_of_layers() -> None:
    first, second = torch.ones(1), torch.ones(2)
    assert list(tensors_of((first, [second, None]))) == [first, second]
    assert list(tensors_of({"not": "looked into"})) == []
