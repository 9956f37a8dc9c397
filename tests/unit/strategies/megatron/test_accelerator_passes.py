"""Megatron's own wrappers, schedules and optimizers give what the CPU's passes and torch's optimizers do."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate._base.errors import ConfigurationError, UsageError
from accelerate._base.imports import is_package_available
from accelerate.strategies.megatron.options import core
from accelerate.strategies.megatron.wrappers import make_schedule

if not is_package_available("megatron.core"):
    pytest.skip("needs megatron-core", allow_module_level=True)
pytest.importorskip("transformers")

from tests.support.megatron import make_model, make_rows
from tests.support.megatron_accelerator import accelerator_host, binding, plain_losses, prepare
from tests.support.training import fresh_accelerator

from accelerate.strategies.megatron import accelerator_passes
from accelerate.strategies.megatron.accelerator_optimizer import freeze_others, group_overrides
from accelerate.strategies.megatron.accelerator_passes import MegatronPasses
from accelerate.utils import MegatronLMPlugin


@pytest.fixture
def host() -> Iterator[list[int]]:
    with accelerator_host() as seeds:
        yield seeds


# --- passes -----------------------------------------------------------------------------------------------------------


def loss_and_gradients(kind: str, parts: int, *, per_token: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Compute them as the passes of the CPU do."""
    plugin = MegatronLMPlugin(calculate_per_token_loss=per_token)
    engine: Any = fresh_accelerator(cpu=True, megatron_lm_plugin=plugin).prepare(make_model(kind))
    outcome = engine.passes.run(engine.train_step_handler.forward_step, in_parts(kind, parts), trains=True)
    outcome.loss.backward()
    named = engine.carried.module.named_parameters()
    return float(outcome.loss), {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def in_parts(kind: str, count: int) -> list[dict[str, torch.Tensor]]:
    # Not of the same size, so that it matters how parts are weighed.
    ends = [0, 3, 8] if count == 2 else [0, 8]
    rows = make_rows(kind, 8)
    return [
        {name: torch.stack([row[name] for row in rows[begin:end]]) for name in rows[0]}
        for begin, end in itertools.pairwise(ends)
    ]


@pytest.mark.parametrize("kind", ["gpt2", "t5", "bert", "bert classes"])
@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("parts", [1, 2])
def test_passes_give_the_loss_and_the_gradients_of_the_cpu(
    host: list[int], kind: str, per_token: bool, parts: int
) -> None:
    expected, gradients = loss_and_gradients(kind, parts, per_token=per_token)
    run = prepare(kind, calculate_per_token_loss=per_token)
    outcome = run.passes.run(run.engine.train_step_handler.forward_step, in_parts(kind, parts), trains=True)
    assert outcome.loss is not None
    (outcome.loss * 3).backward()
    assert float(outcome.loss) == pytest.approx(expected, rel=1e-5)
    trained = {name: value for name, value in run.engine.carried.module.named_parameters() if value.requires_grad}
    assert gradients.keys() == trained.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(trained[name].main_grad, gradient * 3, rtol=1e-4, atol=1e-6)


def test_evaluation_returns_logits_and_leaves_gradients_alone(host: list[int]) -> None:
    run = prepare("gpt2")
    run.accelerator.backward(run.engine(**run.batch()).loss)
    before = [tensor.clone() for tensor in run.passes.gradients.tensors]
    run.engine.eval()
    found = run.engine(**run.batch())
    assert found.logits.shape == (8, 13, 101)
    assert not found.loss.requires_grad
    without = run.engine(input_ids=run.batch()["input_ids"])
    assert without.loss is None
    assert torch.equal(without.logits, found.logits)
    for tensor, expected in zip(run.passes.gradients.tensors, before, strict=True):
        assert torch.equal(tensor, expected)


def test_a_batch_without_labels_cannot_train(host: list[int]) -> None:
    run = prepare("gpt2")
    with pytest.raises(UsageError, match="without labels"):
        run.engine(input_ids=run.batch()["input_ids"])
    assert len(run.train(1)) == 1


def test_generators_are_seeded_once(host: list[int]) -> None:
    prepare("gpt2")
    prepare("gpt2")
    assert host == [0]


def test_a_model_that_is_not_trained_has_no_buffers(host: list[int]) -> None:
    run = prepare("gpt2", precision="bf16")
    inner = run.engine.carried.module
    passes = MegatronPasses(inner, run.engine.configs, trains=False)
    assert passes.gradients.tensors == []
    assert passes.module.module is inner


def test_schedules_are_told_how_gradients_are_exchanged(host: list[int]) -> None:
    run = prepare("gpt2", use_distributed_optimizer=True, other_megatron_args={"overlap_grad_reduce": True})
    config = run.passes.config
    assert config.finalize_model_grads_func is core("distributed").finalize_model_grads
    assert config.no_sync_func == run.passes.chunks[0].no_sync
    assert config.grad_scale_func == run.held.megatron.scale_loss
    losses = [loss for loss, _ in run.train(3)]
    assert losses[-1] < losses[0]


def test_buffers_that_also_hold_weights_are_refused(host: list[int]) -> None:
    run = prepare("gpt2")
    run.engine.configs.ddp.reuse_grad_buf_for_mxfp8_param_ag = True
    with pytest.raises(ConfigurationError, match="reuse_grad_buf_for_mxfp8_param_ag"):
        MegatronPasses(run.engine.carried.module, run.engine.configs, trains=True)


# --- the optimizer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "options", "clip"),
    [
        ("adamw", {}, None),
        ("adamw", {}, 0.5),
        ("sgd", {}, 0.5),
        ("groups", {}, None),
        ("adamw", {"use_distributed_optimizer": True}, 0.5),
        ("groups", {"use_distributed_optimizer": True}, None),
    ],
)
def test_a_model_learns_as_without_megatron(
    host: list[int], optimizer: str, options: dict[str, Any], clip: float | None
) -> None:
    found = prepare("llama", optimizer=optimizer, **options).train(4, clip)
    for (loss, norm), (expected, expected_norm) in zip(found, plain_losses("llama", optimizer, 4, clip), strict=True):
        assert loss == pytest.approx(expected, rel=1e-4)
        assert norm == pytest.approx(expected_norm, rel=1e-3)


