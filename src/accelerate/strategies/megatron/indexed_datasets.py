"""Datasets in Megatron's indexed format, a pair of files `prefix.bin` and `prefix.idx`, made by megatron-core."""

from __future__ import annotations

import difflib
import logging
import os
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy
import torch.distributed as dist

from accelerate._base.errors import ConfigurationError, MissingPackageError
from accelerate._base.imports import is_package_available, require
from accelerate._base.untrusted import check_regular
from accelerate.config import env
from accelerate.runtime.process_group import join_alone, leave
from accelerate.strategies.megatron.dataset_tokenizer import tokenizer_for

logger = logging.getLogger(__name__)

Family = Literal["gpt", "bert", "t5"]
Blend = tuple[list[str], list[float] | None]

SPLITS = ("train", "valid", "test")
_PACKAGE = "megatron.core.datasets"
_CLASSES = {
    "gpt": ("gpt_dataset", "GPTDataset"),
    "bert": ("bert_dataset", "BERTMaskedWordPieceDataset"),
    "t5": ("t5_dataset", "T5MaskedWordPieceDataset"),
}
# Room for the special tokens of a sample, and for two of its own.
_SHORTEST = {"gpt": 1, "bert": 5, "t5": 4}
# How Megatron's own pre-training masks words.
_MASKING = {
    "bert": {"masking_max_ngram": 3, "masking_use_geometric_distribution": False},
    "t5": {"masking_max_ngram": 10, "masking_use_geometric_distribution": True},
}
# Documents with a longer sentence are passed over when samples of BERT and T5 are cut.
_LONGEST_SENTENCE = 512
OTHER_NAMES = {"splits_string": "split", "mock_data": "mock"}
# How an index begins: a mark, the version, the code of a token's dtype, the numbers of sequences and of documents.
_INDEX_START, _INDEX_MARK = struct.Struct("<9sQBQQ"), b"MMIDIDX\x00\x00"
_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
# Entries of an index that are looked at together.
_AT_ONCE = 1_000_000
# What Megatron makes a tokenizer of; here the program brings one.
_OF_THE_TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size", "vocab_extra_ids")


@dataclass(frozen=True)
class DatasetArguments:
    """What `MegatronLMDummyDataLoader` takes; None means "not given".

    Args:
        data_path: A prefix, a list of prefixes, or a list of weights and prefixes in turn.
        train_data_path: The same for one split, instead of `data_path` and `split`.
        split: Shares of the splits, as "949,50,1".
        seq_length: Tokens of a sample; those of the encoder for T5.
        data_cache_path: Folder for the order of the samples, which all machines must share; beside the data if None.
        eod_mask_loss: Leave the ends of documents out of the loss; what the plugin says if None.
        tokenizer: One of Transformers or of Megatron. GPT needs none, unless the ends of documents matter.
        mask_prob: Share of the words that BERT and T5 are to guess.
        short_seq_prob: Share of the samples of BERT and T5 that are cut short.
        mock: Make data up, for GPT alone.
    """

    data_path: Any = None
    train_data_path: Any = None
    valid_data_path: Any = None
    test_data_path: Any = None
    split: Any = None
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    micro_batch_size: int | None = None
    num_workers: int = 2
    data_cache_path: str | os.PathLike[str] | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool | None = None
    create_attention_mask_in_dataloader: bool = True
    tokenizer: Any = None
    mask_prob: float = 0.15
    short_seq_prob: float = 0.1
    bert_binary_head: bool | None = None
    seed: int | None = None
    mock: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> DatasetArguments:
        """Return the arguments in `given`.

        Raises:
            ConfigurationError: A name or a value means nothing here.
        """
        values = {name: value for name, value in given.items() if value is not None}
        # All files are mapped into memory now, and the system reads them ahead by itself.
        values.pop("mmap_warmup", None)
        kind = values.pop("data_impl", "mmap")
        if kind not in ("mmap", "infer"):
            raise ConfigurationError(
                f"data_impl={kind!r} is a format that Megatron no longer reads. Write the data anew with its "
                "tools/preprocess_data.py, and leave data_impl out."
            )
        for other, name in OTHER_NAMES.items():
            if other in values and name in values:
                raise ConfigurationError(f"{other} and {name} are one argument by two names. Give one of them.")
            values.update({name: values.pop(other)} if other in values else {})
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                nearest = ["tokenizer"] if name in _OF_THE_TOKENIZER else difflib.get_close_matches(name, known, 1)
                hint = f"Write {nearest[0]}=..." if nearest else f"Known are {', '.join(known)}"
                raise ConfigurationError(f"{name!r} is not an argument of MegatronLMDummyDataLoader. {hint}.")
        return cls(**values)

    def sources(self) -> dict[str, Any]:
        """Return where the data is, as Megatron's configurations want it: nothing for data that is made up.

        Raises:
            ConfigurationError: The arguments contradict each other, or a file is missing.
        """
        names = [f"{split}_data_path" for split in SPLITS]
        given = [name for name in ("data_path", *names) if getattr(self, name) is not None]
        if self.mock and not given:
            return {}
        shares = "split" if self.split is not None else None
        problems = {
            "mock=True makes data up, and a path was given too. Give one of them": self.mock,
            "there are no data. Give data_path and split, or train_data_path": not given,
            "data_path holds all splits, and the others one each. Give one kind": len(given) > 1
            and "data_path" in given,
            "it does not say which part is for training. Add split='949,50,1'": given == ["data_path"] and not shares,
            "split divides the data of data_path alone. Leave it out": "data_path" not in given and shares is not None,
        }
        for reason, applies in problems.items():
            if applies:
                raise ConfigurationError(f"MegatronLMDummyDataLoader was given {given or 'no path'!r}: {reason}.")
        if given == ["data_path"]:
            return {"blend": _blend("data_path", self.data_path), "split": _shares(self.split)}
        blends = [_blend(name, getattr(self, name)) if name in given else None for name in names]
        return {"blend_per_split": blends}


