"""Every launch option is declared once, keeps its name and default, and reaches somebody."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import accelerate
from accelerate.config import knob as codecs
from accelerate.config.cli import add_launch_arguments
from accelerate.config.resolve import resolve
from accelerate.config.run_config import RunConfig, encode
from accelerate.config.sections.registry import LaunchOption, options
from accelerate.devices.machine import Machine

COMPAT = Path(__file__).resolve().parents[3] / "compat"
PACKAGE = Path(accelerate.__file__).parent
FOUR_GPUS = Machine(device_type="cuda", device_count=4, cpu_count=8, visible_devices_variable="CUDA_VISIBLE_DEVICES")
OPTIONS = list(options().values())


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("accelerate launch", allow_abbrev=False)
    add_launch_arguments(made)
    return made


def launch(*argv: str, environ: dict[str, str] | None = None, machine: Machine = FOUR_GPUS) -> RunConfig:
    """Resolve a command line on a machine with four GPUs and no default file."""
    words = [*argv, "train.py"]
    return resolve(parser().parse_args(words), environ=environ or {}, machine=machine)


@pytest.fixture(autouse=True)
def no_default_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))


# --- names, defaults, choices ----------------------------------------------------------------------------------------


def flags_of(option: LaunchOption) -> list[str]:
    own = [flag for flag in (option.flag, option.knob.negative and f"--{option.knob.negative}") if flag]
    return own + [f"--{name}" for name in option.knob.also]


def test_flags_are_those_of_the_frozen_list() -> None:
    declared = sorted(flag for option in OPTIONS for flag in flags_of(option))
    assert declared == (COMPAT / "launch_flags.txt").read_text().split()
    assert len(declared) == 151


def test_no_two_options_share_a_flag_a_variable_or_a_key() -> None:
    places = [("flag", flag) for option in OPTIONS for flag in [*flags_of(option), option.knob.short] if flag]
    places += [("variable", name) for option in OPTIONS if option.knob.env for name in option.knob.env.split(",")]
    places += [(option.section.file_key or "top", option.file_key) for option in OPTIONS if option.file_key]
    assert sorted(places) == sorted(set(places))


def test_the_parser_takes_every_flag_with_underscores_and_with_hyphens() -> None:
    taken = set(parser()._option_string_actions)
    for flag in (COMPAT / "launch_flags.txt").read_text().split():
        assert {flag, "--" + flag[2:].replace("_", "-")} <= taken


def test_defaults_are_those_that_scripts_know() -> None:
    known = json.loads((COMPAT / "launch_defaults.json").read_text())
    for name, value in known.items():
        option = options()[name]
        text = "" if option.default in (None, False) else option.knob.codec.format(option.default).lower()
        expected = "" if value in (None, False, "false") else str(value).lower()
        if name == "fp8_override_linear_precision":
            assert list(option.default) == value
        else:
            assert (text or "none", name) == (expected or "none", name)


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("mixed_precision", "no fp16 bf16 fp8"),
        ("dynamo_mode", "default reduce-overhead max-autotune"),
        ("fp8_backend", "ao te msamp"),
        ("fp8_format", "HYBRID E4M3 E5M2"),
        ("fp8_amax_compute_algo", "max most_recent"),
        ("fp8_opt_level", "O1 O2"),
        ("parallelism_config_cp_backend", "torch"),
        ("parallelism_config_sp_backend", "deepspeed"),
        ("fsdp_version", "1 2"),
    ],
)
def test_choices_are_those_that_scripts_know(name: str, choices: str) -> None:
    assert [str(choice) for choice in options()[name].knob.choices] == choices.split()


@pytest.mark.parametrize("name", ["aot_torchxla_trace_once", "torhchxla_trace_once", "inductor", "INDUCTOR", "tvm"])
def test_compilers_are_taken_in_any_case_and_in_the_old_spelling(name: str) -> None:
    written = encode(launch("--dynamo_backend", name))["ACCELERATE_DYNAMO_BACKEND"]
    assert written == name.upper().replace("TORHCHXLA", "TORCHXLA")


def test_every_option_has_a_sentence_of_help() -> None:
    for option in OPTIONS:
        assert option.knob.help.endswith("."), option.name
    text = parser().format_help()
    assert "FSDP Arguments" in text
    assert "Distributed GPUs" in text
    assert "--num_processes" in text
    assert "--num-processes" not in text


# --- text ------------------------------------------------------------------------------------------------------------

words = st.text(
    alphabet=st.characters(codec="utf-8", exclude_characters="\x00", exclude_categories=("Cs",)), min_size=1
)
VALUES: dict[int, st.SearchStrategy[Any]] = {
    id(codecs.TEXT): words,
    id(codecs.NAMES): words,
    id(codecs.INTEGER): st.integers(-(2**63), 2**63 - 1),
    id(codecs.THREADS): st.integers(-(2**63), 2**63 - 1),
    id(codecs.NUMBER): st.floats(allow_nan=False),
    id(codecs.YES_NO): st.booleans(),
    id(codecs.TRUE_FALSE): st.booleans(),
    id(codecs.ONE_ZERO): st.booleans(),
    id(codecs.ON_TRUE): st.booleans(),
    id(codecs.ON_ONE): st.booleans(),
    id(codecs.REPEATED): st.lists(words),
    id(codecs.TEXT_OR_FLAG): st.sampled_from(["true", "false", "FULL_SHARD", "flash"]),
}


streams = st.sampled_from(["0", "1", "2", "3", "0:1", "0:1,12:3"])
# A comma inside a word is written twice, which torch cannot always read back.
filters = st.lists(st.text("abc =\"'", min_size=1), min_size=1)
TEXTS: dict[str, st.SearchStrategy[Any]] = {
    "gradient_clipping": st.one_of(st.just("auto"), st.floats(allow_nan=False)),
    "fp8_override_linear_precision": st.tuples(st.booleans(), st.booleans(), st.booleans()),
    "deepspeed_entries": st.dictionaries(words, st.integers() | words),
    "tee": streams,
    "redirects": streams,
    "nproc_per_node": st.sampled_from(["1", "16", "auto", "cpu", "gpu", "xpu"]),
    "nnodes": st.sampled_from(["1", "4", "1:1", "1:4"]),
    "local_ranks_filter": st.sampled_from(["0", "0,1", "3,12"]),
    "signals_to_handle": st.sampled_from(["SIGTERM", "SIGTERM,SIGINT,SIGUSR2"]),
    "duplicate_stdout_filters": filters,
    "duplicate_stderr_filters": filters,
}


def values_of(option: LaunchOption) -> st.SearchStrategy[Any]:
    if option.knob.choices:
        return st.sampled_from(option.knob.choices)
    return TEXTS[option.name] if option.name in TEXTS else VALUES[id(option.knob.codec)]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
@settings(max_examples=30)
@given(data=st.data())
def test_what_is_encoded_is_decoded(option: LaunchOption, data: st.DataObject) -> None:
    value = data.draw(values_of(option))
    codec = option.knob.codec
    assert codec.parse(codec.format(value)) == value
    if option.knob.env is not None:
        # A switch that is off has no variable, so nothing is read back.
        assert option.knob.decode(option.knob.encode(value)) in ([value] if value is not False else [False, None])


# --- no dead flag ----------------------------------------------------------------------------------------------------

CONFLICTING = {
    "num_machines": ("--main_process_ip", "10.0.0.1"),
    "nnodes": ("--main_process_ip", "10.0.0.1"),
    "tpu": ("--no_tpu_cluster",),
}
# The word for each option that changes something and contradicts nothing.
WORDS = {
    "fp8_override_linear_precision": "true,false,true",
    "gpu_ids": "0,1,2,3",
    "machine_rank": "0",
    "fsdp_sync_module_states": "true",
    "num_processes": "2",
    "max_restarts": "3",
    "min_machines": "1",
    "nproc_per_node": "2",
    "nnodes": "2",
    "num_machines": "2",
}


def another_word(option: LaunchOption) -> str:
    """Return a text for the flag that is not the default's."""
    if option.name in WORDS:
        return WORDS[option.name]
    default = option.default
    for candidate in (*map(str, option.knob.choices), "true", "false", "7", "other"):
        try:
            value = option.knob.codec.parse(candidate)
        except ValueError:
            continue
        if value != default and (not option.knob.choices or value in option.knob.choices):
            return candidate
    return str(default)


