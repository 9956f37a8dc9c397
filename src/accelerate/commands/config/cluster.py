"""Ask about runs on this machine or on a cluster."""

from __future__ import annotations

from accelerate.commands.config.config_utils import ask_answers
from accelerate.config import env
from accelerate.config.cluster_config import ClusterConfig
from accelerate.config.questions import Interview, cluster_config, cluster_questions
from accelerate.devices.machine import detect


def cluster_interview() -> Interview:
    """Return the questions, with answers that this machine suggests."""
    return Interview(cluster_questions(detect(env.items())))


def get_cluster_input() -> ClusterConfig:
    """Ask the questions and return the content of the file.

    Raises:
        UsageError: Input or output is no terminal.
    """
    return cluster_config(ask_answers(cluster_interview()))
