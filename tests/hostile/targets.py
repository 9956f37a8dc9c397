"""Every parser of the library that reads what others wrote, each as a function of bytes.

A target may refuse its input by an error of the library's own, or of the file system. Any other exception is a bug.
"""

from __future__ import annotations

import argparse
import base64
import functools
import io
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

from accelerate._base.errors import AccelerateError, ConfigurationError

Target = Callable[[bytes, Path], None]
"""Feeds bytes to a parser; the folder is for its files."""

REFUSALS = (AccelerateError, OSError)
SEPARATOR = "\0"
CANARY = "canary"
"""A file beside the folder that a target reads: nothing may change it."""


def is_refused(target: Target, data: bytes, folder: Path) -> bool:
    """Feed bytes to a target, and return whether it refused them.

    Raises:
        Exception: Whatever else it raises: that is a bug.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            target(data, folder)
        except REFUSALS as error:
            str(error).encode()  # it can be printed
            return True
    return False


def in_turn(*calls: Callable[[], object]) -> None:
    """Make all calls, also those after one that refuses, and refuse if one of them does."""
    refusal: Exception | None = None
    for call in calls:
        try:
            call()
        except REFUSALS as error:
            refusal = refusal or error
    if refusal is not None:
        raise refusal


def text_of(data: bytes) -> str:
    """Return bytes as the system hands them to a program, in variables and on the command line."""
    return data.decode(errors="surrogateescape")


def empty(folder: Path) -> Path:
    """Return a folder that is there and empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


# --- options ------------------------------------------------------------------------------------------------------------


def yaml_config(data: bytes, folder: Path) -> None:
    _config(folder / "config.yaml", data)


def json_config(data: bytes, folder: Path) -> None:
    _config(folder / "config.json", data)


