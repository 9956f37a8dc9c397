"""What Megatron cannot train is refused in one sentence, before a group is made; placeholders become what they stand for."""

from __future__ import annotations

import importlib
import logging
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.megatron import make_model, make_rows
from tests.support.training import fresh_accelerator
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from accelerate import Accelerator
from accelerate._base.errors import ConfigurationError, MissingPackageError, UsageError
from accelerate._base.imports import is_package_available
from accelerate.runtime import current
from accelerate.strategies.megatron.configs import translate
from accelerate.strategies.megatron.micro_batches import MergedBatches, enlarged
from accelerate.strategies.megatron.options import core
from accelerate.strategies.megatron.strategy import check_built
from accelerate.utils import MegatronLMDummyScheduler, MegatronLMPlugin

pytestmark = [
    pytest.mark.skipif(not is_package_available("megatron.core"), reason="needs megatron-core"),
    pytest.mark.usefixtures("alone"),
]


def make(**options: Any) -> Accelerator:
    return fresh_accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**options))


def adamw(model: Any, **values: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, **values)


class Opt(torch.nn.Linear):
    """A model of a type that nobody has registered."""

    class config:
        model_type = "opt"


REFUSED: dict[str, tuple[Any, str]] = {
    "two models": (lambda model: (model, make_model("llama")), r"2 models \(GPT2LMHeadModel, LlamaForCausalLM\)"),
    "an optimizer alone": (lambda model: (adamw(model),), r"AdamW without its model.*prepare\(model, optimizer\)"),
    "another optimizer": (
        lambda model: (model, torch.optim.RMSprop(model.parameters())),
        r"RMSprop was given.*Adam, AdamW and SGD",
    ),
    "no Transformers model": (lambda _: (torch.nn.Linear(2, 2),), r"Linear was given.*Pass a Transformers model"),
    "an unknown type": (lambda _: (Opt(2, 2),), r"type 'opt' are not known here.*register another"),
    "a schedule alone": (
        lambda model: (model, MegatronLMDummyScheduler(None)),
        r"MegatronLMDummyScheduler without an optimizer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_before_a_group_is_made(name: str) -> None:
    given, message = REFUSED[name]
    accelerator, model = make(), make_model("gpt2")
    with pytest.raises(ConfigurationError, match=message):
        accelerator.prepare(*given(model))
    assert not torch.distributed.is_initialized()
    assert not next(model.parameters()).is_meta


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_degree": 3}, r"tp_degree=3.*needs a multiple of 3 processes, and there are 1"),
        ({"pp_degree": 2}, r"pp_degree=2.*needs a multiple of 2 processes"),
        ({"other_megatron_args": {"hiden_size": 8}}, r"'hiden_size'.*Write 'hidden_size'"),
        ({"tensorboard_dir": "logs"}, r"log_with=\"tensorboard\""),
    ],
)
def test_settings_that_cannot_be_are_refused_before_a_process_is_started(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(**options)


def test_without_megatron_core_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import_module = importlib.import_module

    def fail(name: str, *args: Any) -> Any:
        if name.startswith("megatron"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return import_module(name, *args)

    monkeypatch.setattr("accelerate.strategies.megatron.groups.has_package", lambda name: False)
    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(MissingPackageError, match=r"MegatronLMPlugin needs the package .*accelerate\[megatron\]"):
        make()


def test_evaluated_losses_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = make().prepare(make_model("gpt2")).eval()
    ids = torch.arange(8)[None]
    loss = engine(input_ids=ids, labels=ids).loss.item()
    with caplog.at_level(logging.INFO, logger="accelerate.strategies.megatron.engine"):
        engine.log_eval_results()
        engine.log_eval_results()
    assert [record.getMessage() for record in caplog.records] == [
        f"validation loss: {loss:.6f}, perplexity: {math.exp(loss):.6f}"
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"use_custom_fsdp": True, "use_distributed_optimizer": True},
            r"use_custom_fsdp=True\).*use_distributed_optimizer",
        ),
        ({"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1}, r"num_layers_per_virtual.*num_micro_batches"),
    ],
)
def test_what_comes_back_in_no_format_of_its_own_is_refused(options: dict[str, Any], message: str) -> None:
    plugin = MegatronLMPlugin(**options)
    configs = translate(plugin, make_model("llama"), device_type="meta", world_size=2)
    if "pp_degree" in options:
        configs = replace(configs, degrees=replace(configs.degrees, virtual_pipeline=2))
    with pytest.raises(ConfigurationError, match=message):
        check_built(configs)


def test_groups_of_an_optimizer_are_carried_by_name() -> None:
    model = make_model("llama")
    decays = [entry for name, entry in model.named_parameters() if "norm" not in name]
    others = [entry for name, entry in model.named_parameters() if "norm" in name]
    groups = [{"params": decays, "weight_decay": 0.5}, {"params": others, "lr": 0.01, "weight_decay": 0.0}]
    accelerator = make()
    engine, optimizer = accelerator.prepare(model, torch.optim.AdamW(groups, lr=0.1))
    names = {id(entry): name for name, entry in engine.module.named_parameters()}
    found = [{names[id(entry)] for entry in group["params"]} for group in optimizer.param_groups]
    assert found[1] == {name for name in names.values() if "layernorm" in name}
    assert found[0] == set(names.values()) - found[1]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.01]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]


