"""Loaders of Megatron's data have the right number of samples, begin at the right one, and never end where they must not."""

from __future__ import annotations

import pickle
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tests.support.indexed_data import LENGTH, SEED, Eod, loaders, plugin, rows, texts, write
from torch.utils.data import DataLoader

from megatron.core.datasets.gpt_dataset import GPTDataset  # isort: skip  # imported there without its warnings

from accelerate import Accelerator
from accelerate._base.errors import ConfigurationError, UsageError
from accelerate.config.plugins.megatron import MegatronLMPlugin
from accelerate.strategies.megatron.datasets import EndlessLoader, MegatronLMDummyDataLoader


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write(tmp_path / "corpus", texts(40))


# --- how many, and from where -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, (6 * 24, 3 * 2 * 24, 2 * 24)),
        ({"train_iters": None, "train_samples": 100}, (100, 2 * 2 * 24, 2 * 24)),
        ({"eval_iters": 0}, (6 * 24, 0, 0)),
        ({"other_megatron_args": {"eval_iters": 5}}, (6 * 24, 3 * 5 * 24, 5 * 24)),
        ({"num_micro_batches": 1, "other_megatron_args": {"num_micro_batches": 3}}, (6 * 24, 3 * 2 * 24, 2 * 24)),
    ],
    ids=str,
)
def test_numbers_of_samples(settings: dict[str, Any], sizes: tuple[int, ...]) -> None:
    asked: list[tuple[int, ...]] = []

    def provide(sizes: Any) -> tuple[Any, ...]:
        asked.append(tuple(sizes))
        return list(range(50)), None, list(range(7))

    own = plugin(**{"num_micro_batches": 3, **settings}, custom_megatron_datasets_provider_function=provide)
    train, valid, test = loaders({}, own, num_replicas=4)
    assert asked == [sizes]
    assert train is not None
    assert train.batch_size == 6
    assert train.drop_last
    assert valid is None
    assert test is not None
    assert [batch.tolist() for batch in test] == [[0, 1, 2, 3, 4, 5]]


def test_the_datasets_hold_what_was_asked_for(corpus: str) -> None:
    train, valid, test = loaders({"data_path": corpus, "split": "4,3,3"}, plugin(train_iters=50, num_micro_batches=2))
    assert train is not None
    assert valid is not None
    assert test is not None
    # More than the files hold: they are read again and again.
    assert len(train) >= 50
    assert len(valid) >= 34
    assert len(test) >= 2


def test_no_evaluation_needs_no_data(tmp_path: Path) -> None:
    prefix = write(tmp_path / "few", texts(6))
    train, valid, test = loaders({"data_path": prefix, "split": "4,1,1"}, plugin(eval_iters=0))
    assert train is not None
    assert valid is None
    assert test is None


def test_seen_samples_are_passed_over(corpus: str) -> None:
    dataset = {"data_path": corpus, "split": "6,2,2"}
    whole = [rows(loader) for loader in loaders(dataset)]
    rest = [rows(loader) for loader in loaders(dataset, plugin(consumed_samples=[8, 4]))]
    assert rest == [whole[0][8:], whole[1][4:], whole[2]]


def test_more_than_all_samples_cannot_have_been_seen(corpus: str) -> None:
    with pytest.raises(ConfigurationError, match="says that 100000 samples of valid were seen, but there are"):
        loaders({"data_path": corpus, "split": "6,2,2"}, plugin(consumed_samples=[0, 100_000]))


