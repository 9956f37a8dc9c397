"""Files of options: where they are, how older ones are migrated, how they are read, checked and written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from accelerate._base.enums import ComputeEnvironment, DistributedType, SageMakerDistributedType
from accelerate._base.errors import ConfigurationError
from accelerate._base.untrusted import shown
from accelerate.config import env
from accelerate.config.file_text import load_text
from accelerate.config.sections.registry import SECTIONS, LaunchOption, options

_NAME = "default_config.yaml"
_SAGEMAKER = ComputeEnvironment.AMAZON_SAGEMAKER.value
# What a file says beside the options of a launch.
_OWN_KEYS = ("compute_environment", "distributed_type")
SAGEMAKER_KEYS = (
    "ec2_instance_type",
    "iam_role_name",
    "image_uri",
    "profile",
    "region",
    "base_job_name",
    "pytorch_version",
    "transformers_version",
    "py_version",
    "sagemaker_inputs_file",
    "sagemaker_metrics_file",
    "additional_args",
)
_SAGEMAKER_OPTIONS = ("mixed_precision", "cpu", "debug", "num_machines", "gpu_ids", "enable_cpu_affinity")
# Keys that did something once. They are read past, with a note.
_GONE = {
    "ipex_config": "Intel's extension is part of torch now",
    "use_mps_device": "the accelerator of Apple is found by itself",
    "use_xpu": "the accelerator of Intel is found by itself",
    "fsdp_use_orig_param": "it was renamed and never read",
}
_GONE_IN = {"mpirun_config": {"mpirun_ccl": "oneCCL is part of torch's own backends now"}}
# Compilers that no release of torch has any more.
_GONE_COMPILERS = ("ipex", "nvfuser", "aot_nvfuser")
_RENAMED_TYPES = {"TPU": "XLA", "MPS": "NO", "TP": "MULTI_GPU"}


def _cache_home() -> Path:
    return Path(env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface").expanduser()


def current_default_file() -> Path:
    """Return the default file by the variables of this moment; the constants below are those of the import."""
    return _cache_home() / "accelerate" / _NAME


hf_cache_home: str = str(_cache_home())
cache_dir: str = str(Path(hf_cache_home) / "accelerate")
default_yaml_config_file: str = str(Path(cache_dir) / _NAME)
# One file under both names: JSON is YAML.
default_json_config_file: str = default_yaml_config_file
default_config_file: str = default_yaml_config_file


class ConfigFileWriteError(ConfigurationError, OSError):
    """Report a file of options that cannot be written where it was asked for."""


@dataclass(frozen=True)
class FileValue:
    """The value of an option in a file, and the key that holds it there."""

    value: Any
    key: str


@dataclass(frozen=True)
class ConfigFile:
    """A file that was read and found right.

    Args:
        values: The options of a launch that it gives, by name.
        data: All that it says, in the keys of today.
        notes: What the user should know about keys that were read past.
    """

    path: str
    values: Mapping[str, FileValue] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def distributed_type(self) -> str:
        """The kind of run that the file describes."""
        return str(self.data["distributed_type"])

    @property
    def sagemaker(self) -> Mapping[str, Any] | None:
        """What it says about a job on SageMaker; None if it describes none."""
        return self.data if self.data.get("compute_environment") == _SAGEMAKER else None


@dataclass(frozen=True)
class RunKind:
    """What the `distributed_type` of a file stands for.

    Args:
        turns_on: The launch option that it stands for.
        num_processes: How many processes it has where the file does not say; None leaves that open.
    """

    turns_on: str | None = "multi_gpu"
    num_processes: int | None = None


_KINDS: dict[str, RunKind] = {
    DistributedType.NO.value: RunKind(turns_on=None, num_processes=1),
    DistributedType.MULTI_CPU.value: RunKind("cpu"),
    DistributedType.DEEPSPEED.value: RunKind("use_deepspeed"),
    DistributedType.FSDP.value: RunKind("use_fsdp"),
    DistributedType.MEGATRON_LM.value: RunKind("use_megatron_lm"),
    DistributedType.XLA.value: RunKind("tpu"),
}


def kind_of(distributed_type: str) -> RunKind:
    """Return what a `distributed_type` stands for: unless it is listed, a process for each of several accelerators."""
    return _KINDS.get(distributed_type, RunKind())


def _migrate(data: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Turn a file of an earlier release, back to 0.11, into the words of today.

    Returns:
        A copy without empty values, and a note on each key that does nothing any more.
    """
    current = {key: _without_empty(value) for key, value in data.items() if value is not None}
    # The first releases knew one half precision, as a yes or no.
    if isinstance(current.get("fp16"), bool):
        half = current.pop("fp16")
        current.setdefault("mixed_precision", "fp16" if half else "no")
    # The backend of torch.compile went into a section.
    backend = current.pop("dynamo_backend", None)
    if backend not in (None, False) and str(backend).upper() != "NO":
        _set_default(current, "dynamo_config", "dynamo_backend", backend)
    # Tensor parallelism was a kind of run, and became an axis.
    section = current.pop("tp_config", None)
    if isinstance(section, dict) and "tp_size" in section:
        _set_default(current, "parallelism_config", "parallelism_config_tp_size", section["tp_size"])
    # A file that keeps weights from the other processes is from before one process could read them for all.
    section = current.get("fsdp_config")
    if isinstance(section, dict) and section.get("fsdp_sync_module_states") is False:
        section.setdefault("fsdp_cpu_ram_efficient_loading", False)
    kind = current.get("distributed_type")
    if isinstance(kind, str):
        current["distributed_type"] = _RENAMED_TYPES.get(kind, kind)
    notes = _drop_gone_compiler(current)
    notes += [_gone(key, reason) for key, reason in _GONE.items() if current.pop(key, None) is not None]
    for name, keys in _GONE_IN.items():
        values = current.get(name)
        if isinstance(values, dict):
            notes += [_gone(f"{name}.{key}", why) for key, why in keys.items() if values.pop(key, None) is not None]
    return current, tuple(notes)


