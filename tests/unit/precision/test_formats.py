"""Models in half precision: what they return, and that they can be copied, saved and restored."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.precision.formats import AutocastForward
from accelerate.utils import AutocastKwargs, extract_model_from_parallel, load, modeling

FEATURES = 5
FLOAT32 = torch.float32


class Shaped(torch.nn.Module):
    """A model with an output structure and a signature."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(FEATURES, 2)
        self.calls: list[torch.dtype] = []

    def forward(self, inputs: torch.Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.line(inputs)
        self.calls.append(hidden.dtype)
        return {"logits": hidden * scale, "parts": [hidden, (hidden.sum(), "text")], "ids": inputs.argmax(1)}


HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("precision", HALVES)
class TestHalfPrecision:
    def test_outputs_are_float32_and_computed_in_half(self, precision: str) -> None:
        model = Accelerator(mixed_precision=precision).prepare(Shaped())
        outputs = model(torch.ones(3, FEATURES), scale=2.0)
        assert model.calls == [HALVES[precision]]
        assert outputs["logits"].dtype == outputs["parts"][0].dtype == outputs["parts"][1][0].dtype == FLOAT32
        assert (outputs["ids"].dtype, outputs["parts"][1][1]) == (torch.int64, "text")
        assert {parameter.dtype for parameter in model.parameters()} == {FLOAT32}

    def test_a_second_prepare_does_not_wrap_again(self, precision: str) -> None:
        accelerator = Accelerator(mixed_precision=precision)
        model = accelerator.prepare(Shaped())
        forward = model.forward
        assert accelerator.prepare(model) is model
        assert Accelerator(mixed_precision=precision).prepare(model) is model
        assert model.forward is forward
        assert not isinstance(forward.__wrapped__, AutocastForward)
        assert accelerator.precision.wrap_forward(model).forward is forward

    def test_the_signature_stays(self, precision: str) -> None:
        plain = Shaped()
        model = Accelerator(mixed_precision=precision).prepare(Shaped())
        assert inspect.signature(model.forward) == inspect.signature(plain.forward)
        assert model.forward.__name__ == "forward"

    @pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
    def test_a_prepared_model_can_be_copied(self, precision: str, how: str) -> None:
        model = Accelerator(mixed_precision=precision).prepare(Shaped())
        model(torch.ones(1, FEATURES))
        if how == "torch.save":
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            other = load(file, weights_only=False)
        else:
            other = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
        with torch.no_grad():
            other.line.weight.zero_()
            other.line.bias.fill_(5.0)
        assert other(torch.ones(1, FEATURES))["logits"].tolist() == [[5.0, 5.0]]
        assert (len(model.calls), other.calls) == (1, [HALVES[precision]] * 2)
        restored = extract_model_from_parallel(other, keep_fp32_wrapper=False)
        assert (restored is other, restored.forward.__self__ is other) == (True, True)
        assert other(torch.ones(1, FEATURES))["logits"].dtype == FLOAT32
        assert other.calls[-1] == FLOAT32

    def test_unwrapping_restores_the_forward(self, precision: str) -> None:
        accelerator = Accelerator(mixed_precision=precision)
        model = accelerator.prepare(Shaped())
        assert accelerator.unwrap_model(model) is model
        model(torch.ones(1, FEATURES))
        assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
        assert "forward" not in vars(model)
        model(torch.ones(1, FEATURES))
        assert model.calls == [HALVES[precision], FLOAT32]

    def test_a_forward_of_the_instance_comes_back(self, precision: str) -> None:
        accelerator = Accelerator(mixed_precision=precision)
        model = torch.nn.Linear(2, 2)
        model.forward = own = lambda inputs: inputs * 3  # type: ignore[assignment]
        prepared = accelerator.prepare(model)
        assert prepared(torch.ones(1)).item() == 3
        assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False).forward is own

    def test_autocast_is_a_context(self, precision: str) -> None:
        accelerator = Accelerator(mixed_precision=precision)
        line = torch.nn.Linear(2, 2)
        with accelerator.autocast():
            assert line(torch.ones(1, 2)).dtype == HALVES[precision]
            with accelerator.autocast(AutocastKwargs(enabled=False)):
                assert line(torch.ones(1, 2)).dtype == FLOAT32
        assert line(torch.ones(1, 2)).dtype == FLOAT32

    def test_autocast_can_be_switched_off_for_a_run(self, precision: str) -> None:
        accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=[AutocastKwargs(enabled=False)])
        model = accelerator.prepare(Shaped())
        model(torch.ones(1, FEATURES))
        with accelerator.autocast():
            assert torch.nn.functional.linear(torch.ones(1, 2), torch.ones(2, 2)).dtype == FLOAT32
        assert model.calls == [FLOAT32]


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("no", FLOAT32)])
def test_programs_get_the_context_and_the_scaler_of_a_run(precision: str, dtype: torch.dtype) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    line, rows = torch.nn.Linear(2, 2), torch.ones(1, 2)
    with modeling.get_mixed_precision_context_manager(native_amp=True):
        assert line(rows).dtype == dtype
    with modeling.get_mixed_precision_context_manager(native_amp=True, autocast_kwargs=AutocastKwargs(enabled=False)):
        assert line(rows).dtype == FLOAT32
    with modeling.get_mixed_precision_context_manager():
        assert line(rows).dtype == FLOAT32
    scaler = modeling.get_grad_scaler(accelerator.distributed_type, init_scale=4.0)
    assert scaler.scale(torch.ones(1)).item() == 4.0
