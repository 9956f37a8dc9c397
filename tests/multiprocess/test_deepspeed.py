"""What programs ask of DeepSpeed beside a plain loop: placeholders, several models, offload, a clear refusal."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.training import assert_near, fresh_accelerator, group_once, run_checks
from tests.support.zero import (
    BATCH,
    Case,
    make_net,
    make_optimizer,
    make_samples,
    prepare,
    quiet,
    squared_error,
    train,
    train_case,
)
from torch.utils.data import DataLoader

from accelerate import Accelerator, DeepSpeedPlugin, ParallelismConfig, PartialState
from accelerate._base.errors import AccelerateError
from accelerate._base.imports import is_torch_version
from accelerate.utils import DummyOptim, DummyScheduler

deepspeed = pytest.importorskip("deepspeed")
pytestmark = pytest.mark.multiprocess


def make_loader() -> DataLoader[Any]:
    return DataLoader(make_samples(32), batch_size=BATCH)


def step(accelerator: Accelerator, optimizer: Any, loss: torch.Tensor) -> float:
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def message_of(call: Any) -> str:
    try:
        call()
    except AccelerateError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


# --- in a group of two -------------------------------------------------------------------------------------------------


def placeholders() -> dict[str, Any]:
    """The optimizer and the schedule are DeepSpeed's; every entry waits for the program."""
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
        },
    }
    accelerator = fresh_accelerator(
        cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), gradient_accumulation_steps=2
    )
    model = make_net()
    optimizer = DummyOptim(model.parameters(), lr=0.02, weight_decay=0.1)
    schedule = DummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=2)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, make_loader(), schedule)
    losses, rates = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            losses.append(step(accelerator, optimizer, squared_error(model, batch).mean()))
            schedule.step()
        rates.append(schedule.get_last_lr()[0])
    return {
        "losses": losses,
        "rates": rates,
        "config": accelerator.deepspeed_config,
        "classes": [type(entry).__name__ for entry in (model, optimizer, schedule)],
        "engine": accelerator.deepspeed_engine_wrapped.engine is model,
        "unwrapped": type(accelerator.unwrap_model(model)).__name__,
    }


