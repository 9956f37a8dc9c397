"""Context parallelism on one process: attention, masks and buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from accelerate._base.errors import ConfigurationError, UsageError
from accelerate.parallel.context import GatheredAttention, split_sequences


class TestContext:
    def test_attention_of_one_part_is_plain_attention(self, mesh: DeviceMesh) -> None:
        query, key, value = torch.randn(3, 2, 2, 6, 4, dtype=torch.float64).unbind()
        padding = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])[:, None, None]
        for options in ({}, {"is_causal": True}, {"attn_mask": padding}):
            expected = scaled_dot_product_attention(query, key, value, **options)
            with GatheredAttention(mesh.get_group()):
                torch.testing.assert_close(scaled_dot_product_attention(query, key, value, **options), expected)

    @pytest.mark.parametrize("backward", [torch.Tensor.backward, torch.autograd.backward])
    def test_a_checkpointed_layer_attends_in_the_same_way_again(self, mesh: DeviceMesh, backward: Any) -> None:
        calls = []

        class Counted(GatheredAttention):
            def _attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                calls.append(torch.is_grad_enabled())
                return super()._attend(*args, **kwargs)

        states = torch.randn(1, 2, 4, 3, requires_grad=True)
        with Counted(mesh.get_group()):
            outputs = checkpoint(
                lambda: scaled_dot_product_attention(states, states, states, is_causal=True), use_reentrant=False
            )
            backward(outputs.sum())
        assert len(calls) == 2
        found, states.grad = states.grad, None
        scaled_dot_product_attention(states, states, states, is_causal=True).sum().backward()
        torch.testing.assert_close(found, states.grad)

    def test_a_mask_of_a_part_is_refused(self, mesh: DeviceMesh) -> None:
        attention = GatheredAttention(mesh.get_group())
        with pytest.raises(UsageError, match=r"mask of shape \(1, 1, 3, 3\), but 3 of 6"):
            attention._whole_mask(torch.ones(1, 1, 3, 3), 3, 6)

    def test_buffers_are_cut_and_restored(self, mesh: DeviceMesh) -> None:
        whole, left = torch.arange(8).view(2, 4), torch.arange(4)
        view = whole[:, 1:3]
        with split_sequences(mesh, [view, left], [-1, 0], [left]):
            assert view.tolist() == [[1, 2], [5, 6]]
        assert view.tolist() == [[1, 2], [5, 6]]
        assert whole.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]

    @pytest.mark.parametrize(
        ("dims", "kept", "message"),
        [
            ([0, 1], [], "has 2 entries for 1 buffers"),
            ([0], [torch.ones(1)], "not among the 1 buffers"),
            ([5], [], r"Buffer 0 of shape \(4,\) has 1 dimensions.* dimension 5"),
            ([-2], [], r"Buffer 0 of shape \(4,\) has 1 dimensions.* dimension -2"),
        ],
    )
    def test_buffers_and_dimensions_go_together(
        self, mesh: DeviceMesh, dims: list[int], kept: list[torch.Tensor], message: str
    ) -> None:
        with pytest.raises(ConfigurationError, match=message), split_sequences(mesh, [torch.ones(4)], dims, kept):
            pass
