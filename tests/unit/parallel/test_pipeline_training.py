"""How a model is cut into stages for training, and a stage that holds all of it."""

from __future__ import annotations

import pytest
import torch
from tests.support.gpt import TinyGPT, make_tokens
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from accelerate._base.errors import ConfigurationError
from accelerate.parallel.pipeline_training import PipelineStage, check_parts, stage_bounds


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
