"""Models that are split over toy devices, and what else a run does there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.gpt import Plan, TinyGPT, make_tokens, train_gpt, train_plain_gpt
from tests.support.launching import launch_environment
from tests.support.toy_device import environment, on_toy
from tests.support.training import Outcome, assert_same_outcome, fresh_accelerator

from accelerate import Accelerator, PartialState, notebook_launcher
from accelerate.inference import prepare_pippy
from accelerate.test_utils.scripts.test_script import CHECKS
from accelerate.utils import FullyShardedDataParallelPlugin, ProfileKwargs, TorchPipelineParallelConfig

GPIPE = {"pp_handler": TorchPipelineParallelConfig(schedule="gpipe", num_microbatches=4)}
PLANS = {
    "tp": Plan({"tp_size": 2}),
    "tp, tied": Plan({"tp_size": 2}, tied=True, accumulation=1),
    "cp": Plan({"cp_size": 2}, window=True, tied=True),
    "pipeline": Plan({"pp_size": 2}),
    "pipeline, gpipe": Plan({"pp_size": 2}, accumulation=1, handlers=GPIPE),
    "fsdp2, tied": Plan({"dp_shard_size": 2}, fsdp=True, tied=True),
    "fsdp2, checkpointed": Plan({"dp_shard_size": 2}, fsdp=True, checkpointed=True),
}


def check_plan(plan: Plan) -> None:
    found = train_gpt(plan)
    expected = train_plain_gpt(plan.tied, plan.dtype)
    if not found.weights:  # the first rank has them
        assert not PartialState().is_main_process
        found.weights = expected.weights
    weights = {name: value.cpu() for name, value in found.weights.items()}
    assert_same_outcome(Outcome(weights, found.losses, found.rates), expected, tolerance=1e-8)


@pytest.mark.parametrize("name", PLANS)
@on_toy(processes=2)
def test_a_layout_of_two_devices_trains_as_one_process(name: str) -> None:
    check_plan(PLANS[name])


@on_toy(processes=4, devices=4)
def test_a_layout_of_four_devices_trains_as_one_process() -> None:
    check_plan(Plan({"dp_shard_size": 2, "tp_size": 2}, fsdp=True))
    check_plan(Plan({"dp_replicate_size": 2, "tp_size": 2}))


@pytest.mark.parametrize("version", [1, 2])
@on_toy(processes=2)
def test_weights_of_the_first_rank_reach_all(version: int) -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, auto_wrap_policy="NO_WRAP", cpu_ram_efficient_loading=True
    )
    accelerator = fresh_accelerator(fsdp_plugin=plugin)
    expected = TinyGPT(torch.float32, tied=True).state_dict()
    if accelerator.is_main_process:
        model = TinyGPT(torch.float32, tied=True)
    else:
        with torch.device("meta"):
            model = TinyGPT(torch.float32, tied=True)
    model = accelerator.prepare(model)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        assert all(torch.equal(state[name].cpu(), value) for name, value in expected.items())


@on_toy(processes=2)
def test_a_model_is_cut_into_stages_for_inference() -> None:
    state = PartialState()
    model = TinyGPT(torch.float32).eval()
    tokens = make_tokens(4)[:, :-1]
    expected = model(tokens).detach()
    staged = prepare_pippy(TinyGPT(torch.float32).eval(), example_args=(tokens,), gather_output=True)
    with torch.no_grad():
        found = staged(tokens.to(state.device))
    torch.testing.assert_close(found.cpu(), expected)


@on_toy(processes=2)
def test_a_sharded_run_is_saved_beside_training(tmp_path: Path) -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="NO_WRAP", state_dict_type="SHARDED_STATE_DICT"
    )
    accelerator = fresh_accelerator(fsdp_plugin=plugin)
    model = torch.nn.Linear(8, 8)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    inputs = torch.ones(2, 8, device=accelerator.device)
    accelerator.backward(model(inputs).sum())
    optimizer.step()
    saved = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.save_state(tmp_path / "checkpoint", blocking=False)
    accelerator.backward(model(inputs).sum())
    optimizer.step()
    accelerator.wait_for_save()
    accelerator.load_state(tmp_path / "checkpoint")
    loaded = accelerator.get_state_dict(model)
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())


@on_toy()
def test_a_block_is_profiled(tmp_path: Path) -> None:
    options = ProfileKwargs(output_trace_dir=str(tmp_path / "trace"), profile_memory=True)
    accelerator = Accelerator(kwargs_handlers=[options])
    with accelerator.profile() as profiler:
        held = torch.ones(1000, device=accelerator.device)
        torch.ones(500)
    (event,) = [event for event in profiler.key_averages() if event.key == "aten::ones"]
    assert (event.count, event.device_memory_usage) == (2, held.nbytes)
    assert list((tmp_path / "trace").iterdir())


def write_device(folder: Path) -> None:
    state = PartialState()
    (folder / str(state.process_index)).write_text(str(state.device))


@on_toy(devices=2)
def test_a_notebook_starts_a_process_on_each_device(tmp_path: Path) -> None:
    notebook_launcher(write_device, (tmp_path,), num_processes=2)
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["toy:0", "toy:1"]


def test_the_self_check_is_content_with_two_devices() -> None:
    env = launch_environment({"PYTHONPATH": environment()["PYTHONPATH"]})
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "test", "--num_processes", "2"]
    run: Any = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "toy" in run.stdout
    assert all(check.title in run.stdout for check in CHECKS)