def _shares(split: Any) -> str:
    parts = split.split(",") if isinstance(split, str) else split
    try:
        shares = [float(part) for part in parts]
    except (TypeError, ValueError):
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or sum(shares) <= 0:
        raise ConfigurationError(
            f"split={split!r} does not say how the data is divided. Write the shares of training, validation and test: "
            "'949,50,1'."
        )
    return ",".join(str(part).strip() for part in parts)


def _blend(name: str, given: Any) -> Blend:
    """Return prefixes and their weights, None for weights by size, of files that are there."""
    items = [given] if isinstance(given, (str, os.PathLike)) else list(given)
    numbers = [_number(item) for item in items]
    weights = [number for number in numbers[::2] if number is not None]
    is_weighted = any(number is not None for number in numbers)
    is_paired = len(weights) * 2 == len(items) and all(number is None for number in numbers[1::2])
    if not items or (is_weighted and (not is_paired or min(weights) <= 0)):
        raise ConfigurationError(
            f"{name}={given!r} is neither a list of prefixes nor one of weights and prefixes in turn. Write a prefix, "
            "[prefix, prefix], or [0.3, prefix, 0.7, prefix] with weights above 0."
        )
    prefixes = [os.fspath(item) for item in (items[1::2] if is_weighted else items)]
    for prefix in prefixes:
        missing = [prefix + suffix for suffix in (".bin", ".idx") if not Path(prefix + suffix).is_file()]
        if missing:
            raise ConfigurationError(
                f"{name}={given!r} was given, but there is no file {' and no file '.join(missing)}: Megatron's data is a pair "
                "of files. Write their common path, without .bin and .idx."
            )
        if not Path(f"{prefix}.bin").stat().st_size:
            raise ConfigurationError(
                f"{name}={given!r} was given, but {prefix}.bin is empty: there is no token in it. Write the data anew."
            )
        check_index(prefix)
    return prefixes, weights if is_weighted and len(prefixes) > 1 else None


def check_index(prefix: str) -> None:
    """Refuse an index that does not fit its data: megatron-core, whose helper is compiled, reads wherever it points.

    Raises:
        ConfigurationError: It is cut off or broken, or of other data.
    """
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    problem = _index_problem(index, check_regular(data).st_size)
    if problem is not None:
        raise ConfigurationError(
            f"{str(index)!r} is no index of {data.name!r}: {problem}. Write both anew with Megatron's "
            "tools/preprocess_data.py, or copy both again."
        )


def _index_problem(index: Path, num_bytes: int) -> str | None:
    size = check_regular(index).st_size
    with index.open("rb") as file:
        start = file.read(_INDEX_START.size)
    if len(start) < _INDEX_START.size:
        return "it is cut off"
    mark, version, code, sequences, documents = _INDEX_START.unpack(start)
    if mark != _INDEX_MARK or version != 1 or code not in _TOKEN_BYTES:
        return "it does not begin as one"
    expected = _INDEX_START.size + 12 * sequences + 8 * documents
    if not sequences or not documents or size < expected:
        return f"it lists {sequences} sequences in {documents} documents, and has {size} bytes"
    content = numpy.memmap(index, numpy.uint8, "r")
    ends = [_INDEX_START.size, _INDEX_START.size + 4 * sequences, _INDEX_START.size + 12 * sequences, expected]
    lengths, pointers, bounds = (
        content[begin:end].view(kind) for begin, end, kind in zip(ends, ends[1:], ("<i4", "<i8", "<i8"), strict=False)
    )
    for begin in range(0, sequences, _AT_ONCE):
        part, places = lengths[begin : begin + _AT_ONCE], pointers[begin : begin + _AT_ONCE]
        if min(part.min(), places.min()) < 0 or places.max() > num_bytes:
            return "it points out of the data"
        if (places + part.astype("<i8") * _TOKEN_BYTES[code]).max() > num_bytes:
            return "it points out of the data"
    for begin in range(0, documents, _AT_ONCE):
        if (numpy.diff(bounds[begin : begin + _AT_ONCE + 1]) < 0).any():
            return "its documents are not one after the other"
    return None if bounds[0] == 0 and bounds[-1] == sequences else "its documents are not those of its sequences"


