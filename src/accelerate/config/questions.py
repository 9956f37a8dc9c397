"""The questions of `accelerate config`, made from the declarations of the options, and the file that the answers make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate._base.enums import ComputeEnvironment, DistributedType
from accelerate.config.cluster_config import ClusterConfig
from accelerate.config.files import kind_of
from accelerate.config.knob import TEXT, YES_NO, Codec, Condition, LaunchSection
from accelerate.config.sections.compute import DynamoOptions, Fp8Options, ParallelismOptions
from accelerate.config.sections.engines import (
    DeepSpeedOptions,
    FsdpOptions,
    MegatronOptions,
    meets_by_torch,
    started_by_hand,
)
from accelerate.config.sections.launch import MpiOptions, TpuOptions, several_processes
from accelerate.config.sections.registry import LaunchOption, options

if TYPE_CHECKING:
    from accelerate.devices.machine import Machine

Offer = Callable[[Mapping[str, Any]], Any]
Check = Callable[[Any, Mapping[str, Any]], str | None]

KIND = "distributed_type"
ENGINE = "engine"
_ENGINES = {
    "": "none: each process has the whole model",
    DistributedType.FSDP.value: "FSDP: torch shards weights, gradients and optimizer states",
    DistributedType.DEEPSPEED.value: "DeepSpeed: ZeRO",
    DistributedType.MEGATRON_LM.value: "Megatron-LM",
}
# Of most TPUs of one machine, where the questions are answered elsewhere.
_DEVICES_OF_A_TPU = 8
# A name is one question, a section those of all its options.
_ORDER: tuple[str | type[LaunchSection], ...] = (
    KIND,
    "cpu",
    "num_machines",
    MpiOptions,
    # The engine, and who starts it elsewhere, say what else must be known of the machines.
    ENGINE,
    "deepspeed_multinode_launcher",
    "deepspeed_hostfile",
    "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "rdzv_backend",
    "gpu_ids",
    # Every machine of a pod starts as many processes as it has devices.
    "tpu_cluster",
    "num_processes",
    "enable_cpu_affinity",
    "debug",
    FsdpOptions,
    DeepSpeedOptions,
    MegatronOptions,
    "use_parallelism_config",
    ParallelismOptions,
    "mixed_precision",
    Fp8Options,
    DynamoOptions,
    TpuOptions,
)


# Asked for where these hold as well as their own conditions.
_MORE_CONDITIONS: dict[str, Condition] = {
    **dict.fromkeys(("machine_rank", "main_process_ip"), started_by_hand),
    "rdzv_backend": meets_by_torch,
    # DeepSpeed's own file says it.
    "mixed_precision": lambda answers: not answers["deepspeed_config_file"],
}


def _always(answers: Mapping[str, Any]) -> bool:
    return True


@dataclass(frozen=True)
class Question:
    """One question.

    Args:
        name: The option that it asks for.
        choices: The answers to choose from, each with its label; empty for a text.
        offer: Gives the answer that is offered, from the answers before.
        optional: An empty text is an answer, None.
        applies: Says whether it is asked, from the answers before.
        check: Gives the reason why an answer cannot be taken; None takes it.
    """

    name: str
    text: str
    codec: Codec[Any] = TEXT
    choices: tuple[tuple[Any, str], ...] = ()
    offer: Offer = lambda answers: None
    optional: bool = False
    applies: Condition = _always
    check: Check = lambda value, answers: None

    def read(self, text: str, answers: Mapping[str, Any]) -> Any:
        """Return the answer that a text holds.

        Raises:
            ValueError: The text is no answer; the message says what one is.
        """
        if not text.strip():
            if self.optional:
                return None
            raise ValueError(f"An answer is needed: {self.codec.meaning}")
        try:
            value = self.codec.parse(text.strip())
        except ValueError as error:
            raise ValueError(f"Not {self.codec.meaning}") from error
        reason = self.check(value, answers)
        if reason is not None:
            raise ValueError(reason)
        return value

    def shown(self, value: Any) -> str:
        """Return an answer as the text that would give it."""
        return "" if value is None else self.codec.format(value)


class Interview:
    """Go through questions one by one, forward and back.

    Args:
        questions: All questions in their order; those that do not apply are passed over.
    """

    def __init__(self, questions: Sequence[Question]) -> None:
        self._questions = tuple(questions)
        self._path: list[int] = []
        self._given: dict[str, Any] = {}
        # What was said before a step back is offered again.
        self._before: dict[str, Any] = {}

    @property
    def answers(self) -> dict[str, Any]:
        """What was asked and answered, by name, in order."""
        return dict(self._given)

    @property
    def values(self) -> dict[str, Any]:
        """Every option by name as answered so far, and what the answers stand for."""
        return implied(self._given)

    def current(self) -> Question | None:
        """Return the question to ask now; None when all are answered."""
        index = self._next()
        return None if index is None else self._questions[index]

    def offered(self) -> Any:
        """Return the answer that the current question offers: the one given before a step back, else its default."""
        question = self.current()
        if question is None:
            return None
        offer = question.offer(self.values)
        before = self._before.get(question.name, offer)
        known = not question.choices or any(value == before for value, _ in question.choices)
        return before if known else offer

    def answer(self, value: Any) -> None:
        """Answer the current question and go on to the next."""
        index = self._next()
        if index is not None:
            self._given[self._questions[index].name] = value
            self._path.append(index)

    def back(self) -> bool:
        """Take the last answer back; False where there is none."""
        if not self._path:
            return False
        name = self._questions[self._path.pop()].name
        self._before[name] = self._given.pop(name)
        return True

    def _next(self) -> int | None:
        values = self.values
        start = self._path[-1] + 1 if self._path else 0
        indices = range(start, len(self._questions))
        return next((index for index in indices if self._questions[index].applies(values)), None)


def implied(answers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of every option under some answers, with the switches that they stand for."""
    defaults = {
        name: option.knob.fallback if option.default is None else option.default for name, option in options().items()
    }
    values = {**defaults, KIND: DistributedType.NO.value, ENGINE: "", **answers}
    for kind in (values[KIND], values[ENGINE] or DistributedType.NO.value):
        switch = kind_of(kind).turns_on
        if switch is not None:
            values[switch] = True
    return values


