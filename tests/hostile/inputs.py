"""Inputs that are nearly right, made by hypothesis: valid documents with one thing or another changed in them."""

from __future__ import annotations

import copy
import io
import json
import pickle
import struct
import tempfile
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st
from tests.hostile.targets import archive

TEXTS = [
    *("", ".", "..", "../x", "a/../../x", "/etc/passwd", "C:x", "C:\\x", "..\\x", "\\x", "//x/y", "a\0b", "\ud800"),
    *(
        "a",
        "sub/b",
        "model.safetensors",
        "none.bin",
        "x" * 300,
        "float32",
        "load",
        "F32",
        "NO",
        "FSDP",
        "auto",
        "~",
        "-",
    ),
    *(
        "1e999",
        "nan",
        "9" * 5000,
        "٣",
        "-1",
        "0",
        "1",
        "true",
        "1_0",
        "0x10",
        "4(x2),3",
        "\n",
        "%s",
        "{x}",
        "a,b",
        "1,2",
    ),
]
NUMBERS = [0, 1, -1, 2, 3, 64, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 0.5, 1e308, -0.0]
SPECIAL = [None, True, False, [], {}, [[]], {"": {}}, float("inf"), float("nan"), [1, 2], ["a"], [0], [2**62, 4, 0]]


def leaves() -> st.SearchStrategy[Any]:
    """Values that stand where others are expected."""
    return st.one_of(
        st.sampled_from(TEXTS), st.sampled_from(NUMBERS), st.sampled_from(SPECIAL), st.text(max_size=5), st.integers()
    )


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the ways to all values inside a document, and to itself."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, entry in inside for place in _places(entry, (*path, key)))]


def _changed(document: Any, path: tuple[Any, ...], change: str, value: Any) -> Any:
    if not path:
        return value if change == "replace" else document
    node = document
    for key in path[:-1]:
        node = node[key]
    if change == "delete":
        del node[path[-1]]
    elif change == "rename" and isinstance(node, dict):
        node[str(value)] = node.pop(path[-1])
    elif change == "repeat" and isinstance(node, list):
        node.append(node[path[-1]])
    else:
        node[path[-1]] = value
    return document


@st.composite
def documents(draw: st.DrawFn, valid: list[Any]) -> Any:
    """Valid documents with up to three values replaced, renamed, repeated or taken away."""
    document = copy.deepcopy(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(0, 3))):
        path = draw(st.sampled_from(_places(document)))
        change = draw(st.sampled_from(("replace", "replace", "replace", "delete", "rename", "repeat")))
        document = _changed(document, path, change, copy.deepcopy(draw(leaves())))
    return document


@st.composite
def damaged(draw: st.DrawFn, content: st.SearchStrategy[bytes]) -> bytes:
    """Bytes of which now and then a part is missing, twice there, another one, or nested deeply."""
    data = draw(content)
    kind = draw(st.integers(0, 11))
    if kind > 4 or not data:
        return data
    begin = draw(st.integers(0, len(data)))
    end = min(len(data), begin + draw(st.integers(0, 8)))
    new = draw(st.one_of(st.binary(max_size=8), st.sampled_from((b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"\0"))))
    return (
        (data[:begin], data[:end] + data[begin:], data[:begin] + data[end:])[kind]
        if kind < 3
        else (data[:begin] + new + data[end:])
    )


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def json_of(*valid: Any) -> st.SearchStrategy[bytes]:
    """JSON texts that are nearly one of the valid values."""
    return damaged(documents(list(valid)).map(_json))


# --- options ------------------------------------------------------------------------------------------------------------

