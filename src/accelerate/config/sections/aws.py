"""Launch options of Amazon SageMaker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accelerate.config.knob import knob
from accelerate.config.sections.launch_section import LaunchSection


@dataclass
class AwsOptions(LaunchSection):
    """Who pays."""

    title: ClassVar[str] = "AWS Arguments"

    aws_access_key_id: str | None = knob(
        help="Key of the account, for jobs on SageMaker.", env="AWS_ACCESS_KEY_ID", yaml="", secret=True
    )
    aws_secret_access_key: str | None = knob(
        help="Secret of that key.", env="AWS_SECRET_ACCESS_KEY", yaml="", secret=True
    )
