"""The training step on groups of processes: when gradients are exchanged, and what schedules and hooks do then."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from tests.support.training import (
    FEATURES,
    copy_weights,
    fresh_accelerator,
    group_once,
    make_data,
    make_model,
    run_checks,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import reset_warnings
from accelerate.local_sgd import LocalSGD
from accelerate.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
)

pytestmark = pytest.mark.multiprocess

FLOAT32 = torch.float32
SCALE = 1024.0


def own_batch(accelerator: Accelerator) -> torch.Tensor:
    return torch.full((1, 1), float(accelerator.process_index + 1))


def line() -> torch.nn.Module:
    return torch.nn.Linear(1, 1, bias=False)


def gradient(model: torch.nn.Module) -> float:
    return next(model.parameters()).grad.item()  # type: ignore[union-attr]


def ranks(accelerator: Accelerator, value: float) -> list[float]:
    """Return the values of all ranks."""
    return accelerator.gather(torch.tensor([value])).tolist()  # type: ignore[no-any-return]


def exchange_by_window() -> list[list[float]]:
    return _gradients_after_each_batch()


def exchange_by_batch() -> list[list[float]]:
    return _gradients_after_each_batch(sync_each_batch=True)


def _gradients_after_each_batch(**options: Any) -> list[list[float]]:
    plugin = GradientAccumulationPlugin(num_steps=2, **options)
    accelerator = fresh_accelerator(gradient_accumulation_plugin=plugin)
    model = accelerator.prepare(line())
    found = []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(own_batch(accelerator)).sum())
            found.append(ranks(accelerator, gradient(model)))
    return found


def no_sync_suspends_the_exchange() -> list[list[float]]:
    accelerator = fresh_accelerator()
    model = accelerator.prepare(line())
    with accelerator.no_sync(model):
        accelerator.backward(model(own_batch(accelerator)).sum())
    apart = ranks(accelerator, gradient(model))
    accelerator.backward(model(own_batch(accelerator)).sum())
    return [apart, ranks(accelerator, gradient(model))]


def trigger_sync_exchanges_after_all() -> list[list[float]]:
    accelerator = fresh_accelerator()
    model = accelerator.prepare(line())
    with accelerator.no_sync(model):
        first = model(own_batch(accelerator)).sum()
        second = model(own_batch(accelerator)).sum()
        accelerator.backward(first)
        apart = ranks(accelerator, gradient(model))
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(second)
        together = ranks(accelerator, gradient(model))
        model.zero_grad()
        accelerator.backward(model(own_batch(accelerator)).sum())
    return [apart, together, ranks(accelerator, gradient(model))]


def nested_loop_inside_a_window() -> list[int]:
    accelerator = fresh_accelerator(gradient_accumulation_steps=3)
    batches = 7 * 2 * accelerator.num_processes
    model, train, test = accelerator.prepare(
        line(), *(DataLoader(torch.ones(count, 1), batch_size=2) for count in (batches, 5))
    )
    found = []
    for number, batch in enumerate(train, 1):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
            for _ in test:
                assert accelerator.gradient_state.active_dataloader is test
                if number % 2:
                    break
            found += [number] if accelerator.sync_gradients else []
    assert accelerator.gradient_state.active_dataloader is None
    return found


def learning_rates() -> dict[str, list[float]]:
    """Return the learning rate after each of three optimizer steps under the rules of stepping."""

    def run(make: Any, calls: int = 3, **options: Any) -> list[float]:
        accelerator = fresh_accelerator(**options)
        model = line()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, make(optimizer))
        rates = []
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This schedule advances")
            for _ in range(calls):
                with accelerator.accumulate(model):
                    accelerator.backward(model(own_batch(accelerator)).sum())
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                    rates.append(schedule.get_last_lr()[0])
        return rates

    def halving(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def one_cycle(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=5)

    return {
        "processes": run(halving),
        "split": run(halving, dataloader_config=DataLoaderConfiguration(split_batches=True)),
        "by hand": run(halving, step_scheduler_with_optimizer=False),
        "window": run(halving, calls=4, gradient_accumulation_steps=2),
        "one cycle": run(one_cycle, calls=6),
    }


def overflow_on_one_rank() -> list[Any]:
    accelerator = fresh_accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=SCALE)])
    model = line()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    found = []
    for factor in (3e38 if accelerator.is_last_process else 1.0, 1.0):
        accelerator.backward((model(own_batch(accelerator)) * factor).sum())
        before = copy_weights(model)
        optimizer.step()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="This schedule advances")
            schedule.step()
        optimizer.zero_grad()
        moved = not before["module.weight"].equal(model.module.weight)
        rate = schedule.get_last_lr()[0]
        found.append((accelerator.optimizer_step_was_skipped, moved, accelerator.scaler.get_scale(), rate))
    return found


def join_of_uneven_loaders() -> dict[str, Any]:
    """Ranks with different numbers of batches train in one loop; gradients are those of the ranks that are left."""
    accelerator = fresh_accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    world = accelerator.num_processes
    values = torch.arange(1.0, world + 2)[:, None]
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(values, batch_size=1))
    gradients = []
    with accelerator.join_uneven_inputs([model]):
        for batch in loader:
            accelerator.backward(model(batch).sum())
            gradients.append(gradient(model))
            optimizer.step()
            optimizer.zero_grad()
    even = accelerator.prepare(DataLoader(values, batch_size=1))
    accelerator.even_batches = True
    counts = [len(list(even))]
    with accelerator.join_uneven_inputs([model], even_batches=True):
        counts.append(len(list(even)))
    return {"gradients": gradients, "counts": counts, "after": len(list(even))}


def triggers() -> list[bool]:
    accelerator = fresh_accelerator()
    found = [accelerator.check_trigger()]
    if accelerator.is_last_process:
        accelerator.set_trigger()
    return [*found, accelerator.check_trigger(), accelerator.check_trigger()]


def local_sgd() -> dict[str, Any]:
    accelerator = fresh_accelerator(gradient_accumulation_steps=2)
    model = line()
    with torch.no_grad():
        model.weight.fill_(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    seen = []
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4) as averaging:
        for _ in range(6):
            with accelerator.accumulate(model):
                accelerator.backward(model(own_batch(accelerator)).sum())
                optimizer.step()
                optimizer.zero_grad()
                averaging.step()
            seen.append(ranks(accelerator, model.module.weight.item()))
    after = ranks(accelerator, model.module.weight.item())
    accelerator.gradient_accumulation_steps = 1
    accelerator.backward(model(own_batch(accelerator)).sum())
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=False) as idle:
        idle.step()
    counted = (averaging.num_steps, idle.num_steps)
    return {"seen": seen, "after": after, "exchange": ranks(accelerator, gradient(model)), "counted": counted}


def communication_hooks() -> dict[str, Any]:
    """Train with compressed gradients; return losses and whether ranks agree."""
    found: dict[str, Any] = {}
    options: dict[str, dict[str, Any]] = {
        "no": {},
        "fp16": {"comm_hook": "fp16"},
        "power_sgd": {"comm_hook": "power_sgd", "comm_state_option": {"matrix_approximation_rank": 2}},
        "power_sgd in fp16": {"comm_hook": "power_sgd", "comm_wrapper": "fp16"},
    }
    for name, option in options.items():
        if "power_sgd" in name:
            state = {"start_powerSGD_iter": 2, **option.get("comm_state_option", {})}
            option = {**option, "comm_state_option": state}
        accelerator = fresh_accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**option)])
        model = make_model(dtype=FLOAT32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer, loader = accelerator.prepare(
            model, optimizer, DataLoader(make_data(24, FLOAT32), batch_size=12 // accelerator.num_processes)
        )
        losses = []
        for _ in range(6):
            for inputs, targets in loader:
                loss = (model(inputs) - targets).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
        flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        spread = (accelerator.gather(flat[None]) - flat).abs().max().item()
        found[name] = {"losses": losses, "spread": spread, "weights": flat}
    return found


def options_of_ddp() -> dict[str, Any]:
    options = {"bucket_cap_mb": 3, "find_unused_parameters": True, "gradient_as_bucket_view": True}
    accelerator = fresh_accelerator(kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, **options)])
    two = torch.nn.ModuleList([line(), line()])
    two.forward = lambda inputs: two[0](inputs)  # type: ignore[method-assign]
    model = accelerator.prepare(two)
    # A parameter without a gradient would stop the second pass if the option did not arrive.
    for _ in range(2):
        accelerator.backward(model(own_batch(accelerator)).sum())
    found = {name: getattr(model, name) for name in ("find_unused_parameters", "gradient_as_bucket_view")}
    return {**found, "bucket": model.bucket_bytes_cap, "buffers": model.broadcast_buffers}


def options_that_are_set_later() -> dict[str, Any]:
    """Transformers' Trainer sets the options of DDP when it wraps its model."""
    accelerator = fresh_accelerator(mixed_precision="bf16")
    accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True, bucket_cap_mb=3)
    accelerator.autocast_handler = AutocastKwargs(enabled=False)
    user = make_model(dtype=FLOAT32)
    inside: list[bool] = []
    user.register_forward_pre_hook(lambda module, args: inside.append(torch.is_autocast_enabled("cpu")))
    model = accelerator.prepare(user)
    model(torch.ones(1, FEATURES))
    return {"unused": model.find_unused_parameters, "bucket": model.bucket_bytes_cap, "autocast": inside}


