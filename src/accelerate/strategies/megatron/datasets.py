"""Loaders of data in Megatron's indexed format, and what stands for them in a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, Subset

from accelerate._base.errors import ConfigurationError, UsageError
from accelerate.config.plugins.megatron import MegatronLMPlugin
from accelerate.runtime import current
from accelerate.runtime.gradient_clock import GradientState
from accelerate.strategies.megatron.indexed_datasets import (
    OTHER_NAMES,
    SPLITS,
    DatasetArguments,
    Family,
    build_datasets,
    some_process_group,
)

Provider = Callable[[Sequence[int]], Sequence[Any]]
Loaders = tuple["DataLoader[Any] | None", "DataLoader[Any] | None", "DataLoader[Any] | None"]

_DEFAULT_SEED = 1234
_NO_BATCH = object()


class MegatronLMDummyDataLoader:
    """Stand for the three loaders of Megatron's indexed datasets: give it to `prepare` once for each.

    megatron-core cuts the samples with a compiled helper, which its wheels for Linux bring.

    Args:
        dataset_kwargs: What `DatasetArguments` has, by the names of Megatron's own arguments.

    Raises:
        ConfigurationError: An argument is unknown.

    Example:
        >>> loader = MegatronLMDummyDataLoader(data_path="corpus_text_document", splits_string="949,50,1", seq_length=512)
    """

    def __init__(self, **dataset_kwargs: Any) -> None:
        DatasetArguments.of(dataset_kwargs)
        self.dataset_args = dataset_kwargs

    def set_megatron_data_args(self, plugin: MegatronLMPlugin | None = None) -> None:
        """Check the arguments, and write them where the run reads those of Megatron.

        Args:
            plugin: Where they are written, `megatron_lm_default_args`; the plugin of this process if None.

        Raises:
            ConfigurationError: The arguments contradict each other, or a file is missing.
            UsageError: There is no plugin.
        """
        plugin = plugin if plugin is not None else current.ACCELERATOR.get("megatron_lm_plugin")
        if plugin is None:
            raise UsageError(
                "set_megatron_data_args was called before there was an Accelerator with a plugin of Megatron-LM. Make an "
                "Accelerator(megatron_lm_plugin=MegatronLMPlugin(...)) first."
            )
        arguments = DatasetArguments.of(self.dataset_args)
        if plugin.custom_megatron_datasets_provider_function is None:
            arguments.sources()
        written = {OTHER_NAMES.get(name, name) for name in self.dataset_args}
        values = {name: getattr(arguments, name) for name in written if name in arguments.__dataclass_fields__}
        values.pop("tokenizer", None)
        plugin.megatron_lm_default_args.update(values)
        for name in ("seq_length", "encoder_seq_length", "decoder_seq_length"):
            if getattr(arguments, name) is not None:
                setattr(plugin, name, getattr(arguments, name))

    def get_train_valid_test_datasets_provider(self, accelerator: Any) -> Provider:
        """Return the function that makes three datasets of the numbers of their samples: the plugin's, or Megatron's."""
        plugin = plugin_of(accelerator)
        custom: Provider | None = plugin.custom_megatron_datasets_provider_function
        return custom or _provider(DatasetArguments.of(self.dataset_args), plugin, **sample_shape(plugin))

    def build_train_valid_test_data_iterators(
        self, accelerator: Any
    ) -> tuple[EndlessLoader | None, EndlessLoader | None, EndlessLoader | None]:
        """Return prepared loaders for training, validation and test that never end; None for a split without data.

        Raises:
            UsageError: The model was not prepared, so nobody knows what its samples are.
        """
        plugin = plugin_of(accelerator)
        rows = self.dataset_args.get("micro_batch_size") or plugin.megatron_lm_default_args.get("micro_batch_size")
        if rows is None:
            raise ConfigurationError(
                "MegatronLMDummyDataLoader was given no micro_batch_size, and no other loader says one. Write "
                "micro_batch_size=..., the samples that go through the pipeline at a time."
            )
        _, num_replicas = accelerator.strategy.data_shard()
        shape = sample_shape(plugin)
        loaders = build_loaders(self, plugin, micro_batch_size=rows, num_replicas=num_replicas, **shape)
        train, valid, test = (
            None if loader is None else EndlessLoader(accelerator.prepare_data_loader(loader)) for loader in loaders
        )
        return train, valid, test


class EndlessLoader:
    """A prepared loader that also answers `next`, and goes on with the next epoch where one ends.

    A loop over it is one epoch, as a loop over the loader itself is.

    Args:
        loader: The prepared loader; it answers for everything else.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __next__(self) -> Any:
        progress = getattr(self.loader, "epoch_progress", None)
        if progress is not None and progress.is_finished:
            # A loop has read the epoch to its end, or a checkpoint was loaded: what was begun here is over.
            self._batches = None
        for _ in range(2):
            if self._batches is None:
                self._batches = iter(self.loader)
            batch = next(self._batches, _NO_BATCH)
            if batch is not _NO_BATCH:
                self._become_active()
                return batch
            self._batches = None
        raise UsageError(
            "next() found no batch in a loader of Megatron's data: there are fewer samples than a step of all replicas "
            "takes, or consumed_samples says that all were seen. Give more data, or smaller batches."
        )

    def _become_active(self) -> None:
        """Tell the clock that this batch is at hand, though the pass over another loader may have begun later."""
        clock = GradientState()
        if clock.active_dataloader is not self.loader and any(
            loader is self.loader for loader in clock.dataloader_references
        ):
            clock._remove_dataloader(self.loader)
            clock._add_dataloader(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.loader, name)

    def __getstate__(self) -> dict[str, Any]:
        return {"loader": self.loader, "_batches": None}