def _set_default(data: dict[str, Any], section: str, key: str, value: Any) -> None:
    entries = data.setdefault(section, {})
    if isinstance(entries, dict):  # what is none is told where it is read
        entries.setdefault(key, value)


def _drop_gone_compiler(data: dict[str, Any]) -> list[str]:
    section = data.get("dynamo_config")
    if not isinstance(section, dict):
        return []
    found = {key: value for key, value in section.items() if str(value).lower() in _GONE_COMPILERS}
    data["dynamo_config"] = {key: value for key, value in section.items() if key not in found}
    return [
        f"'dynamo_config.{key}: {value}' names a compiler that torch no longer has, so nothing is compiled; "
        "`inductor` is torch's own."
        for key, value in found.items()
    ]


def _without_empty(value: Any) -> Any:
    return {key: entry for key, entry in value.items() if entry is not None} if isinstance(value, dict) else value


def _gone(key: str, reason: str) -> str:
    return f"{key!r} does nothing any more ({reason}); it can be removed."


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a sentence with the known word that looks most like a wrong one, or nothing."""
    import difflib  # here, because only an error needs it

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def read_config_file(path: str | Path) -> ConfigFile:
    """Read and check a file of options.

    Raises:
        ConfigurationError: The file is missing, does not parse, or holds an unknown key or a value of a wrong type.
    """
    return check(load_text(path), str(path))


def check(raw: Mapping[str, Any], path: str) -> ConfigFile:
    """Check the content of a file that stands at `path`, for messages.

    Raises:
        ConfigurationError: It holds an unknown key or a value of a wrong type.
    """
    data, notes = _migrate(raw)
    place = f"The configuration file {path!r}"
    on_sagemaker = _check_kind(data, place)
    values: dict[str, FileValue] = {}
    for key, value in data.items():
        if key in _OWN_KEYS or (on_sagemaker and key in SAGEMAKER_KEYS):
            continue
        values.update(_read_entry(key, value, place, on_sagemaker))
    return ConfigFile(path, values, data, notes)


def _check_kind(data: dict[str, Any], place: str) -> bool:
    """Check where and how the run takes place, and say whether it is on SageMaker."""
    where = data.setdefault("compute_environment", ComputeEnvironment.LOCAL_MACHINE.value)
    _check_member(place, "compute_environment", where, ComputeEnvironment)
    on_sagemaker = bool(where == _SAGEMAKER)
    if "distributed_type" not in data:
        raise ConfigurationError(
            f"{place} has no key 'distributed_type', so it does not say what to run. Add one, such as "
            "`distributed_type: NO`, or make the file with `accelerate config`."
        )
    if data["distributed_type"] is False:  # how YAML reads the bare word NO
        data["distributed_type"] = DistributedType.NO.value
    kind = SageMakerDistributedType if on_sagemaker else DistributedType
    _check_member(place, "distributed_type", data["distributed_type"], kind)
    return on_sagemaker


def _check_member(place: str, key: str, value: object, enum: type) -> None:
    known = [str(member.value) for member in enum]  # type: ignore[attr-defined]
    if value not in known:
        raise ConfigurationError(
            f"{place} says {key}: {shown(value)}, which is none of {', '.join(known)}.{nearest(shown(value), known)}"
        )


@cache
def _top_level() -> dict[str, LaunchOption]:
    return _by_key(option for option in options().values() if option.section.file_key is None)


@cache
def _sections() -> dict[str, tuple[str, dict[str, LaunchOption]]]:
    """Return each dictionary of a file: the prefix that its keys may leave out, and its options by key."""
    return {
        section.file_key: (
            section.prefix,
            _by_key(option for option in options().values() if option.section is section),
        )
        for section in SECTIONS
        if section.file_key is not None
    }


def _by_key(candidates: Iterable[LaunchOption]) -> dict[str, LaunchOption]:
    return {key: option for option in candidates if option.file_key for key in (option.file_key, *option.knob.old_keys)}


def known_keys(on_sagemaker: bool = False) -> list[str]:
    """Return the keys that the top level of a file may hold."""
    if on_sagemaker:
        shared = [key for key, option in _top_level().items() if option.name in _SAGEMAKER_OPTIONS]
        return [*_OWN_KEYS, *shared, *SAGEMAKER_KEYS, "dynamo_config"]
    return [*_OWN_KEYS, *_top_level(), *_sections()]


def section_keys(section: str) -> list[str]:
    """Return the keys that a dictionary of a file may hold."""
    return list(_sections()[section][1])


def _read_entry(key: str, value: Any, place: str, on_sagemaker: bool) -> Iterator[tuple[str, FileValue]]:
    if key not in known_keys(on_sagemaker):
        raise _unknown(place, key, known_keys(on_sagemaker))
    if key in _top_level():
        option = _top_level()[key]
        yield option.name, FileValue(_load(option, value, place, key), key)
        return
    if not isinstance(value, dict):
        raise ConfigurationError(
            f"{place} says {key}: {shown(value)}, which is a {type(value).__name__}; it must hold keys of its own. "
            f"Write `{key}:` and below it, indented, lines such as `{section_keys(key)[0]}: ...`."
        )
    prefix, known = _sections()[key]
    section = next(section for section in SECTIONS if section.file_key == key)
    rest: dict[str, Any] = {}
    for inner, entry in value.items():
        inner_option = known.get(inner) or known.get(f"{prefix}{inner}")
        if inner_option is None and inner in section.rest_keys():
            rest[inner] = entry
            continue
        if inner_option is None:
            raise _unknown(place, inner, [*known, *section.rest_keys()], section=key)
        yield inner_option.name, FileValue(_load(inner_option, entry, place, f"{key}.{inner}"), f"{key}.{inner}")
    if rest and section.rest is not None:
        given = value.get(section.rest) or {}
        keys = ", ".join(f"{key}.{inner}" for inner in rest)
        yield section.rest, FileValue(_load(known[section.rest], {**given, **rest}, place, keys), keys)


def _unknown(place: str, key: str, known: Iterable[str], section: str | None = None) -> ConfigurationError:
    words = sorted(known)
    where = f"{place} has an unknown key {shown(key)}" + (f" in {section!r}" if section else "")
    elsewhere = next(
        (f" It belongs into {name!r}." for name, (_, keys) in _sections().items() if key in keys and name != section),
        nearest(str(key), words) or f" Known are {', '.join(words)}.",
    )
    return ConfigurationError(f"{where}.{elsewhere}")


def _load(option: LaunchOption, value: Any, place: str, key: str) -> Any:
    choices = option.knob.choices
    meaning = f"one of {', '.join(map(str, choices))}" if choices else option.knob.codec.meaning
    try:
        loaded = option.knob.codec.load(value)
        if choices and loaded not in choices:
            raise ValueError(f"{loaded!r} is no choice")
    except ValueError as error:
        hint = nearest(value, map(str, choices)) if isinstance(value, str) else ""
        raise ConfigurationError(
            f"{place} says {key}: {shown(value)}, which is not {meaning}.{hint or ' Correct the value.'}"
        ) from error
    return loaded


def place_to_write(path: str | Path) -> Path:
    """Return where a file of options goes.

    Raises:
        ConfigurationError: (also an `OSError`) it is a folder, or no path that this machine can have.
    """
    try:
        place = Path(path).expanduser()
        is_folder = place.is_dir()
    except (OSError, RuntimeError) as error:  # the latter for the home of a user who does not exist
        raise _unwritable(path, error) from error
    if is_folder:
        raise ConfigFileWriteError(
            f"The configuration file {str(path)!r} is a folder, and options are written to a file. "
            f"Write the path of a file, such as {str(place / 'config.yaml')!r}."
        )
    return place


def write_text(path: str | Path, text: str) -> None:
    """Write a file of options, and the folders above it.

    Raises:
        ConfigurationError: (also an `OSError`) it cannot be written there.
    """
    place = place_to_write(path)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: str | Path, error: Exception) -> ConfigFileWriteError:
    return ConfigFileWriteError(
        f"The configuration file {str(path)!r} cannot be written: {getattr(error, 'strerror', None) or error}. Write the "
        "path of a file in a folder that you may write to; the default one is under the folder that HF_HOME names."
    )
