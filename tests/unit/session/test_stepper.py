"""The training step on one process: the clock, the scaler, the schedule."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tests.support.training import FEATURES, copy_weights, make_data, make_model
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate._base.errors import ConfigurationError
from accelerate.utils import (
    GradientAccumulationPlugin,
    GradScalerKwargs,
    patch_environment,
)

FLOAT32 = torch.float32
SCALE = 1024.0


def loader_of(batches: int) -> DataLoader[Any]:
    return DataLoader(make_data(batches * 2, FLOAT32), batch_size=2)


def float16(**options: Any) -> Accelerator:
    options.setdefault("init_scale", SCALE)
    return Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(**options)])


def syncs(accelerator: Accelerator, loader: Any, epochs: int = 1) -> list[list[int]]:
    """Return the numbers of the batches, from 1, that close a window, in each epoch."""
    return [
        [number for number, _ in enumerate(loader, 1) if _enters(accelerator) and accelerator.sync_gradients]
        for _ in range(epochs)
    ]


def _enters(accelerator: Accelerator) -> bool:
    with accelerator.accumulate():
        return True


class TestClock:
    def test_a_window_closes_every_few_batches_and_at_the_end(self) -> None:
        accelerator = Accelerator(gradient_accumulation_steps=3)
        loader = accelerator.prepare(loader_of(7))
        assert syncs(accelerator, loader, 2) == [[3, 6, 7], [3, 6, 7]]

    def test_windows_may_run_over_the_end_of_a_loader(self) -> None:
        plugin = GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False)
        accelerator = Accelerator(gradient_accumulation_plugin=plugin)
        loader = accelerator.prepare(loader_of(7))
        assert syncs(accelerator, loader, 3) == [[3, 6], [2, 5], [1, 4, 7]]

    def test_the_number_of_steps_can_be_changed_at_run_time(self) -> None:
        accelerator = Accelerator()
        loader = accelerator.prepare(loader_of(6))
        assert (accelerator.gradient_accumulation_steps, syncs(accelerator, loader)) == (1, [[1, 2, 3, 4, 5, 6]])
        accelerator.gradient_accumulation_steps = 4
        assert (accelerator.gradient_accumulation_steps, syncs(accelerator, loader)) == (4, [[4, 6]])

    def test_the_environment_gives_the_number_of_steps(self) -> None:
        with patch_environment(accelerate_gradient_accumulation_steps=3):
            accelerator = Accelerator()
        assert accelerator.gradient_accumulation_steps == 3
        assert syncs(accelerator, accelerator.prepare(loader_of(4))) == [[3, 4]]

    def test_a_step_outside_of_loaders_is_counted(self) -> None:
        accelerator = Accelerator(gradient_accumulation_steps=2)
        assert [_enters(accelerator) and accelerator.sync_gradients for _ in range(4)] == [False, True, False, True]

    def test_a_nested_loop_does_not_disturb_the_outer_one(self) -> None:
        accelerator = Accelerator(gradient_accumulation_steps=3)
        train, test = accelerator.prepare(loader_of(7), loader_of(2))
        found = []
        for number, _ in enumerate(train, 1):
            with accelerator.accumulate():
                for inner, _ in enumerate(test, 1):
                    assert accelerator.gradient_state.active_dataloader is test
                    assert accelerator.gradient_state.end_of_dataloader == (inner == 2)
                assert accelerator.gradient_state.active_dataloader is train
                assert accelerator.gradient_state.end_of_dataloader == (number == 7)
                found += [number] if accelerator.sync_gradients else []
        assert found == [3, 6, 7]

    @pytest.mark.parametrize("ending", ["break", "raise"])
    def test_a_loop_that_ends_early_leaves_no_active_loader(self, ending: str) -> None:
        accelerator = Accelerator(gradient_accumulation_steps=3)
        loader = accelerator.prepare(loader_of(7))
        try:
            for _ in loader:
                assert accelerator.gradient_state.in_dataloader
                if ending == "break":
                    break
                raise KeyError
        except KeyError:
            pass
        assert accelerator.gradient_state.active_dataloader is None
        assert not accelerator.gradient_state.end_of_dataloader
        assert syncs(accelerator, loader) == [[3, 6, 7]]

    def test_optimizer_and_scheduler_rest_inside_a_window(self) -> None:
        accelerator = Accelerator(gradient_accumulation_steps=3)
        model = make_model(dtype=FLOAT32)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader_of(7), schedule)
        rates, changed, cleared = [], [], []
        for inputs, _ in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(inputs).mean())
                before = copy_weights(model)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                changed.append(any(not value.equal(before[name]) for name, value in model.state_dict().items()))
                cleared.append(all(parameter.grad is None for parameter in model.parameters()))
                rates.append(schedule.get_last_lr()[0])
        assert changed == cleared == [False, False, True, False, False, True, True]
        assert rates == [1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.125]

    @pytest.mark.parametrize("steps", [0, -2])
    def test_a_window_without_batches_is_refused(self, steps: int) -> None:
        with pytest.raises(ConfigurationError, match=f"gradient_accumulation_steps={steps}"):
            Accelerator(gradient_accumulation_steps=steps)

    def test_contexts_of_a_single_process_do_nothing(self) -> None:
        accelerator = Accelerator()
        model, loader = accelerator.prepare(make_model(dtype=FLOAT32), loader_of(3))
        with accelerator.no_sync(model), accelerator.trigger_sync_in_backward(model):
            accelerator.backward(model(torch.ones(1, FEATURES)).sum())
        with accelerator.join_uneven_inputs([model]):
            assert len(list(loader)) == 3
        assert not accelerator.check_trigger()
        accelerator.set_trigger()
        assert (accelerator.check_trigger(), accelerator.check_trigger()) == (True, False)


class TestBackward:
    @pytest.mark.parametrize("items", [{}, {"num_items": 2}])
    def test_options_of_backward_are_passed_on(self, items: dict[str, int]) -> None:
        accelerator = Accelerator()
        model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
        loss = model(torch.ones(2, 1)).sum()
        accelerator.backward(loss, retain_graph=True, **items)
        accelerator.backward(loss, **items)
        assert model.weight.grad.item() == (4 if not items else 2)

    def test_a_loss_is_divided_by_the_number_of_steps(self) -> None:
        accelerator = Accelerator(gradient_accumulation_steps=4)
        model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
        accelerator.backward(model(torch.ones(1, 1)).sum())
        assert model.weight.grad.item() == 0.25

    @pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
    def test_clipping_by_norm_equals_plain(self, norm_type: float) -> None:
        plain, twin = make_model(), make_model()
        accelerator = Accelerator()
        prepared = accelerator.prepare(twin)
        inputs, targets = make_data(8)[:]
        for model in (plain, prepared):
            (model(inputs) - targets).square().sum().backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)
        found = accelerator.clip_grad_norm_(prepared.parameters(), 0.5, norm_type)
        assert found == expected > 0.5
        for left, right in zip(prepared.parameters(), plain.parameters(), strict=True):
            assert left.grad.equal(right.grad)

    def test_clipping_by_value_equals_plain(self) -> None:
        accelerator = Accelerator()
        model = accelerator.prepare(torch.nn.Linear(3, 1, bias=False))
        accelerator.backward(model(torch.tensor([[1.0, -5.0, 0.1]])).sum())
        accelerator.clip_grad_value_(model.parameters(), 0.5)
        assert model.weight.grad.tolist() == [[0.5, -0.5, pytest.approx(0.1)]]


def overflowing(accelerator: Accelerator, model: Any, overflows: bool) -> None:
    """Compute gradients that fit float32, or do not once they are scaled."""
    factor = 3e38 if overflows else 1.0
    accelerator.backward((model(torch.ones(2, FEATURES)) * factor).mean())


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}


class TestScaler:
    @pytest.mark.parametrize("clips", [False, True])
    @pytest.mark.parametrize("kind", OPTIMIZERS)
    def test_an_overflow_skips_optimizer_and_scheduler_and_halves_the_scale(self, kind: str, clips: bool) -> None:
        accelerator = float16()
        model = make_model(dtype=FLOAT32)
        optimizer = OPTIMIZERS[kind](model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        assert not optimizer.step_was_skipped
        assert not accelerator.optimizer_step_was_skipped
        found = []
        for overflows in (False, True, False, True, True):
            overflowing(accelerator, model, overflows)
            if clips:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            before = copy_weights(model)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            moved = any(not value.equal(before[name]) for name, value in model.state_dict().items())
            skipped = accelerator.optimizer_step_was_skipped
            assert skipped == optimizer.step_was_skipped == (not moved)
            found.append((skipped, accelerator.scaler.get_scale(), schedule.get_last_lr()[0]))
        assert found == [
            (False, SCALE, 0.05),
            (True, SCALE / 2, 0.05),
            (False, SCALE / 2, 0.025),
            (True, SCALE / 4, 0.025),
            (True, SCALE / 8, 0.025),
        ]

    @pytest.mark.parametrize("looks", [False, True])
    @pytest.mark.parametrize("clips", ["none", "once", "each", "twice"])
    def test_two_optimizers_share_a_scaler(self, clips: str, looks: bool) -> None:
        """Gradients are divided by the scale once, so the weights are those of float32 training."""

        def run(accelerator: Accelerator) -> dict[str, torch.Tensor]:
            first, second = make_model(0, FLOAT32), make_model(1, FLOAT32, out_features=FEATURES)
            optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
            first, second, *optimizers = accelerator.prepare(first, second, *optimizers)
            inputs, targets = make_data(8, FLOAT32)[:]
            for _ in range(3):
                accelerator.backward((first(second(inputs)) - targets).square().mean())
                both = [*first.parameters(), *second.parameters()]
                if clips in ("once", "twice"):
                    accelerator.clip_grad_norm_(both, 0.5)
                if clips == "twice":
                    accelerator.clip_grad_norm_(both, 0.5)
                    accelerator.unscale_gradients(optimizers)
                for model, optimizer in zip((first, second), optimizers, strict=True):
                    if clips == "each":
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    if looks and accelerator.scaler is not None:
                        assert accelerator.scaler.get_scale() == SCALE
                for optimizer in optimizers:
                    optimizer.zero_grad()
            return {f"{index}.{k}": v for index, m in enumerate((first, second)) for k, v in copy_weights(m).items()}

        found = run(float16())
        Accelerator().reset()
        expected = run(Accelerator())
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=2e-2, atol=2e-3)

    def test_optimizers_that_step_in_turn_see_one_update_each(self) -> None:
        accelerator = float16(growth_interval=2)
        first, second = make_model(0, FLOAT32), make_model(1, FLOAT32)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
        first, second, *optimizers = accelerator.prepare(first, second, *optimizers)
        for model, optimizer in zip((first, second), optimizers, strict=True):
            overflowing(accelerator, model, overflows=model is first)
            optimizer.step()
            optimizer.zero_grad()
        assert [optimizer.step_was_skipped for optimizer in optimizers] == [True, False]
        assert accelerator.optimizer_step_was_skipped
        assert accelerator.scaler.get_scale() == SCALE / 2

    def test_one_overflowing_optimizer_does_not_hold_back_the_other(self) -> None:
        accelerator = float16()
        models = [make_model(seed, FLOAT32) for seed in (0, 1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        first, second, *optimizers = accelerator.prepare(*models, *optimizers)
        overflowing(accelerator, first, overflows=True)
        overflowing(accelerator, second, overflows=False)
        for optimizer in optimizers:
            optimizer.step()
        assert [optimizer.step_was_skipped for optimizer in optimizers] == [True, False]
        assert accelerator.scaler.get_scale() == SCALE / 2

    def test_options_reach_the_scaler(self) -> None:
        accelerator = float16(init_scale=64.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=7)
        scaler = accelerator.scaler
        assert scaler.get_scale() == 64.0
        assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (3.0, 0.25, 7)

    @pytest.mark.parametrize("precision", ["no", "bf16"])
    def test_other_formats_have_no_scaler(self, precision: str) -> None:
        accelerator = Accelerator(mixed_precision=precision)
        assert accelerator.scaler is None
        accelerator.unscale_gradients()

    def test_scaler_state_makes_a_round_trip(self) -> None:
        scaler = float16(init_scale=64.0).scaler
        other = pickle.loads(pickle.dumps(scaler))
        assert other.get_scale() == 64.0
        scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0})
        assert scaler.get_scale() == 8.0


class TestOptimizer:
    @pytest.mark.parametrize("precision", ["no", "fp16"])
    def test_state_makes_a_round_trip(self, precision: str) -> None:
        accelerator = Accelerator(mixed_precision=precision)
        model = make_model(dtype=FLOAT32)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        overflowing(accelerator, model, overflows=False)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        other = torch.optim.AdamW(make_model(dtype=FLOAT32).parameters(), lr=0.5)
        other.load_state_dict(saved)
        assert other.param_groups[0]["lr"] == 0.1
        optimizer.param_groups[0]["lr"] = 7.0
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == optimizer.optimizer.param_groups[0]["lr"] == 0.1
        for left, right in zip(other.state_dict()["state"].values(), saved["state"].values(), strict=True):
            assert left["exp_avg"].equal(right["exp_avg"])

    @pytest.mark.parametrize("copier", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
    def test_a_copy_still_knows_whether_it_stepped(self, copier: Any) -> None:
        accelerator = float16()
        model = make_model(dtype=FLOAT32)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        overflowing(accelerator, model, overflows=True)
        optimizer.step()
        other = copier(optimizer)
        assert other.step_was_skipped
        assert other.gradient_state.sync_gradients
        own = other.param_groups[0]["params"]
        for parameter in own:
            parameter.grad = torch.ones_like(parameter)
        before = [parameter.detach().clone() for parameter in own]
        other.scaler.scale(torch.zeros(()))
        other.step()
        assert not other.step_was_skipped
        assert all(not left.equal(right) for left, right in zip(own, before, strict=True))

    def test_a_closure_is_passed_on(self) -> None:
        accelerator = Accelerator()
        model = make_model(dtype=FLOAT32)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert optimizer.step(lambda: 3.5) == 3.5


class TestScheduler:
    def prepared(self, accelerator: Accelerator, make: Any) -> tuple[Any, Any, Any]:
        model = make_model(dtype=FLOAT32)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return accelerator.prepare(model, optimizer, make(optimizer))  # type: ignore[no-any-return]

    def test_a_scheduler_by_hand_steps_at_every_call(self) -> None:
        accelerator = Accelerator(gradient_accumulation_steps=4, step_scheduler_with_optimizer=False)
        _, optimizer, schedule = self.prepared(accelerator, lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5))
        optimizer.step()
        for expected in (0.5, 0.25):
            with accelerator.accumulate():
                schedule.step()
            assert schedule.get_last_lr() == [expected]

    def test_state_makes_a_round_trip(self) -> None:
        accelerator = Accelerator()
        _, optimizer, schedule = self.prepared(accelerator, lambda o: torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5))
        optimizer.step()
        for _ in range(3):
            schedule.step()
        saved = schedule.state_dict()
        _, _, other = self.prepared(accelerator, lambda o: torch.optim.lr_scheduler.StepLR(o, 9, gamma=0.1))
        other.load_state_dict(saved)
        assert (other.scheduler.last_epoch, other.scheduler.step_size, other.get_last_lr()) == (3, 2, [0.5])

    def test_a_scheduler_follows_its_own_optimizer(self) -> None:
        accelerator = float16()
        models = [make_model(seed, FLOAT32) for seed in (0, 1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
        schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
        first, second, *rest = accelerator.prepare(*models, *optimizers, *schedules)
        overflowing(accelerator, first, overflows=True)
        overflowing(accelerator, second, overflows=False)
        for stepping in rest:
            stepping.step()
        assert [schedule.get_last_lr()[0] for schedule in rest[2:]] == [1.0, 0.5]


class TestAccelerator:
    def test_a_deep_copy_is_the_accelerator_itself(self) -> None:
        accelerator = Accelerator()
        assert copy.deepcopy(accelerator) is accelerator
        assert copy.deepcopy({"key": accelerator})["key"] is accelerator

    @pytest.mark.parametrize("precision", ["no", "fp16"])
    def test_it_can_be_pickled_also_inside_a_loop(self, precision: str) -> None:
        accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=2)
        model = make_model(dtype=FLOAT32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader_of(3), schedule)
        for _ in loader:
            other = pickle.loads(pickle.dumps(accelerator))
            break
        assert (other.mixed_precision, other.device, other.num_processes) == (precision, accelerator.device, 1)
        # The copy follows the same clock.
        accelerator.gradient_accumulation_steps = 5
        assert other.gradient_accumulation_steps == 5