def test_a_group_with_a_part_of_a_fused_weight_is_refused() -> None:
    model = make_model("llama")
    queries = [entry for name, entry in model.named_parameters() if "q_proj" in name]
    rest = [entry for name, entry in model.named_parameters() if "q_proj" not in name]
    with pytest.raises(ConfigurationError, match=r"fuses into 'decoder.layers.0.self_attention.linear_qkv.weight'"):
        make().prepare(model, torch.optim.SGD([{"params": queries}, {"params": rest}], lr=0.1))


def test_a_weight_that_is_fused_with_a_frozen_one_is_refused() -> None:
    model = make_model("llama")
    model.model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
    with pytest.raises(ConfigurationError, match=r"k_proj.weight' has requires_grad=False.*Freeze both, or none"):
        make().prepare(model)


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    model = make_model("gpt2")
    optimizer = adamw(model)
    model(input_ids=torch.arange(4)[None], labels=torch.arange(4)[None]).loss.backward()
    optimizer.step()
    with pytest.raises(ConfigurationError, match=r"has stepped already.*before its first step"):
        make().prepare(model, optimizer)


def test_conditions_of_the_plugin_make_groups() -> None:
    model = make_model("gpt2")
    accelerator = make(
        no_wd_decay_cond=lambda name, parameter: name.endswith(".bias"),
        scale_lr_cond=lambda name, parameter: "position" in name,
        lr_mult=0.5,
    )
    engine, optimizer = accelerator.prepare(model, adamw(model, weight_decay=0.2))
    names = {id(entry): name for name, entry in engine.module.named_parameters()}
    found = {names[id(entry)]: group for group in optimizer.param_groups for entry in group["params"]}
    assert found.keys() == set(names.values())
    for name, group in found.items():
        assert group["weight_decay"] == (0.0 if name.endswith(".bias") else 0.2)
        assert group["lr"] == pytest.approx(0.05 if "position" in name else 0.1)


def test_a_placeholder_becomes_megatrons_schedule() -> None:
    model = make_model("gpt2")
    accelerator = make(min_lr=0.01)
    optimizer = adamw(model)
    schedule = MegatronLMDummyScheduler(optimizer, total_num_steps=10, warmup_num_steps=2)
    loader = DataLoader(make_rows("gpt2"), batch_size=2)
    engine, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    rates = []
    for batch in loader:
        accelerator.backward(engine(**batch).loss)
        optimizer.step()
        rates.append(schedule.get_last_lr()[0])
        schedule.step()
        optimizer.zero_grad()
    expected = [0.0, 0.05, 0.1, *(0.01 + 0.09 * (8 - step) / 8 for step in range(1, 6))]
    assert rates == pytest.approx(expected)
    assert schedule.get_lr() == pytest.approx(schedule.get_last_lr())
    state = schedule.state_dict()
    schedule.load_state_dict(state)
    assert schedule.state_dict() == state


