"""DeepSpeed's configuration as plain data: read from what users give, checked, and completed by what is known elsewhere."""

from __future__ import annotations

import base64
import binascii
import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from accelerate._base.errors import ConfigurationError
from accelerate._base.untrusted import check_nesting, first_line, parse_json
from accelerate.config.deepspeed_rules import (
    ACCUMULATION,
    AUTO,
    BATCH_SIZES,
    ENTRIES,
    MICRO,
    MISSING,
    TOTAL,
    check,
    find_faults,
    is_word,
    look_up,
    refuse,
    unreadable,
)

if TYPE_CHECKING:
    from accelerate.config.run_config import RunConfig

# Options that DeepSpeed's configuration has too, and where.
PLACES = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
}
_MOST_CHARACTERS = 1_000_000
HALF = {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}
"""The half precision of DeepSpeed's that each of ours turns on."""


EntryPath: TypeAlias = tuple[str, ...]
"""The names of the sections around an entry, and its own."""


@dataclass(frozen=True)
class Fact:
    """What the program or the launcher says about an entry.

    Args:
        origin: Who says it, such as `Accelerator(gradient_accumulation_steps=4)`.
        binding: Another value in the configuration contradicts it; otherwise it only fills an entry that is "auto".
    """

    value: Any
    origin: str
    binding: bool = True


@dataclass(frozen=True)
class Completed:
    """A configuration without open entries, and where the value of each dotted name comes from."""

    config: dict[str, Any]
    origins: dict[str, str]


def precision_of(config: Mapping[str, Any]) -> str:
    """Return the number format that a configuration turns on: "fp16", "bf16" or "no"."""
    return next((name for name in ("fp16", "bf16") if (config.get(name) or {}).get("enabled") is True), "no")


# --- reading ----------------------------------------------------------------------------------------------------------


def read(given: Any) -> tuple[dict[str, Any], str]:
    """Return a configuration and its place, which messages name.

    Args:
        given: A dictionary (copied), the path of a JSON file, or JSON text, plain or in base 64.

    Raises:
        ConfigurationError: It is none of these.
    """
    if isinstance(given, Mapping):
        return copy.deepcopy(dict(given)), "hf_ds_config"
    if not isinstance(given, (str, Path)):
        raise unreadable(
            given, f"it is of type {type(given).__name__}", "Write the path of a JSON file, or a dictionary"
        )
    text = str(given)
    if text.lstrip().startswith(("{", "[")):
        return _parse(text, given), "hf_ds_config"
    try:
        if Path(text).is_fifo():
            raise unreadable(given, "it is a pipe", "Write the path of a JSON file")
        with Path(text).open(encoding="utf-8") as file:
            found = file.read(_MOST_CHARACTERS + 1)
        return _parse(found, given), text
    except IsADirectoryError as error:
        raise unreadable(given, "it is a folder", "Write the path of a JSON file in it") from error
    except ConfigurationError:
        raise
    except UnicodeDecodeError as error:
        raise unreadable(given, "the file holds no text", "Write the path of a JSON file") from error
    except ValueError as error:  # a path with a zero in it
        raise unreadable(given, f"it is no path ({error})", "Write the path of a JSON file") from error
    except OSError as error:
        decoded = _from_base64(text)
        if decoded is None:
            reason = "no such file" if isinstance(error, FileNotFoundError) else str(error.strerror)
            remedy = "Write the path of a JSON file that exists, or a dictionary"
            raise unreadable(given, f"{reason}, and no JSON", remedy) from error
        return _parse(decoded, given), "hf_ds_config"


def _from_base64(text: str) -> str | None:
    try:
        return base64.urlsafe_b64decode(text).decode("utf-8")
    except (binascii.Error, ValueError):
        return None


