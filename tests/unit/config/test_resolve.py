"""Flags, file, environment, detection and defaults merge in that order, and every value knows its origin."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import yaml

from accelerate._base.enums import DistributedType
from accelerate._base.errors import ConfigurationError
from accelerate.config.cli import add_launch_arguments
from accelerate.config.resolve import resolve
from accelerate.config.run_config import HIDDEN, OptionSource, RunConfig, encode
from accelerate.config.sections.registry import options
from accelerate.devices.machine import Machine, SlurmJob

GPUS = Machine(device_type="cuda", device_count=4, cpu_count=8, visible_devices_variable="CUDA_VISIBLE_DEVICES")
ONE_GPU = Machine(device_type="cuda", device_count=1, cpu_count=8)
NO_GPU = Machine(device_type="cpu", device_count=0, cpu_count=8)


@pytest.fixture(autouse=True)
def no_default_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))


def parse(*argv: str) -> argparse.Namespace:
    made = argparse.ArgumentParser("accelerate launch", allow_abbrev=False)
    add_launch_arguments(made)
    return made.parse_args([*argv, "train.py", "--epochs", "3"])


def launch(*argv: str, machine: Machine = GPUS, environ: dict[str, str] | None = None) -> RunConfig:
    return resolve(parse(*argv), environ=environ or {}, machine=machine)


def file(folder: Path, name: str = "config.yaml", **content: Any) -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(yaml.dump({"distributed_type": "NO", **content}))
    return str(path)


def refused(*argv: str, machine: Machine = GPUS, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        launch(*argv, machine=machine, environ=environ)
    return str(caught.value)


# --- precedence ------------------------------------------------------------------------------------------------------


def test_the_stronger_source_wins_and_is_named(tmp_path: Path) -> None:
    path = file(tmp_path, mixed_precision="bf16")
    environ = {"ACCELERATE_MIXED_PRECISION": "fp16"}
    default = launch()
    assert (default["mixed_precision"], default.origin("mixed_precision")) == ("no", "default")
    told = launch(environ=environ)
    assert (told["mixed_precision"], told.origin("mixed_precision")) == (
        "fp16",
        "environment ACCELERATE_MIXED_PRECISION",
    )
    written = launch("--config_file", path, environ=environ)
    assert (written["mixed_precision"], written.origin("mixed_precision")) == ("bf16", f"file {path}: mixed_precision")
    typed = launch("--config_file", path, "--mixed-precision", "fp8", environ=environ)
    assert (typed["mixed_precision"], typed.origin("mixed_precision")) == ("fp8", "flag --mixed_precision")
    assert typed.resolved("mixed_precision").origin.source is OptionSource.FLAG


def test_a_configuration_is_a_mapping_of_every_option() -> None:
    config = launch("--num_processes", "3")
    assert set(config) == set(options())
    assert len(config) == len(options())
    assert dict(config)["num_processes"] == 3


def test_a_flag_with_the_value_of_the_default_wins_over_the_file(tmp_path: Path) -> None:
    path = file(tmp_path, rdzv_backend="c10d", fsdp_config={"fsdp_version": 2})
    config = launch("--config_file", path, "--rdzv_backend", "static", "--fsdp_version", "1")
    assert (config["rdzv_backend"], config["fsdp_version"]) == ("static", 1)


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("rdzv_backend", "c10d", "rdzv_backend"),
        ("same_network", True, "same_network"),
        ("enable_cpu_affinity", True, "enable_cpu_affinity"),
        ("downcast_bf16", True, "downcast_bf16"),
        ("tpu_use_sudo", True, "tpu_use_sudo"),
        ("tpu_use_cluster", True, "tpu_cluster"),
        ("debug", True, "debug"),
    ],
)
def test_keys_whose_flags_have_defaults_are_read_from_the_file(tmp_path: Path, key: str, value: Any, name: str) -> None:
    config = launch("--config_file", file(tmp_path, **{key: value}))
    assert config[name] == value
    assert config.origin(name).endswith(f": {key}")


def test_the_default_file_is_read_unless_the_run_is_on_the_cpu(tmp_path: Path) -> None:
    path = file(tmp_path / "cache" / "accelerate", "default_config.yaml", mixed_precision="bf16")
    assert launch().origin("mixed_precision") == f"file {path}: mixed_precision"
    assert launch("--cpu").origin("mixed_precision") == "default"
    assert launch("--cpu", "--config_file", path)["mixed_precision"] == "bf16"


def test_a_file_that_was_named_must_be_there() -> None:
    assert "gone.yaml" in refused("--config_file", "gone.yaml")


def test_values_that_a_program_puts_into_the_namespace_count_as_flags() -> None:
    namespace = parse()
    namespace.num_processes = 2
    namespace.fsdp_version = "2"
    namespace.training_script = "other.py"
    config = resolve(namespace, environ={}, machine=GPUS)
    assert (config["num_processes"], config["fsdp_version"], config["training_script"]) == (2, 2, "other.py")
    namespace.fsdp_version = "two"
    with pytest.raises(ConfigurationError, match="--fsdp_version='two'"):
        resolve(namespace, environ={}, machine=GPUS)


def test_arguments_of_the_script_are_kept_word_for_word() -> None:
    config = launch("-m")
    assert (config["module"], config["training_script"], config["training_script_args"]) == (
        True,
        "train.py",
        ["--epochs", "3"],
    )


def test_repeated_and_negated_flags() -> None:
    config = launch("--vm", "a", "--vm", "b", "--tpu_cluster", "--no-tpu-cluster")
    assert (config["vm"], config["tpu_cluster"]) == (["a", "b"], False)


# --- detection -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "machine", "processes", "multi_gpu"),
    [
        ([], GPUS, 4, True),
        ([], ONE_GPU, 1, False),
        ([], NO_GPU, 1, False),
        (["--cpu"], GPUS, 1, False),
        (["--cpu", "--num_processes", "3"], NO_GPU, 3, False),
        (["--num_processes", "2"], GPUS, 2, True),
        (["--num_processes", "2"], NO_GPU, 2, False),
        (["--gpu_ids", "1,2"], GPUS, 2, True),
        (["--use_fsdp"], GPUS, 4, False),
        (["--num_machines", "2", "--main_process_ip", "10.0.0.1"], GPUS, 8, True),
    ],
)
def test_what_nobody_said_follows_the_machine(
    argv: list[str], machine: Machine, processes: int, multi_gpu: bool
) -> None:
    config = launch(*argv, machine=machine)
    assert (config["num_processes"], config["multi_gpu"]) == (processes, multi_gpu)
    if "--num_processes" not in argv:
        assert config.origin("num_processes").startswith("detected: ")


# --- kinds of runs in files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "turned_on"),
    [
        ("MULTI_GPU", "multi_gpu"),
        ("MULTI_XPU", "multi_gpu"),
        ("MULTI_NEURON", "multi_gpu"),
        ("MULTI_CPU", "cpu"),
        ("DEEPSPEED", "use_deepspeed"),
        ("FSDP", "use_fsdp"),
        ("MEGATRON_LM", "use_megatron_lm"),
        ("XLA", "tpu"),
        ("NO", None),
    ],
)
def test_the_kind_of_run_in_a_file_turns_its_option_on(tmp_path: Path, kind: str, turned_on: str | None) -> None:
    path = file(tmp_path, distributed_type=kind, num_processes=2 if turned_on else 1)
    config = launch("--config_file", path)
    on = [name for name in ("cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm") if config[name]]
    assert on == ([turned_on] if turned_on else [])
    if turned_on:
        assert config.origin(turned_on) == f"file {path}: distributed_type"


def test_a_file_for_several_accelerators_can_be_used_for_one_process(tmp_path: Path) -> None:
    path = file(tmp_path, distributed_type="MULTI_GPU", num_processes=4)
    config = launch("--config_file", path, "--num_processes", "1", machine=ONE_GPU)
    assert (config["num_processes"], config["multi_gpu"]) == (1, True)


@pytest.mark.parametrize("machine", [GPUS, NO_GPU])
def test_a_file_for_one_process_starts_one_whatever_number_is_left_in_it(tmp_path: Path, machine: Machine) -> None:
    path = file(tmp_path, num_processes=8, gpu_ids="all")
    config = launch("--config_file", path, machine=machine)
    assert (config["num_processes"], config["multi_gpu"]) == (1, False)
    assert config.origin("num_processes") == f"file {path}: distributed_type"
    (note,) = config.notes
    assert note == (
        f"{path}: num_processes 8 is not used, because distributed_type NO is one process. Add --num_processes 8 for more."
    )


@pytest.mark.parametrize(
    "argv",
    [["--num_processes", "2"], ["--nproc_per_node", "2"], ["--use_fsdp", "--num_processes", "2"]],
)
def test_flags_may_ask_for_more_than_a_file_for_one_process(tmp_path: Path, argv: list[str]) -> None:
    path = file(tmp_path, num_processes=4)
    config = launch("--config_file", path, *argv)
    assert (config["num_processes"], config.notes) == (2, ())
    assert launch("--config_file", path, "--multi_gpu")["num_processes"] == 4


def test_a_flag_for_another_kind_of_run_replaces_that_of_the_file_and_says_so(tmp_path: Path) -> None:
    path = file(tmp_path, distributed_type="FSDP", num_processes=2, use_cpu=True)
    config = launch("--config_file", path, "--multi_gpu")
    assert (config["use_fsdp"], config["multi_gpu"], config["cpu"]) == (False, True, False)
    assert config.notes == (f"{path}: distributed_type FSDP is not used, because --multi_gpu was given.",)


def test_axes_in_a_file_are_turned_on(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        distributed_type="FSDP",
        num_processes=4,
        fsdp_config={"fsdp_version": 2},
        parallelism_config={"cp_size": 2, "dp_shard_size": 2},
    )
    written = encode(launch("--config_file", path))
    assert written["ACCELERATE_USE_PARALLELISM_CONFIG"] == "true"
    assert written["PARALLELISM_CONFIG_CP_COMM_STRATEGY"] == "allgather"
    assert "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION" not in written


def test_fields_of_deepspeed_in_a_file_are_listed_for_the_worker(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        distributed_type="DEEPSPEED",
        num_processes=2,
        mixed_precision="bf16",
        deepspeed_config={"zero_stage": 3, "gradient_clipping": 1.0},
    )
    written = encode(launch("--config_file", path))
    assert set(written["ACCELERATE_CONFIG_DS_FIELDS"].split(",")) == {
        "zero_stage",
        "gradient_clipping",
        "mixed_precision",
    }


def test_a_job_on_sagemaker_is_marked(tmp_path: Path) -> None:
    path = file(
        tmp_path,
        compute_environment="AMAZON_SAGEMAKER",
        distributed_type="DATA_PARALLEL",
        ec2_instance_type="ml.p3.16xlarge",
        iam_role_name="role",
        num_machines=2,
    )
    config = launch("--config_file", path, machine=NO_GPU)
    assert encode(config)["ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"] == "DATA_PARALLEL"
    assert encode(config)["ACCELERATE_USE_SAGEMAKER"] == "true"


# --- what cannot work ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "machine", "words"),
    [
        (["--use_fsdp", "--use_deepspeed"], GPUS, ["--use_deepspeed", "--use_fsdp", "exclude each other"]),
        (["--cpu", "--multi_gpu", "--num_processes", "2"], GPUS, ["--cpu", "--multi_gpu"]),
        (["--cpu", "--use_fsdp", "--use_megatron_lm"], GPUS, ["--use_fsdp", "--use_megatron_lm"]),
        (["--tpu", "--use_fsdp"], GPUS, ["--tpu", "--use_fsdp"]),
        (["--multi_gpu", "--num_processes", "1"], GPUS, ["--num_processes 2 or more"]),
        (["--num_machines", "2"], GPUS, ["flag --num_machines", "--main_process_ip"]),
        (["--num_processes", "0"], GPUS, ["num_processes=0", "at least one"]),
        (
            ["--num_processes", "3", "--num_machines", "2", "--main_process_ip", "a"],
            GPUS,
            ["--num_processes 2", "multiple"],
        ),
        (["--machine_rank", "1"], GPUS, ["machine_rank=1", "from 0 to 0"]),
        (
            ["--use_deepspeed", "--deepspeed_hostfile", "hosts", "--deepspeed_multinode_launcher", "standard"],
            GPUS,
            ["deepspeed_hostfile='hosts'", "'standard'"],
        ),
        (["--max_restarts", "-1"], GPUS, ["max_restarts=-1"]),
        (["--monitor_interval", "nan"], GPUS, ["monitor_interval=nan"]),
        (["--monitor_interval", "0"], GPUS, ["monitor_interval=0"]),
        (["--preemption_grace", "inf"], GPUS, ["preemption_grace=inf"]),
        (["--main_process_port", "70000"], GPUS, ["main_process_port=70000"]),
        (["--multi_gpu", "--num_processes", "8"], NO_GPU, ["no accelerator", "8 CPU cores", "--cpu"]),
        (["--gpu_ids", "0,1", "--num_processes", "2"], NO_GPU, ["gpu_ids='0,1'", "no accelerator", "--cpu"]),
        (["--use_fsdp", "--gpu_ids", "0"], NO_GPU, ["gpu_ids='0'", "no accelerator"]),
        (["--num_processes", "8"], GPUS, ["4 of type cuda", "--num_processes 4"]),
        (["--gpu_ids", "0", "--multi_gpu", "--num_processes", "2"], GPUS, ["gpu_ids='0'", "names 1 accelerator"]),
        (["--use_parallelism_config"], GPUS, ["--use_fsdp --fsdp_version 2"]),
        (
            ["--use_parallelism_config", "--parallelism_config_dp_shard_size", "2"],
            GPUS,
            ["--use_fsdp --fsdp_version 2"],
        ),
        (["--use_parallelism_config", "--use_fsdp"], GPUS, ["fsdp_version=1 (default)", "--fsdp_version 2"]),
        (["--use_fsdp", "--fsdp_sync_module_states", "false"], GPUS, ["fsdp_cpu_ram_efficient_loading=True"]),
    ],
)
def test_what_cannot_work_is_refused_with_values_origins_and_remedy(
    argv: list[str], machine: Machine, words: list[str]
) -> None:
    message = refused(*argv, machine=machine)
    for word in words:
        assert word in message
    assert "\n" not in message


@pytest.mark.parametrize("axis", ["tp", "cp", "pp", "dp_replicate"])
def test_axes_that_do_not_shard_need_no_engine(axis: str) -> None:
    size = f"parallelism_config_{axis}_size"
    config = launch("--use_parallelism_config", f"--{size}", "2", "--num_processes", "2", machine=GPUS)
    assert config[size] == 2


@pytest.mark.parametrize(
    ("kind", "switch"), [("FSDP", "use_fsdp"), ("DEEPSPEED", "use_deepspeed"), ("MEGATRON_LM", "use_megatron_lm")]
)
def test_an_engine_computes_on_the_cpu_where_there_is_nothing_else_and_says_so(
    tmp_path: Path, kind: str, switch: str
) -> None:
    path = file(tmp_path, distributed_type=kind, num_processes=2, gpu_ids="0,1")
    config = launch("--config_file", path, machine=NO_GPU)
    assert config[switch]
    assert config.notes == (
        f"{switch}=True (file {path}: distributed_type) runs on the CPU: this machine has no accelerator and 8 CPU cores.",
    )
    assert "runs on the CPU" in launch(f"--{switch}", machine=NO_GPU).notes[0]
    for argv, machine in ((["--cpu"], NO_GPU), (["--num_processes", "2"], GPUS)):
        assert launch(f"--{switch}", *argv, machine=machine).notes == ()


def test_a_file_for_several_gpus_computes_on_the_cpu_where_there_is_none_and_says_so(tmp_path: Path) -> None:
    path = file(tmp_path, distributed_type="MULTI_GPU", num_processes=8, gpu_ids="all")
    config = launch("--config_file", path, machine=NO_GPU)
    assert (config["num_processes"], config["multi_gpu"], config["cpu"]) == (8, True, False)
    assert config.notes == (
        f"multi_gpu=True (file {path}: distributed_type) runs on the CPU: this machine has no accelerator and 8 CPU cores.",
    )
    assert launch("--config_file", path, "--num_processes", "4").notes == ()
    # A flag is about this machine.
    assert "needs accelerators" in refused("--config_file", path, "--multi_gpu", machine=NO_GPU)


def test_an_engine_on_the_machines_of_a_cluster_is_not_said_to_run_on_this_ones_cpu() -> None:
    argv = ("--use_fsdp", "--num_machines", "2", "--num_processes", "2")
    assert launch(*argv, "--mpirun_hostfile", "hosts", machine=NO_GPU).notes == ()


def test_accumulation_on_the_command_line_belongs_to_deepspeed(tmp_path: Path) -> None:
    variable = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    flags = ("--gradient_accumulation_steps", "4")
    without = launch(*flags, "--use_fsdp")
    assert variable not in encode(without)
    (note,) = without.notes
    assert note.startswith("--gradient_accumulation_steps changes nothing without DeepSpeed. ")
    assert "Accelerator(gradient_accumulation_steps=4)" in note
    with_it = launch(*flags, "--use_deepspeed")
    assert (encode(with_it)[variable], with_it.notes) == ("4", ())
    # A variable of the shell is meant for the script, and mpirun hands on only what is encoded.
    assert encode(launch(environ={variable: "3"}))[variable] == "3"
    path = file(tmp_path, deepspeed_config={"gradient_accumulation_steps": 2})
    assert variable not in encode(launch("--config_file", path))


def test_no_number_of_processes_in_a_file_is_refused(tmp_path: Path) -> None:
    assert "num_processes=-1" in refused("--config_file", file(tmp_path, num_processes=-1))


def test_threads_for_each_level_of_nesting_are_read() -> None:
    assert launch(environ={"OMP_NUM_THREADS": "4,2"})["num_cpu_threads_per_process"] == 4


def test_a_variable_that_cannot_be_read_is_named() -> None:
    assert "OMP_NUM_THREADS='many'" in refused(environ={"OMP_NUM_THREADS": "many"})


@pytest.mark.parametrize(
    ("argv", "machine", "environ"),
    [
        (["--cpu", "--use_fsdp", "--num_processes", "2"], NO_GPU, {}),
        (["--use_fsdp"], NO_GPU, {"ACCELERATE_TORCH_DEVICE": "cpu"}),
        (["--num_machines", "2"], Machine("cuda", 4, slurm=SlurmJob("1", 2, 2, 0)), {}),
        (["--cpu", "--num_machines", "2", "--num_processes", "2", "--mpirun_hostfile", "hosts"], NO_GPU, {}),
        (["--num_machines", "2"], GPUS, {"MASTER_ADDR": "10.0.0.1"}),
    ],
)
def test_what_can_work_is_not_refused(argv: list[str], machine: Machine, environ: dict[str, str]) -> None:
    assert launch(*argv, machine=machine, environ=environ)["num_processes"] >= 1


# --- the result ------------------------------------------------------------------------------------------------------


def test_rows_list_every_option_once_and_hide_secrets() -> None:
    rows = list(launch("--aws_secret_access_key", "xyz").rows())
    assert [key for _, key, _, _ in rows] == list(options())
    assert ("AWS Arguments", "aws_secret_access_key", HIDDEN, "flag --aws_secret_access_key") in rows
    assert "xyz" not in str(rows)


def test_secrets_of_the_environment_are_left_there_and_given_ones_reach_the_worker() -> None:
    assert "AWS_SECRET_ACCESS_KEY" not in encode(launch(environ={"AWS_SECRET_ACCESS_KEY": "xyz"}))
    given = encode(launch("--aws_secret_access_key", "xyz"))
    assert given["AWS_SECRET_ACCESS_KEY"] == "xyz"


def test_a_tpu_decides_the_number_of_its_processes_itself() -> None:
    config = launch("--tpu", machine=NO_GPU)
    reason = "detected: a process for each device, or one for all (SPMD)"
    assert (config["num_processes"], config.origin("num_processes")) == (None, reason)
    assert launch("--tpu", "--num_processes", "8", machine=NO_GPU)["num_processes"] == 8


def test_a_tpu_that_is_there_is_used() -> None:
    machine = Machine("xla", 4, 8, label=DistributedType.XLA)
    config = launch(machine=machine)
    assert (config["tpu"], config["multi_gpu"], config["num_processes"]) == (True, False, None)
    assert config.origin("tpu") == "detected: 4 of type xla"
    assert launch("--num_processes", "1", machine=machine)["tpu"]
    for flag in ("--cpu", "--use_fsdp", "--multi_gpu"):
        assert not launch(flag, "--num_processes", "2", machine=machine)["tpu"]


def test_axes_need_no_engine_on_a_tpu() -> None:
    words = ("--use_parallelism_config", "--parallelism_config_dp_shard_size", "4")
    assert launch("--tpu", *words, machine=NO_GPU)["use_parallelism_config"]
    assert launch("--tpu", "--use_parallelism_config", machine=NO_GPU)["use_parallelism_config"]
    with pytest.raises(ConfigurationError, match="needs an engine that shards"):
        launch(*words, machine=NO_GPU)


def test_what_a_tpu_cannot_do_is_known_before_a_launcher_is_asked() -> None:
    with pytest.raises(ConfigurationError, match=r"mixed_precision='fp16' \(flag --mixed_precision\) with a TPU"):
        launch("--tpu", "--mixed_precision", "fp16", machine=NO_GPU)


def test_processes_that_megatron_cannot_share_out_are_refused() -> None:
    words = ("--use_megatron_lm", "--megatron_lm_tp_degree", "2", "--megatron_lm_pp_degree", "2", "--cpu")
    message = (
        r"tp_degree=2 \(flag --megatron_lm_tp_degree\).*multiple of 4 processes.*Write --num_processes 8, or lower"
    )
    with pytest.raises(ConfigurationError, match=message):
        launch(*words, "--num_processes", "6")
    assert launch(*words, "--num_processes", "8")["megatron_lm_tp_degree"] == 2


def test_a_flag_that_is_not_needed_says_so() -> None:
    assert "--same_network changes nothing" in launch("--same_network").notes[0]


def test_options_of_an_engine_are_read_by_name() -> None:
    config = launch("--use_fsdp", "--fsdp_version", "2")
    assert (config["fsdp_version"], config["fsdp_offload_params"]) == (2, False)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--mixed_precision", "bf61"], ["'bf61' is not one of no, fp16, bf16, fp8", "Did you mean 'bf16'?"]),
        (["--num_processes", "two"], ["'two' is not a whole number"]),
        (["--fsdp_version", "3"], ["'3' is not one of 1, 2"]),
        (["--fsdp_offload_params", "maybe"], ["'maybe' is not true or false"]),
    ],
)
def test_a_wrong_value_of_a_flag_ends_with_code_2(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*argv)
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    for word in words:
        assert word in shown