def build_loaders(
    dummy: MegatronLMDummyDataLoader,
    plugin: MegatronLMPlugin,
    *,
    micro_batch_size: int,
    num_replicas: int,
    family: Family,
    seq_length: int | None = None,
    decoder_seq_length: int | None = None,
    seed: int | None = None,
) -> Loaders:
    """Return the loaders for training, validation and test, None for a split without data.

    They are plain loaders that nobody has shared among the processes yet. A batch has the rows of one step on one
    replica, `micro_batch_size * num_micro_batches`. Megatron's datasets are shuffled inside, so they are read in their
    order, from `plugin.consumed_samples` on; a last batch that is incomplete is left out. Every process of the group must
    call this: rank 0 writes the order of the samples, and the others wait and read it.

    Args:
        num_replicas: Replicas of the model that share the data.
        family: Which samples the model takes.
        seq_length: Tokens of a sample where the arguments of `dummy` say none, as for the two that follow.

    Raises:
        ConfigurationError: An argument cannot work.
        MissingPackageError: megatron-core or its compiled helper is not installed.
    """
    arguments = DatasetArguments.of(dummy.dataset_args)
    if arguments.micro_batch_size not in (None, micro_batch_size):
        raise ConfigurationError(
            f"MegatronLMDummyDataLoader(micro_batch_size={arguments.micro_batch_size!r}) differs from the "
            f"{micro_batch_size!r} samples that the run sends through the pipeline at a time. Write the same number."
        )
    batch_size = micro_batch_size * _setting(plugin, "num_micro_batches")
    sizes = _num_samples(plugin, batch_size * num_replicas)
    provide: Provider | None = plugin.custom_megatron_datasets_provider_function
    if provide is None:
        lengths = {"seq_length": seq_length, "decoder_seq_length": decoder_seq_length}
        provide = _provider(arguments, plugin, family=family, seed=seed, **lengths)
    with some_process_group():
        datasets = provide(sizes)
    if len(datasets) != len(SPLITS):
        raise ConfigurationError(
            f"custom_megatron_datasets_provider_function returned {len(datasets)} datasets. Return three, for training, "
            "validation and test; None is one without data."
        )
    seen = [*(_setting(plugin, "consumed_samples") or ()), 0, 0, 0][: len(SPLITS)]
    options = {"batch_size": batch_size, "num_workers": arguments.num_workers, "drop_last": True}
    train, valid, test = (_loader(*one, options) for one in zip(SPLITS, datasets, seen, strict=True))
    return train, valid, test