CONFIGS = [
    {"compute_environment": "LOCAL_MACHINE", "distributed_type": "MULTI_GPU", "num_processes": 2, "gpu_ids": "all"},
    {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHARD", "x": None}},
    {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3, "offload_param_device": "cpu"}},
    {"distributed_type": "NO", "dynamo_config": {"dynamo_backend": "inductor"}, "fp16": True, "downcast_bf16": "no"},
    {
        "distributed_type": "MEGATRON_LM",
        "megatron_lm_config": {"megatron_lm_tp_degree": 2},
        "tp_config": {"tp_size": 2},
    },
    {"distributed_type": "NO", "dynamo_backend": "INDUCTOR", "parallelism_config": {"parallelism_config_cp_size": 1}},
    {
        "compute_environment": "AMAZON_SAGEMAKER",
        "distributed_type": "DATA_PARALLEL",
        "ec2_instance_type": "x",
        "additional_args": {"a": 1},
    },
]
FRAGMENTS = [
    *("!!python/object/apply:os.system ['true']", "!!python/name:os.system", "!!int ''", "!!bool x", "!!timestamp x"),
    *("!!binary '*'", "!!set {a, b}", "!!omap [a: 1]", "!!pairs [a: 1]", "!!float x", "!!merge x", "=", "!!null x"),
    *("2001-99-99", "2001-12-14t21:59:43.10-05:00", "1:2:3", "0b" + "1" * 20000, "0x" + "f" * 9000, "9" * 5000, ".inf"),
    *(
        "&a [*a]",
        "&a {*a : 1}",
        "? [a]\n: b",
        "{[a]: b}",
        "'\\x'",
        '"\\ud800"',
        "\t",
        "- a\n- b",
        "%YAML 9.9\n---\na: b",
    ),
    *(
        "---\na: 1\n---\nb: 2",
        "a: b: c",
        "[" * 2000,
        "{a: " * 2000,
        "|\n x",
        "*x",
        "!<x> y",
        "!x y",
        "<<: [1]",
        "<<: {a: 1}",
    ),
]


def _repeating(depth: int, entry: str, begin: str) -> str:
    """A list in which each entry repeats the one before nine times."""
    entries = [entry % (i, ", ".join([f"*a{i - 1}"] * 9)) for i in range(1, depth)]
    return f"[{', '.join([begin, *entries])}]"


BOMBS = [_repeating(depth, "&a%d [%s]", "&a0 [x]") for depth in (3, 9, 30)]
BOMBS += [_repeating(depth, "&a%d {<<: [%s]}", "&a0 {x: 1}") for depth in (3, 9)]


@st.composite
def yaml_texts(draw: st.DrawFn) -> bytes:
    document = draw(documents(CONFIGS))
    text = yaml.safe_dump(document, allow_unicode=draw(st.booleans()))
    for _ in range(draw(st.integers(0, 2))):
        key = draw(st.sampled_from(("num_processes", "fsdp_config", "distributed_type", "<<", "x", "main_process_ip")))
        text += f"\n{key}: {draw(st.sampled_from(FRAGMENTS))}\n"
    if draw(st.integers(0, 9)) == 0:
        text += f"\nnum_processes: {draw(st.sampled_from(BOMBS))}\n"
    return text.encode(errors="surrogatepass")


@cache
def _flags() -> list[str]:
    from accelerate.config.sections.registry import options

    return [str(option.flag) for option in options().values() if option.flag]


VARIABLES = [
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK"),
    *(
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "SLURM_PROCID",
        "SLURM_NODEID",
    ),
    *(
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_LOCALID",
        "SLURM_JOB_ID",
        "SLURM_NNODES",
        "SLURM_NTASKS",
    ),
    *("CLOUD_TPU_TASK_ID", "TPU_PROCESS_ADDRESSES", "PJRT_LOCAL_PROCESS_RANK", "PJRT_LOCAL_PROCESS_COUNT"),
    *("CUDA_VISIBLE_DEVICES", "TPU_ACCELERATOR_TYPE", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_FSDP"),
]


def texts() -> st.SearchStrategy[str]:
    return st.one_of(
        st.sampled_from(TEXTS), st.sampled_from(NUMBERS).map(str), st.text(max_size=8), st.integers(-3, 9).map(str)
    )


def _encoded(words: list[str]) -> bytes:
    return "\0".join(words).encode(errors="surrogatepass")


@st.composite
def command_lines(draw: st.DrawFn) -> bytes:
    words = []
    for _ in range(draw(st.integers(0, 5))):
        words.append(draw(st.sampled_from(_flags())))
        if draw(st.booleans()):
            words.append(draw(texts()))
    pairs = draw(st.lists(st.tuples(st.sampled_from(VARIABLES), texts()), max_size=2))
    return _encoded([*words, *map("=".join, pairs)])


def assignments() -> st.SearchStrategy[bytes]:
    pair = st.tuples(st.sampled_from(VARIABLES), texts()).map("=".join)
    return st.lists(pair, max_size=8).map(_encoded)


def numbered_texts(begin: st.SearchStrategy[bytes], most: int) -> st.SearchStrategy[bytes]:
    """A choice, and up to so many texts, each with a number before it."""
    value = st.tuples(st.integers(0, 255), texts()).map(lambda pair: bytes(pair[:1]) + pair[1].encode(errors="replace"))
    return st.tuples(begin, st.lists(value, max_size=most)).map(lambda pair: pair[0] + b"\0".join(pair[1]))


HOSTS = [
    "one slots=2\ntwo slots=4 # more\n\n# none\n",
    "one slots=99999999999999\n",
    "one:4\ntwo\n",
    "a b c\n",
    "\ufeffone",
]
FILTERS = ["one", "one:0", "one:0,1@two", "two:9", "@", "one:" + "9" * 5000, ":", "one:-1", "one:٣"]
LISTS = ["4(x2),3", "4(x99999999999)", "1(x1000001)", "(x2)", "gpu[003-005,9],login", "[", "a[1", "9" * 5000, "a,b", ""]
CLAIMS = [
    {"host": "far-away", "process": 7, "owner": "far-away-7.5.0123abcd", "run": "feed0001"},
    {"owner": "here-99.5.0123abcd", "run": "0123abcd"},
    {"owner": "a-b-c-1.0.None", "run": "0"},
]
SIZES = ["5GB", "1.5GiB", "-1KB", "9" * 400 + "TB", "1e5MB", " 3 kb ", "٣GB", "GB", "5"]
DEEPSPEED = [
    {"zero_optimization": {"stage": 2}, "train_batch_size": 8, "gradient_accumulation_steps": 1},
    {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": "/x"},
            "reduce_bucket_size": 5e8,
        },
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "bf16": {"enabled": False},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.99]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "gradient_clipping": 1.0,
    },
]


