"""The questions of `accelerate config`: all are reached, only those that apply are asked, and every way through writes a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from tests.support.launching import FakeHost

from accelerate._base.enums import DistributedType
from accelerate.commands.config.sagemaker import sagemaker_config, sagemaker_interview
from accelerate.commands.explain import explain
from accelerate.commands.launch import launch_command_parser
from accelerate.config.cluster_config import SageMakerConfig, load_config_from_file
from accelerate.config.questions import Interview, cluster_config, cluster_questions, option_question
from accelerate.config.resolve import resolve
from accelerate.config.sections.registry import options
from accelerate.devices.machine import Machine, SlurmJob
from accelerate.launch import make_plan

FOUR = Machine("cuda", 4, 8, label=DistributedType.MULTI_GPU)
PLAIN = Machine(cpu_count=4)
NEEDED = {
    "main_process_ip": "10.0.0.1",
    "deepspeed_hostfile": "hosts",
    "tpu_name": "pod",
    "tpu_zone": "here",
    "iam_role_name": "role",
}


def walk(interview: Interview, **chosen: Any) -> dict[str, Any]:
    """Answer every question as chosen, else as offered, and return the answers."""
    while (question := interview.current()) is not None:
        offered = chosen.get(question.name, interview.offered())
        if question.choices:
            assert offered in [value for value, _ in question.choices], question.name
            interview.answer(offered)
        else:
            text = question.shown(offered) or NEEDED.get(question.name, "")
            interview.answer(question.read(text, interview.values))
    return interview.answers


def test_every_option_that_may_be_asked_for_has_one_place() -> None:
    names = [question.name for question in cluster_questions(PLAIN)]
    asked = {name for name, option in options().items() if option.knob.ask is not None}
    assert len(names) == len(set(names))
    assert set(names) == asked | {"distributed_type", "engine"}


def test_an_option_that_is_not_declared_for_it_is_not_asked_for() -> None:
    with pytest.raises(ValueError, match="role is not asked for"):
        option_question(options()["role"], PLAIN)


WAYS: list[tuple[Machine, dict[str, Any], set[str]]] = [
    (PLAIN, {}, set()),
    (PLAIN, {"distributed_type": "MULTI_CPU"}, {"num_processes"}),
    (PLAIN, {"distributed_type": "MULTI_CPU", "num_machines": 2}, {"main_process_ip", "machine_rank"}),
    (PLAIN, {"distributed_type": "MULTI_CPU", "num_machines": 2, "mpirun_hostfile": "hosts"}, {"mpirun_hostfile"}),
    (PLAIN, {"distributed_type": "MULTI_CPU", "engine": "FSDP"}, {"fsdp_version"}),
    (PLAIN, {"distributed_type": "XLA", "tpu_cluster": True, "mixed_precision": "bf16"}, {"tpu_name", "downcast_bf16"}),
    (PLAIN, {"distributed_type": "XLA"}, {"num_processes", "tpu_cluster", "main_training_function"}),
    (FOUR, {}, {"gpu_ids", "num_processes"}),
    (FOUR, {"engine": "FSDP", "fsdp_version": 1}, {"fsdp_sharding_strategy", "fsdp_backward_prefetch"}),
    (FOUR, {"engine": "FSDP", "use_parallelism_config": True}, {"parallelism_config_cp_size"}),
    (FOUR, {"engine": "FSDP", "use_parallelism_config": True, "parallelism_config_cp_size": 2}, set()),
    (FOUR, {"engine": "DEEPSPEED"}, {"zero_stage", "offload_optimizer_device"}),
    (FOUR, {"engine": "DEEPSPEED", "deepspeed_config_file": "ds.json"}, {"deepspeed_config_file"}),
    (FOUR, {"engine": "DEEPSPEED", "zero_stage": 3, "offload_param_device": "cpu"}, {"zero3_init_flag"}),
    (FOUR, {"engine": "DEEPSPEED", "num_machines": 2, "deepspeed_multinode_launcher": "pdsh"}, {"deepspeed_hostfile"}),
    (FOUR, {"engine": "MEGATRON_LM", "megatron_lm_pp_degree": 2}, {"megatron_lm_num_micro_batches"}),
    (FOUR, {"mixed_precision": "fp8", "fp8_backend": "te"}, {"fp8_margin", "fp8_override_linear_precision"}),
    (FOUR, {"mixed_precision": "fp8", "fp8_backend": "ao"}, {"fp8_pad_inner_dim"}),
    (FOUR, {"dynamo_backend": "inductor", "dynamo_mode": "max-autotune"}, {"dynamo_use_fullgraph"}),
]


@pytest.mark.parametrize(("machine", "chosen", "asked"), WAYS, ids=[str(chosen) for _, chosen, _ in WAYS])
def test_every_way_writes_what_a_launch_reads(
    tmp_path: Path, machine: Machine, chosen: dict[str, Any], asked: set[str]
) -> None:
    answers = walk(Interview(cluster_questions(machine)), **chosen)
    assert asked <= set(answers)
    assert {name: answers[name] for name in chosen} == chosen
    path = tmp_path / "answers.yaml"
    cluster_config(answers).to_yaml_file(path)
    load_config_from_file(path)
    config = resolve(argparse.Namespace(config_file=str(path)), machine, environ={})
    for name, value in answers.items():
        # An answer that says "none" is left out of the file, and read as none.
        if name in config and value is not None:
            assert config[name] == value, name


def test_a_tpu_is_asked_for_as_many_processes_as_it_has_devices() -> None:
    here = Machine("xla", 4, 8, label=DistributedType.XLA)
    assert walk(Interview(cluster_questions(here)))["num_processes"] == 4
    assert walk(Interview(cluster_questions(PLAIN)), distributed_type="XLA")["num_processes"] == 8
    pod = walk(Interview(cluster_questions(here)), tpu_cluster=True)
    assert "num_processes" not in pod
    assert cluster_config(pod).num_processes == 1


TWO = {"engine": "DEEPSPEED", "distributed_type": "MULTI_CPU", "num_machines": 2}
NVME = {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/one", "offload_param_device": "nvme"}
BY_HAND = {"machine_rank", "main_process_ip"}
BY_FILE = {"deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter"}


@pytest.mark.parametrize(
    ("chosen", "asked", "not_asked"),
    [
        ({"engine": "DEEPSPEED", "zero_stage": 2}, {"offload_optimizer_device"}, {"offload_param_device", *BY_FILE}),
        (
            {"engine": "DEEPSPEED", "zero_stage": 3, **NVME, "offload_param_nvme_path": "/two"},
            {"zero3_init_flag", "zero3_save_16bit_model"},
            {"deepspeed_multinode_launcher"},
        ),
        (
            {"engine": "DEEPSPEED", "deepspeed_config_file": "ds.json"},
            {"deepspeed_config_file"},
            {"zero_stage", "gradient_clipping", "mixed_precision"},
        ),
        ({**TWO, "deepspeed_multinode_launcher": "standard"}, {*BY_HAND, "rdzv_backend"}, BY_FILE),
        ({**TWO, "deepspeed_multinode_launcher": "nossh"}, BY_HAND, {*BY_FILE, "rdzv_backend"}),
        ({**TWO, "deepspeed_multinode_launcher": "slurm"}, set(), {*BY_FILE, *BY_HAND, "rdzv_backend"}),
        *(
            ({**TWO, "deepspeed_multinode_launcher": name}, BY_FILE, {*BY_HAND, "rdzv_backend"})
            for name in ("pdsh", "openmpi", "mpich", "mvapich")
        ),
    ],
    # Sets print in an order of their own.
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_answers_about_deepspeed_make_a_file_that_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: dict[str, Any], asked: set[str], not_asked: set[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("hosts").write_text("a slots=1\nb slots=1\n")
    Path("ds.json").write_text('{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}')
    machine = PLAIN if "distributed_type" in chosen else FOUR
    answers = walk(Interview(cluster_questions(machine)), **chosen)
    assert (asked <= set(answers), not_asked & set(answers)) == (True, set())
    cluster_config(answers).to_yaml_file("answers.yaml")
    words = ["--config_file", "answers.yaml", "train.py"]
    config = resolve(launch_command_parser().parse_args(words), machine, environ={})
    version = "HYDRA" if answers.get("deepspeed_multinode_launcher") in ("mpich", "mvapich") else "Open MPI"
    plan = make_plan(config, FakeHost({}, mpi_version=lambda program: version))
    told = {**plan.environment, **dict(word.split("=", 1) for word in plan.argv if "=" in word)}
    if "offload_param_nvme_path" in chosen:
        assert told["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH"] == "/one"
        assert told["ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH"] == "/two"
    if "deepspeed_config_file" in chosen:
        # What DeepSpeed's own file may say, the launcher's does not say as well.
        assert told["ACCELERATE_CONFIG_DS_FIELDS"] == "deepspeed_config_file"
    explain(config, plan)


def test_questions_of_other_ways_are_not_asked() -> None:
    one = set(walk(Interview(cluster_questions(PLAIN))))
    assert one == {"distributed_type", "cpu", "mixed_precision", "dynamo_backend"}
    second = set(walk(Interview(cluster_questions(FOUR)), engine="FSDP", fsdp_version=2))
    assert not second & {
        "fsdp_sharding_strategy",
        "fsdp_backward_prefetch",
        "fsdp_use_orig_params",
        "zero_stage",
        "cpu",
    }


def test_the_machine_suggests_answers() -> None:
    assert walk(Interview(cluster_questions(PLAIN)))["cpu"] is True
    assert walk(Interview(cluster_questions(FOUR)))["num_processes"] == 4
    assert walk(Interview(cluster_questions(FOUR)), gpu_ids="1,3")["num_processes"] == 2
    assert walk(Interview(cluster_questions(FOUR)), num_machines=3)["num_processes"] == 12
    job = Machine("cuda", 4, 8, label=DistributedType.MULTI_GPU, slurm=SlurmJob("1", 2, 8, 1))
    answers = walk(Interview(cluster_questions(job)))
    assert (answers["num_machines"], answers["machine_rank"]) == (2, 1)


def test_a_step_back_forgets_what_followed_and_offers_what_was_said() -> None:
    interview = Interview(cluster_questions(PLAIN))
    assert not interview.back()
    walk(interview, distributed_type="MULTI_CPU", engine="FSDP")
    while interview.answers.get("num_processes") is not None:
        assert interview.back()
    assert "fsdp_version" not in interview.answers
    interview.answer(5)
    assert interview.answers["num_processes"] == 5
    interview.back()
    assert interview.offered() == 5
    interview.answer(5)
    assert walk(interview)["fsdp_version"] == 2


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("num_processes", "3", "multiple of 2"),
        ("num_processes", "0", "At least one"),
        ("num_processes", "many", "whole number"),
        ("num_machines", "0", "At least one"),
        ("machine_rank", "2", "from 0 to 1"),
        ("main_process_port", "70000", "65535"),
        ("main_process_ip", " ", "An answer is needed"),
        ("fsdp_min_num_params", "-1", "negative"),
    ],
)
def test_an_answer_that_cannot_work_is_refused(name: str, text: str, reason: str) -> None:
    question = option_question(options()[name], PLAIN)
    with pytest.raises(ValueError, match=reason):
        question.read(text, {"num_machines": 2})


@pytest.mark.parametrize("spread", ["NO", "DATA_PARALLEL"])
def test_jobs_on_sagemaker(tmp_path: Path, spread: str) -> None:
    answers = walk(sagemaker_interview(), sagemaker_distributed_type=spread, num_machines=2)
    assert ("num_machines" in answers) is (spread != "NO")
    path = tmp_path / "answers.yaml"
    sagemaker_config(answers).to_yaml_file(path)
    loaded = load_config_from_file(path)
    assert isinstance(loaded, SageMakerConfig)
    assert (loaded.iam_role_name, loaded.distributed_type.value) == ("role", spread)
    assert loaded.num_machines == (1 if spread == "NO" else 2)


def test_nothing_is_offered_after_the_last_answer() -> None:
    interview = Interview(cluster_questions(PLAIN))
    assert interview.offered() is not None
    walk(interview)
    assert (interview.current(), interview.offered()) == (None, None)
