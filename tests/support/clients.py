"""Client programs: which there are, how they are started, and how what they gave is compared with release 1.15."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tests.support.launching import launch_command, launch_environment
from tests.support.processes import ROOT

PROGRAMS_FOLDER = ROOT / "tests" / "clients" / "programs"
RECORDED = ROOT / "tests" / "clients" / "recorded"
TWO_PROCESSES = ROOT / "examples" / "two_processes.yaml"
# Machines round differently, and steps of training carry it on.
RELATIVE, ABSOLUTE = 1e-4, 1e-6


@dataclass(frozen=True)
class Program:
    """One program, what it does in a few words, and the numbers of processes that it runs on."""

    name: str
    does: str
    processes: tuple[int, ...] = (1, 2)

    @property
    def path(self) -> Path:
        """Return the file of the program."""
        return PROGRAMS_FOLDER / f"{self.name}.py"


PROGRAMS = (
    Program("trainer_digits", "Transformers: a CNN of one's own on digits under `Trainer`"),
    Program(
        "trainer_classification",
        "Transformers: sequence classification with metrics, callbacks, length groups, resume in mid-epoch, "
        "`auto_find_batch_size`, `accelerator_config`, `torch_compile`",
    ),
    Program("trainer_causal_lm", "Transformers: a language model with accumulation weighed by tokens, and bf16"),
    Program("trainer_seq2seq", "Transformers: `Seq2SeqTrainer`, which generates while it evaluates"),
    Program("trainer_fsdp", "Transformers: `Trainer` under FSDP 1 and 2 beside replicas, resume, whole weights", (2,)),
    Program("no_trainer", "Transformers: a loop of one's own, checkpoints of each epoch, a tracker"),
    Program("transformers_inference", "Transformers: `device_map`, `max_memory`, disk, generation, pipelines", (1,)),
    Program("diffusion", "Diffusers: a UNet trained with averaged weights, hooks on save and load, a tracker"),
    Program("diffusion_pipelines", "Diffusers: model, sequential, group and disk offload", (1,)),
    Program("lora", "PEFT: LoRA trained, saved, and loaded on a base that stays on the disk"),
    Program("trl_trainers", "TRL: SFT, DPO, GRPO and reward trainers"),
    Program("sentence_embeddings", "sentence-transformers: trained, evaluated, saved"),
    Program("streaming", "datasets: map-style, streamed, shuffled in a buffer, filtered"),
)


# --- runs -------------------------------------------------------------------------------------------------------------


class ProgramFailure(AssertionError):
    """A program ended with another code than 0."""


@dataclass(frozen=True)
class Outcome:
    """What a program gave: the release that it ran on, and the values of its main process by the names of its parts."""

    version: str
    parts: dict[str, Any]


def run_program(program: Program, processes: int, folder: Path) -> Outcome:
    """Run a program on this package as a user does: by python, or by `accelerate launch` with a configuration file."""
    launcher = [sys.executable] if processes == 1 else launch_command("--config_file", str(TWO_PROCESSES))
    return start(program, processes, folder, launcher, launch_environment())


def run_on_reference(program: Program, processes: int, folder: Path, python: Path) -> Outcome:
    """Run a program on the other release: its launcher starts one process on a CPU, so torchrun starts two."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    launcher = [str(python)]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        environment["ACCELERATE_USE_CPU"] = "true"
    return start(program, processes, folder, launcher, environment)


def start(
    program: Program, processes: int, folder: Path, launcher: Sequence[str], environment: Mapping[str, str]
) -> Outcome:
    """Run a program by a launcher and return what it gave.

    Raises:
        ProgramFailure: The program did not end with 0 on so many processes; the end of what it printed is part of the
            message.
    """
    command = [*launcher, str(program.path), str(folder)]
    # No configuration and no cache of this user.
    settings = {
        "HF_HOME": f"{folder}-home",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "0",
    }
    done = subprocess.run(
        command, env={**environment, **settings}, capture_output=True, text=True, check=False, timeout=900
    )
    if done.returncode:
        raise ProgramFailure(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr[-6000:]}")
    results = [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(processes)]
    if any(result["processes"] != processes for result in results):
        raise ProgramFailure(f"{' '.join(command)} ran on {results[0]['processes']} processes, not on {processes}")
    return Outcome(results[0]["version"], results[0]["parts"])


# --- the record of release 1.15 ---------------------------------------------------------------------------------------


def write_recorded(program: Program, runs: Mapping[int, Outcome]) -> None:
    """Keep what the other release gave on each number of processes."""
    parts = {str(processes): _rounded(outcome.parts) for processes, outcome in runs.items()}
    (RECORDED / f"{program.name}.json").write_text(json.dumps(parts, indent=1) + "\n")