def lines_of(*valid: str) -> st.SearchStrategy[bytes]:
    """Texts that are nearly one of the valid ones."""
    return damaged(st.sampled_from(valid).map(str.encode))


# --- weights ------------------------------------------------------------------------------------------------------------

INDEXES = [
    {"metadata": {"total_size": 8}, "weight_map": {"a": "1.safetensors", "b": "2.safetensors"}},
    {"weight_map": {}},
    {"a": "1.safetensors"},
]
OFFLOADED = [
    {"a": {"dtype": "float32", "shape": [2, 3]}, "b.weight": {"dtype": "int8", "shape": [0]}},
    {"a": {"safetensors_file": "w.safetensors", "weight_name": "a", "dtype": "float16"}},
    {"a": {"safetensors_file": "/w.safetensors", "weight_name": "a", "size": 5, "modified": 7}},
]
HEADERS = [
    {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "U8", "shape": [4], "data_offsets": [24, 28]},
    },
    {"__metadata__": {"format": "pt"}, "a": {"dtype": "BF16", "shape": [], "data_offsets": [0, 2]}},
    {
        "a": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]},
        "b": {"dtype": "F8_E8M0", "shape": [0, 5], "data_offsets": [2, 2]},
    },
    {},
]


@st.composite
def safetensors_files(draw: st.DrawFn) -> bytes:
    header = draw(json_of(*HEADERS))
    length = draw(
        st.one_of(st.just(len(header)), st.just(len(header)), st.sampled_from([0, 1, 99_999_999, 2**63, 2**64 - 1]))
    )
    content = bytes(range(draw(st.sampled_from([28, 28, 28, 2, 0, 100]))))
    return struct.pack("<Q", length) + header + content


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('code was run')",)


@cache
def _pickles() -> list[bytes]:
    import numpy
    import torch

    usual = []
    arrays = [numpy.arange(3), numpy.zeros(2, "S3"), numpy.float64(1), numpy.zeros(1, "M8[s]")]
    for saving in (
        OrderedDict(a=torch.arange(6.0), b=torch.ones(2, 2)[0], c=3, d=[1, {"e": None}]),
        {"a": arrays, "b": {1, (2, "x")}, "c": bytearray(b"x"), "d": Counter("ab")},
        {"a": torch.eye(2).to_sparse(), "b": torch.ones(3).to(torch.float8_e4m3fn), "c": torch.nn.Linear(1, 1).weight},
    ):
        saved = io.BytesIO()
        torch.save(saving, saved)
        with zipfile.ZipFile(saved) as file:
            usual.append(file.read(next(name for name in file.namelist() if name.endswith("data.pkl"))))
    cycle: dict[str, Any] = {}
    cycle["model"] = cycle
    nested: Any = 1
    for _ in range(300):
        nested = [nested]
    values = [cycle, nested, {"state_dict": {}}, [1], {1: 2}, {"a": "b"}, _Runs(), {"a": _Runs()}, bytearray(3), None]
    return [*usual, *(pickle.dumps(value, 2) for value in values), b"]" * 500 + b"."]


@cache
def _torch_files() -> list[bytes]:
    import torch

    made = []
    for new in (True, False):
        saved = io.BytesIO()
        torch.save({"a": torch.arange(6.0), "b": torch.ones(2)}, saved, _use_new_zipfile_serialization=new)
        made.append(saved.getvalue())
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"]" * 100000)
    return [*made, packed.getvalue(), archive(_pickles()[0])]