def _config(path: Path, data: bytes) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2
    from accelerate.config.file_text import load_text
    from accelerate.config.files import read_config_file

    path.write_bytes(data)
    in_turn(
        lambda: read_config_file(path),
        lambda: load_config_from_file(str(path)),
        lambda: convert_config_to_fsdp2(load_text(path)),
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigurationError(message.encode(errors="backslashreplace").decode())  # as it is printed


@functools.cache
def _launch_parser() -> argparse.ArgumentParser:
    from accelerate.config.cli import add_launch_arguments

    parser = _Parser(add_help=False, allow_abbrev=False)
    add_launch_arguments(parser)
    return parser


def launch_options(data: bytes, folder: Path) -> None:
    """Read the words of a command line, and variables: those with a "=" and no dash."""
    from accelerate.config.resolve import resolve
    from accelerate.config.run_config import encode
    from accelerate.devices.machine import Machine

    words = text_of(data).split(SEPARATOR)
    variables = dict(word.split("=", 1) for word in words if "=" in word and not word.startswith("-"))
    typed = [word for word in words if "=" not in word or word.startswith("-")]
    files = [word for word in typed if "config_file" in word or "config-file" in word]
    namespace = _launch_parser().parse_args([*(word for word in typed if word not in files), "train.py"])
    namespace.config_file = str(folder / "none.yaml") if files else None
    (folder / "none.yaml").write_text("distributed_type: 'NO'\n")
    encode(resolve(namespace, Machine(cpu_count=2), environ=variables))


def environment(data: bytes, folder: Path) -> None:
    """Read a variable: two bytes choose which."""
    from accelerate.config import env

    text, declared = text_of(data[2:]).replace("\0", ""), _declared()
    knob = declared[int.from_bytes(data[:2], "big") % len(declared)]
    with env.patch_environment(hostile=text):
        in_turn(
            lambda: knob.decode(dict.fromkeys(str(knob.env).split(","), text)),
            lambda: env.flag("HOSTILE"),
            lambda: env.integer("HOSTILE", 0),
            lambda: env.convert_dict_to_env_variables({"HOSTILE": text}),
        )


@functools.cache
def _declared() -> list:
    from accelerate.config.knob import knobs
    from accelerate.config.sections.registry import options

    listed = [option.knob for option in options().values()]
    listed += [knob for plugin in _plugins() for knob in knobs(plugin).values()]
    return [knob for knob in listed if knob.env]


@functools.cache
def _plugins() -> list:
    from accelerate.config.plugins.deepspeed import DeepSpeedPlugin
    from accelerate.config.plugins.fsdp import FullyShardedDataParallelPlugin
    from accelerate.config.plugins.megatron import MegatronLMPlugin
    from accelerate.config.plugins.parallelism import TorchContextParallelConfig
    from accelerate.config.plugins.training import GradientAccumulationPlugin, TorchDynamoPlugin

    return [
        DeepSpeedPlugin,
        FullyShardedDataParallelPlugin,
        MegatronLMPlugin,
        TorchContextParallelConfig,
        GradientAccumulationPlugin,
        TorchDynamoPlugin,
    ]


def plugin_variables(data: bytes, folder: Path) -> None:
    """Make a plugin from variables: one byte chooses it, and pairs of a number and a value follow."""
    from accelerate.config import env
    from accelerate.config.knob import knobs

    if not data:
        return
    plugin = _plugins()[data[0] % len(_plugins())]
    declared = [knob for knob in knobs(plugin).values() if knob.env]
    variables = {"USER": "nobody"}
    for pair in data[1:].split(b"\0"):
        if declared and pair:
            names = str(declared[pair[0] % len(declared)].env).split(",")
            variables |= dict.fromkeys(names, text_of(pair[1:]))
    if any("CONFIG_FILE" in name for name in variables):  # a path of this machine
        return
    with env.clear_environment():
        env.update(variables)
        plugin()


def rank_variables(data: bytes, folder: Path) -> None:
    from accelerate.config import env
    from accelerate.devices.machine import detect
    from accelerate.runtime.rank_sources import get_cpu_distributed_information

    pairs = (word.partition("=")[::2] for word in text_of(data).split(SEPARATOR))
    variables = {name: value for name, value in pairs if name}
    root = folder / "root"
    root.mkdir(exist_ok=True)
    with env.clear_environment():
        env.update(variables)
        in_turn(get_cpu_distributed_information, lambda: detect({"PATH": "", **variables}, root=root))


def slurm_lists(data: bytes, folder: Path) -> None:
    from accelerate.devices.machine import first_host, port_of_job, tasks_of_nodes

    text = data.decode(errors="replace")
    in_turn(lambda: tasks_of_nodes(text), lambda: first_host(text), lambda: port_of_job(text))


def hostfile(data: bytes, folder: Path) -> None:
    """Read a hostfile of DeepSpeed, and after a zero the filters of its machines."""
    from accelerate.launch.hostfile import exclude, filter_text, hostfile_text, include, read_hostfile

    lines, _, chosen = data.partition(b"\0")
    path = folder / "hostfile"
    path.write_bytes(lines)
    hosts = read_hostfile(path, "a test")
    for choose in (include, exclude):
        left = choose(hosts, text_of(chosen), "a filter") if chosen else hosts
        filter_text(left)
        hostfile_text(left)


def mpi_hostfile(data: bytes, folder: Path) -> None:
    """Read a hostfile of mpirun, and what follows a zero, or else its lines, as a list of hosts."""
    from accelerate.launch import mpi

    lines, zero, listed = data.partition(b"\0")
    path = folder / "hosts"
    path.write_bytes(lines)
    text = text_of(listed) if zero else ",".join(text_of(lines).splitlines())
    in_turn(lambda: mpi._hostfile(str(path), 2), lambda: mpi._hostfile(text.replace("/", ""), 2))


def claim_file(data: bytes, folder: Path) -> None:
    """Read who has claimed a folder; what was cut is nobody's."""
    from accelerate.runtime import claims

    file = folder / ".state.accelerate-claim"
    file.write_bytes(data)
    holder = claims.Holder.read(file)
    claims.other_run(folder / "state")
    if holder is None or holder.owner is None:
        raise ConfigurationError("The claim is nobody's.")
    holder.owner.is_alive()
    holder.signs_of_life(file)


def file_size(data: bytes, folder: Path) -> None:
    from accelerate.offload.memory import convert_file_size_to_int
    from accelerate.offload.places import lookup, prefixes

    text = text_of(data)
    prefixes(text)
    lookup({text: "cpu"}, text)
    convert_file_size_to_int(text)


def deepspeed_config(data: bytes, folder: Path) -> None:
    from accelerate.config.deepspeed import complete, read
    from accelerate.config.deepspeed_rules import check

    path = folder / "deepspeed.json"
    path.write_bytes(data)
    encoded = base64.urlsafe_b64encode(data).decode()
    config, place = read(str(path))
    again, _ = read(encoded)
    assert repr(again) == repr(config)
    in_turn(lambda: check(config, place), lambda: complete(config, {}, num_replicas=2, place=place))


# --- weights ------------------------------------------------------------------------------------------------------------


def weight_index(data: bytes, folder: Path) -> None:
    from accelerate.offload.weight_files import checkpoint_files, find_weight_files, index_shards, read_json

    index = folder / "model.safetensors.index.json"
    index.write_bytes(data)
    found: list[Path] = []
    in_turn(
        lambda: found.extend(index_shards(index)),
        lambda: found.extend(find_weight_files(folder)),
        lambda: found.extend(checkpoint_files(folder)),
        lambda: read_json(index),
    )
    assert all(path.resolve().is_relative_to(folder.resolve()) for path in found)


def offload_index(data: bytes, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from accelerate.offload.store import OffloadedWeightsLoader, offload_weight
    from accelerate.offload.weight_files import save_offload_index

    if not (folder / "w.safetensors").exists():
        save_file({"a": torch.ones(3)}, folder / "w.safetensors")
        for name in ("a", "b.weight"):
            offload_weight(torch.ones(2, 3), name, folder)
    (folder / "index.json").write_bytes(data)
    weights = OffloadedWeightsLoader(save_folder=folder)
    in_turn(
        *(functools.partial(weights.__getitem__, name) for name in weights),
        *(functools.partial(weights.identity, name) for name in weights),
        lambda: save_offload_index({"new": {"dtype": "float32", "shape": [1]}}, folder),
    )


def safetensors_file(data: bytes, folder: Path) -> None:
    from accelerate.checkpointing.catalog import inspect
    from accelerate.offload.estimate import read_tensors
    from accelerate.offload.store import open_weights_file

    path = folder / "model.safetensors"
    path.write_bytes(data)

    def read_all() -> None:
        file = open_weights_file(path)
        for name in file.names():
            in_turn(functools.partial(file.like, name), lambda name=name: file.read(name, "cpu").numel())

    in_turn(read_all, lambda: read_tensors([path]), lambda: inspect(folder))


def torch_file(data: bytes, folder: Path) -> None:
    """Read a file of torch: with a first byte of 1 the rest is the pickle in an archive that is otherwise right."""
    from accelerate.checkpointing.catalog import inspect
    from accelerate.checkpointing.parts import LoadOptions, read_torch
    from accelerate.offload.estimate import read_tensors
    from accelerate.offload.store import open_weights_file

    path = folder / "pytorch_model.bin"
    path.write_bytes(archive(data[1:]) if data[:1] == b"\1" else data)

    def read_all() -> None:
        import torch

        file = open_weights_file(path)
        for name in file.names():
            in_turn(functools.partial(file.like, name), lambda name=name: file.read(name, torch.device("cpu")))

    in_turn(read_all, lambda: read_tensors([path]), lambda: inspect(folder), lambda: read_torch(path, LoadOptions()))


def archive(pickled: bytes) -> bytes:
    """Return what `torch.save` writes, with another pickle in it."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as file:
        entries = {"data.pkl": pickled, "byteorder": b"little", "data/0": b"\0" * 24, "version": b"3\n"}
        for name, content in entries.items():
            file.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
    return written.getvalue()


# --- checkpoints --------------------------------------------------------------------------------------------------------


def _checkpoint(folder: Path) -> Path:
    """Return the folder of a checkpoint with two files, beside one that nobody may touch."""
    project = empty(folder / "project")
    (project / CANARY).write_text(CANARY)
    checkpoint = project / "checkpoint_0"
    (checkpoint / "sub").mkdir(parents=True)
    (checkpoint / "a").write_text("one")
    (checkpoint / "sub" / "b").write_text("two")
    return checkpoint


def manifest(data: bytes, folder: Path) -> None:
    from accelerate.checkpointing.catalog import inspect, newest_valid, surplus, verify
    from accelerate.checkpointing.manifest import Manifest
    from accelerate.checkpointing.run_parts import _window_files
    from accelerate.commands.checkpoints import _age

    checkpoint = _checkpoint(folder)
    (checkpoint / "manifest.json").write_bytes(data)
    info = inspect(checkpoint, checksums=True)
    verify(info)
    newest_valid(checkpoint.parent)
    surplus([info], 1)
    _age(-info.created)
    assert (checkpoint.parent / CANARY).read_text() == CANARY
    found = Manifest.read(checkpoint)
    if found is not None:
        _window_files(checkpoint, found.world_size)


def pending_manifest(data: bytes, folder: Path) -> None:
    """Put a decided checkpoint into place, whose manifest, or the one that it replaces, is hostile."""
    from accelerate.checkpointing.catalog import newest_valid
    from accelerate.checkpointing.manifest import finish_publish

    old, _, new = data.partition(b"\0")
    checkpoint = _checkpoint(folder)
    (checkpoint / "manifest.json").write_bytes(old)
    (checkpoint / ".sealed").mkdir()
    (checkpoint / ".sealed" / "a").write_text("new")
    (checkpoint / ".sealed" / "manifest.json").write_bytes(new or old)
    in_turn(lambda: newest_valid(checkpoint.parent), lambda: finish_publish(checkpoint))
    assert sorted(path.name for path in checkpoint.parent.iterdir()) == [CANARY, "checkpoint_0"]
    assert (checkpoint.parent / CANARY).read_text() == CANARY


def progress(data: bytes, folder: Path) -> None:
    from accelerate.checkpointing.catalog import inspect
    from accelerate.checkpointing.parts import LoadOptions
    from accelerate.checkpointing.run_parts import ProgressPart
    from accelerate.runtime.gradient_clock import Progress

    checkpoint = empty(folder / "checkpoint_0")
    (checkpoint / "progress.json").write_bytes(data)
    part = ProgressPart(Progress())

    def read() -> None:
        part.restore(part.read(checkpoint, LoadOptions()))

    in_turn(lambda: inspect(checkpoint), read)


# --- datasets -----------------------------------------------------------------------------------------------------------


def shard_description(data: bytes, folder: Path) -> None:
    """Read the description of shards, and what it names of a file of zeros."""
    from accelerate.checkpointing.sharded import ShardFolder

    shards = empty(folder / "shards")
    (shards / ".metadata").write_bytes(data)
    (shards / "__0_0.distcp").write_bytes(bytes(4096))
    ShardFolder(shards).read_whole()


def shard_file(data: bytes, folder: Path) -> None:
    """Read shards that a description names, which is right."""
    from tests.hostile.inputs import saved_shards

    from accelerate.checkpointing.sharded import ShardFolder

    shards = empty(folder / "shards")
    (shards / ".metadata").write_bytes(saved_shards()[0])
    (shards / "__0_0.distcp").write_bytes(data)
    ShardFolder(shards).read_whole()


def indexed_data(data: bytes, folder: Path) -> None:
    """Read the index of Megatron's data; one that is right is read to its end."""
    import numpy

    from accelerate.strategies.megatron.indexed_datasets import check_index

    (folder / "text.bin").write_bytes(bytes(64))
    (folder / "text.idx").write_bytes(data)
    check_index(str(folder / "text"))
    count, documents = (int.from_bytes(data[begin : begin + 8], "little") for begin in (18, 26))
    lengths = numpy.frombuffer(data, "<i4", count, 34)
    pointers = numpy.frombuffer(data, "<i8", count, 34 + 4 * count)
    bounds = numpy.frombuffer(data, "<i8", documents, 34 + 12 * count)
    assert all(0 <= place <= place + length <= 64 for place, length in zip(pointers, lengths, strict=True))
    assert all(0 <= bound <= count for bound in bounds)


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        yaml_config,
        json_config,
        launch_options,
        environment,
        plugin_variables,
        rank_variables,
        slurm_lists,
        hostfile,
        mpi_hostfile,
        file_size,
        deepspeed_config,
        weight_index,
        offload_index,
        safetensors_file,
        torch_file,
        manifest,
        pending_manifest,
        progress,
        shard_description,
        shard_file,
        claim_file,
        indexed_data,
    )
}
