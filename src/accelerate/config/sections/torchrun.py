"""Launch options that torchrun has under names of its own, so that its command lines work here as they are.

Those that only rename one of ours stand beside it in the other sections, as `also`.
"""

from __future__ import annotations

import signal
from typing import ClassVar

from accelerate.config.knob import Codec, LaunchSection, Reader, knob, matching

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_SIGNAL = f"({'|'.join(signal.Signals.__members__)})"


def _read_filters(text: str) -> list[str]:
    # A comma that belongs to a word is written twice.
    return [word.replace("\0", ",") for word in text.replace(",,", "\0").split(",")]


STREAMS = matching(r"[0-3]|\d{1,9}:[0-3](,\d{1,9}:[0-3])*", "0, 1, 2 or 3, or a list such as `0:1,1:3`")
_NODES = matching(r"[1-9]\d{0,8}(:[1-9]\d{0,8})?", "a number of machines from 1 on, or a range such as `1:4`")
_LOCAL = matching(r"\d{1,9}|[a-z]+", "a whole number, auto, cpu, gpu or the type of a device")
_RANKS = matching(r"\d{1,9}(,\d{1,9})*", "a list of ranks such as `0,1`")
_HEARD = matching(f"{_SIGNAL}(,{_SIGNAL})*", "a list of signals such as `SIGTERM,SIGINT`")
_FILTERS: Codec[list[str]] = Codec(
    _read_filters, lambda words: ",".join(word.replace(",", ",,") for word in words), "words between commas"
)


class TorchrunOptions(LaunchSection):
    """What a command line of torchrun says that ours does not, or says otherwise."""

    title: ClassVar[str] = "torchrun Arguments"
    in_files: ClassVar[bool] = False
    reader: ClassVar[Reader | None] = "elastic"

    nproc_per_node: str | None = knob(
        help="Number of processes on each machine, where --num_processes counts them all; `auto` and `gpu` take one for "
        "each accelerator, `cpu` one for each core.",
        codec=_LOCAL,
        reader="resolver",
    )
    nnodes: str | None = knob(
        help="Number of machines (as --num_machines), or the least and the most: `1:4`.",
        codec=_NODES,
        reader="resolver",
    )
    standalone: bool = knob(
        False, help="Use this machine alone, on a free port; addresses are not used.", shape="switch", reader="resolver"
    )
    rdzv_endpoint: str | None = knob(
        help="Where the machines meet, as `host:port` (as --main_process_ip and --main_process_port).",
        reader="resolver",
    )
    rdzv_id: str = knob("none", help="Name of the run, the same on all machines.")
    local_addr: str | None = knob(help="Address under which the other machines reach this one; found if not given.")
    redirects: str = knob(
        "0",
        help="Streams that go to log files instead of the terminal: 1 is output, 2 is errors, 3 is both.",
        codec=STREAMS,
        short="-r",
    )
    local_ranks_filter: str | None = knob(
        help="Processes of this machine whose streams the terminal shows, such as `0,1`.", codec=_RANKS
    )
    log_line_prefix_template: str | None = knob(
        help="Prefix of each line that --tee shows, such as `${role_name}${local_rank}: `; also `${rank}` and, with torch "
        "2.15, `${hostname}`."
    )
    duplicate_stdout_filters: list[str] | None = knob(
        help="Words whose lines of output go to `filtered_stdout.log` as well; needs --tee.",
        codec=_FILTERS,
    )
    duplicate_stderr_filters: list[str] | None = knob(
        help="Words whose lines of errors go to `filtered_stderr.log` as well; needs --tee.",
        codec=_FILTERS,
    )
    logs_specs: str | None = knob(help="Class that decides on log files, by its entry point in `torchrun.logs_specs`.")
    event_log_handler: str = knob("null", help="Handler of the agent's events that is registered with torch.")
    numa_binding: str | None = knob(
        help="Bind each process to the cores near its GPU, as torch does it.",
        choices=("node", "socket", "exclusive", "core-complex"),
    )
    signals_to_handle: str = knob(
        _SIGNALS, help="Signals to the launcher that end the run; SIGUSR1 always asks it to save and end.", codec=_HEARD
    )
    virtual_local_rank: bool = knob(
        False, help="Let each process see its own GPU alone, as local rank 0.", shape="switch"
    )
    start_method: str = knob(
        "spawn",
        help="Accepted and not needed: each process is a program of its own.",
        choices=("spawn", "fork", "forkserver"),
        idle=": each process is a program of its own, started as from a shell.",
    )
    run_path: bool = knob(
        False,
        help="Accepted and not needed: a script always runs in the interpreter that the launcher starts.",
        shape="switch",
        idle=": a script always runs in the interpreter that the launcher starts.",
    )
