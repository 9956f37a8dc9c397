"""Ask about jobs on Amazon SageMaker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate._base.constants import SAGEMAKER_PARALLEL_EC2_INSTANCES
from accelerate._base.enums import ComputeEnvironment, SageMakerDistributedType
from accelerate.commands.config.config_utils import ask_answers
from accelerate.config import env
from accelerate.config.cluster_config import SageMakerConfig
from accelerate.config.questions import Interview, Question, by_section, option_question
from accelerate.config.sections.registry import options
from accelerate.devices.machine import detect

_SPREAD = "sagemaker_distributed_type"
_KINDS = {
    SageMakerDistributedType.NO.value: "one machine, not spread",
    SageMakerDistributedType.DATA_PARALLEL.value: "data parallel",
    SageMakerDistributedType.MODEL_PARALLEL.value: "model parallel",
}
_ASKED_OF_LAUNCHES = (
    "dynamo_backend",
    "dynamo_mode",
    "dynamo_use_fullgraph",
    "dynamo_use_dynamic",
    "dynamo_use_regional_compilation",
    "mixed_precision",
)


def _is_spread(answers: Mapping[str, Any]) -> bool:
    return bool(answers[_SPREAD] != SageMakerDistributedType.NO.value)


_QUESTIONS = (
    Question("profile", "Profile of AWS credentials", offer=lambda answers: "default"),
    Question("region", "Region", offer=lambda answers: "us-east-1"),
    Question("iam_role_name", "Name of the IAM role that runs the job"),
    Question("image_uri", "Container image; empty takes the one of Hugging Face", optional=True),
    Question("sagemaker_inputs_file", "File of the job's inputs (TSV)", optional=True),
    Question("sagemaker_metrics_file", "File of the job's metrics (TSV)", optional=True),
    Question(
        _SPREAD,
        "How the job is spread",
        choices=tuple(_KINDS.items()),
        offer=lambda answers: SageMakerDistributedType.NO.value,
    ),
    Question(
        "ec2_instance_type",
        "Type of the machines",
        offer=lambda answers: SAGEMAKER_PARALLEL_EC2_INSTANCES[0] if _is_spread(answers) else "ml.p3.2xlarge",
    ),
)


def sagemaker_interview() -> Interview:
    """Return the questions."""
    machine = detect(env.items())
    machines = Question(
        "num_machines",
        "Number of machines",
        options()["num_machines"].knob.codec,
        offer=lambda answers: 1,
        applies=_is_spread,
        check=option_question(options()["num_machines"], machine).check,
    )
    shared = [option_question(options()[name], machine) for name in _ASKED_OF_LAUNCHES]
    return Interview((*_QUESTIONS, machines, *shared))


def sagemaker_config(answers: Mapping[str, Any]) -> SageMakerConfig:
    """Return the file that the answers make."""
    own = {question.name: answers[question.name] for question in _QUESTIONS if question.name != _SPREAD}
    machines = answers.get("num_machines", 1)
    content: dict[str, Any] = {
        "compute_environment": ComputeEnvironment.AMAZON_SAGEMAKER,
        "distributed_type": SageMakerDistributedType(answers[_SPREAD]),
        "use_cpu": False,
        "debug": False,
        "base_job_name": f"accelerate-sagemaker-{machines}",
    }
    return SageMakerConfig(**(content | own | by_section(answers)))


def get_sagemaker_input() -> SageMakerConfig:
    """Ask the questions and return the content of the file.

    Raises:
        UsageError: Input or output is no terminal.
    """
    return sagemaker_config(ask_answers(sagemaker_interview()))