def _number(item: Any) -> float | None:
    try:
        return float(item)
    except (TypeError, ValueError):
        return None


def build_datasets(arguments: DatasetArguments, family: Family, sizes: Sequence[int]) -> tuple[Any, Any, Any]:
    """Return the datasets for training, validation and test, None for a split without data.

    Every process of the group must call this: rank 0 writes the order of the samples, the others wait and read it.

    Args:
        arguments: Complete: with a length of sequences, a seed, and what the plugin says.
        sizes: Samples of each split, at least.

    Raises:
        ConfigurationError: An argument cannot work.
        MissingPackageError: megatron-core or its compiled helper is not installed.
    """
    sources = arguments.sources()
    _check_values(arguments, family, sources)
    finds_ends = arguments.eod_mask_loss or arguments.reset_position_ids or arguments.reset_attention_mask
    tokenizer = tokenizer_for(arguments.tokenizer, family, finds_ends=bool(finds_ends or arguments.mock))
    module_name, class_name = _CLASSES[family]
    module, builder = _megatron(module_name), _megatron("blended_megatron_dataset_builder")
    options: dict[str, Any] = {
        "random_seed": arguments.seed,
        "sequence_length": arguments.seq_length,
        "path_to_cache": None if arguments.data_cache_path is None else os.fspath(arguments.data_cache_path),
        "tokenizer": tokenizer,
        **sources,
    }
    config = getattr(module, f"{class_name}Config")(**options, **_options_of(arguments, family))
    with some_process_group():
        _leave_out_empty_splits(config, arguments, family, sizes)
        dataset_class = getattr(module, f"Mock{class_name}" if arguments.mock else class_name)
        made = builder.BlendedMegatronDatasetBuilder(dataset_class, list(sizes), lambda: True, config).build()
    train, valid, test = made
    return train, valid, test


@contextmanager
def some_process_group() -> Iterator[None]:
    """Have a process group, of this process alone if there is none: megatron-core 0.16 asks for its rank without one."""
    if dist.is_initialized():
        yield
        return
    hook, interface = sys.excepthook, env.get("GLOO_SOCKET_IFNAME")
    join_alone("gloo")
    try:
        yield
    finally:
        leave()
        env.update({"GLOO_SOCKET_IFNAME": interface})
        # torch 2.13 lets the tracebacks of a group begin with the rank, and does not take that back.
        sys.excepthook = hook


def _megatron(module: str) -> ModuleType:
    why = "MegatronLMDummyDataLoader"
    found = require(f"{_PACKAGE}.{module}", why=why, extra="megatron")
    if not is_package_available(f"{_PACKAGE}.helpers_cpp"):
        raise MissingPackageError(
            f"{why} needs {_PACKAGE}.helpers_cpp, the compiled part of megatron-core, which is not there: only the wheels "
            "for Linux bring it. Install one of those, or build it from source with `pip install --no-binary megatron-core "
            "megatron-core`.",
            name=f"{_PACKAGE}.helpers_cpp",
        )
    return found


def _check_values(arguments: DatasetArguments, family: Family, sources: Mapping[str, Any]) -> None:
    """Raise for what fails, or never ends, in megatron-core, before a process waits for another."""
    if family not in _CLASSES:
        raise ConfigurationError(
            f"megatron-core has no indexed data for models of the kind {family!r}, only for {', '.join(_CLASSES)}. Give "
            "MegatronLMPlugin(custom_megatron_datasets_provider_function=...)."
        )
    for name in ("seq_length", "decoder_seq_length")[: 2 if family == "t5" else 1]:
        length = getattr(arguments, name)
        if length is None or length < _SHORTEST[family]:
            raise ConfigurationError(
                f"{name}={length!r} is no length for the samples of a {family.upper()} model. Write {name}=..., at least "
                f"{_SHORTEST[family]}, in MegatronLMDummyDataLoader."
            )
    shares = {"mask_prob": 0 < arguments.mask_prob < 1, "short_seq_prob": 0 <= arguments.short_seq_prob <= 1}
    for name, is_share in shares.items():
        if not is_share:
            raise ConfigurationError(
                f"{name}={getattr(arguments, name)!r} is no share of the words or samples. Write a number between 0 and 1."
            )
    if arguments.seed is None or arguments.seed < 1:
        raise ConfigurationError(f"seed={arguments.seed!r} is not a seed that Megatron takes. Write a number above 0.")
    if family != "gpt" and arguments.mock:
        raise ConfigurationError(
            f"mock=True makes data up for GPT, but the model is a {family.upper()}. Give data_path and split."
        )
    blends = [blend for blend in (sources.get("blend"), *sources.get("blend_per_split", ())) if blend]
    for prefixes, weights in blends:
        if family != "gpt" and len(prefixes) > 1 and weights is None:
            raise ConfigurationError(
                f"The prefixes {prefixes} were given without weights, but megatron-core reads several files of "
                f"{family.upper()} data by weights alone. Write [0.5, prefix, 0.5, prefix]."
            )
        for prefix in prefixes if arguments.data_cache_path is None else ():
            _check_cache(Path(prefix, "cache"))
    if arguments.data_cache_path is not None:
        _check_cache(Path(arguments.data_cache_path))


