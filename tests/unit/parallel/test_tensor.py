"""What a plan of tensor parallelism means on one process, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.gpt import TinyGPT, make_tokens
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel

from accelerate._base.errors import ConfigurationError
from accelerate.parallel.tensor import plan_of, split_layers


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