def command_line(option: LaunchOption) -> list[str]:
    own = [option.flag or ""] if option.knob.shape == "switch" else [option.flag or "", another_word(option)]
    extra = list(CONFLICTING.get(option.name, ()))
    if option.name == "use_parallelism_config":
        extra = ["--use_fsdp", "--fsdp_version", "2"]
    if option.knob.engine_only:
        extra = [f"--{option.section.switch}"]
    return [*own, *extra]


@pytest.mark.parametrize(
    "option", [option for option in OPTIONS if option.flag and option.name != "config_file"], ids=lambda o: o.name
)
def test_every_flag_reaches_the_worker_or_the_launcher(option: LaunchOption) -> None:
    config = launch(*command_line(option))
    assert config.origin(option.name) == f"flag {option.flag}"
    if option.knob.env is not None:
        written = encode(config)
        for variable, text in option.knob.encode(config[option.name]).items():
            assert written[variable] == text
        assert option.knob.encode(config[option.name])
    else:
        assert option.knob.reader is not None


def test_every_option_without_a_variable_is_read_by_name_in_the_launching_process() -> None:
    folders = [PACKAGE / "launch", PACKAGE / "commands"]
    texts = [path.read_text() for folder in folders for path in folder.rglob("*.py")]
    texts += [(PACKAGE / "config" / name).read_text() for name in ("resolve.py", "run_config.py", "conflicts.py")]
    source = "\n".join(texts)
    unread = [
        option.name
        for option in OPTIONS
        if option.knob.env is None and f'"{option.name}"' not in source and f"'{option.name}'" not in source
        # Who types one of these is told that it changes nothing.
        if not option.knob.idle
    ]
    # These three are keys of files for the command that prepares a TPU pod.
    assert sorted(set(unread) - {"command_file", "commands", "tpu_zone"}) == []


