"""Every number format passes the same checks, on this device; and every device takes or refuses it with a reason."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from tests.support.training import FEATURES, make_data, make_model

from accelerate._base.enums import PrecisionType
from accelerate._base.errors import ConfigurationError
from accelerate.devices import registry
from accelerate.devices.base import DeviceBackend
from accelerate.precision import formats as precisions
from accelerate.precision.formats import Precision
from accelerate.runtime import current
from accelerate.strategies.base import Strategy, StrategyContext
from accelerate.utils import AutocastKwargs, GradScalerKwargs, TorchDynamoPlugin


def backward(precision: Precision, loss: torch.Tensor) -> None:
    """Run the backward pass as the strategy of one device does."""
    Strategy(StrategyContext(current.runtime(), precision, TorchDynamoPlugin())).backward(loss)


@pytest.mark.parametrize("name", precisions.FORMATS)
class TestNumberFormats:
    def make(self, name: str) -> Precision:
        return precisions.make(name, current.runtime().backend)

    def test_it_knows_its_name(self, name: str) -> None:
        precision = self.make(name)
        assert (precision.name, precision.native_amp) == (name, name != "no")

    def test_it_wraps_a_model_once_and_in_place(self, name: str) -> None:
        precision, model = self.make(name), make_model(dtype=torch.float32)
        assert precision.wrap_forward(model) is model
        forward = vars(model).get("forward")
        assert precision.wrap_forward(model) is model
        assert vars(model).get("forward") is forward
        with precision.autocast():
            assert model(torch.ones(1, FEATURES)).dtype == torch.float32

    def test_gradients_are_those_of_the_loss_once_unscaled(self, name: str) -> None:
        precision, line = self.make(name), torch.nn.Linear(1, 1)
        backward(precision, line(torch.ones(1, 1)).sum())
        scale = precision.scaler.get_scale() if precision.scaler is not None else 1.0
        assert line.weight.grad is not None
        assert line.weight.grad.item() / scale == 1.0

    def test_it_is_one_that_users_can_write(self, name: str) -> None:
        assert name in PrecisionType.list()

    def test_a_step_lowers_the_loss(self, name: str) -> None:
        precision = precisions.make(name, current.runtime().backend, None, GradScalerKwargs(init_scale=1024.0))
        model = precision.wrap_forward(make_model(dtype=torch.float32))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        inputs, targets = make_data(16, torch.float32)[:]
        losses = []
        for _ in range(8):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            backward(precision, loss)
            if precision.scaler is None:
                optimizer.step()
            else:
                precision.scaler.step(optimizer)
                precision.scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0]

    def test_a_wrapped_model_is_copied_and_pickled_with_its_format(self, name: str) -> None:
        model = self.make(name).wrap_forward(make_model(dtype=torch.float32))
        inputs = torch.randn(3, FEATURES)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert twin(inputs).equal(model(inputs))
        assert list(model.state_dict()) == list(make_model().state_dict())

    def test_autocast_can_be_turned_off_for_a_block(self, name: str) -> None:
        with self.make(name).autocast(AutocastKwargs(enabled=False)):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"fp4.*bf16, fp16, fp8, no"):
        precisions.make("fp4", current.runtime().backend)


PAIRS = list(itertools.product(precisions.FORMATS, registry.all_backends()))


@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled, but .* is not available")
@pytest.mark.parametrize(("name", "backend"), PAIRS, ids=[f"{name}-{backend.type}" for name, backend in PAIRS])
def test_a_device_takes_a_format_or_says_why_not(name: str, backend: DeviceBackend) -> None:
    try:
        precision = precisions.make(name, backend)
    except ConfigurationError as error:
        refusal = str(error)
    else:
        assert precision.name == name
        return
    dtype = {"fp16": "float16", "bf16": "bfloat16", "fp8": "bfloat16"}[name]
    assert not backend.supports_autocast(dtype)
    assert f"mixed_precision={name!r}" in refusal
    assert repr(backend.type) in refusal
