"""Datasets of Megatron's indexed files are those that megatron-core makes by hand, or it is said why there are none."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.support.indexed_data import (
    EOD,
    LENGTH,
    SEED,
    SPECIAL,
    Eod,
    loaders,
    plugin,
    rows,
    texts,
    word_tokenizer,
    write,
)

# Imported there without their warnings.
from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset  # isort: skip
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # isort: skip
from megatron.core.datasets.indexed_dataset import IndexedDataset  # isort: skip
from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset  # isort: skip
from megatron.core.datasets.utils import Split  # isort: skip
from transformers import PreTrainedTokenizerFast  # isort: skip

from accelerate._base import imports
from accelerate._base.errors import ConfigurationError, MissingPackageError


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write(tmp_path / "corpus", texts(40))


@pytest.fixture
def sentences(tmp_path: Path) -> str:
    return write(tmp_path / "sentences", texts(40, sentences=5))


# --- GPT ----------------------------------------------------------------------------------------------------------------


def test_gpt_batches_are_those_of_megatrons_dataset(corpus: str, tmp_path: Path) -> None:
    loader, _, _ = loaders({"data_path": corpus, "splits_string": "8,1,1", "data_cache_path": tmp_path / "cache"})
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=LENGTH,
        blend=([corpus], None),
        split="8,1,1",
        path_to_cache=str(tmp_path / "by hand"),
        tokenizer=Eod(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    documents = numpy.arange(32, dtype=numpy.int32)
    by_hand = GPTDataset(IndexedDataset(corpus), corpus, documents, 12, Split.train, config)
    assert loader is not None
    batches = list(loader)
    assert len(loader) == len(batches) == len(by_hand) // 2 >= 6
    for number, batch in enumerate(batches):
        assert set(batch) == {"tokens", "labels", "loss_mask", "position_ids", "attention_mask"}
        for row in range(2):
            expected = by_hand[2 * number + row]
            for key, value in expected.items():
                assert torch.equal(batch[key][row], value), key
        assert torch.equal(batch["labels"][:, :-1], batch["tokens"][:, 1:])
    assert batches[0]["attention_mask"].shape == (2, 1, LENGTH, LENGTH)
    assert batches[0]["position_ids"].tolist() == [list(range(LENGTH))] * 2
    assert all(batch["loss_mask"].eq(1).all() for batch in batches)


def test_samples_are_pieces_of_the_documents_of_their_split(tmp_path: Path) -> None:
    # Token 10 in documents 0 to 5, 11 in 6 and 7, 12 in 8 and 9.
    kinds = [10] * 6 + [11] * 2 + [12] * 2
    prefix = write(tmp_path / "kinds", [[[kind] * 40] for kind in kinds])
    found = loaders({"data_path": prefix, "split": "6,2,2"})
    assert [{token for row in rows(loader) for token in row} for loader in found] == [{10}, {11}, {12}]


def test_a_split_of_its_own_files(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, [[[token] * 50] * 3]) for name, token in (("a", 10), ("b", 11), ("c", 12))]
    train, valid, test = loaders({"train_data_path": paths[0], "valid_data_path": [0.5, paths[1], 0.5, paths[2]]})
    assert {token for row in rows(train) for token in row} == {10}
    assert {row[0] for row in rows(valid)} == {11, 12}
    assert test is None


@pytest.mark.parametrize("weights", [[0.75, 0.25], ["3", "1"]], ids=str)
def test_weights_say_how_often_files_are_read(tmp_path: Path, weights: list[Any]) -> None:
    paths = [write(tmp_path / name, [[[token] * 50] * 4]) for name, token in (("a", 10), ("b", 11))]
    blend = [item for pair in zip(weights, paths, strict=True) for item in pair]
    train, valid, test = loaders({"data_path": blend, "split": "1,0,0"}, plugin(train_iters=20))
    first = [row[0] for row in rows(train)]
    assert len(first) == 40
    assert first.count(10) == 30
    assert valid is None
    assert test is None
    assert "dataset_id" in next(iter(train))  # type: ignore[arg-type]


def test_without_weights_each_file_is_read_once(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, [[[token] * size] * 4]) for name, token, size in (("a", 10, 50), ("b", 11, 20))]
    train, _, _ = loaders({"data_path": paths, "split": "1,0,0"}, plugin(train_iters=500))
    first = [row[0] for row in rows(train)]
    assert (first.count(10), first.count(11)) == (199 // LENGTH, 79 // LENGTH)


def test_a_single_file_with_a_weight_is_a_single_file(corpus: str) -> None:
    one, weighted = (loaders({"data_path": path, "split": "1,0,0"})[0] for path in (corpus, [0.4, corpus]))
    assert rows(one) == rows(weighted)


def test_ends_of_documents_are_left_out_of_the_loss(corpus: str) -> None:
    given = {"data_path": corpus, "split": "1,0,0", "tokenizer": Eod()}
    for dataset, settings in (({**given, "eod_mask_loss": True}, None), (given, plugin(eod_mask_loss=True))):
        loader, _, _ = loaders(dataset, settings)
        assert loader is not None
        ends = 0
        for batch in loader:
            assert torch.equal(batch["loss_mask"] == 0, batch["tokens"] == EOD)
            ends += int((batch["tokens"] == EOD).sum())
        assert ends > 5
    loader, _, _ = loaders({**given, "eod_mask_loss": False}, plugin(eod_mask_loss=True))
    assert loader is not None
    assert all(batch["loss_mask"].all() for batch in loader)


def test_positions_and_masks_begin_anew_after_an_end(corpus: str) -> None:
    changes = {"reset_position_ids": True, "reset_attention_mask": True, "tokenizer": Eod()}
    loader, _, _ = loaders({"data_path": corpus, "split": "1,0,0", **changes})
    assert loader is not None
    batch = next(batch for batch in loader if (batch["tokens"][0, :-1] == EOD).any())
    after = int((batch["tokens"][0] == EOD).nonzero()[0]) + 1
    assert batch["position_ids"][0, after] == 0
    assert batch["attention_mask"][0, 0, after, :after].all()  # True is hidden


def test_attention_masks_can_be_left_to_the_attention(corpus: str) -> None:
    loader, _, _ = loaders({"data_path": corpus, "split": "1,0,0", "create_attention_mask_in_dataloader": False})
    assert set(next(iter(loader))) == {"tokens", "labels", "loss_mask", "position_ids"}  # type: ignore[arg-type]


def test_a_transformers_tokenizer_that_pads_with_the_end_is_taken(corpus: str) -> None:
    tokenizer = word_tokenizer(pad_token="[SEP]", eos_token="[SEP]")
    loader, _, _ = loaders({"data_path": corpus, "split": "1,0,0", "tokenizer": tokenizer, "eod_mask_loss": True})
    assert loader is not None
    assert tokenizer.eos_token_id == EOD
    assert all(torch.equal(batch["loss_mask"] == 0, batch["tokens"] == EOD) for batch in loader)


def test_made_up_data() -> None:
    train, valid, _ = loaders({"mock": True, "tokenizer": Eod()})
    assert train is not None
    assert valid is not None
    assert next(iter(train))["tokens"].shape == (2, LENGTH)


def test_another_seed_is_another_order(corpus: str) -> None:
    first, again, other = (
        rows(loaders({"data_path": corpus, "split": "1,0,0", "seed": seed})[0]) for seed in (7, 7, 8)
    )
    assert first == again != other
    assert loaders({"data_path": corpus, "split": "1,0,0", "seed": None}, seed=8)[0] is not None
    assert rows(loaders({"data_path": corpus, "split": "1,0,0", "seed": None}, seed=8)[0]) == other


def test_workers_read_the_same(corpus: str) -> None:
    alone, helped = (loaders({"data_path": corpus, "split": "1,0,0", "num_workers": count})[0] for count in (0, 1))
    assert rows(alone) == rows(helped)


# --- splits without data -----------------------------------------------------------------------------------------------


def test_a_split_that_rounds_to_nothing_has_no_loader(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prefix = write(tmp_path / "few", texts(10))
    with caplog.at_level(logging.WARNING, logger="accelerate"):
        train, valid, test = loaders({"data_path": prefix, "split": "949,50,1"})
    assert train is not None
    assert valid is not None
    assert test is None
    assert "There is no loader for test" in caplog.text


def test_empty_documents_have_no_loader(tmp_path: Path) -> None:
    prefix = write(tmp_path / "empty", [[[10] * 40], [[]], [[]], [[]]])
    train, valid, test = loaders({"data_path": prefix, "split": "1,1,2"})
    assert train is not None
    assert (valid, test) == (None, None)


def test_a_file_without_a_token_is_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path / "empty", [[[]]])
    with pytest.raises(ConfigurationError, match=r"empty\.bin is empty: there is no token in it"):
        loaders({"data_path": prefix, "split": "1,0,0"})


# --- BERT and T5 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("binary_head", [True, False])
def test_bert(sentences: str, binary_head: bool) -> None:
    changes = {"tokenizer": word_tokenizer(), "bert_binary_head": binary_head, "seq_length": 48}
    train, _, test = loaders({"data_path": sentences, "split": "8,1,1", **changes}, family="bert")
    assert train is not None
    assert test is not None
    dataset = train.dataset
    assert isinstance(dataset, BERTMaskedWordPieceDataset)
    batch = next(iter(train))
    assert set(batch) == {"text", "types", "labels", "is_random", "padding_mask", "loss_mask", "truncated"}
    for key in ("text", "labels", "padding_mask"):
        assert batch[key][1].tolist() == dataset[1][key].tolist()
    text, labels, guessed = batch["text"], batch["labels"], batch["loss_mask"] == 1
    assert (text[:, 0] == 2).all()
    assert guessed.any(dim=1).all()
    assert torch.equal(guessed, labels >= len(SPECIAL))
    assert (text[guessed] == 4).any()
    assert torch.equal(batch["padding_mask"] == 0, text == 0)
    assert bool(batch["types"].any()) is binary_head


def test_random_words_do_not_depend_on_the_order_of_the_vocabulary(sentences: str) -> None:
    class Reversed(PreTrainedTokenizerFast):
        """A fast tokenizer lists its words in an order that changes from process to process."""

        def get_vocab(self) -> dict[str, int]:
            return dict(sorted(super().get_vocab().items(), reverse=True))

    one = word_tokenizer()
    other = word_tokenizer()
    other.__class__ = Reversed
    dataset = {"data_path": sentences, "split": "1,0,0", "seq_length": 48}
    texts_of = [rows(loaders({**dataset, "tokenizer": each}, family="bert")[0], "text") for each in (one, other)]
    assert list(one.get_vocab()) != list(other.get_vocab())
    assert texts_of[0] == texts_of[1]


def test_t5(sentences: str) -> None:
    tokenizer = word_tokenizer(bos_token="[CLS]", eos_token="[SEP]")
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<extra_id_{number}>" for number in range(20)]})
    first = tokenizer.convert_tokens_to_ids("<extra_id_0>")
    changes = {"tokenizer": tokenizer, "seq_length": 48, "decoder_seq_length": 32}
    train, _, _ = loaders({"data_path": sentences, "split": "8,1,1", **changes}, family="t5")
    assert train is not None
    assert isinstance(train.dataset, T5MaskedWordPieceDataset)
    batch = next(iter(train))
    assert set(batch) == {"text_enc", "text_dec", "labels", "loss_mask", "truncated", "enc_mask", "dec_mask"}
    assert batch["text_enc"].shape == (2, 48)
    assert batch["text_dec"].shape == (2, 32)
    assert (batch["text_dec"][:, 0] == 2).all()
    assert (batch["text_dec"][:, 1] == first).all()
    counts = batch["loss_mask"].sum(dim=1)
    for row, count in enumerate(counts.tolist()):
        assert torch.equal(batch["labels"][row, : count - 1], batch["text_dec"][row, 1:count])
        assert batch["labels"][row, count - 1] == 3


def test_documents_of_one_sentence_make_no_pair(corpus: str) -> None:
    dataset = {"data_path": corpus, "split": "1,0,0", "tokenizer": word_tokenizer()}
    assert loaders(dataset, family="bert") == (None, None, None)
    assert loaders({**dataset, "bert_binary_head": False}, family="bert")[0] is not None


def test_documents_with_a_long_sentence_are_passed_over(tmp_path: Path) -> None:
    prefix = write(tmp_path / "long", [[[10] * 600, [11] * 5]])
    assert loaders({"data_path": prefix, "split": "1,0,0", "tokenizer": word_tokenizer()}, family="bert")[0] is None


# --- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "was given 'no path': there are no data. Give data_path"),
        ({"data_path": "{}"}, "does not say which part is for training. Add split="),
        ({"data_path": "{}", "test_data_path": "{}", "split": "1"}, "Give one kind"),
        ({"train_data_path": "{}", "split": "1"}, "split divides the data of data_path alone"),
        ({"data_path": "{}", "split": "1", "mock": True}, "mock=True makes data up, and a path was given too"),
        ({"data_path": "{}", "split": "9,-1"}, "split='9,-1' does not say how the data is divided"),
        ({"data_path": "{}", "split": "most"}, "split='most' does not say"),
        ({"data_path": "{}", "split": [0, 0]}, "does not say how"),
        (
            {"data_path": "nowhere", "split": "1"},
            "no file nowhere.bin and no file nowhere.idx: Megatron's data is a pair",
        ),
        ({"data_path": "{}.bin", "split": "1"}, "without .bin and .idx"),
        ({"data_path": [], "split": "1"}, "neither a list of prefixes nor one of weights"),
        ({"data_path": [0.5, "{}", "{}"], "split": "1"}, "neither a list of prefixes nor one of weights"),
        ({"data_path": [0.5, "{}", 0, "{}"], "split": "1"}, "with weights above 0"),
        (
            {"data_path": "{}", "split": "1", "seq_length": None},
            "seq_length=None is no length for the samples of a GPT",
        ),
        ({"data_path": "{}", "split": "1", "seed": 0}, "seed=0 is not a seed"),
        (
            {"data_path": "{}", "split": "1", "eod_mask_loss": True},
            "tokenizer=None was given, but these samples of a GPT",
        ),
        (
            {"data_path": "{}", "split": "1", "eod_mask_loss": True, "tokenizer": "gpt2"},
            "Write tokenizer=AutoTokenizer",
        ),
        ({"mock": True}, "tokenizer=None was given"),
        ({"data_path": "{}", "split": "1", "micro_batch_size": 3}, "differs from the 2 samples that the run sends"),
    ],
    ids=str,
)
def test_wrong_values(corpus: str, given: dict[str, Any], message: str) -> None:
    def filled(value: Any) -> Any:
        if isinstance(value, list):
            return [filled(item) for item in value]
        return value.replace("{}", corpus) if isinstance(value, str) else value

    with pytest.raises(ConfigurationError, match=message):
        loaders({name: filled(value) for name, value in given.items()})


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("bert", {"tokenizer": None}, "tokenizer=None was given, but these samples of a BERT"),
        ("bert", {"seq_length": 4}, "seq_length=4 is no length for the samples of a BERT model. .* at least 5"),
        ("bert", {"data_path": ["{}", "{}"]}, "reads several files of BERT data by weights alone"),
        ("bert", {"tokenizer": word_tokenizer(pad_token="[UNK]")}, "pads with token 1, .* where padding must be 0"),
        ("bert", {"tokenizer": word_tokenizer(mask_token=None)}, "has no mask token"),  # type: ignore[arg-type]
        ("bert", {"mask_prob": 1.0}, "mask_prob=1.0 is no share of the words"),
        ("bert", {"short_seq_prob": -0.1}, "short_seq_prob=-0.1 is no share"),
        ("mamba", {}, "no indexed data for models of the kind 'mamba', only for gpt, bert, t5"),
        ("bert", {"mock": True, "data_path": None, "split": None}, "mock=True makes data up for GPT"),
        ("t5", {}, "decoder_seq_length=None is no length"),
        ("t5", {"decoder_seq_length": 16}, "has no additional special"),
        (
            "t5",
            {"decoder_seq_length": 16, "tokenizer": word_tokenizer(cls_token=None, sep_token=None)},  # type: ignore[arg-type]
            "has no bos and no eos and no additional special",
        ),
    ],
    ids=str,
)
def test_wrong_values_of_masked_words(sentences: str, family: str, changes: dict[str, Any], message: str) -> None:
    given = {"data_path": "{}", "split": "1,0,0", "tokenizer": word_tokenizer(), **changes}
    paths = given["data_path"]
    given["data_path"] = [sentences] * 2 if isinstance(paths, list) else paths and sentences
    with pytest.raises(ConfigurationError, match=message):
        loaders(given, family=family)


def test_files_of_a_blend_that_have_nothing_for_a_split(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, texts(count)) for name, count in (("many", 40), ("few", 2))]
    with pytest.raises(ConfigurationError, match=r"few'\] have no sample for valid with split='8,1,1'"):
        loaders({"data_path": [0.5, paths[0], 0.5, paths[1]], "split": "8,1,1"})


def test_an_order_that_cannot_be_written_is_refused(corpus: str, tmp_path: Path) -> None:
    Path(corpus).touch()  # where the folder beside the data would be
    with pytest.raises(ConfigurationError, match=r"cannot be written to\. Write data_cache_path="):
        loaders({"data_path": corpus, "split": "1,0,0"})
    assert (
        loaders({"data_path": corpus, "split": "1,0,0", "data_cache_path": tmp_path / "new" / "cache"})[0] is not None
    )


def test_a_group_for_the_time_of_the_building_leaves_nothing(corpus: str) -> None:
    hook = sys.excepthook
    assert loaders({"data_path": corpus, "split": "1,0,0"})[0] is not None
    assert not torch.distributed.is_initialized()
    assert sys.excepthook is hook


def test_the_compiled_part_of_megatron_is_asked_for(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = imports.is_package_available
    name = "accelerate.strategies.megatron.indexed_datasets.is_package_available"
    monkeypatch.setattr(name, lambda package: not package.endswith("helpers_cpp") and known(package))
    with pytest.raises(MissingPackageError, match="only the wheels for Linux bring it"):
        loaders({"data_path": corpus, "split": "1,0,0"})


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, b"X", "it does not begin as one"),
        (9, b"\2", "it does not begin as one"),
        (17, b"\x09", "it does not begin as one"),
        (18, (2**40).to_bytes(8, "little"), r"it lists 1099511627776 sequences in 41 documents"),
        (26, (0).to_bytes(8, "little"), r"it lists 40 sequences in 0 documents"),
        (34, (-1).to_bytes(4, "little", signed=True), "it points out of the data"),
        (34, (2**31 - 1).to_bytes(4, "little"), "it points out of the data"),
        (34 + 4 * 40, (2**62).to_bytes(8, "little"), "it points out of the data"),
        (34 + 12 * 40 + 8, (30).to_bytes(8, "little"), "its documents are not one after the other"),
        (34 + 12 * 40 + 8 * 40, (2**40).to_bytes(8, "little"), "its documents are not those of its sequences"),
    ],
)
def test_an_index_that_does_not_fit_its_data_is_refused(corpus: str, place: int, value: bytes, message: str) -> None:
    index = Path(f"{corpus}.idx")
    content = bytearray(index.read_bytes())
    content[place : place + len(value)] = value
    index.write_bytes(content)
    with pytest.raises(ConfigurationError, match=rf"corpus\.idx' is no index of 'corpus\.bin': {message}"):
        loaders({"data_path": corpus, "splits_string": "8,1,1"})


def test_an_index_that_is_cut_off_is_refused(corpus: str) -> None:
    index = Path(f"{corpus}.idx")
    for length in (0, 20, 100):
        index.write_bytes(index.read_bytes()[:length] if length else b"")
        with pytest.raises(ConfigurationError, match=r"corpus\.idx' is no index of"):
            loaders({"data_path": corpus, "splits_string": "8,1,1"})
