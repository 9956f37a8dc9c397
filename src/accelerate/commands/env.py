"""`accelerate env`: say what this installation and this machine are, for a report of a problem."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import __version__
from accelerate._base.errors import ConfigurationError
from accelerate.commands import command_parser, run_as_program
from accelerate.config import env
from accelerate.config.cli import spellings
from accelerate.config.cluster_config import load_config_from_file
from accelerate.config.file_text import ConfigFileNotFoundError
from accelerate.config.files import current_default_file, default_config_file, read_config_file
from accelerate.devices.machine import detect
from accelerate.devices.registry import (
    is_mlu_available,
    is_mps_available,
    is_musa_available,
    is_neuron_available,
    is_npu_available,
    is_sdaa_available,
    is_xpu_available,
)

__all__ = [
    "default_config_file",
    "env_command",
    "env_command_parser",
    "is_mlu_available",
    "is_mps_available",
    "is_musa_available",
    "is_neuron_available",
    "is_npu_available",
    "is_sdaa_available",
    "is_xpu_available",
    "load_config_from_file",
    "main",
]

# What a run usually stands on; those that are not installed are left out.
_PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "huggingface_hub",
    "transformers",
    "datasets",
    "torchdata",
    "deepspeed",
    "torchao",
    "bitsandbytes",
    "transformer_engine",
    "triton",
    "torch_xla",
)
_PREFIXES = (
    *("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_", "NCCL_", "GLOO_", "OMP_", "MASTER_"),
    *("PJRT_", "XLA_", "TPU_", "CPU_NUM_DEVICES"),
)
_SECRET = ("secret", "password", "token", "key")


def env_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Make the parser of `accelerate env`."""
    parser = command_parser("env", subparsers, description="Show versions, hardware and the configuration in force.")
    parser.set_defaults(func=env_command)
    parser.add_argument(*spellings("--config_file"), default=None, help="The configuration file to show.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object, for programs.")
    parser.add_argument(
        "--verbose", action="store_true", help="Load torch, which takes seconds, and show what it says of itself."
    )
    return parser


def env_command(args: argparse.Namespace) -> dict[str, Any]:
    """Print what was found and return it.

    Raises:
        ConfigurationError: If a file was named that is not there.
    """
    versions = {name: _version(name) for name in _PACKAGES}
    report: dict[str, Any] = {
        "accelerate": {
            "version": __version__,
            "location": str(Path(__file__).resolve().parents[1]),
            "program": shutil.which("accelerate"),
        },
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
        },
        "platform": platform.platform(),
        "packages": {name: version for name, version in versions.items() if version is not None},
        "hardware": _hardware(),
        "config": _config(args.config_file),
        "variables": _variables(env.items()),
    }
    if getattr(args, "verbose", False):
        report["torch"] = _torch_facts()
    if getattr(args, "json", False):
        text = json.dumps(report, indent=2, default=str)
    else:
        text = "\n".join(line for title, value in report.items() for line in _lines(title, value, empty="  (none)"))
    sys.stdout.write(f"{text}\n")
    return report


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hardware() -> dict[str, Any]:
    import psutil

    machine = detect(env.items())
    slurm = {"slurm_job": machine.slurm.job} if machine.slurm is not None else {}
    return {
        "accelerators": machine.device_count,
        "type": machine.device_type,
        "cpu_cores": machine.cpu_count,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "mpirun": machine.has_mpirun,
        **slurm,
    }


def _config(named: str | None) -> dict[str, Any]:
    path = Path(named).expanduser() if named is not None else current_default_file()
    if named is None and not path.is_file():
        return {"file": None, "default_place": str(path)}
    try:
        return {"file": str(path), "content": read_config_file(path).data}
    except ConfigFileNotFoundError:
        raise
    except ConfigurationError as error:
        # The report is needed most when something is wrong.
        return {"file": str(path), "error": " ".join(str(error).split())}


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change a run; secrets are hidden."""
    limits = ("VISIBLE_DEVICES", "VISIBLE_CORES")
    chosen = {name: value for name, value in environ.items() if name.startswith(_PREFIXES) or name.endswith(limits)}
    return {name: "***" if any(word in name.lower() for word in _SECRET) else chosen[name] for name in sorted(chosen)}


def _torch_facts() -> dict[str, Any]:
    import torch

    from accelerate.devices import registry

    chosen = registry.default()
    backend = chosen.value
    return {
        "version": torch.__version__,
        "device": backend.type,
        "reason": chosen.reason,
        "device_count": backend.device_count(),
        "bf16": backend.supports_autocast("bfloat16"),
        "distributed": torch.distributed.is_available(),
        "group_backend": backend.group_backend,
        "threads": torch.get_num_threads(),
        "build": [line.strip() for line in torch.__config__.show().splitlines() if line.strip()],
    }


def _lines(name: str, value: Any, indent: str = "", empty: str = "") -> list[str]:
    """Return a value as indented lines; `empty` stands for a mapping without entries."""
    if isinstance(value, Mapping):
        below = [line for key, entry in value.items() for line in _lines(key, entry, indent + "  ")]
        return [f"{indent}{name}:", *(below or ([empty] if empty else []))]
    if isinstance(value, list):
        return [f"{indent}{name}:", *(f"{indent}  - {entry}" for entry in value)]
    return [f"{indent}{name}: {'(none)' if value is None else value}"]


def main() -> None:
    """Show it, as a program of its own."""
    run_as_program("env")


if __name__ == "__main__":
    main()