def learned_inputs() -> dict[str, Any]:
    """A frozen model with parameters beside it, whose gradients nobody averages but the program."""
    accelerator = fresh_accelerator()
    reset_warnings()
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for average in (False, True):
            prompt = torch.nn.Parameter(torch.zeros(1, 1))
            model, optimizer = accelerator.prepare(line().requires_grad_(False), torch.optim.SGD([prompt], lr=1.0))
            model.weight.fill_(1.0)
            accelerator.backward((model(prompt) * own_batch(accelerator)).sum())
            if average:
                prompt.grad = accelerator.reduce(prompt.grad, "mean")
            optimizer.step()
            found["averaged" if average else "alone"] = ranks(accelerator, prompt.item())
    found["warnings"] = [(str(entry.message), entry.filename) for entry in said]
    return found


def frozen_models() -> dict[str, Any]:
    """Models without anything to train, which DDP refuses: alone, beside one that is trained, and one after another."""
    accelerator = fresh_accelerator()
    teacher = accelerator.prepare(line().requires_grad_(False))
    judge, student = accelerator.prepare(line().requires_grad_(False), line())
    for frozen in (teacher, judge):
        frozen.weight.fill_(2.0)
    accelerator.backward((student(own_batch(accelerator)) * teacher(own_batch(accelerator))).sum())
    return {
        "wrapped": [isinstance(model, DistributedDataParallel) for model in (teacher, judge, student)],
        "devices": [model.weight.device.type for model in (teacher, judge)],
        "gradient": accelerator.unwrap_model(student).weight.grad.item(),
        "kept": len(accelerator._models),
    }


