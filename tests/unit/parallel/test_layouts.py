"""The steps of model parallelism on one process: what a plan means, how a model is cut, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.gpt import TinyGPT, make_tokens
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from accelerate._base.errors import ConfigurationError, UsageError
from accelerate.parallel.context import GatheredAttention, split_sequences
from accelerate.parallel.mesh import averaging_group, axis_group, axis_rank, build_mesh, has_axis
from accelerate.parallel.pipeline_training import PipelineStage, check_parts, stage_bounds
from accelerate.parallel.tensor import plan_of, split_layers, tensor_parallel_step


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of one rank, which takes every way that a mesh of many takes."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


class TestPlans:
    def test_the_model_or_its_class_has_one(self) -> None:
        model = nn.Linear(2, 2)
        with pytest.raises(ConfigurationError, match=r"Linear has no tp_plan.*tp_size=1"):
            plan_of(model)
        model._tp_plan = {"": "colwise"}  # type: ignore[assignment]
        assert plan_of(model) == {"": "colwise"}
        assert plan_of(TinyGPT()) == TinyGPT.tp_plan

    def test_names_and_objects_are_styles_and_the_rest_stays_whole(self, mesh: DeviceMesh) -> None:
        model = TinyGPT()
        expected = TinyGPT()(make_tokens(2)[:, :-1])
        split_layers(model, mesh, {"blocks.*.up": "colwise", "head": ColwiseParallel(), "blocks.0.out": "replicated"})
        split = {name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)}
        assert split == {
            "head.weight",
            *(f"blocks.{index}.up.{part}" for index in range(3) for part in ("weight", "bias")),
        }
        torch.testing.assert_close(model(make_tokens(2)[:, :-1]), expected)

    def test_a_split_model_is_left_alone(self, mesh: DeviceMesh) -> None:
        model = split_layers(TinyGPT(), mesh)
        before = list(model.parameters())
        assert all(left is right for left, right in zip(before, split_layers(model, mesh).parameters(), strict=True))
        model.tp_size = 2  # type: ignore[assignment]
        with pytest.raises(ConfigurationError, match="loaded over tp_size=2 ranks, but the run has tp_size=1"):
            split_layers(model, mesh)

    def test_tied_weights_stay_tied(self, mesh: DeviceMesh) -> None:
        model = split_layers(TinyGPT(tied=True), mesh)
        assert model.head.weight is model.embedding.tokens.weight
        assert isinstance(model.head.weight, DTensor)

    @pytest.mark.parametrize(
        ("plan", "message"),
        [
            ({"blocks.*.up": "diagonal"}, r"style 'diagonal'.*colwise"),
            ({"layers.*.up": "colwise"}, r"names 'layers.\*.up', but the model has no such module"),
        ],
    )
    def test_what_cannot_be_applied_is_refused_untouched(
        self, mesh: DeviceMesh, plan: dict[str, Any], message: str
    ) -> None:
        model = TinyGPT()
        with pytest.raises(ConfigurationError, match=message):
            split_layers(model, mesh, {"head": "colwise_rep", **plan})
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())

    def test_a_tie_that_the_plan_tears_is_refused(self, mesh: DeviceMesh) -> None:
        model = nn.ModuleDict({"left": nn.Linear(4, 4, bias=False), "right": nn.Linear(4, 4, bias=False)})
        model["right"].weight = model["left"].weight
        with pytest.raises(ConfigurationError, match=r"'left.weight', 'right.weight'.*Add 'right' to the plan"):
            split_layers(model, mesh, {"left": "colwise"})
        with pytest.raises(ConfigurationError, match="in different ways"):
            split_layers(model, mesh, {"left": "colwise", "right": "rowwise"})

    def test_heads_are_not_cut(self, mesh: DeviceMesh) -> None:
        model = TinyGPT()
        model.config = type("Config", (), {"num_attention_heads": 3})()
        assert split_layers(model, mesh) is model
        two = type("Mesh", (), {"size": lambda self: 2})()
        with pytest.raises(
            ConfigurationError, match="num_attention_heads=3, which cannot be shared evenly by tp_size=2"
        ):
            fresh = TinyGPT()
            fresh.config = model.config
            split_layers(fresh, two)


class TestSteps:
    def test_an_axis_that_is_not_in_use_has_no_step(self, mesh: DeviceMesh) -> None:
        assert tensor_parallel_step(None) is None
        step = tensor_parallel_step(mesh)
        assert step is not None
        assert isinstance(step(TinyGPT()).head.weight, DTensor)  # type: ignore[union-attr]

    def test_axes_of_a_mesh(self, mesh: DeviceMesh) -> None:
        assert (has_axis(mesh, "tp"), has_axis(mesh, "cp"), has_axis(None, "tp")) == (True, False, False)
        assert (axis_rank(mesh, "tp"), axis_rank(mesh, "pp"), axis_rank(None, "tp")) == (0, 0, 0)
        assert axis_group(mesh, "tp") is not None
        assert axis_group(mesh, "cp") is averaging_group(mesh) is averaging_group(None) is None
        assert build_mesh("cpu", {"tp": 1}, {}) is None


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


class TestPipeline:
    @pytest.mark.parametrize(
        ("weights", "stages", "bounds"),
        [
            ([1, 1, 1, 1], 2, [(0, 2), (2, 4)]),
            ([10, 1, 1, 1], 2, [(0, 1), (1, 4)]),
            ([1, 1, 1, 9, 1], 3, [(0, 3), (3, 4), (4, 5)]),
            ([0, 5, 0], 3, [(0, 1), (1, 2), (2, 3)]),
        ],
    )
    def test_stages_are_as_even_as_they_can_be(
        self, weights: list[int], stages: int, bounds: list[tuple[int, int]]
    ) -> None:
        parts = [nn.Linear(1, weight, bias=False) if weight else nn.Identity() for weight in weights]
        assert stage_bounds(parts, stages) == bounds

    def test_more_stages_than_parts(self) -> None:
        with pytest.raises(ConfigurationError, match="5 parts cannot be cut into pp_size=6"):
            check_parts(TinyGPT(), 6)

    def test_a_parameter_outside_of_all_parts(self) -> None:
        model = TinyGPT()
        model.extra = nn.Parameter(torch.ones(1))
        with pytest.raises(ConfigurationError, match="'extra' of TinyGPT is in none of the parts"):
            check_parts(model, 2)

    def test_a_loss_knows_its_gradients(self, mesh: DeviceMesh) -> None:
        whole, tokens = TinyGPT(), make_tokens(4)
        stage = PipelineStage(TinyGPT(), mesh, num_microbatches=2)
        assert set(stage.state_dict()) == set(whole.state_dict())
        for scale in (0.5, 3.0):
            (whole(tokens[:, :-1], tokens[:, 1:]) * scale).backward()
            (stage(tokens[:, :-1], tokens[:, 1:]) * scale).backward()
        expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
        for name, parameter in stage.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name])
