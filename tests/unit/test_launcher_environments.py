"""Commands and environments for programs that start the processes themselves."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.support.processes import run_group

from accelerate._base.errors import ConfigurationError, UsageError
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import (
    PrepareForLaunch,
    _filter_args,
    env_var_path_add,
    prepare_deepspeed_cmd_env,
    prepare_extend_env_parallelism_config,
    prepare_multi_gpu_env,
    prepare_sagemager_args_inputs,
    prepare_simple_launcher_cmd_env,
    prepare_tpu,
    setup_fp8_env,
)

pytestmark = pytest.mark.usefixtures("empty_script")


def parsed(*words: str) -> argparse.Namespace:
    return launch_command_parser().parse_args([*words, "train.py", "--lr", "1"])


def test_one_process() -> None:
    command, environment = prepare_simple_launcher_cmd_env(parsed("--cpu", "--mixed_precision", "bf16"))
    assert command == [sys.executable, "train.py", "--lr", "1"]
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert "PATH" in environment


def test_several_processes_fill_in_torchruns_options() -> None:
    args = parsed("--cpu", "--num_processes", "4", "--num_machines", "2", "--machine_rank", "1",
                  "--main_process_ip", "10.0.0.1", "--main_process_port", "1234")  # fmt: skip
    environment = prepare_multi_gpu_env(args)
    assert (args.nproc_per_node, args.nnodes, args.rdzv_endpoint) == ("2", "2", "10.0.0.1:1234")
    assert args.rdzv_conf == "rank=1"
    assert environment["ACCELERATE_USE_CPU"] == "True"


def test_deepspeed() -> None:
    command, environment = prepare_deepspeed_cmd_env(parsed("--cpu", "--use_deepspeed", "--num_processes", "2"))
    assert command is None
    assert environment["ACCELERATE_USE_DEEPSPEED"] == "true"
    Path("hosts").write_text("a slots=2\nb slots=2\n")
    many = ("--num_machines", "2", "--main_process_ip", "10.0.0.1", "--deepspeed_hostfile", "hosts")
    by_hand = (*many, "--deepspeed_multinode_launcher", "nossh", "--machine_rank", "1", "--main_process_port", "1234")
    words = ("--cpu", "--use_deepspeed", "--num_processes", "4", *by_hand)
    command, environment = prepare_deepspeed_cmd_env(parsed(*words))
    assert command is not None
    assert command[1:3] == ["-m", "deepspeed.launcher.runner"]
    assert command[-3:] == ["train.py", "--lr", "1"]
    # The files that the command names are there.
    assert Path(command[command.index("--hostfile") + 1]).read_text() == "a slots=2\nb slots=2\n"
    assert (environment["DS_ACCELERATOR"], "PATH" in environment) == ("cpu", True)


def test_parts_of_the_environment() -> None:
    args = parsed(
        "--cpu",
        "--num_processes",
        "4",
        "--use_fsdp",
        "--fsdp_version",
        "2",
        "--use_parallelism_config",
        "--parallelism_config_tp_size",
        "2",
    )
    sizes = prepare_extend_env_parallelism_config(args, {"KEPT": "1"})
    assert sizes["PARALLELISM_CONFIG_TP_SIZE"] == "2"
    assert sizes["KEPT"] == "1"
    assert all(name == "KEPT" or name.startswith("PARALLELISM_CONFIG_") for name in sizes)
    fp8 = setup_fp8_env(parsed("--cpu", "--mixed_precision", "fp8", "--fp8_backend", "ao"), {})
    assert fp8["ACCELERATE_FP8_BACKEND"].lower() == "ao"


def test_tpu() -> None:
    given = parsed("--mixed_precision", "bf16")
    given.tpu_name = "pod"
    args, environment = prepare_tpu(given, {}, pod=True)
    assert (environment["XLA_USE_BF16"], environment["XLA_DOWNCAST_BF16"], args.tpu) == ("1", "0", "pod")
    args, environment = prepare_tpu(parsed("--mixed_precision", "bf16", "--downcast_bf16"), {})
    assert (environment["XLA_USE_BF16"], environment["XLA_DOWNCAST_BF16"]) == ("0", "1")


def test_tpu_with_debugging() -> None:
    args = parsed("--debug")
    assert prepare_tpu(args, {})[1]["ACCELERATE_DEBUG_MODE"] == "true"


def test_a_command_that_needs_files_beside_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    args = parsed("--cpu", "--num_processes", "4", "--num_machines", "2", "--mpirun_hostfile", "first,second")
    with pytest.raises(ConfigurationError, match=r"MPI launcher needs files beside its command.*Call launch_command"):
        prepare_simple_launcher_cmd_env(args)


def test_small_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_PATHS", "/a:/b")
    assert env_var_path_add("SOME_PATHS", "/c") == "/a:/b:/c"
    assert env_var_path_add("NO_PATHS", "/c") == "/c"
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_processes", type=int, default=1)
    parser.add_argument("--own", default="kept")
    assert vars(_filter_args(parsed("--num_processes", "4", "--cpu"), parser)) == {"num_processes": 4, "own": "kept"}
    with pytest.raises(ConfigurationError, match="sagemaker package"):
        prepare_sagemager_args_inputs(object(), parsed())


def _enter(file: str) -> tuple[int, int, str]:
    import os

    rank = int(os.environ.pop("RANK"))
    os.environ["ACCELERATE_DEBUG_RDV_FILE"] = file
    seen: list[tuple[int, int, str]] = []
    PrepareForLaunch(
        lambda word: seen.append((dist.get_rank(), dist.get_world_size(), os.environ["FORK_LAUNCHED"] + word)),
        debug=True,
    )(rank, "x")
    dist.barrier()  # the store is a file, which goes with the first process that leaves
    dist.destroy_process_group()
    return seen[0]


def test_a_process_meets_the_others_at_a_file(tmp_path: Path) -> None:
    assert run_group(_enter, 2, str(tmp_path / "meeting")) == [(0, 2, "1x"), (1, 2, "1x")]


def test_a_process_learns_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "FORK_LAUNCHED"):
        monkeypatch.setenv(name, "")
    seen: list[str | None] = []

    def function() -> None:
        import os

        seen.extend(os.environ.get(name) for name in ("RANK", "LOCAL_RANK"))

    PrepareForLaunch(function, "MULTI_GPU")(3)
    assert seen == ["3", "3"]
    with pytest.raises(UsageError, match="cannot meet"):
        PrepareForLaunch(function, debug=True)(0)