def wrappers() -> dict[str, Any]:
    """A replica in bf16: outputs, a second prepare, unwrapping, copies."""
    accelerator = fresh_accelerator(mixed_precision="bf16")
    user = make_model(dtype=FLOAT32)
    frozen = make_model(dtype=FLOAT32).requires_grad_(False)
    model, still = accelerator.prepare(user, frozen)
    assert isinstance(model, DistributedDataParallel)
    assert still is frozen
    assert accelerator.prepare(model) is model
    for again in (user, accelerator.unwrap_model(model)):
        with pytest.raises(ConfigurationError, match="already prepared"):
            accelerator.prepare(again)
    assert accelerator.unwrap_model(model) is user
    evaluated = accelerator.prepare_model(make_model(dtype=FLOAT32), evaluation_mode=True)
    assert not isinstance(evaluated, DistributedDataParallel)
    other = copy.deepcopy(accelerator.unwrap_model(model))
    inputs = torch.ones(2, FEATURES)
    with torch.no_grad():
        assert other(inputs).equal(user(inputs))
        dtype = model(inputs).dtype
    assert copy.deepcopy(accelerator) is accelerator
    pickled = pickle.loads(pickle.dumps(accelerator.unwrap_model(model, keep_fp32_wrapper=False)))
    return {"dtype": dtype, "keys": list(pickled.state_dict()) == list(accelerator.get_state_dict(model))}


def evaluated_before_it_is_trained() -> dict[str, Any]:
    """A model is prepared for evaluation, as by the Trainer's evaluate(), and for training after that."""
    accelerator = fresh_accelerator()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    same = accelerator.prepare_model(model, evaluation_mode=True) is model
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trained, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(trained(torch.full((1, 1), accelerator.process_index + 1.0)).sum())
    gradient = model.weight.grad.item() if model.weight.grad is not None else None
    return {
        "same": same,
        "wrapped": isinstance(trained, DistributedDataParallel),
        "gradient": gradient,
        "again": accelerator.prepare(trained) is trained,
        "kept": (len(accelerator._models), accelerator._models[0] is model),
    }


