"""Launch options that say how processes of one or several machines meet and are watched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from accelerate.config.knob import INTEGER, NAMES, NUMBER, ON_TRUE, YES_NO, Ask, knob
from accelerate.config.sections.asking import chooses_devices, machines_meet
from accelerate.config.sections.launch_section import LaunchSection


@dataclass
class DistributedOptions(LaunchSection):
    """Addresses, rendezvous, logs and restarts."""

    title: ClassVar[str] = "Distributed GPUs"

    gpu_ids: str | None = knob(
        help="Accelerators of this machine to use, such as `0,2`, or `all`.",
        codec=NAMES,
        fallback="all",
        reader="launcher",
        ask=Ask(only_if=chooses_devices),
    )
    same_network: bool = knob(
        False,
        help="Accepted and not needed: machines always meet at the address of the first one.",
        codec=YES_NO,
        shape="switch",
        reader="resolver",
    )
    machine_rank: int | None = knob(
        help="Number of this machine, from 0.",
        codec=INTEGER,
        fallback=0,
        reader="elastic",
        ask=Ask(only_if=machines_meet),
    )
    main_process_ip: str | None = knob(
        help="Address of the first machine.", env="MASTER_ADDR", reader="elastic", ask=Ask(only_if=machines_meet)
    )
    main_process_port: int | None = knob(
        help="Port of the first machine; 0 takes a free one.",
        codec=INTEGER,
        env="MASTER_PORT",
        reader="elastic",
        ask=Ask(default=29500, only_if=machines_meet),
    )
    tee: str = knob(
        "0",
        help="Streams that go to the terminal and to the log files: 1 is output, 2 is errors, 3 is both.",
        short="-t",
        yaml="",
        reader="elastic",
    )
    log_dir: str | None = knob(help="Folder for the logs of each process.", yaml="", reader="elastic")
    role: str = knob("default", help="Name of the workers in logs.", yaml="", reader="elastic")
    rdzv_backend: str = knob(
        "static",
        help="How the machines meet: static, c10d or etcd.",
        reader="elastic",
        ask=Ask("How the machines meet", choices=("static", "c10d", "etcd"), only_if=machines_meet),
    )
    rdzv_conf: str = knob("", help="Options of the meeting, as `key=value,key=value`.", yaml="", reader="elastic")
    max_restarts: int = knob(
        0, help="How often the workers are started anew after a failure.", codec=INTEGER, yaml="", reader="elastic"
    )
    auto_resume: bool = knob(
        False,
        help="Let `accelerator.epochs()` go on from the newest valid checkpoint of the project folder.",
        codec=ON_TRUE,
        env="ACCELERATE_AUTO_RESUME",
        shape="switch",
        yaml="",
    )
    preemption_grace: float = knob(
        30.0,
        help="Seconds that workers which read `accelerator.should_stop` have to save and end after SIGTERM.",
        codec=NUMBER,
        yaml="",
        reader="elastic",
    )
    monitor_interval: float = knob(
        0.1, help="Seconds between two looks at the workers.", codec=NUMBER, yaml="", reader="elastic"
    )