# --- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data_pth": "x"}, "'data_pth' is not an argument of MegatronLMDummyDataLoader. Write data_path=..."),
        ({"vocab_file": "x"}, "'vocab_file' is not an argument .* Write tokenizer=..."),
        ({"zzz": 1}, "'zzz' is not an argument .* Known are data_path, "),
        ({"data_impl": "lazy"}, "data_impl='lazy' is a format that Megatron no longer reads"),
        ({"split": "1", "splits_string": "1"}, "splits_string and split are one argument by two names"),
    ],
    ids=str,
)
def test_wrong_names(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MegatronLMDummyDataLoader(**given)


def test_old_names_that_mean_nothing_now(corpus: str) -> None:
    for kind in ("mmap", "infer"):
        given = {"data_path": corpus, "split": "1,0,0", "data_impl": kind, "mmap_warmup": True}
        assert loaders(given)[0] is not None


def test_the_length_of_the_training_must_be_known(corpus: str) -> None:
    with pytest.raises(ConfigurationError, match=r"MegatronLMDummyScheduler\(total_num_steps=\.\.\.\)"):
        loaders({"data_path": corpus, "split": "1"}, plugin(train_iters=None))


def test_a_provider_returns_three_datasets() -> None:
    own = plugin(custom_megatron_datasets_provider_function=lambda sizes: [None])
    with pytest.raises(ConfigurationError, match=r"returned 1 datasets\. Return three"):
        loaders({}, own)


def test_the_module_needs_no_megatron() -> None:
    program = (
        "import sys; import accelerate.strategies.megatron.datasets as d; d.MegatronLMDummyDataLoader(data_path='x'); "
        "assert 'megatron' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# --- in a run -----------------------------------------------------------------------------------------------------------


def run(**changes: Any) -> tuple[Accelerator, MegatronLMPlugin]:
    accelerator = Accelerator(cpu=True)
    settings = plugin(**changes)
    accelerator.state.megatron_lm_plugin = settings
    settings.megatron_lm_default_args.update(model_type_name="gpt", micro_batch_size=2)
    return accelerator, settings


def dummy_of(corpus: str, **changes: Any) -> MegatronLMDummyDataLoader:
    given = {"data_path": corpus, "splits_string": "8,2,0", "seed": SEED, "seq_length": LENGTH, "num_workers": 0}
    return MegatronLMDummyDataLoader(**{**given, **changes})


def test_arguments_go_where_the_run_reads_them(corpus: str) -> None:
    _, settings = run()
    dummy_of(corpus, tokenizer=Eod()).set_megatron_data_args()
    written = settings.megatron_lm_default_args
    assert written["data_path"] == corpus
    assert written["split"] == "8,2,0"
    assert written["seq_length"] == LENGTH
    assert settings.seq_length == LENGTH
    assert "splits_string" not in written
    assert "tokenizer" not in written
    assert "mask_prob" not in written


def test_arguments_need_a_run_and_files(corpus: str) -> None:
    with pytest.raises(UsageError, match="before there was an Accelerator with a plugin of Megatron-LM"):
        dummy_of(corpus).set_megatron_data_args()
    settings = plugin()
    with pytest.raises(ConfigurationError, match=r"no file elsewhere\.bin"):
        dummy_of("elsewhere").set_megatron_data_args(settings)
    dummy_of(corpus).set_megatron_data_args(settings)
    assert settings.megatron_lm_default_args["data_path"] == corpus


def test_the_provider_is_the_programs_or_megatrons(corpus: str) -> None:
    accelerator, settings = run()
    train, valid, test = dummy_of(corpus).get_train_valid_test_datasets_provider(accelerator)((12, 4, 4))
    assert len(train) >= 12
    assert len(valid) >= 4
    assert test is None
    assert isinstance(train, GPTDataset)
    settings.custom_megatron_datasets_provider_function = provide = lambda sizes: (1, 2, 3)
    assert dummy_of(corpus).get_train_valid_test_datasets_provider(accelerator) is provide


def test_iterators_of_a_run_go_on_for_ever(corpus: str) -> None:
    accelerator, settings = run()
    dummy = dummy_of(corpus)
    plain = loaders(dummy.dataset_args, settings)
    train, valid, test = dummy.build_train_valid_test_data_iterators(accelerator)
    assert train is not None
    assert valid is not None
    assert test is None
    expected = rows(plain[0])
    found = [row for _ in range(2 * len(train) + 1) for row in next(train)["tokens"].tolist()]
    assert found == [*expected, *expected, *expected[:2]]
    assert accelerator._dataloaders == [train.loader, valid.loader]


def test_the_provider_and_the_iterators_need_a_model_and_its_batches(corpus: str) -> None:
    accelerator, settings = run()
    settings.megatron_lm_default_args.pop("micro_batch_size")
    with pytest.raises(ConfigurationError, match="given no micro_batch_size, and no other loader"):
        dummy_of(corpus).build_train_valid_test_data_iterators(accelerator)
    settings.megatron_lm_default_args.pop("model_type_name")
    with pytest.raises(UsageError, match="before the model was prepared"):
        dummy_of(corpus, micro_batch_size=2).build_train_valid_test_data_iterators(accelerator)
    accelerator.state.megatron_lm_plugin = None
    with pytest.raises(UsageError, match="made without Megatron-LM"):
        dummy_of(corpus).get_train_valid_test_datasets_provider(accelerator)


# --- endless loaders ----------------------------------------------------------------------------------------------------


def test_an_endless_loader_is_its_loader_and_an_iterator() -> None:
    accelerator = Accelerator(cpu=True)
    loader = EndlessLoader(accelerator.prepare(DataLoader(range(6), batch_size=2)))  # type: ignore[arg-type]
    assert len(loader) == 3
    assert loader.total_batch_size == 2
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    assert [next(loader).tolist()[0] for _ in range(7)] == [0, 2, 4, 0, 2, 4, 0]
    assert loader.position.epoch == 3
    assert loader.position.samples == 2
    with pytest.raises(AttributeError):
        loader.nothing  # noqa: B018
    assert len(pickle.loads(pickle.dumps(loader))) == 3


def test_the_loader_whose_batch_is_at_hand_is_the_clocks() -> None:
    accelerator = Accelerator(cpu=True)
    prepared = [accelerator.prepare(DataLoader(range(6), batch_size=2)) for _ in range(2)]  # type: ignore[arg-type]
    train, valid = map(EndlessLoader, prepared)
    for loader in (train, valid, train, train, train, valid, train):
        next(loader)
        assert accelerator.gradient_state.active_dataloader is loader.loader
    assert len(accelerator.gradient_state.dataloader_references) == 3


def test_next_goes_on_where_a_checkpoint_was_written(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    loader = EndlessLoader(accelerator.prepare(DataLoader(range(10), batch_size=2)))  # type: ignore[arg-type]
    seen = [next(loader).tolist()[0] for _ in range(7)]
    accelerator.save_state(tmp_path / "state")
    rest = [next(loader).tolist()[0] for _ in range(5)]
    assert seen + rest == [0, 2, 4, 6, 8] * 2 + [0, 2]
    accelerator.load_state(tmp_path / "state")
    assert [next(loader).tolist()[0] for _ in range(5)] == rest


def test_a_plain_loader_goes_on_too() -> None:
    loader = EndlessLoader(DataLoader(range(4), batch_size=2))  # type: ignore[arg-type]
    assert [next(loader).tolist() for _ in range(3)] == [[0, 1], [2, 3], [0, 1]]
    assert [batch.tolist() for batch in islice(loader, 1)] == [[0, 1]]


def test_a_loader_without_batches_says_so() -> None:
    loader = EndlessLoader(DataLoader(range(1), batch_size=2, drop_last=True))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"next\(\) found no batch"):
        next(loader)