def plain_placeholders() -> list[float]:
    """The same without DeepSpeed: the warm-up of two steps from zero, then a straight line to zero after ten."""
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.1)
    inputs, targets = make_samples(32).tensors
    batches = [(inputs[begin : begin + 16], targets[begin : begin + 16]) for begin in (0, 16)]
    losses = []
    for number, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = (0.0, 0.02)[number]
        loss = squared_error(model, batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def teacher_and_student() -> dict[str, Any]:
    """One model is trained with ZeRO 2, another is read with ZeRO 3, by one Accelerator."""
    plugins = {"student": DeepSpeedPlugin(zero_stage=2), "teacher": DeepSpeedPlugin(zero_stage=3)}
    accelerator = fresh_accelerator(cpu=True, deepspeed_plugins=plugins)
    student = make_net()
    student, optimizer, loader = accelerator.prepare(student, make_optimizer(student), make_loader())
    accelerator.state.select_deepspeed_plugin("teacher")
    teacher = accelerator.prepare(make_net(seed=1))
    teacher.eval()
    losses = []
    for inputs, _ in loader:
        with torch.no_grad():
            wanted = teacher(inputs)
        losses.append(step(accelerator, optimizer, ((student(inputs) - wanted) ** 2).mean()))
    weights = accelerator.get_state_dict(teacher)
    expected = make_net(seed=1).state_dict()
    selected = [accelerator.deepspeed_plugin is plugins["teacher"], accelerator.state.get_deepspeed_plugin("student")]
    return {
        "losses": losses,
        "is sharded": [hasattr(parameter, "ds_id") for parameter in teacher.parameters()],
        "teacher": all(weights[name].equal(expected[name]) for name in weights) and bool(weights),
        "selected": selected[0] and selected[1] is plugins["student"] and not plugins["student"].selected,
        "unknown": message_of(lambda: accelerator.state.select_deepspeed_plugin("nobody")),
    }


def two_models(way: str) -> list[tuple[float, float]]:
    """Two models with settings of their own train together, through one Accelerator or through two."""
    plugins = {"first": DeepSpeedPlugin(zero_stage=2), "second": DeepSpeedPlugin(zero_stage=3)}
    accelerator = fresh_accelerator(
        cpu=True, gradient_accumulation_steps=2, **({} if way == "ddp" else {"deepspeed_plugins": plugins})
    )
    other = Accelerator(gradient_accumulation_steps=2) if way == "two accelerators" else accelerator
    first, second = make_net(), make_net(seed=1)
    first, first_optimizer, loader = accelerator.prepare(first, make_optimizer(first), make_loader())
    if way != "ddp":
        accelerator.state.select_deepspeed_plugin("second")
    second, second_optimizer = other.prepare(second, make_optimizer(second))
    losses = []
    for batch in loader:
        with accelerator.accumulate(first, second):
            one = step(accelerator, first_optimizer, squared_error(first, batch).mean())
            wanted = first(batch[0]).detach()
            losses.append((one, step(other, second_optimizer, ((second(batch[0]) - wanted) ** 2).mean())))
    return losses


def joint_loss(way: str) -> list[float]:
    """One loss of two engines."""
    plugins = {"first": DeepSpeedPlugin(zero_stage=1), "second": DeepSpeedPlugin(zero_stage=2)}
    accelerator = fresh_accelerator(cpu=True, **({} if way == "ddp" else {"deepspeed_plugins": plugins}))
    encoder, decoder = torch.nn.Linear(8, 6), torch.nn.Linear(6, 4)
    for seed, layer in enumerate((encoder, decoder)):
        torch.manual_seed(seed)
        layer.reset_parameters()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (encoder, decoder)]
    encoder, optimizers[0], loader = accelerator.prepare(encoder, optimizers[0], make_loader())
    decoder, optimizers[1] = accelerator.prepare(decoder, optimizers[1])
    losses = []
    for inputs, targets in loader:
        # Two passes for one step, with a norm that is asked for in between.
        accelerator.backward(((decoder(encoder(inputs)) - targets) ** 2).mean() * 0.25)
        accelerator.clip_grad_norm_(encoder.parameters(), float("inf"))
        loss = ((decoder(encoder(inputs)) - targets) ** 2).mean()
        accelerator.backward(loss * 0.75)
        accelerator.clip_grad_norm_(encoder.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def offloaded(stage: int) -> list[float]:
    """Optimizer states, and weights of ZeRO 3, rest on the host, and the program's own optimizer steps."""
    zero: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
    zero |= {"offload_param": {"device": "cpu"}} if stage == 3 else {}
    case = Case(stage, clip=0.5, config={"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False})
    found = train_case(case)
    return found.losses + found.norms


def dropped(stage: int) -> tuple[list[float], list[float]]:
    """Gradients that are not used are gone with zero_grad()."""
    found = []
    for drops in (False, True):
        run = prepare(Case(stage))
        losses = []
        for number, batch in enumerate(run.loader):
            loss = squared_error(run.model, batch).mean()
            if drops and number % 2 == 0:
                run.accelerator.backward(loss * 100)
                run.optimizer.zero_grad()
                loss = squared_error(run.model, batch).mean()
            losses.append(step(run.accelerator, run.optimizer, loss))
        found.append(losses)
    return found[0], found[1]


def overflowed(stage: int) -> dict[str, Any]:
    """A gradient that is not finite is not stepped with, on any rank, and the schedule waits."""
    run = prepare(Case(stage, "bf16", config={"bf16": {"enabled": True, "check_grad_overflow": True}}))
    skipped, rates = [], []
    for number, batch in enumerate(run.loader):
        factor = float("inf") if number == 1 and PartialState().process_index == 1 else 1.0
        step(run.accelerator, run.optimizer, squared_error(run.model, batch).mean() * factor)
        run.scheduler.step()
        skipped.append((run.optimizer.step_was_skipped, run.accelerator.optimizer_step_was_skipped))
        rates.append(run.scheduler.get_last_lr()[0])
    finite = all(weight.isfinite().all() for weight in run.accelerator.get_state_dict(run.model).values())
    return {"skipped": skipped, "rates": rates, "finite": finite}


def compiled() -> dict[str, Any]:
    from torch._dynamo.utils import counters

    found = {}
    for way, options in {
        "eager": {},
        "whole": {"dynamo_backend": "eager"},
    }.items():
        counters.clear()
        case = Case(2, options=options)
        run = prepare(case)
        found[way] = (train(run, case).losses, counters["stats"]["unique_graphs"])
    return found


def sharded_from_the_start() -> dict[str, Any]:
    """A model of Transformers is built in shards, and its parameters can be brought together."""
    transformers = pytest.importorskip("transformers")
    from accelerate.utils import GatheredParameters

    plugin = DeepSpeedPlugin(zero_stage=3)
    accelerator = fresh_accelerator(cpu=True, deepspeed_plugin=plugin)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    sharded = [(hasattr(parameter, "ds_id"), parameter.numel()) for parameter in model.parameters()]
    with GatheredParameters(list(model.parameters()), modifier_rank=None):
        whole = sum(parameter.numel() for parameter in model.parameters())
    with plugin.zero3_init_context_manager(enable=False):
        plain = transformers.AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = DataLoader(torch.arange(64).reshape(8, 8) % 32, batch_size=2)
    model, optimizer, tokens = accelerator.prepare(model, optimizer, tokens)
    losses = [step(accelerator, optimizer, model(input_ids=batch, labels=batch).loss) for batch in tokens]
    return {
        "sharded": sharded,
        "whole": whole,
        "plain": [hasattr(parameter, "ds_id") for parameter in plain.parameters()],
        "expected": sum(parameter.numel() for parameter in plain.parameters()),
        "losses": losses,
        "bucket": accelerator.deepspeed_config["zero_optimization"],
    }


def refused() -> dict[str, str]:
    """What cannot work is refused before anything is touched."""
    found = {}
    accelerator = fresh_accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    one, two = make_net(), make_net(seed=1)
    found["two models"] = message_of(lambda: accelerator.prepare(one, two, make_loader()))
    found["no model"] = message_of(lambda: accelerator.prepare(make_optimizer(one)))
    found["no batch size"] = message_of(lambda: accelerator.prepare(one, make_optimizer(one)))
    found["placeholder"] = message_of(lambda: accelerator.prepare(one, DummyOptim(one.parameters()), make_loader()))
    found["another plugin"] = message_of(lambda: Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3)))
    with pytest.raises(NotImplementedError):
        Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))
    found["no engine"] = message_of(lambda: accelerator.backward(torch.ones((), requires_grad=True)))
    model, optimizer, _ = accelerator.prepare(one, make_optimizer(one), make_loader())
    found["closure"] = message_of(lambda: optimizer.step(lambda: 0.0))
    found["value"] = message_of(lambda: accelerator.clip_grad_value_(model.parameters(), 1.0))
    found["norm"] = message_of(lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1))
    own = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 1}}
    accelerator = fresh_accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=own))
    net = make_net()
    found["two optimizers"] = message_of(lambda: accelerator.prepare(net, make_optimizer(net), make_loader()))
    fixed = {"gradient_clipping": 0.5, "zero_optimization": {"stage": 1}}
    accelerator = fresh_accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=fixed))
    model, *_ = accelerator.prepare(net, make_optimizer(net), make_loader())
    found["two norms"] = message_of(lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0))
    found["the same norm"] = message_of(lambda: accelerator.clip_grad_norm_(model.parameters(), 0.5))
    steps = {"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 1}}
    found["two windows"] = message_of(
        lambda: fresh_accelerator(
            cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=steps), gradient_accumulation_steps=2
        )
    )
    taken = fresh_accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=steps))
    found["window of the configuration"] = str(taken.gradient_accumulation_steps)
    accelerator = fresh_accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=1), mixed_precision="fp16")
    found["fp16"] = message_of(lambda: accelerator.prepare(net, make_optimizer(net), make_loader()))
    half = {"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    found["two formats"] = message_of(
        lambda: fresh_accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=half), mixed_precision="bf16")
    )
    accelerator = fresh_accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=0))
    accelerator.prepare(net, make_optimizer(net), make_loader())
    found["two without ZeRO"] = message_of(lambda: accelerator.prepare(two, make_optimizer(two)))
    found["layers"] = message_of(
        lambda: fresh_accelerator(
            cpu=True, deepspeed_plugin=DeepSpeedPlugin(), parallelism_config=ParallelismConfig(tp_size=2)
        )
    )
    return found