@pytest.mark.parametrize("order", ["zero first", "zero between", "accumulation"])
def test_loops_may_forget_gradients_where_torch_lets_them(host: list[int], order: str) -> None:
    run = prepare("llama")
    losses = []
    for _ in range(3):
        if order == "zero first":
            run.optimizer.zero_grad()
        if order == "accumulation":
            for begin in (0, 4):
                part = run.engine(**run.batch(begin, begin + 4)).loss / 2
                run.accelerator.backward(part)
            loss = run.engine(**run.batch()).loss.detach()  # nobody goes back through it
        else:
            loss = run.engine(**run.batch()).loss
            if order == "zero between":
                run.optimizer.zero_grad()
            run.accelerator.backward(loss)
        losses.append(float(loss))
        run.optimizer.step()
        if order == "accumulation":
            run.optimizer.zero_grad()
    assert losses == pytest.approx([loss for loss, _ in plain_losses("llama", "adamw", 3)], rel=1e-4)


def test_a_step_without_gradients_changes_nothing(host: list[int]) -> None:
    run = prepare("gpt2")
    before = run.weights()
    kept = run.engine(**run.batch()).loss
    run.optimizer.step()
    assert run.held.num_updates == 0
    assert all(torch.equal(one, other) for one, other in zip(run.weights(), before, strict=True))
    assert float(run.held.clip_grad_norm(1.0)) == 0.0
    run.accelerator.backward(kept)
    run.optimizer.step()
    assert run.held.num_updates == 1


def test_an_overflow_skips_the_step_and_lowers_the_scale(host: list[int]) -> None:
    run = prepare("gpt2", precision="fp16", other_megatron_args={"initial_loss_scale": 2.0**30, "hysteresis": 1})
    before, scale = run.weights(), float(run.held.megatron.get_loss_scale())
    _, norm = run.train(1, clip=1.0)[0]
    assert run.optimizer.step_was_skipped
    assert norm == float("inf")
    assert all(torch.equal(one, other) for one, other in zip(run.weights(), before, strict=True))
    assert float(run.held.megatron.get_loss_scale()) == scale / 2
    run = prepare("gpt2", precision="fp16", other_megatron_args={"initial_loss_scale": 2.0**8})
    found = run.train(3, clip=1.0)
    assert not run.optimizer.step_was_skipped
    assert found[-1][0] < found[0][0]
    # Neither loss nor norm is multiplied by the scale.
    assert found[0] == pytest.approx(plain_losses("gpt2", "adamw", 1, clip=1.0)[0], rel=1e-2)


def test_the_norm_of_the_loop_is_for_one_step(host: list[int]) -> None:
    run = prepare("gpt2", gradient_clipping=0.25)
    run.train(1, clip=7.0)
    assert run.engine.configs.optimizer.clip_grad == 0.25
    assert "prepare_grads" not in vars(run.held.megatron)
    with pytest.raises(ConfigurationError, match="2-norm"):
        run.held.clip_grad_norm(1.0, norm_type=1.0)


def test_schedules_set_the_numbers_of_the_given_groups(host: list[int]) -> None:
    run = prepare("llama", optimizer="groups")
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.held.given, [lambda step: 0.5**step, lambda step: 0.1**step])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.train(1)
        scheduler.step()
    run.train(1)
    rates = {group["given_group"]: group["lr"] for group in run.held.megatron.param_groups}
    assert rates == {0: pytest.approx(5e-3), 1: pytest.approx(3e-4)}
    decays = {group["given_group"]: group["weight_decay"] for group in run.held.megatron.param_groups}
    assert decays == {0: pytest.approx(1e-2), 1: 0.0}