def cluster_questions(machine: Machine) -> tuple[Question, ...]:
    """Return the questions about runs on this machine or on a cluster, with the answers that a machine suggests."""
    own = {KIND: _kind(machine), ENGINE: _engine()}
    found: list[Question] = []
    for entry in _ORDER:
        if not isinstance(entry, str):
            found += [option_question(option, machine) for option in _of_section(entry)]
        else:
            found.append(own[entry] if entry in own else option_question(options()[entry], machine))
    return tuple(found)


def option_question(option: LaunchOption, machine: Machine) -> Question:
    """Return the question that asks for an option.

    Raises:
        ValueError: The option is not declared as one to ask for.
    """
    declared, ask = option.knob, option.knob.ask
    if ask is None:
        raise ValueError(f"{option.name} is not asked for; give its knob an `ask`")
    conditions = [
        condition
        for condition in (
            _switched_on(option.section.switch),
            declared.only_if,
            ask.only_if,
            _MORE_CONDITIONS.get(option.name),
        )
        if condition is not None
    ]
    choices = [(choice, str(choice)) for choice in ask.choices or declared.choices]
    if declared.codec.meaning == YES_NO.meaning:
        choices = [(False, "no"), (True, "yes")]
    first = choices[0][0] if choices and not ask.optional else None
    usual = next((value for value in (ask.default, option.default, declared.fallback) if value is not None), first)
    return Question(
        option.name,
        ask.text or declared.help.rstrip("."),
        declared.codec,
        tuple(choices),
        offer=lambda answers: _detected(option.name, machine, answers, usual),
        optional=ask.optional,
        applies=lambda answers: all(condition(answers) for condition in conditions),
        check=_CHECKS.get(option.name, _not_negative),
    )


def _switched_on(switch: str | None) -> Condition | None:
    return None if switch is None else lambda answers: bool(answers[switch])


def _of_section(section: type[LaunchSection]) -> Iterator[LaunchOption]:
    """Yield the options of a section that are asked for, those behind another one right after it."""
    asked = [
        option
        for option in options().values()
        if option.section is section and option.knob.ask is not None and option.name not in _ORDER
    ]
    followers = {option.knob.ask.after: option for option in asked if option.knob.ask and option.knob.ask.after}
    for option in asked:
        if option in followers.values():
            continue
        current: LaunchOption | None = option
        while current is not None:
            yield current
            current = followers.get(current.name)


def _kind(machine: Machine) -> Question:
    several = [kind.value for kind in DistributedType if kind.value.startswith("MULTI_")]
    # What this machine has comes first, then the most usual.
    first = (machine.label.value, DistributedType.MULTI_CPU.value)
    several.sort(key=lambda kind: kind not in first)
    labels = {DistributedType.NO.value: "one process"}
    labels |= {kind: f"several accelerators ({kind})" for kind in several}
    if machine.device_count > 1:
        labels[machine.label.value] = f"several accelerators ({machine.label.value}, found here)"
    labels |= {DistributedType.MULTI_CPU.value: "several processes on the CPU", DistributedType.XLA.value: "TPU"}
    usual = machine.label.value if machine.device_count > 1 else DistributedType.NO.value
    return Question(KIND, "What the run is on", choices=tuple(labels.items()), offer=lambda answers: usual)