def pickled_accelerator() -> tuple[Any, ...]:
    accelerator = fresh_accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
    accelerator.gather(torch.ones(1))
    _, loader = accelerator.prepare(line(), DataLoader(torch.ones(8, 1), batch_size=1))
    for _ in loader:
        other = pickle.loads(pickle.dumps(accelerator))
        break
    same = (other.process_index, other.num_processes) == (accelerator.process_index, accelerator.num_processes)
    return same, other.gradient_accumulation_steps, other.gather(torch.tensor([other.process_index])).tolist()


CHECKS = (
    exchange_by_window,
    exchange_by_batch,
    no_sync_suspends_the_exchange,
    trigger_sync_exchanges_after_all,
    nested_loop_inside_a_window,
    learning_rates,
    overflow_on_one_rank,
    join_of_uneven_loaders,
    triggers,
    local_sgd,
    communication_hooks,
    options_of_ddp,
    options_that_are_set_later,
    learned_inputs,
    frozen_models,
    wrappers,
    evaluated_before_it_is_trained,
    pickled_accelerator,
)
WORLD_SIZES = pytest.mark.parametrize("world_size", [2, 3])


def results(world_size: int, check: str) -> list[Any]:
    return [found[check] for found in group_once(run_checks, world_size, *CHECKS)]


def mean_of_ranks(world_size: int) -> float:
    return (world_size + 1) / 2


@WORLD_SIZES
def test_gradients_differ_inside_a_window_and_agree_at_its_end(world_size: int) -> None:
    halves = [(rank + 1) / 2 for rank in range(world_size)]
    for found in results(world_size, "exchange_by_window"):
        assert found == [halves, [pytest.approx(mean_of_ranks(world_size))] * world_size]


@WORLD_SIZES
def test_gradients_agree_after_each_batch_if_asked(world_size: int) -> None:
    mean = mean_of_ranks(world_size)
    for found in results(world_size, "exchange_by_batch"):
        assert found == [[pytest.approx(mean / 2)] * world_size, [pytest.approx(mean)] * world_size]


@WORLD_SIZES
def test_no_sync_holds_gradients_back_until_the_next_pass(world_size: int) -> None:
    apart = [rank + 1.0 for rank in range(world_size)]
    for found in results(world_size, "no_sync_suspends_the_exchange"):
        assert found == [apart, [pytest.approx(2 * mean_of_ranks(world_size))] * world_size]


@WORLD_SIZES
def test_an_exchange_can_be_triggered_after_no_sync(world_size: int) -> None:
    apart = [rank + 1.0 for rank in range(world_size)]
    together = [pytest.approx(2 * mean_of_ranks(world_size))] * world_size
    for found in results(world_size, "trigger_sync_exchanges_after_all"):
        assert found == [apart, together, apart]


@WORLD_SIZES
def test_nested_loops_leave_the_windows_alone(world_size: int) -> None:
    assert results(world_size, "nested_loop_inside_a_window") == [[3, 6, 7]] * world_size


@WORLD_SIZES
def test_schedules_step_by_the_rules(world_size: int) -> None:
    pace = 0.5**world_size
    for found in results(world_size, "learning_rates"):
        assert found["processes"] == [pace, pace**2, pace**3]
        assert found["split"] == found["by hand"] == [0.5, 0.25, 0.125]
        assert found["window"] == [1.0, pace, pace, pace**2]


@WORLD_SIZES
def test_a_one_cycle_schedule_stops_at_its_end(world_size: int) -> None:
    model = line()
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        torch.optim.SGD(model.parameters(), lr=1.0), max_lr=1.0, total_steps=5
    )
    schedule.optimizer.step()
    rates = [schedule.get_last_lr()[0]]
    for _ in range(5):
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    with pytest.raises(ValueError, match="Tried to step 6 times"):
        schedule.step()
    for found in results(world_size, "learning_rates"):
        reached = [min(world_size * call, len(rates) - 1) for call in range(1, 7)]
        assert found["one cycle"] == pytest.approx([rates[index] for index in reached])


@WORLD_SIZES
def test_an_overflow_on_one_rank_skips_the_step_on_all(world_size: int) -> None:
    for found in results(world_size, "overflow_on_one_rank"):
        assert found == [(True, False, SCALE / 2, 1.0), (False, True, SCALE / 2, 0.5**world_size)]


@WORLD_SIZES
def test_ranks_with_fewer_batches_wait_in_a_join(world_size: int) -> None:
    first, *others = results(world_size, "join_of_uneven_loaders")
    mean = sum(range(1, world_size + 1)) / world_size
    # The last sample is alone in its round; torch divides by the number of ranks at the start.
    assert first["gradients"] == pytest.approx([mean, (world_size + 1) / world_size])
    assert all(other["gradients"] == pytest.approx([mean]) for other in others)
    assert first["counts"] == [2, 2]
    assert all(other["counts"] == [1, 2] for other in others)
    assert [found["after"] for found in (first, *others)] == [2] + [1] * (world_size - 1)