# --- variables -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", json.loads((COMPAT / "worker_environment.json").read_text()), ids=lambda case: " ".join(case["argv"])
)
def test_workers_get_the_variables_that_they_have_always_got(case: dict[str, Any]) -> None:
    argv = [word for word in case["argv"] if not (word == "--multi_gpu" and "--use_fsdp" in case["argv"])]
    if "--use_parallelism_config" in argv and "--fsdp_version" not in argv:
        argv += ["--fsdp_version", "2"]
        case["env"]["FSDP_VERSION"] = "2"
    written = encode(launch(*argv))
    assert {name: written.get(name) for name in case["env"]} == case["env"]


def test_chosen_devices_go_into_the_variable_of_the_vendor() -> None:
    machine = Machine(device_type="npu", device_count=4, visible_devices_variable="ASCEND_RT_VISIBLE_DEVICES")
    assert encode(launch("--gpu_ids", "1,3", machine=machine))["ASCEND_RT_VISIBLE_DEVICES"] == "1,3"
    assert "ASCEND_RT_VISIBLE_DEVICES" not in encode(launch("--gpu_ids", "all", machine=machine))


def test_variables_of_an_engine_that_is_off_are_not_set_unless_somebody_gave_them() -> None:
    assert not [
        name for name in encode(launch()) if name.startswith(("FSDP_", "MEGATRON", "PARALLELISM", "ACCELERATE_FP8"))
    ]
    written = encode(launch("--fsdp_offload_params", "true", "--fp8_margin", "2"))
    assert written["FSDP_OFFLOAD_PARAMS"] == "true"
    assert written["ACCELERATE_FP8_MARGIN"] == "2"
    assert "ACCELERATE_USE_FSDP" not in written


def test_8_bit_options_are_written_when_training_in_8_bits() -> None:
    written = encode(
        launch("--mixed_precision", "fp8", "--fp8_backend", "te", "--fp8_override_linear_precision", "1,0,1")
    )
    assert written["ACCELERATE_FP8_BACKEND"] == "te"
    assert written["ACCELERATE_FP8_FORMAT"] == "HYBRID"
    assert written["ACCELERATE_FP8_OVERRIDE_FPROP"] == "True"
    assert written["ACCELERATE_FP8_OVERRIDE_DGRAD"] == "False"
    assert written["ACCELERATE_FP8_PAD_INNER_DIM"] == "1"


def test_nvme_paths_reach_the_worker() -> None:
    written = encode(launch("--use_deepspeed", "--offload_param_nvme_path", "/nvme"))
    assert written["ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH"] == "/nvme"


# --- start-up --------------------------------------------------------------------------------------------------------


def test_the_launcher_side_loads_neither_torch_nor_anything_slow() -> None:
    program = (
        "import sys; import accelerate.config.cli, accelerate.config.resolve, accelerate.config.run_config;"
        "import accelerate.config.files, accelerate.commands.config.default;"
        "print([name for name in ('torch', 'numpy', 'yaml', 'huggingface_hub') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