def _engine() -> Question:
    return Question(
        ENGINE,
        "Engine that shards the model",
        choices=tuple(_ENGINES.items()),
        offer=lambda answers: "",
        applies=lambda answers: several_processes(answers) and not answers["tpu"],
    )


def _detected(name: str, machine: Machine, answers: Mapping[str, Any], usual: Any) -> Any:
    """Return the answer that the machine suggests, where it suggests one."""
    suggestions: dict[str, Offer] = {
        "cpu": lambda answers: not machine.has_accelerator,
        "num_processes": lambda answers: _processes(machine, answers),
        "num_machines": lambda answers: machine.slurm.num_nodes if machine.slurm else usual,
        "machine_rank": lambda answers: machine.slurm.node_rank if machine.slurm else usual,
    }
    return suggestions[name](answers) if name in suggestions else usual


def _processes(machine: Machine, answers: Mapping[str, Any]) -> int:
    """Suggest a process for each accelerator; on CPUs the fewest that are several."""
    if answers["tpu"]:
        return machine.device_count if machine.device_type == "xla" else _DEVICES_OF_A_TPU
    machines = int(answers["num_machines"])
    chosen = [entry for entry in str(answers["gpu_ids"]).split(",") if entry.strip().isdecimal()]
    local = 0 if answers["cpu"] else len(chosen) or machine.device_count
    return max(local, 1 if machines > 1 else 2) * machines


def _at_least_one(value: Any, answers: Mapping[str, Any]) -> str | None:
    return None if value >= 1 else "At least one is needed"


def _shared_evenly(value: Any, answers: Mapping[str, Any]) -> str | None:
    machines = answers["num_machines"]
    even = value >= 1 and value % machines == 0
    return None if even else f"Needs a multiple of {machines}, the number of machines" if value >= 1 else "At least one"


def _place_among_machines(value: Any, answers: Mapping[str, Any]) -> str | None:
    last = answers["num_machines"] - 1
    return None if 0 <= value <= last else f"Machines are numbered from 0 to {last}"


def _port(value: Any, answers: Mapping[str, Any]) -> str | None:
    return None if 0 <= value <= 65535 else "Ports go up to 65535"


def _not_negative(value: Any, answers: Mapping[str, Any]) -> str | None:
    return "Cannot be negative" if type(value) in (int, float) and value < 0 else None


_CHECKS: dict[str, Check] = {
    "num_machines": _at_least_one,
    "num_processes": _shared_evenly,
    "machine_rank": _place_among_machines,
    "main_process_port": _port,
    **{name: _at_least_one for name in options() if name.endswith(("_size", "_degree", "_micro_batches", "_steps"))},
}


# --- the file ---------------------------------------------------------------------------------------------------------

_YES_NO = {"true": True, "false": False}


def cluster_config(answers: Mapping[str, Any]) -> ClusterConfig:
    """Return the file that answers to the questions about this machine or a cluster make."""
    values = implied(answers)
    kind = values[ENGINE] or values[KIND]
    content: dict[str, Any] = {
        "compute_environment": ComputeEnvironment.LOCAL_MACHINE,
        "distributed_type": DistributedType(kind),
        "mixed_precision": None if values["deepspeed_config_file"] else values["mixed_precision"],
        "use_cpu": bool(values["cpu"]),
        "debug": bool(values["debug"]),
        # One process, where no number was asked for.
        "num_processes": values["num_processes"] or 1,
    }
    content |= by_section(answers)
    return ClusterConfig(**content)


def by_section(answers: Mapping[str, Any]) -> dict[str, Any]:
    """Return answers under the keys of files: in the dictionaries of their sections, or at the top.

    A section that was answered by "no" alone is left out.
    """
    content: dict[str, Any] = {}
    for name, value in answers.items():
        option = options().get(name)
        if option is None or option.file_key is None or value is None:
            continue
        place = content if option.section.file_key is None else content.setdefault(option.section.file_key, {})
        if isinstance(value, tuple):
            value = ",".join(str(entry) for entry in value)
        place[_file_key(option)] = _YES_NO.get(value, value) if isinstance(value, str) else value
    if content.get("dynamo_config", {}).get("dynamo_backend") == "no":
        del content["dynamo_config"]
    return content


def _file_key(option: LaunchOption) -> str:
    """Return the key, without the prefix where files have always left it out."""
    key = option.file_key or option.name
    if option.section is Fp8Options and key != "fp8_format":
        return key.removeprefix(Fp8Options.prefix)
    return key