def _parse(text: str, given: Any) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = Counter(name for name, _ in pairs)
        double = next((name for name, count in names.items() if count > 1), None)
        if double is not None:
            raise unreadable(given, f"the entry {double!r} stands in it twice", "Remove one of the two")
        return dict(pairs)

    if len(text) > _MOST_CHARACTERS:
        raise unreadable(
            given, f"it has more than {_MOST_CHARACTERS} characters", "Write the path of a JSON file of entries"
        )
    try:
        config = parse_json(text, unique)
        check_nesting(config)
    except ConfigurationError:
        raise
    except ValueError as error:
        place = f", in line {error.lineno}, column {error.colno}" if isinstance(error, JSONDecodeError) else ""
        problem = error.msg if isinstance(error, JSONDecodeError) else first_line(error)
        raise unreadable(given, f"it is no JSON{place}: {problem}", "Correct it there") from error
    if not isinstance(config, dict):
        raise unreadable(
            given, f"it holds a {type(config).__name__}", 'Write an object, such as {"zero_optimization": {}}'
        )
    return config


# --- looking up -------------------------------------------------------------------------------------------------------


def _leaves(config: Mapping[str, Any], path: EntryPath = ()) -> Iterator[tuple[EntryPath, Any]]:
    """Yield the ways to all values, and the values; a list is a value."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


def _put(config: dict[str, Any], way: EntryPath, value: Any) -> None:
    """Set the value at the end of a way, or remove the entry."""
    *path, last = way
    node = config
    for part in path:
        node = node[part]
    if value is MISSING:
        del node[last]
    else:
        node[last] = value


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return list(one) == list(other)
    return bool(one == other or str(one) == str(other))


# --- completing -------------------------------------------------------------------------------------------------------

# Sections and entries in which "auto" is a word of DeepSpeed's own.
_OWN_WORDS = (
    "data_types.keep_in_fp32_modules",
    "pipeline.",
    "zero_optimization.zenflow.",
    "expert_parallel.",
    "autotuning.",
)
# Entries that DeepSpeed has no default for, or none that anybody would guess, and what to do for each.
_NEEDED = {
    "zero_optimization.stage": "Write 0, 1, 2 or 3",
    "optimizer.params.lr": "Write the learning rate, or pass DummyOptim(parameters, lr=...) to prepare()",
    **dict.fromkeys(
        ("scheduler.params.warmup_max_lr", "scheduler.params.cycle_min_lr", "scheduler.params.cycle_max_lr"),
        "Write the learning rate",
    ),
    **{
        f"scheduler.params.{name}": f"Write a number of steps, or pass DummyScheduler(optimizer, {name}=...) to prepare()"
        for name in ("total_num_steps", "warmup_num_steps")
    },
}
_HIDDEN_SIZE = "the hidden size of the model, else DeepSpeed's default"
# Who fills an entry that still waits when the program starts.
_FILLED_BY = {
    MICRO: "the batch size of the prepared loader",
    TOTAL: "the batch size of the prepared loader times the accumulation steps times the processes",
    ACCUMULATION: "Accelerator(gradient_accumulation_steps=...)",
    "gradient_clipping": "the norm given to clip_grad_norm_",
    "fp16.enabled": "Accelerator(mixed_precision=...)",
    "bf16.enabled": "Accelerator(mixed_precision=...)",
    "zero_optimization.reduce_bucket_size": _HIDDEN_SIZE,
    "zero_optimization.stage3_prefetch_bucket_size": _HIDDEN_SIZE,
    "zero_optimization.stage3_param_persistence_threshold": _HIDDEN_SIZE,
}
_FALLBACKS = {
    "zero_stage": 2,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "offload_optimizer_nvme_path": "none",
    "offload_param_nvme_path": "none",
    "zero3_save_16bit_model": False,
}
_OBJECTS = {"optimizer.params.": "DummyOptim(...)", "scheduler.params.": "DummyScheduler(...)"}


def hidden_size_facts(hidden_size: int, stage: int) -> dict[str, Fact]:
    """Return the sizes of buckets that suit a model, as Transformers chooses them; two of them have a use in ZeRO 3 alone."""
    square, origin = hidden_size * hidden_size, f"the model's hidden size of {hidden_size}"
    sizes = {"reduce_bucket_size": square}
    if stage == 3:
        sizes["stage3_prefetch_bucket_size"] = int(0.9 * square)
        sizes["stage3_param_persistence_threshold"] = 10 * hidden_size
    return {f"zero_optimization.{name}": Fact(size, origin, binding=False) for name, size in sizes.items()}


def complete(
    config: Mapping[str, Any],
    facts: Mapping[str, Fact],
    *,
    num_replicas: int,
    place: str = "DeepSpeed's configuration",
) -> Completed:
    """Fill every entry that is "auto", and the batch sizes that follow from others; the configuration given stays as it is.

    Args:
        facts: What is known elsewhere, by dotted name.
        num_replicas: How many processes see different batches.
        place: Where the configuration comes from, for messages.

    Raises:
        ConfigurationError: An entry contradicts a fact, cannot be filled, or is wrong; all of these are named at once.
    """
    refuse([*find_faults(config)], place)
    facts = {name: fact for name, fact in facts.items() if not is_word(fact.value, (AUTO,))}
    final, origins, waiting = _fill(config, facts, place)
    faults = _contradictions(config, facts, place)
    for name, path in waiting.items():
        if name in _NEEDED or not _has_default(name):
            faults.append(
                f"{name}='auto', and nothing gives its value. {_NEEDED.get(name, 'Write the value, or remove the entry')}."
            )
        else:
            _put(final, path, MISSING)
    refuse(faults, place)
    for name, fact in _batch_sizes(final, facts, origins, num_replicas, place).items():
        final[name], origins[name] = fact.value, fact.origin
    refuse([*find_faults(final)], place)
    return Completed(final, origins)


def check_against(config: Mapping[str, Any], facts: Mapping[str, Fact], place: str) -> None:
    """Refuse a configuration that contradicts what is known elsewhere.

    Raises:
        ConfigurationError: It does; both places and both values are named.
    """
    refuse(_contradictions(config, facts, place), place)


def _contradictions(config: Mapping[str, Any], facts: Mapping[str, Fact], place: str) -> list[str]:
    found = []
    for name, fact in facts.items():
        value = look_up(config, name)
        if fact.binding and value not in (None, AUTO) and not _is_same(value, fact.value):
            found.append(
                f"{name}={value!r} contradicts {fact.value!r}, which {fact.origin} gives. Leave one of the two out, or write "
                f'"auto" in {place}.'
            )
    return found


def _fill(
    config: Mapping[str, Any], facts: Mapping[str, Fact], place: str
) -> tuple[dict[str, Any], dict[str, str], dict[str, EntryPath]]:
    """Return a filled copy, where each of its values comes from, and the entries that still wait, batch sizes aside."""
    final, origins, waiting = copy.deepcopy(dict(config)), {}, {}
    for path, value in _leaves(config):
        name = ".".join(map(str, path))
        if name in BATCH_SIZES and value in (None, AUTO):
            _put(final, path, MISSING)
        elif not is_word(value, (AUTO,)) or name.startswith(_OWN_WORDS):
            origins[name] = place
        elif name in facts:
            _put(final, path, copy.deepcopy(facts[name].value))
            origins[name] = facts[name].origin
        else:
            waiting[name] = path
    return final, origins, waiting


def _has_default(name: str) -> bool:
    """Say whether DeepSpeed has a value of its own for an entry that is left out."""
    return name.split(".", maxsplit=1)[0] in ENTRIES


def _batch_sizes(
    config: Mapping[str, Any], facts: Mapping[str, Fact], origins: Mapping[str, str], num_replicas: int, place: str
) -> dict[str, Fact]:
    """Return the three sizes of a batch; what the configuration and the facts leave open follows from the others."""
    known = {name: Fact(int(config[name]), origins[name]) for name in BATCH_SIZES if name in config}
    known |= {name: facts[name] for name in BATCH_SIZES if name in facts and facts[name].binding and name not in known}
    for name in (MICRO, ACCUMULATION):
        if name not in known and name in facts and len(known) < 2:
            known[name] = facts[name]
    if known.keys() <= {ACCUMULATION}:
        raise ConfigurationError(
            f"{place}: {MICRO}={AUTO!r} cannot be filled, because no batch size is known. Give a loader with a batch "
            f"size to prepare(), or set {MICRO} to a number."
        )
    if len(known) < 2:
        known[ACCUMULATION] = Fact(1, "DeepSpeed's default")
    said = dict(known)
    if TOTAL not in known:
        total = known[MICRO].value * known[ACCUMULATION].value * num_replicas
        known[TOTAL] = Fact(total, f"{MICRO} times {ACCUMULATION} times {num_replicas} processes")
    for name, other in ((MICRO, ACCUMULATION), (ACCUMULATION, MICRO)):
        if name not in known:
            share = known[TOTAL].value // (known[other].value * num_replicas)
            known[name] = Fact(share, f"{TOTAL} divided by {other} and {num_replicas} processes")
    product = known[MICRO].value * known[ACCUMULATION].value * num_replicas
    if known[TOTAL].value != product:
        shown = ", ".join(
            f"{name}={known[name].value!r} ({known[name].origin})" for name in BATCH_SIZES if name in said
        )
        raise ConfigurationError(
            f"{place}: {shown} cannot hold together on {num_replicas} processes: {TOTAL} is {MICRO} times "
            f"{ACCUMULATION} times the processes. " + _batch_remedy(said, num_replicas)
        )
    return known


def _batch_remedy(said: Mapping[str, Fact], num_replicas: int) -> str:
    product = math.prod(said[name].value for name in BATCH_SIZES[1:] if name in said) * num_replicas
    return f'Write "auto" for one of them, or a {TOTAL} that is {"" if len(said) == 3 else "a multiple of "}{product}.'


# --- a launch ---------------------------------------------------------------------------------------------------------


def from_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration that stands for the options of the launcher or of the plugin."""
    offload = {
        f"offload_{what}": {"device": device, "nvme_path": path if device == "nvme" else None}
        for what in ("optimizer", "param")
        for device, path in [(_device(what, options), options[f"offload_{what}_nvme_path"])]
    }
    return {
        TOTAL: AUTO,
        MICRO: AUTO,
        ACCUMULATION: options["gradient_accumulation_steps"],
        "zero_optimization": {
            "stage": options["zero_stage"],
            **offload,
            "stage3_gather_16bit_weights_on_model_save": options["zero3_save_16bit_model"],
        },
        "gradient_clipping": options["gradient_clipping"],
    }