def _loader(split: str, dataset: Any, seen: int, options: dict[str, Any]) -> DataLoader[Any] | None:
    if dataset is None:
        return None
    if not 0 <= seen <= len(dataset):
        raise ConfigurationError(
            f"consumed_samples says that {seen} samples of {split} were seen, but there are {len(dataset)}. Give the numbers "
            "of the run that is continued, and train_iters or train_samples of the whole training."
        )
    return DataLoader(Subset(dataset, range(seen, len(dataset))) if seen else dataset, **options)


def _num_samples(plugin: MegatronLMPlugin, global_batch_size: int) -> tuple[int, int, int]:
    """Return how many samples training, all validations together and the test take."""
    steps, samples = _setting(plugin, "train_iters"), _setting(plugin, "train_samples")
    if not (steps or samples):
        raise ConfigurationError(
            "Nobody says how long the training is, so Megatron cannot lay out its data. Prepare a "
            "MegatronLMDummyScheduler(total_num_steps=...) beside the loaders, or write MegatronLMPlugin(train_iters=...)."
        )
    steps = samples // global_batch_size if samples else steps
    evaluation = _setting(plugin, "eval_iters") * global_batch_size
    interval = _setting(plugin, "eval_interval")
    num_evaluations = steps // interval + 1 if interval else 0
    return samples or steps * global_batch_size, num_evaluations * evaluation, evaluation


def _setting(plugin: MegatronLMPlugin, name: str) -> Any:
    """Return what the program says last: Megatron's own arguments win over those of the plugin."""
    own = (plugin.other_megatron_args or {}).get(name)
    value = getattr(plugin, name, None) if own is None else own
    return plugin.megatron_lm_default_args.get(name) if value is None else value


def plugin_of(accelerator: Any) -> MegatronLMPlugin:
    """Return the settings of Megatron-LM that an accelerator was made with.

    Raises:
        UsageError: If it was made without.
    """
    plugin: MegatronLMPlugin | None = getattr(accelerator.state, "megatron_lm_plugin", None)
    if plugin is None:
        raise UsageError(
            "This Accelerator was made without Megatron-LM, whose data this is. Make an "
            "Accelerator(megatron_lm_plugin=MegatronLMPlugin(...))."
        )
    return plugin


def sample_shape(plugin: MegatronLMPlugin) -> dict[str, Any]:
    """Return what the plugin knows of the samples that the model takes."""
    family = plugin.megatron_lm_default_args.get("model_type_name")
    if family is None:
        raise UsageError(
            "The data was asked for before the model was prepared, so nobody knows which samples it takes. Give both to one "
            "accelerator.prepare(...), or call plugin.set_network_size_args(model) first."
        )
    encoder = _setting(plugin, "encoder_seq_length") if family == "t5" else None
    return {
        "family": family,
        "seq_length": encoder or _setting(plugin, "seq_length"),
        "decoder_seq_length": _setting(plugin, "decoder_seq_length"),
        "seed": _setting(plugin, "seed"),
    }


def _provider(
    arguments: DatasetArguments,
    plugin: MegatronLMPlugin,
    *,
    family: Family,
    seq_length: int | None,
    decoder_seq_length: int | None,
    seed: int | None,
) -> Provider:
    """Return the function that lets megatron-core make the datasets; what the arguments say wins over the rest."""
    head = _setting(plugin, "bert_binary_head") if arguments.bert_binary_head is None else arguments.bert_binary_head
    ends = _setting(plugin, "eod_mask_loss") if arguments.eod_mask_loss is None else arguments.eod_mask_loss
    complete = replace(
        arguments,
        seq_length=arguments.encoder_seq_length or arguments.seq_length or seq_length,
        decoder_seq_length=arguments.decoder_seq_length or decoder_seq_length,
        seed=next((value for value in (arguments.seed, seed) if value is not None), _DEFAULT_SEED),
        eod_mask_loss=ends,
        bert_binary_head=head is None or bool(head),
    )
    return partial(build_datasets, complete, family)