def read_recorded(program: Program, processes: int) -> dict[str, Any]:
    """Return what the other release gave."""
    recorded: dict[str, Any] = json.loads((RECORDED / f"{program.name}.json").read_text())[str(processes)]
    return recorded


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return float(f"{value:.7g}")
        case dict():
            return {name: _rounded(inner) for name, inner in value.items()}
        case list():
            return [_rounded(inner) for inner in value]
        case _:
            return value


# --- comparison -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Values of a program that are not those of release 1.15, and the reason.

    Args:
        values: The values, as patterns of `fnmatch` over their paths: "resumed/losses/*".
        what: What they are, in a few words.
    """

    program: str
    processes: tuple[int, ...]
    values: tuple[str, ...]
    what: str
    reason: str

    def covers(self, program: str, processes: int, path: str) -> bool:
        """Return whether a value is one of these."""
        return (
            program == self.program
            and processes in self.processes
            and any(fnmatchcase(path, pattern) for pattern in self.values)
        )


@dataclass
class Comparison:
    """How the values of a run stand beside the recorded ones."""

    equal: int = 0
    close: int = 0
    largest: float = 0.0
    explained: dict[Difference, int] = field(default_factory=dict)
    unexplained: dict[str, tuple[Any, Any]] = field(default_factory=dict)


def compare(program: Program, processes: int, found: Any, recorded: Any) -> Comparison:
    """Compare what a run gave with what release 1.15 gave."""
    result = Comparison()
    ours, theirs = dict(_values(found)), dict(_values(recorded))
    for path in sorted(ours.keys() | theirs.keys()):
        one: Any = ours.get(path)
        other: Any = theirs.get(path)
        reason = next((entry for entry in DIFFERENCES if entry.covers(program.name, processes, path)), None)
        if one == other:
            result.equal += 1
        elif reason is not None:
            result.explained[reason] = result.explained.get(reason, 0) + 1
        elif _is_close(one, other):
            result.close += 1
            result.largest = max(result.largest, abs(one - other) / max(abs(one), abs(other)))
        else:
            result.unexplained[path] = (one, other)
    return result


def _values(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every number and text with its path. Names of files have no order, and those that only we write are left out."""
    match value:
        case dict():
            for name, inner in value.items():
                yield from _values(inner, f"{path}/{name}" if path else name)
        case list() if path.rpartition("/")[2] == "files":
            for name in value:
                if not any(fnmatchcase(Path(name).name, pattern) for pattern in OWN_FILES):
                    yield f"{path}/{name}", True
        case list():
            yield f"{path}/length", len(value)
            for index, inner in enumerate(value):
                yield from _values(inner, f"{path}/{index}")
        case _:
            yield path, value


def _is_close(one: Any, other: Any) -> bool:
    return (
        isinstance(one, float)
        and isinstance(other, float)
        and math.isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    )


# --- what differs, and why --------------------------------------------------------------------------------------------

# A checkpoint of ours has these beside the files of release 1.15, and its folder the last two while a run lives.
OWN_FILES = ("loader*.bin", "manifest.json", "progress.json", ".*accelerate-claim", ".accelerate-pulse-*")

_EXACT_RESUME = "`load_state` brings the loaders back too, so the resumed run goes on as the one that was never stopped"
DIFFERENCES = (
    Difference(
        "trainer_classification",
        (2,),
        ("dropout and length groups/*",),
        "losses and weights with dropout and groups of equal length",
        "the sampler draws on rank 0 alone, so the random streams of the other ranks, which their dropout draws from, are not moved",
    ),
    Difference(
        "trainer_classification",
        (2,),
        tuple(
            f"{way}/{name}" for way in ("split_batches", "dispatch_batches") for name in ("eval_loss/*", "evaluated")
        ),
        "the loss of an evaluation whose last batch the processes share unevenly",
        "`gather_for_metrics` keeps of each process what stands for its own samples; 1.15 cuts the end off, whosever it is",
    ),
    Difference(
        "trainer_fsdp",
        (2,),
        ("FSDP 1/*", "FSDP 2/files/*", "FSDP 2/type"),
        "everything under FSDP",
        "without accelerators 1.15 refuses FSDP 1, and trains replicas where FSDP 2 is asked for; here both shard, and give the numbers of replicas",
    ),
    Difference(
        "no_trainer",
        (1, 2),
        ("resumed/*",),
        "losses and weights after a resume",
        _EXACT_RESUME,
    ),
    Difference(
        "no_trainer",
        (2,),
        ("order from the global random state/*",),
        "losses and weights where the global random state decides the order",
        "on several processes the order is the one of rank 0's plain loop",
    ),
    Difference("diffusion", (1, 2), ("resumed/*",), "losses and weights after a resume", _EXACT_RESUME),
    Difference(
        "diffusion_pipelines",
        (1,),
        ("sequential offload/*",),
        "images with sequential offload",
        "1.15 fails with a TypeError where the device to compute on is the CPU",
    ),
)