def _check_cache(folder: Path) -> None:
    """Raise on all ranks where rank 0 could not write, instead of letting the others wait for it."""
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    # Where the folder is there, it may hold the order already.
    if not there.is_dir() or (there != folder and not os.access(there, os.W_OK)):
        raise ConfigurationError(
            f"The order of the samples is kept in {str(folder)!r}, but {str(there)!r} cannot be written to. Write "
            "data_cache_path=..., a folder that all machines share."
        )


def _options_of(arguments: DatasetArguments, family: Family) -> dict[str, Any]:
    if family == "gpt":
        return {
            "reset_position_ids": arguments.reset_position_ids,
            "reset_attention_mask": arguments.reset_attention_mask,
            "eod_mask_loss": arguments.eod_mask_loss,
            "create_attention_mask": arguments.create_attention_mask_in_dataloader,
        }
    masked = {
        "masking_probability": arguments.mask_prob,
        "short_sequence_probability": arguments.short_seq_prob,
        "masking_do_full_word": True,
        "masking_do_permutation": False,
        "masking_use_longer_ngrams": False,
        **_MASKING[family],
    }
    if family == "bert":
        return {**masked, "classification_head": arguments.bert_binary_head}
    return {**masked, "sequence_length_decoder": arguments.decoder_seq_length}


# --- splits without data ------------------------------------------------------------------------------------------------


def _leave_out_empty_splits(config: Any, arguments: DatasetArguments, family: Family, sizes: Sequence[int]) -> None:
    """Take out of the configuration what has no samples: megatron-core 0.16 would look for some for ever."""
    for index, split in enumerate(SPLITS):
        spans = config.split_matrix if config.blend_per_split is None else config.blend_per_split
        if spans[index] is None:
            continue
        blend, span = (config.blend, spans[index]) if config.blend_per_split is None else (spans[index], (0.0, 1.0))
        if not sizes[index] or not (config.mock or _has_samples(split, blend, span, arguments, family)):
            spans[index] = None


def _has_samples(
    split: str, blend: Blend, span: tuple[float, float], arguments: DatasetArguments, family: Family
) -> bool:
    prefixes, weights = blend
    # Without weights each file is read once, and must hold a sample; with them again and again.
    least = (arguments.seq_length or 0) + 1 if len(prefixes) > 1 and weights is None else 1
    sentences = 2 if family == "bert" and arguments.bert_binary_head else 1
    found = {prefix: _is_enough(prefix, span, least, 0 if family == "gpt" else sentences) for prefix in prefixes}
    if any(found.values()) and not all(found.values()):
        lacking = [prefix for prefix, is_enough in found.items() if not is_enough]
        raise ConfigurationError(
            f"{lacking} have no sample for {split} with split={arguments.split!r}, but other files of the blend have. "
            "Give that split a greater share, or leave these files out."
        )
    if not any(found.values()) and dist.get_rank() == 0:
        logger.warning(
            "There is no loader for %s: with split=%r, %s have no samples for it.", split, arguments.split, prefixes
        )
    return any(found.values())


def _is_enough(prefix: str, span: tuple[float, float], tokens: int, sentences: int) -> bool:
    """Return whether there are so many tokens, or, with a number of sentences, a document that has so many."""
    # Its arrays are of its own memory: they must not outlive it.
    data = _megatron("indexed_dataset").IndexedDataset(prefix)
    lengths, documents = data.sequence_lengths, data.document_indices
    total = float(len(documents) - 1 if sentences else len(lengths))
    begin, end = (round(edge * total) for edge in span)
    if not sentences:
        return int(lengths[begin:end].sum(dtype="int64")) >= tokens
    bounds = ((int(documents[index]), int(documents[index + 1])) for index in range(begin, end))
    return any(
        last - first >= sentences and (last - first == 1 or lengths[first:last].max() <= _LONGEST_SENTENCE)
        for first, last in bounds
    )