def _device(what: str, options: Mapping[str, Any]) -> str:
    """Return where something is offloaded to: weights nowhere but in the stage that shards them."""
    return "none" if what == "param" and options["zero_stage"] != 3 else str(options[f"offload_{what}_device"])


def merge_entries(config: dict[str, Any], entries: Mapping[str, Any]) -> None:
    """Put further entries into a configuration, in place of what it says about them."""
    for name, value in entries.items():
        if isinstance(value, Mapping) and isinstance(config.get(name), dict):
            merge_entries(config[name], value)
        else:
            config[name] = copy.deepcopy(value)


def entry_facts(entries: Mapping[str, Any], origin: str) -> dict[str, Fact]:
    """Return what further entries say, by dotted names."""
    return {".".join(path): Fact(value, origin) for path, value in _leaves(entries)}


def add_missing(config: dict[str, Any], facts: Mapping[str, Fact]) -> list[str]:
    """Write what is said elsewhere into entries that a configuration leaves out, and return their names."""
    missing = {
        name: fact.value for name, fact in facts.items() if look_up(config, name) is None and fact.value != "none"
    }
    for name, value in missing.items():
        *path, last = name.split(".")
        node = config
        for part in path:
            node[part] = node.get(part) or {}
            node = node[part]
        node[last] = value
    return list(missing)