def test_a_schedule_of_torch_works_as_anywhere() -> None:
    model = make_model("gpt2")
    accelerator, optimizer = make(), adamw(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    engine, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    ids = torch.arange(6)[None]
    accelerator.backward(engine(input_ids=ids, labels=ids).loss)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_a_model_without_weights_begins_with_megatrons() -> None:
    with torch.device("meta"):
        model = make_model("gpt2")
    engine = make().prepare(model)
    weights = engine.carried.full_state_dict(keep=True)
    assert list(weights) == list(make_model("gpt2").state_dict())
    assert 0.005 < weights["transformer.wte.weight"].std() < 0.05


def test_what_megatron_does_not_compute_is_refused() -> None:
    engine = make().prepare(make_model("gpt2"))
    with pytest.raises(UsageError, match="inputs_embeds was given"):
        engine(inputs_embeds=torch.ones(1, 2, 32))


def test_parts_of_a_batch_need_labels() -> None:
    engine = make(num_micro_batches=2).prepare(make_model("gpt2"))
    with pytest.raises(UsageError, match=r"without labels came in 2 parts.*num_micro_batches=1"):
        engine(input_ids=torch.ones(2, 4, dtype=torch.long))


def test_the_programs_model_asks_the_engine() -> None:
    model = make_model("gpt2")
    accelerator = make()
    engine = accelerator.prepare(model)
    assert accelerator.unwrap_model(engine) is model
    ids = torch.arange(6)[None]
    assert torch.equal(model(input_ids=ids).logits, engine.eval()(ids).logits)
    assert next(model.parameters()).is_meta
    with pytest.raises(ConfigurationError, match="was already prepared"):
        accelerator.prepare(model)


# --- models and functions of the program's own --------------------------------------------------------------------------


def test_a_function_of_the_program_builds_the_model() -> None:
    from accelerate.utils.megatron_lm import model_provider_func

    seen: list[Any] = []

    def change(module: torch.nn.Module) -> torch.nn.Module:
        seen.append(module)
        return module

    model = make_model("gpt2")
    accelerator = make(custom_model_provider_function=model_provider_func, custom_prepare_model_function=change)
    engine, optimizer = accelerator.prepare(model, adamw(model))
    assert seen == [engine.module]
    ids = torch.arange(8)[None]
    before = engine(input_ids=ids, labels=ids).loss
    accelerator.backward(before)
    optimizer.step()
    assert engine(input_ids=ids, labels=ids).loss < before
    weights = accelerator.get_state_dict(engine)
    assert "decoder.layers.0.self_attention.linear_qkv.weight:q" in weights


def test_several_groups_do_not_follow_a_model_of_the_program() -> None:
    from accelerate.utils.megatron_lm import model_provider_func

    model = make_model("gpt2")
    first, *rest = model.parameters()
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1)
    with pytest.raises(ConfigurationError, match="Give it one group"):
        make(custom_model_provider_function=model_provider_func).prepare(model, optimizer)


# --- rows of a step ------------------------------------------------------------------------------------------------------


def test_a_batch_has_the_rows_of_all_parts() -> None:
    accelerator = make(num_micro_batches=3)
    given = DataLoader(make_rows("gpt2"), batch_size=2)
    sizes = [len(batch["input_ids"]) for batch in accelerator.prepare(given)]
    assert sizes == [6, 6, 4]
    assert given.batch_size == 2


def test_batches_of_a_sampler_of_the_program_are_merged() -> None:
    class Pairs(BatchSampler):
        """Another class than torch's own."""

    sampler = Pairs(SequentialSampler(range(7)), 2, drop_last=False)
    merged = MergedBatches(sampler, 2)
    assert list(merged) == [[0, 1, 2, 3], [4, 5, 6]]
    assert len(merged) == 2
    loader = enlarged(DataLoader(list(range(7)), batch_sampler=sampler), 2)
    assert [batch.tolist() for batch in loader] == list(merged)


def test_groups_that_a_run_leaves_are_made_anew() -> None:
    make().prepare(make_model("gpt2"))
    assert core("parallel_state").get_tensor_model_parallel_world_size() == 1
    first = core("parallel_state").get_tensor_model_parallel_group()
    current.forget("groups of Megatron")
    make().prepare(make_model("gpt2"))
    assert core("parallel_state").get_tensor_model_parallel_group() is not first