class Experts(torch.nn.Module):
    """Two layers, of which each sample uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        chosen = (inputs[:, :1] > 0).float()
        return chosen * self.layers[0](inputs) + (1 - chosen) * self.layers[1](inputs)


def experts() -> dict[str, Any]:
    """Layers of a class that is named are gathered as a whole."""
    from deepspeed.utils import get_z3_leaf_modules

    plugin = DeepSpeedPlugin(zero_stage=3, transformer_moe_cls_names="Experts")
    accelerator = fresh_accelerator(cpu=True, deepspeed_plugin=plugin)
    model = torch.nn.Sequential(make_net(), Experts())
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader())
    leaves = [type(layer).__name__ for layer in get_z3_leaf_modules(model.module)]
    return {
        "leaves": leaves,
        "losses": [step(accelerator, optimizer, squared_error(model, batch).mean()) for batch in loader],
    }


def prepared_again() -> list[tuple[int, int]]:
    """What the first loader filled is open for the next one."""
    accelerator = fresh_accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    found = []
    for batch_size in (2, 8):
        model = make_net()
        loader = DataLoader(make_samples(32), batch_size=batch_size)
        objects = accelerator.prepare(model, make_optimizer(model), loader)
        config = accelerator.deepspeed_config
        found.append((config["train_micro_batch_size_per_gpu"], config["train_batch_size"]))
        objects = accelerator.free_memory(*objects)
    return found


def stopped(root: str) -> dict[str, Any]:
    """A signal that one process got stops both at the same step, and the run goes on from there."""
    case = Case(3)
    whole = train(prepare(case), case).losses
    run = prepare(case)
    accelerator = run.accelerator
    assert not accelerator.should_stop
    losses = []
    for number, batch in enumerate(run.loader):
        losses.append(step(accelerator, run.optimizer, squared_error(run.model, batch).mean()))
        run.scheduler.step()
        if number == 2 and accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if number >= 2:
            time.sleep(0.2)  # the processes agree ten times a second, and few steps are left
        if accelerator.should_stop:
            break
    accelerator.save_state(f"{root}/stopped")
    rest = prepare(case)
    rest.accelerator.load_state(f"{root}/stopped")
    return {"whole": whole, "losses": losses, "rest": train(rest, case).losses}


def work_of_two(root: str) -> dict[str, Any]:
    quiet()
    found = run_checks(placeholders, teacher_and_student, compiled, sharded_from_the_start, refused, experts)
    found["two models"] = {way: two_models(way) for way in ("ddp", "one accelerator", "two accelerators")}
    found["joint"] = {way: joint_loss(way) for way in ("ddp", "deepspeed")}
    plain = train_case(Case(None, clip=0.5))
    found["offloaded"] = {stage: offloaded(stage) for stage in (1, 2, 3)}
    found["not offloaded"] = plain.losses + plain.norms
    found["dropped"] = {stage: dropped(stage) for stage in (0, 1, 2, 3)}
    found["overflowed"] = {stage: overflowed(stage) for stage in (2, 3)}
    found |= {"prepared again": prepared_again(), "stopped": stopped(root)}
    return found


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    FOLDER.append(str(tmp_path_factory.mktemp("deepspeed")))


FOLDER: list[str] = []


def two(what: str) -> list[Any]:
    return [rank[what] for rank in group_once(work_of_two, 2, FOLDER[0])]


def test_what_one_loader_filled_is_open_for_the_next() -> None:
    assert two("prepared again") == [[(2, 4), (8, 16)]] * 2


def test_a_signal_stops_both_processes_at_the_same_step() -> None:
    for found in two("stopped"):
        assert 3 <= len(found["losses"]) < len(found["whole"])
        assert found["losses"] + found["rest"] == found["whole"]
    assert len({len(found["losses"]) for found in two("stopped")}) == 1


def test_placeholders_stand_for_the_configuration() -> None:
    for found in two("placeholders"):
        assert found["classes"] == ["DeepSpeedEngine", "DeepSpeedOptimizerWrapper", "DeepSpeedSchedulerWrapper"]
        assert found["engine"]
        assert found["unwrapped"] == "Sequential"
        config = found["config"]
        assert (config["train_batch_size"], config["train_micro_batch_size_per_gpu"]) == (16, 4)
        assert config["optimizer"]["params"] == {"lr": 0.02, "weight_decay": 0.1, "torch_adam": True}
        assert config["scheduler"]["params"] == {
            "warmup_min_lr": 0,
            "warmup_max_lr": 0.02,
            "warmup_num_steps": 2,
            "total_num_steps": 10,
        }
        # The engine steps its schedule once a window.
        assert found["rates"] == pytest.approx([found["rates"][0], 0.0, 0.0, 0.02], abs=1e-12)
    means = torch.tensor([rank["losses"] for rank in two("placeholders")]).mean(dim=0).reshape(2, 2).mean(dim=1)
    assert_near("losses", means, torch.tensor(plain_placeholders()), 2e-6)


def test_a_model_that_is_only_read_is_sharded_too() -> None:
    for rank, found in enumerate(two("teacher_and_student")):
        assert all(found["is sharded"])
        assert found["teacher"] is (rank == 0)
        assert found["selected"]
        assert "There are no settings of DeepSpeed under 'nobody'" in found["unknown"]
        assert len(set(found["losses"])) == 4


@pytest.mark.parametrize("way", ["one accelerator", "two accelerators"])
def test_two_models_with_two_plugins_train_together(way: str) -> None:
    for found in two("two models"):
        assert_near(way, torch.tensor(found[way]), torch.tensor(found["ddp"]), 2e-6)


def test_one_loss_of_two_engines() -> None:
    for found in two("joint"):
        assert_near("losses", torch.tensor(found["deepspeed"]), torch.tensor(found["ddp"]), 2e-6)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_on_the_host_train_the_same(stage: int) -> None:
    for found, expected in zip(two("offloaded"), two("not offloaded"), strict=True):
        assert_near("losses and norms", torch.tensor(found[stage]), torch.tensor(expected), 2e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_that_are_not_used_are_dropped(stage: int) -> None:
    for found in two("dropped"):
        without, with_drops = found[stage]
        assert with_drops == without


@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_that_is_not_finite_is_not_stepped_with(stage: int) -> None:
    for found in two("overflowed"):
        assert found[stage]["skipped"] == [(False, False), (True, True), *[(False, False)] * 6]
        assert found[stage]["finite"]
        rates = found[stage]["rates"]
        assert rates[1] == rates[0]
        assert rates[2] < rates[1]


def test_a_compiled_model_trains_the_same() -> None:
    for found in two("compiled"):
        assert found["whole"][0] == pytest.approx(found["eager"][0], abs=1e-6)
        assert found["eager"][1] == 0
        # That of torch 2.9 does not follow DeepSpeed's hooks, and compiles what is around them or nothing.
        assert is_torch_version("<", "2.10") or found["whole"][1] == 1


def test_models_are_built_in_shards() -> None:
    for found in two("sharded_from_the_start"):
        assert all(is_sharded and not numbers for is_sharded, numbers in found["sharded"])
        assert not any(found["plain"])
        assert found["whole"] == found["expected"]
        assert found["losses"][-1] < found["losses"][0]


def test_experts_are_gathered_as_a_whole() -> None:
    for found in two("experts"):
        assert found["leaves"] == ["Experts"]
        assert len(found["losses"]) == 4


REFUSALS = {
    "two models": "was given 2 models (Sequential, Sequential) under DeepSpeed",
    "no model": "was given AdamW without its model",
    "no batch size": "Give a loader with a batch size to prepare()",
    "placeholder": "A DummyOptim was given, which stands for the optimizer of DeepSpeed's configuration",
    "another plugin": "This process has the settings 'default' of DeepSpeed already",
    "no engine": "no model was prepared with an optimizer",
    "closure": "optimizer.step(closure) was called under DeepSpeed",
    "value": "clip_grad_value_ was called under 'deepspeed'",
    "norm": "clip_grad_norm_(norm_type=1) was called under DeepSpeed",
    "two optimizers": "AdamW was given as the optimizer, but DeepSpeed's configuration has one too",
    "two norms": "clip_grad_norm_(max_norm=1.0) was called, but DeepSpeed's configuration says gradient_clipping=0.5",
    "the same norm": "nothing was refused",
    "two windows": "gradient_accumulation_steps=2 was given to the Accelerator, but DeepSpeed's configuration says",
    "window of the configuration": "4",
    "fp16": "DeepSpeed does not compute in it on this cpu",
    "two formats": "mixed_precision='bf16' contradicts",
    "two without ZeRO": "Make a second Accelerator()",
    "layers": "tp_size=2, cp_size=1 were given with DeepSpeed",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_work_is_refused(what: str) -> None:
    for found in two("refused"):
        assert REFUSALS[what] in found[what]


# --- in a process of its own -------------------------------------------------------------------------------------------


def alone(root: str) -> dict[str, Any]:
    """A program that nobody launched trains with DeepSpeed, saves and goes on."""
    found = {}
    for stage in (0, 2, 3):
        case = Case(stage)
        run = prepare(case)
        whole = train(
            run, case, stop=5, then=lambda run=run, stage=stage: run.accelerator.save_state(f"{root}/{stage}")
        )
        rest = prepare(case)
        rest.accelerator.load_state(f"{root}/{stage}")
        found[stage] = (whole.losses, train(rest, case).losses, rest.accelerator.num_processes)
    return found


def test_a_program_that_nobody_launched(tmp_path: Path) -> None:
    found = group_once(alone, 1, str(tmp_path))[0]
    plain = group_once(alone_without, 1)[0]
    for losses, rest, count in found.values():
        assert_near("losses", torch.tensor(losses + rest), torch.tensor(plain), 2e-6)
        assert count == 1


def alone_without() -> list[float]:
    return train_case(Case(None)).losses
