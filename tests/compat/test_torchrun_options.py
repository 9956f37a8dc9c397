"""A command line of torchrun works here: every option that the installed torch has is taken, in all its spellings."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.launching import FakeHost
from torch.distributed.run import config_from_args, get_args_parser

from accelerate._base.errors import ConfigurationError
from accelerate._base.imports import is_torch_version
from accelerate.commands.launch import launch_command_parser
from accelerate.config.resolve import resolve
from accelerate.config.run_config import RunConfig
from accelerate.devices.machine import Machine
from accelerate.launch import make_plan
from accelerate.launch.plan import ElasticOptions
from accelerate.utils.launch import _filter_args, prepare_multi_gpu_env

OPTIONS = {action.dest: action for action in get_args_parser()._actions if action.option_strings}
GPUS = Machine(device_type="cuda", device_count=4, cpu_count=8, visible_devices_variable="CUDA_VISIBLE_DEVICES")
NO_GPU = Machine(cpu_count=8)
TWO_MACHINES = ("--nnodes=2", "--node_rank=0", "--master_addr=10.0.0.1")

# For each option of torchrun: its words, and what the agent is told.
TAKEN: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "nnodes": (("2", "--node-rank=0", "--master-addr=a"), {"num_nodes": 2, "nproc_per_node": 4}),
    "nproc_per_node": (("3",), {"nproc_per_node": 3, "num_nodes": 1}),
    "rdzv_backend": (("c10d", *TWO_MACHINES), {"rdzv_backend": "c10d"}),
    "rdzv_endpoint": (("10.0.0.7:29400", "--nnodes=2", "--node-rank=1"), {"rdzv_endpoint": "10.0.0.7:29400"}),
    "rdzv_id": (("job7",), {"run_id": "job7"}),
    "rdzv_conf": (("timeout=60",), {"rdzv_configs": {"timeout": "60"}}),
    "standalone": ((), {"num_nodes": 1, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}),
    "max_restarts": (("3",), {"max_restarts": 3}),
    "monitor_interval": (("5",), {"monitor_interval": 5.0}),
    "event_log_handler": (("console",), {"event_log_handler": "console"}),
    "role": (("trainer",), {"role": "trainer"}),
    "log_dir": (("logs",), {"log_dir": "logs"}),
    "redirects": (("0:1,1:2",), {"redirects": "0:1,1:2"}),
    "tee": (("3",), {"tee": "3"}),
    "local_ranks_filter": (("0,2",), {"local_ranks_filter": (0, 2)}),
    "log_line_prefix_template": (("${rank}: ",), {"log_line_prefix_template": "${rank}: "}),
    "duplicate_stdout_filters": (("a,b,,c",), {"duplicate_stdout_filters": ("a", "b,c")}),
    "duplicate_stderr_filters": (("a,b",), {"duplicate_stderr_filters": ("a", "b")}),
    "node_rank": (("1", "--nnodes=2", "--master_addr=10.0.0.1"), {"rdzv_configs": {"rank": "1"}}),
    "master_addr": (("10.0.0.2", "--nnodes=2", "--node_rank=1"), {"rdzv_endpoint": "10.0.0.2:29500"}),
    "master_port": (("29555",), {"rdzv_endpoint": "127.0.0.1:29555", "rdzv_backend": "static"}),
    "local_addr": (("10.0.0.3",), {"local_addr": "10.0.0.3"}),
    "logs_specs": (("default",), {"logs_specs": "default"}),
    "numa_binding": (("node",), {"numa_binding": "node"}),
    "signals_to_handle": (("SIGTERM,SIGUSR2",), {"signals": ("SIGTERM", "SIGUSR2")}),
    "shutdown_timeout": (("7",), {"seconds_to_end": 7.0}),
    "virtual_local_rank": ((), {"virtual_local_rank": True}),
}
# These are about the command, not the agent.
COMMANDS: dict[str, tuple[str, ...]] = {
    "module": ("-u", "worker.py", "module", "train.py", "--lr", "1"),
    "no_python": ("train.py", "--lr", "1"),
}
# What torchrun does by these is done in any case; the launcher says so.
NOT_NEEDED = {"start_method": ("fork",), "run_path": ()}
# These came to torchrun after torch 2.9; here they are there with any torch.
NEWER = {
    *("duplicate_stdout_filters", "duplicate_stderr_filters", "signals_to_handle", "shutdown_timeout"),
    *("virtual_local_rank", "log_line_prefix_template"),
}
# These are about torchrun itself, not about a run: here they are commands.
OF_TORCHRUN = {"help", "print_completion"}


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))


def launched(*words: str, machine: Machine = GPUS, environ: dict[str, str] | None = None) -> RunConfig:
    options = launch_command_parser().parse_args([*words, "train.py", "--lr", "1"])
    return resolve(options, machine, environ=environ or {})


def agent_of(*words: str, machine: Machine = GPUS) -> ElasticOptions:
    plan = make_plan(launched(*words, machine=machine), FakeHost({}))
    assert plan.elastic is not None, words
    return plan.elastic


def test_every_option_of_the_installed_torch_is_known_here() -> None:
    known = {*TAKEN, *COMMANDS, *NOT_NEEDED}
    assert set(OPTIONS) - OF_TORCHRUN == (known if is_torch_version(">=", "2.15") else known - (NEWER - set(OPTIONS)))


def spellings(name: str) -> Sequence[str]:
    return OPTIONS[name].option_strings if name in OPTIONS else [f"--{name}", f"--{name.replace('_', '-')}"]


@pytest.mark.parametrize(("spelling", "name"), [(spelling, name) for name in TAKEN for spelling in spellings(name)])
def test_an_option_reaches_the_agent(spelling: str, name: str) -> None:
    words, expected = TAKEN[name]
    # As two words and as one, as torchrun takes it.
    forms = [(spelling, *words)]
    if words and spelling.startswith("--"):
        forms.append((f"{spelling}={words[0]}", *words[1:]))
    for form in forms:
        agent = agent_of(*form)
        assert {field: getattr(agent, field) for field in expected} == expected


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_reaches_the_command(name: str) -> None:
    for spelling in OPTIONS[name].option_strings:
        plan = make_plan(launched(spelling, "--nproc-per-node=2"), FakeHost({}))
        words = [Path(word).name for word in plan.argv]
        assert tuple(words[1:] if words[0] == "python3" else words) == COMMANDS[name]


@pytest.mark.parametrize("name", NOT_NEEDED)
def test_an_option_that_is_not_needed_says_so(name: str) -> None:
    for spelling in OPTIONS[name].option_strings:
        (note,) = launched(spelling, *NOT_NEEDED[name], "--nproc-per-node=2").notes
        assert note.startswith(f"--{name} changes nothing: ")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nproc_per_node=gpu"], "--nproc_per_node='gpu' counts accelerators, and this machine has no accelerator"),
        (["--nproc_per_node=npu"], "--nproc_per_node='npu' counts accelerators"),
        (["--multi_gpu", "--nproc_per_node=2"], "multi_gpu=True (flag --multi_gpu) with num_processes=2"),
        (["--numa-binding=node", "--nproc_per_node=2"], "numa_binding='node' (flag --numa_binding) binds processes"),
        (["--nnodes=1:2", "--nproc_per_node=2", "--master_addr=a"], "Add --rdzv_backend c10d"),
        (["--nnodes=2", "--nproc_per_node=2"], "Add --main_process_ip"),
        (["--nproc_per_node=0"], "num_processes=0 (flag --nproc_per_node 0) cannot work"),
        (["--rdzv-endpoint=host:port"], "--rdzv_endpoint='host:port' is no address"),
        (["--nnodes=3:2", "--master_addr=a"], "min_machines=3 (flag --nnodes) is no number up to num_machines=2"),
        (["--standalone", "--nnodes=2"], "num_machines=2 (flag --nnodes) and num_machines=1 (flag --standalone)"),
    ],
)
def test_what_this_machine_cannot_do_is_refused_with_a_reason(words: list[str], told: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        launched(*words, machine=NO_GPU)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nnodes", "0"], "'0' is not a number of machines from 1 on, or a range"),
        (["--nproc_per_node", "4.5"], "'4.5' is not a whole number, auto, cpu, gpu"),
        (["--redirects", "7"], "'7' is not 0, 1, 2 or 3"),
        (["--local-ranks-filter", "a"], "'a' is not a list of ranks"),
        (["--signals-to-handle", "SIGTREM"], "'SIGTREM' is not a list of signals"),
        (["--start-method", "thread"], "'thread' is not one of spawn, fork, forkserver"),
    ],
)
def test_a_value_that_cannot_be_read_is_named(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        launch_command_parser().parse_args([*words, "train.py"])
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("--multi_gpu", "--num_processes=4"),
        ("--multi_gpu", "--num_processes=4", "--main_process_port=29555", "--max_restarts=2", "-t", "3"),
        ("--multi_gpu", "--num_processes=4", *TWO_MACHINES[:1], "--node_rank=1", "--master_addr=10.0.0.1"),
    ],
)
def test_parsed_options_become_those_of_torchrun(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.launchers.commands.detect", lambda environ: GPUS)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torchrun sets it where it is missing
    args = launch_command_parser().parse_args([*words, "train.py"])
    prepare_multi_gpu_env(args)
    config, _, _ = config_from_args(_filter_args(args, get_args_parser(), ["train.py"]))
    agent = agent_of(*words)
    assert (config.nproc_per_node, config.max_nodes) == (agent.nproc_per_node, agent.num_nodes)
    assert (config.rdzv_backend, config.rdzv_endpoint) == (agent.rdzv_backend, agent.rdzv_endpoint)
    assert {key: str(config.rdzv_configs[key]) for key in agent.rdzv_configs} == agent.rdzv_configs
    assert (config.max_restarts, config.run_id) == (agent.max_restarts, agent.run_id)


def test_every_name_stands_for_an_option_in_help(monkeypatch: pytest.MonkeyPatch) -> None:
    parser: argparse.ArgumentParser = launch_command_parser()
    monkeypatch.setattr("sys.argv", ["accelerate", "launch", "--help", "--verbose"])
    text = parser.format_help()
    for name in set(OPTIONS) - OF_TORCHRUN:
        assert f"--{name}" in text