def test_schedules_of_megatron_set_them_too(host: list[int]) -> None:
    run = prepare("llama", optimizer="groups", train_iters=10, lr_warmup_iters=2, lr_decay_style="constant")
    assert run.engine.configs.schedule is not None
    schedule = make_schedule(run.held, run.engine.configs.schedule)
    schedule.step(increment=1)
    run.train(1)
    rates = {group["given_group"]: group["lr"] for group in run.held.megatron.param_groups}
    assert rates == {0: pytest.approx(5e-3), 1: pytest.approx(1.5e-3)}
    decays = {group["given_group"]: group["weight_decay"] for group in run.held.megatron.param_groups}
    assert decays == {0: pytest.approx(1e-2), 1: 0.0}


def test_parameters_of_no_group_and_frozen_ones_stay_out(host: list[int]) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    freeze_others(layers, torch.optim.SGD(layers[1].parameters(), lr=0.1))
    assert [parameter.requires_grad for parameter in layers.parameters()] == [False, False, True, True]
    run = prepare("gpt2")
    trained = {id(parameter) for group in run.held.param_groups for parameter in group["params"]}
    for name, parameter in run.engine.carried.module.named_parameters():
        assert parameter.requires_grad == (id(parameter) in trained), name


def test_each_group_is_told_by_its_parameters() -> None:
    first, second, other = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": [second], "lr": 0.5, "weight_decay": 0.0}]
    given = torch.optim.AdamW(groups, lr=0.1)
    overrides = group_overrides(given)
    assert [[key.matches(parameter, "") for parameter in (first, second, other)] for key in overrides] == [
        [True, False, False],
        [False, True, False],
    ]
    assert list(overrides.values()) == [
        {"given_group": 0, "lr": 0.1, "max_lr": 0.1, "weight_decay": 0.01, "lr_mult": 1.0},
        {"given_group": 1, "lr": 0.5, "max_lr": 0.5, "weight_decay": 0.0, "lr_mult": 2.0},
    ]
    sharded = torch.nn.Parameter(torch.zeros(1))
    sharded.orig_param = second  # type: ignore[attr-defined]
    assert [key.matches(sharded, "") for key in overrides] == [False, True]


@pytest.mark.parametrize(
    ("kind", "entry", "value"),
    [
        (torch.optim.AdamW, "betas", (0.5, 0.9)),
        (torch.optim.AdamW, "eps", 1e-3),
        (torch.optim.AdamW, "amsgrad", True),
        (torch.optim.SGD, "momentum", 0.3),
        (torch.optim.SGD, "maximize", True),
    ],
)
def test_numbers_that_megatron_has_once_are_refused_by_name(kind: Any, entry: str, value: Any) -> None:
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    given = kind([{"params": [first]}, {"params": [second], entry: value}], lr=0.1)
    with pytest.raises(ConfigurationError, match=f"Group 1 .* {entry}="):
        group_overrides(given)


def test_what_megatron_cannot_do_after_prepare_is_refused(host: list[int]) -> None:
    run = prepare("gpt2")
    with pytest.raises(UsageError, match="closure"):
        run.optimizer.step(lambda: 0.0)
    with pytest.raises(UsageError, match="added after prepare"):
        run.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})


# --- what is refused, and how schedules are called ---------------------------------------------------------------------


def test_a_pipeline_of_experts_needs_another_dispatcher(host: list[int]) -> None:
    run = prepare("gpt2")
    run.passes.stages = SimpleNamespace(size=lambda: 2)  # type: ignore[assignment]
    run.passes.config.num_moe_experts = 4
    run.passes.config.moe_token_dispatcher_type = "allgather"
    with pytest.raises(ConfigurationError, match="moe_token_dispatcher_type"):
        run.passes._configure(trains=True)
    run.passes.config.moe_token_dispatcher_type = "alltoall"
    run.passes._configure(trains=True)
    assert run.passes.config.variable_seq_lengths


def test_several_stages_of_a_process_need_as_many_parts(host: list[int]) -> None:
    run = prepare("gpt2")
    run.passes.chunks = run.passes.chunks * 2
    run.passes.stages = SimpleNamespace(size=lambda: 4)  # type: ignore[assignment]
    with pytest.raises(UsageError, match="num_micro_batches"):
        run.passes.run(run.engine.train_step_handler.forward_step, in_parts("gpt2", 2), trains=True)


def test_schedules_are_called_as_they_take_it(host: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """All three schedules have the same arguments; the one for several stages of a process is never run here."""
    run = prepare("gpt2")
    schedules = core("pipeline_parallel.schedules")
    for name in ("no_pipelining", "pipelining_without_interleaving", "pipelining_with_interleaving"):
        real = getattr(schedules, f"forward_backward_{name}")
        made: list[dict[str, Any]] = []
        schedule = binding(real, lambda made=made, **arguments: made.append(arguments))
        monkeypatch.setattr(accelerator_passes, "get_forward_backward_func", lambda schedule=schedule: schedule)
        outcome = run.passes.run(run.engine.train_step_handler.forward_step, in_parts("gpt2", 2), trains=False)
        assert outcome.loss is None
        assert made[0]["num_microbatches"] == 2
        assert made[0]["forward_only"]
        assert [len(list(batches)) for batches in made[0]["data_iterator"]] == [2]