def torch_files() -> st.SearchStrategy[bytes]:
    pickles = st.deferred(lambda: damaged(st.sampled_from(_pickles()))).map(lambda content: b"\1" + content)
    return st.one_of(pickles, pickles, st.deferred(lambda: damaged(st.sampled_from(_torch_files()))))


# --- checkpoints and datasets ---------------------------------------------------------------------------------------------

MANIFESTS = [
    {
        "version": 1,
        "files": [
            {"name": "a", "size": 3, "checksum": "column-sums:0"},
            {"name": "sub/b", "size": 3, "checksum": "column-sums:1"},
        ],
        "world_size": 2,
        "facts": {"step": 4, "samples": 8, "epoch": 1, "iteration": 0},
        "created": 1700000000.5,
        "versions": {"python": "3.11"},
    },
]


@cache
def saved_shards(is_empty: bool = False) -> tuple[bytes, bytes]:
    """What torch writes about shards, and the shards."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    state = {} if is_empty else {"model": {"a": torch.ones(2, 3), "b": 5}, "list": [torch.ones(1), "x"]}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, storage_writer=FileSystemWriter(folder))
        shards = Path(folder) / "__0_0.distcp"
        return (Path(folder) / ".metadata").read_bytes(), b"" if is_empty else shards.read_bytes()


@cache
def _descriptions() -> list[bytes]:
    """What torch writes about shards: of tensors and values, of nothing at all; and one that runs code."""
    return [saved_shards()[0], saved_shards(is_empty=True)[0], pickle.dumps(_Runs())]


def two_of(one: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Two texts with a zero between them."""
    return st.tuples(one, one).map(b"\0".join)


@st.composite
def indexes_of_data(draw: st.DrawFn) -> bytes:
    lengths, pointers, bounds = [3, 4], [0, 12], [0, 1, 2]
    for numbers in (lengths, pointers, bounds):
        if draw(st.integers(0, 3)) == 0:
            numbers[draw(st.integers(0, 1))] = draw(st.sampled_from([-1, 0, 5, 2**31 - 1, -(2**31)]))
    counts = [2, 3]
    if draw(st.integers(0, 3)) == 0:
        counts[draw(st.integers(0, 1))] = draw(st.sampled_from([0, 1, 3, 2**31, 2**63, 2**64 - 1]))
    mark = draw(st.sampled_from([b"MMIDIDX\0\0", b"MMIDIDX\0\0", b"MMIDIDX\0\0", b"TNTIDX\0\0\0"]))
    start = struct.pack(
        "<9sQBQQ", mark, draw(st.sampled_from([1, 1, 1, 2])), draw(st.sampled_from([4, 4, 8, 0, 9])), *counts
    )
    return start + struct.pack("<2i2q3q", *lengths, *pointers, *bounds)


INPUTS: dict[str, Callable[[], st.SearchStrategy[bytes]]] = {
    "yaml_config": lambda: damaged(yaml_texts()),
    "json_config": lambda: json_of(*CONFIGS),
    "launch_options": command_lines,
    "environment": lambda: numbered_texts(st.binary(min_size=1, max_size=1), 1),
    "plugin_variables": lambda: numbered_texts(st.binary(min_size=1, max_size=1), 4),
    "rank_variables": assignments,
    "slurm_lists": lambda: lines_of(*LISTS),
    "hostfile": lambda: st.tuples(lines_of(*HOSTS), lines_of("", *FILTERS)).map(b"\0".join),
    "mpi_hostfile": lambda: lines_of(*HOSTS),
    "claim_file": lambda: json_of(*CLAIMS),
    "file_size": lambda: lines_of(*SIZES),
    "deepspeed_config": lambda: json_of(*DEEPSPEED),
    "weight_index": lambda: json_of(*INDEXES),
    "offload_index": lambda: json_of(*OFFLOADED),
    "safetensors_file": lambda: damaged(safetensors_files()),
    "torch_file": torch_files,
    "manifest": lambda: json_of(*MANIFESTS),
    "pending_manifest": lambda: two_of(json_of(*MANIFESTS)),
    "progress": lambda: json_of({"epoch": 1, "step": 2, "samples": 3}),
    "shard_file": lambda: damaged(st.deferred(lambda: st.just(saved_shards()[1]))),
    "shard_description": lambda: damaged(st.sampled_from(_descriptions())),
    "indexed_data": lambda: damaged(indexes_of_data()),
}