def refuse_doubles(names: list[str]) -> None:
    """Refuse options in the launcher's file that a configuration of DeepSpeed's own gives as well.

    Raises:
        ConfigurationError: There are some.
    """
    doubles = [name for name in names if name in (*PLACES, "mixed_precision")]
    if doubles:
        raise ConfigurationError(
            f"The configuration file of the launcher gives {', '.join(doubles)}, which DeepSpeed's own "
            "configuration gives too, so one of the two would be ignored. Remove them from the launcher's file."
        )


def precision_facts(mixed_precision: str, origin: str) -> dict[str, Fact]:
    """Return what a number format says about fp16 and bf16: it excludes the other one, and full precision excludes none."""
    chosen = HALF.get(mixed_precision)
    return {
        f"{name}.enabled": Fact(name == chosen, origin, binding=chosen not in (None, name)) for name in ("fp16", "bf16")
    }


def explain_launch(run: RunConfig) -> list[tuple[str, Any, str]]:
    """Return name, value and origin of every entry that a launch gives DeepSpeed, or leaves to the program.

    Raises:
        ConfigurationError: The file of DeepSpeed's cannot be read, is wrong, or contradicts the options.
    """
    given = {name: Fact(run[name], run.origin(name)) for name in PLACES if run.is_given(name) and run[name] is not None}
    said = {PLACES[name]: fact for name, fact in given.items() if fact.value != AUTO}
    entries = run["deepspeed_entries"] or {}
    said |= entry_facts(entries, run.origin("deepspeed_entries"))
    facts = {PLACES[name]: Fact(value, "default", binding=False) for name, value in _FALLBACKS.items()} | said
    if run.is_given("mixed_precision"):
        facts |= precision_facts(run["mixed_precision"], run.origin("mixed_precision"))
    path = run["deepspeed_config_file"]
    if path in (None, "", "none"):
        place, options = "default", {**dict.fromkeys(PLACES, AUTO), **_FALLBACKS}
        config = from_options(options | {name: fact.value for name, fact in given.items()})
        merge_entries(config, entries)
        check(config, "The options of this launch")
        for name, fact in facts.items():
            if look_up(config, name) == fact.value:
                _put(config, tuple(name.split(".")), AUTO)
    else:
        config, read_from = read(path)
        place = f"file {read_from}"
        check(config, read_from)
        refuse_doubles(list(run.file.values) if run.file is not None else [])
        check_against(config, facts, read_from)
        config["zero_optimization"].setdefault("stage", AUTO)
        for name in add_missing(config, said):
            _put(config, tuple(name.split(".")), AUTO)
    for name in BATCH_SIZES:
        config.setdefault(name, AUTO)
    for name in ("fp16", "bf16"):
        config[name] = {"enabled": AUTO, **(config.get(name) or {})}
    rows = [row for row in _explain(config, facts, place) if row[0] != "steps_per_print"]
    return [*rows, ("steps_per_print", math.inf, "always: DeepSpeed reports nothing on its own")]


def _explain(config: Mapping[str, Any], facts: Mapping[str, Fact], place: str) -> list[tuple[str, Any, str]]:
    final, origins, _ = _fill(config, facts, place)
    filled = dict(_leaves(final))
    rows = []
    for path, value in _leaves(config):
        name = ".".join(map(str, path))
        waits = name not in origins and (value is None or is_word(value, (AUTO,)))
        if waits and name in facts:
            rows.append((name, facts[name].value, facts[name].origin))
        else:
            rows.append((name, AUTO if waits else filled.get(path), _who_fills(name) if waits else origins[name]))
    return rows


def _who_fills(name: str) -> str:
    by_object = next((who for prefix, who in _OBJECTS.items() if name.startswith(prefix)), None)
    who = _FILLED_BY.get(name, by_object)
    return f"filled by the program: {who}" if who else "left out: DeepSpeed's default"