@WORLD_SIZES
def test_a_trigger_reaches_all_ranks_once(world_size: int) -> None:
    assert results(world_size, "triggers") == [[False, True, False]] * world_size


@WORLD_SIZES
def test_local_sgd_averages_weights_now_and_then(world_size: int) -> None:
    mean = mean_of_ranks(world_size)
    own = [rank + 1.0 for rank in range(world_size)]
    for found in results(world_size, "local_sgd"):
        # Every second batch updates, and every fourth call averages.
        start, alone, still_alone, averaged, same, apart = found["seen"]
        assert start == [0.0] * world_size
        assert alone == still_alone == [-value for value in own]
        assert averaged == same == pytest.approx([-2 * mean] * world_size)
        assert apart == pytest.approx([-2 * mean - value for value in own])
        assert found["counted"] == (6, 1)
        assert found["after"] == pytest.approx([-3 * mean] * world_size)
        assert found["exchange"] == pytest.approx([mean] * world_size)


@WORLD_SIZES
@pytest.mark.parametrize("hook", ["fp16", "power_sgd", "power_sgd in fp16"])
def test_compressed_gradients_train(hook: str, world_size: int) -> None:
    for found in results(world_size, "communication_hooks"):
        losses = found[hook]["losses"]
        assert losses[-1] < 0.9 * losses[0]
        assert found[hook]["spread"] == 0.0
        # The compression is really in use: it changes the weights a little.
        difference = (found[hook]["weights"] - found["no"]["weights"]).abs().max().item()
        assert 0 < difference < 0.5


@WORLD_SIZES
def test_options_reach_ddp(world_size: int) -> None:
    for found in results(world_size, "options_of_ddp"):
        assert (found["find_unused_parameters"], found["gradient_as_bucket_view"]) == (True, True)
        assert (found["bucket"], found["buffers"]) == (3 * 1024 * 1024, False)


@WORLD_SIZES
def test_options_that_are_set_later_reach_what_is_prepared_then(world_size: int) -> None:
    for found in results(world_size, "options_that_are_set_later"):
        assert found == {"unused": True, "bucket": 3 * 2**20, "autocast": [False]}


@WORLD_SIZES
def test_parameters_of_no_model_are_trained_and_a_warning_says_how_to_average_them(world_size: int) -> None:
    for found in results(world_size, "learned_inputs"):
        assert found["alone"] == [-(rank + 1.0) for rank in range(world_size)]
        assert found["averaged"] == [-mean_of_ranks(world_size)] * world_size
        ((message, file),) = found["warnings"]
        assert "SGD are in no prepared model" in message
        assert 'accelerator.reduce(parameter.grad, "mean")' in message
        assert file == __file__


@WORLD_SIZES
def test_frozen_models_are_prepared_beside_those_that_are_trained(world_size: int) -> None:
    squares = [2.0 * rank * rank for rank in range(1, world_size + 1)]
    for found in results(world_size, "frozen_models"):
        assert found["wrapped"] == [False, False, True]
        assert found["devices"] == ["cpu", "cpu"]
        assert found["gradient"] == pytest.approx(sum(squares) / world_size)
        assert found["kept"] == 3


@WORLD_SIZES
def test_a_replica_is_wrapped_once_and_unwraps_to_the_model(world_size: int) -> None:
    for found in results(world_size, "wrappers"):
        assert found == {"dtype": torch.float32, "keys": True}


@WORLD_SIZES
def test_a_model_that_was_evaluated_first_is_trained_as_a_replica(world_size: int) -> None:
    for found in results(world_size, "evaluated_before_it_is_trained"):
        assert (found["same"], found["wrapped"], found["again"]) == (True, True, True)
        assert found["gradient"] == pytest.approx(mean_of_ranks(world_size))
        assert found["kept"] == (1, True)


@WORLD_SIZES
def test_an_accelerator_of_a_group_can_be_pickled(world_size: int) -> None:
    assert results(world_size, "pickled_accelerator") == [(True, 2, list(range(world_size)))] * world_size


def test_averaging_after_no_step_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"local_sgd_steps=0 is not a number of steps. Write 1 or more"):
        LocalSGD(fresh_accelerator(), line(), 0)
