"""One step of a model that Megatron trains: what it takes of a batch, and how its outputs become a loss.

A step makes three functions, as Megatron's schedules ask for: one takes the next batch of an iterator, one runs the model
on it and returns its outputs with a function of them, and that one returns the loss. A program gives a class of its own,
or replaces one of the functions, through the plugin.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from accelerate._base.errors import UsageError
from accelerate._base.imports import require

Batch = Mapping[str, Any]
IGNORED = -100
_WHY = "MegatronLMPlugin"


def replica_group() -> dist.ProcessGroup:
    """Return the ranks that hold the same part of the model and read other data."""
    state = require("megatron.core.parallel_state", why=_WHY, extra="megatron")
    group: dist.ProcessGroup = state.get_data_parallel_group(with_context_parallel=True)
    return group


def avg_losses_across_data_parallel_group(losses: list[torch.Tensor]) -> torch.Tensor:
    """Return losses averaged over the replicas of the model."""
    group = replica_group()
    averaged = torch.cat([loss.detach().clone().reshape(1) for loss in losses])
    dist.all_reduce(averaged, group=group)
    return averaged / group.size()


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """Return tensors of all replicas, one after another along the first dimension; nested ones too."""
    from accelerate.collectives.nested import recursively_apply
    from accelerate.strategies.megatron.cpu_layers import gather_parts

    def gather(found: torch.Tensor) -> torch.Tensor:
        return gather_parts(found.reshape(1) if found.dim() == 0 else found, replica_group(), 0)

    return recursively_apply(gather, tensor, error_on_other_type=True)


def inner_model(model: Any) -> Any:
    """Return what Megatron built, inside of its wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


class AbstractTrainStep(ABC):
    """What a class of the program's own must have to be a training step.

    Args:
        name: What the step is called.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @abstractmethod
    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return the function that takes the next batch of an iterator."""

    @abstractmethod
    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return the function that runs the model on the next batch, and returns outputs and a function of them."""

    @abstractmethod
    def get_loss_func(self, accelerator: Any) -> Callable[..., Any]:
        """Return the function of the outputs that gives the loss."""


def _ones(like: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(like, dtype=torch.long)


def split_labels(labels: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return labels that are all words, and a mask with 0 where there was none."""
    if labels is None:
        return None, None
    return labels.clamp(min=0), (labels != IGNORED).float()


def summed_loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of losses where the mask is 1, and their number."""
    return (losses.float() * loss_mask).sum(), loss_mask.sum()


class _BuiltInStep(AbstractTrainStep):
    """What the steps of this library share.

    Args:
        accelerator: Whose `state.megatron_lm_plugin` has the functions that the program replaces.
        args: The arguments of Megatron, as attributes.
    """

    output_class = ""
    """The class of Transformers whose instance the model returns."""

    def __init__(self, accelerator: Any, args: Any, name: str) -> None:
        super().__init__(name)
        self.args = args
        self.wants_logits = False
        """Whether the outputs are returned beside the loss."""
        self.get_batch = self.get_batch_func(accelerator, bool(getattr(args, "megatron_dataset_flag", False)))

    def replaced(self, accelerator: Any, function: str) -> Callable[..., Any] | None:
        """Return the function that the program gave in place of one of this step."""
        found: Callable[..., Any] | None = getattr(accelerator.state.megatron_lm_plugin, function, None)
        return found

    @property
    def model_output_class(self) -> type:
        """Return the class of what the model returns."""
        outputs = require("transformers.modeling_outputs", why=_WHY)
        found: type = getattr(outputs, self.output_class)
        return found


class _WordsStep(_BuiltInStep):
    """What the steps share whose loss is that of the words they say."""

    def get_loss_func(self, accelerator: Any) -> Callable[..., Any]:
        """Return the function that sums the losses of words that count."""
        given = self.replaced(accelerator, "custom_loss_function")
        if given is not None:
            return given

        def loss_func(loss_mask: torch.Tensor, output_tensor: torch.Tensor) -> tuple[Any, ...]:
            total, count = summed_loss(loss_mask, output_tensor)
            return total, count, {"lm loss": (total.detach(), count)}

        return loss_func


class GPTTrainStep(_WordsStep):
    """Train a decoder to say the next word."""

    output_class = "CausalLMOutputWithCrossAttentions"

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__(accelerator, args, "GPTTrainStep")
        self.loss_func = self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return the function that gives tokens, labels, loss mask, attention mask and positions."""
        given = self.replaced(accelerator, "custom_get_batch_function")
        if given is not None:
            return given
        return self._megatron_batch if megatron_dataset_flag else self._batch

    def _batch(self, data_iterator: Iterator[Batch]) -> tuple[Any, ...]:
        """Take a batch as Transformers' models take it: labels are the tokens, and the model shifts them."""
        batch = next(data_iterator)
        if "tokens" in batch:
            return self._of_megatron(batch)
        tokens, labels = batch["input_ids"], batch.get("labels")
        if labels is not None:
            labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        targets, loss_mask = split_labels(labels)
        positions = self._positions(batch.get("position_ids"), tokens)
        return tokens, targets, loss_mask, _causal_mask(batch.get("attention_mask"), tokens), positions

    def _megatron_batch(self, data_iterator: Iterator[Batch]) -> tuple[Any, ...]:
        """Take a batch of Megatron's own data, whose labels are shifted."""
        batch = next(data_iterator)
        return self._of_megatron(batch) if "tokens" in batch else self._batch(iter([batch]))

    def _of_megatron(self, batch: Batch) -> tuple[Any, ...]:
        tokens = batch["tokens"]
        loss_mask = batch["loss_mask"].float() if "loss_mask" in batch else torch.ones_like(tokens, dtype=torch.float)
        positions = self._positions(batch.get("position_ids"), tokens)
        return tokens, batch.get("labels"), loss_mask, batch.get("attention_mask"), positions

    def _positions(self, given: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor:
        counted = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        if given is None:
            return counted
        if getattr(self.args, "position_embedding_type", None) == "rope" and not torch.equal(given, counted):
            raise UsageError(
                "position_ids were given that do not count from 0 to the end of each row, but Megatron rotates by the place "
                "in the row. Leave them out, and give each sequence a row of its own."
            )
        return given

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return the function that runs the model on a batch."""

        def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[Any, Callable[..., Any]]:
            batch = self.get_batch(data_iterator)
            if getattr(self.args, "context_parallel_size", 1) > 1:
                batch = own_positions(batch)
            tokens, labels, loss_mask, attention_mask, position_ids = batch
            inner = inner_model(model)
            if not inner.post_process or (labels is not None and not self.wants_logits):
                output = model(tokens, position_ids, attention_mask, labels=labels)
                return output, partial(self.loss_func, loss_mask)
            logits = model(tokens, position_ids, attention_mask)
            return logits, partial(_with_logits, inner, labels, partial(self.loss_func, loss_mask))

        return forward_step


def own_positions(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return this rank's part of each sequence that ranks share: one from the front and one from the back."""
    tokens, labels, loss_mask, attention_mask, position_ids = batch
    if attention_mask is not None:
        raise UsageError(
            "attention_mask hides words of a batch whose sequences are split (context_parallel_size), which Megatron cannot hide "
            "there. Fill sequences with words, and leave the mask out."
        )
    utils = require("megatron.core.utils", why=_WHY, extra="megatron")
    whole = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": position_ids}
    part = utils.get_batch_on_this_cp_rank(whole)
    return part["tokens"], part["labels"], part["loss_mask"], None, part["position_ids"]


def whole_sequences(part: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return what `own_positions` shared out, `[b, s, ...]`, in the order of the sequences.

    Args:
        group: The ranks that share sequences; by default those of the run.
    """
    if group is None:
        state = require("megatron.core.parallel_state", why=_WHY, extra="megatron")
        group = state.get_context_parallel_group()
    if group.size() == 1:
        return part
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    halves = [entry.chunk(2, dim=1) for entry in parts]
    return torch.cat([*(front for front, _ in halves), *(back for _, back in reversed(halves))], dim=1)


def _with_logits(
    model: Any, labels: torch.Tensor | None, loss_func: Callable[..., Any], logits: torch.Tensor
) -> tuple[Any, ...]:
    """Return what a loss function does of logits `[b, s, words of this rank]`, and all logits beside it."""
    every = {"logits": whole_sequences(model.all_logits(logits))}
    if labels is None:
        return None, every
    *found, report = loss_func(model.compute_language_model_loss(labels, logits.transpose(0, 1).clone()))
    return *found, {**report, **every}


def _causal_mask(attention_mask: torch.Tensor | None, tokens: torch.Tensor) -> torch.Tensor | None:
    """Return True where a word is not looked at; None where it is the later ones alone.

    Transformers' masks of whole sequences say True, or 1, or 0 to add to a score, where a word is looked at.
    """
    if attention_mask is not None and attention_mask.dim() == 4:
        return attention_mask < 0 if attention_mask.is_floating_point() else attention_mask == 0
    if attention_mask is None or bool(attention_mask.all()):
        return None
    length = tokens.shape[1]
    later = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
    return later | (attention_mask == 0)[:, None, None, :]


class BertTrainStep(_BuiltInStep):
    """Train an encoder to say masked words and whether two sentences follow each other, or to classify."""

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__(accelerator, args, "BertTrainStep")
        self.pretraining_flag = bool(getattr(args, "pretraining_flag", True))
        self.bert_binary_head = bool(getattr(args, "bert_binary_head", True))
        self.output_class = (
            ("MegatronBertForPreTrainingOutput" if self.bert_binary_head else "MaskedLMOutput")
            if self.pretraining_flag
            else "SequenceClassifierOutput"
        )
        self.loss_func = self.get_loss_func(accelerator, self.pretraining_flag, getattr(args, "num_labels", None))
        self.forward_step = self.get_forward_step_func(self.pretraining_flag, self.bert_binary_head)

    @property
    def model_output_class(self) -> type:
        """Return the class of what the model returns."""
        if self.output_class != "MegatronBertForPreTrainingOutput":
            return super().model_output_class
        models = require("transformers.models.megatron_bert.modeling_megatron_bert", why=_WHY)
        found: type = models.MegatronBertForPreTrainingOutput
        return found

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return the function that gives tokens, types, sentence order, loss mask, labels and padding mask."""
        given = self.replaced(accelerator, "custom_get_batch_function")
        if given is not None:
            return given

        def get_batch(data_iterator: Iterator[Batch]) -> tuple[Any, ...]:
            batch = next(data_iterator)
            if "text" in batch:  # of Megatron's own data
                mask, labels = batch["loss_mask"].float(), batch["labels"].clamp(min=0)
                return batch["text"], batch["types"], batch["is_random"], mask, labels, batch["padding_mask"]
            tokens, labels = batch["input_ids"], batch.get("labels")
            types = batch.get("token_type_ids")
            padding = batch.get("attention_mask")
            order = batch.get("next_sentence_label")
            loss_mask = None
            if labels is not None and labels.dim() == 2 and labels.shape == tokens.shape:
                labels, loss_mask = split_labels(labels)
            types = torch.zeros_like(tokens) if types is None else types
            return tokens, types, order, loss_mask, labels, _ones(tokens) if padding is None else padding

        return get_batch

    def get_forward_step_func(self, pretraining_flag: bool, bert_binary_head: bool) -> Callable[..., Any]:  # type: ignore[override]
        """Return the function that runs the model on a batch."""

        def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[Any, Callable[..., Any]]:
            tokens, types, order, loss_mask, labels, padding_mask = self.get_batch(data_iterator)
            inner = inner_model(model)
            has_types = (
                getattr(inner, "embedding", None) is not None and inner.embedding.tokentype_embeddings is not None
            )
            words = labels if pretraining_flag else None
            as_logits = self.wants_logits or words is None
            output = model(
                tokens,
                padding_mask,
                tokentype_ids=types if has_types else None,
                lm_labels=None if as_logits else words,
            )
            if not inner.post_process:
                return output, partial(self.loss_func, loss_mask, order)
            if not pretraining_flag:
                return output, partial(self.loss_func, labels, None)
            if not as_logits:
                return output, partial(self.loss_func, loss_mask, order)
            return output, partial(_bert_logits, inner, words, partial(self.loss_func, loss_mask, order))

        return forward_step

    def get_loss_func(self, accelerator: Any, pretraining_flag: bool, num_labels: int | None) -> Callable[..., Any]:  # type: ignore[override]
        """Return the function that adds the mean losses of the heads."""
        given = self.replaced(accelerator, "custom_loss_function")
        if given is not None:
            return given

        def pretraining_loss(
            loss_mask: torch.Tensor, sentence_order: torch.Tensor | None, output_tensor: Any
        ) -> tuple[Any, ...]:
            losses, order_logits = output_tensor
            total, count = summed_loss(loss_mask, losses)
            loss = total / count
            report = {"lm loss": loss.detach()}
            if sentence_order is not None and order_logits is not None:
                order_loss = torch.nn.functional.cross_entropy(
                    # Transformers ignores -100 here, and Megatron's data says -1.
                    order_logits.view(-1, 2).float(),
                    sentence_order.view(-1).masked_fill(sentence_order.view(-1) == -1, IGNORED),
                )
                loss, report["sop loss"] = loss + order_loss, order_loss.detach()
            return loss, report

        def classification_loss(labels: torch.Tensor | None, _: Any, output_tensor: Any) -> tuple[Any, ...]:
            logits = output_tensor[1]
            report = {"logits": logits}
            if labels is None:
                return None, report
            return _class_loss(logits.float(), labels, num_labels, self.args), report

        return pretraining_loss if pretraining_flag else classification_loss


def _class_loss(logits: torch.Tensor, labels: torch.Tensor, num_labels: int | None, args: Any) -> torch.Tensor:
    """Return the loss that Transformers takes: as its configuration says, else as such labels are of."""
    kind = getattr(args, "problem_type", None)
    if kind is None:
        is_class = labels.dtype in (torch.long, torch.int)
        kind = "single_label_classification" if is_class else "multi_label_classification"
        kind = "regression" if num_labels == 1 else kind
    if kind == "regression":
        return torch.nn.functional.mse_loss(logits.squeeze(), labels.squeeze().to(logits.dtype))
    if kind == "single_label_classification":
        return torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
    return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))


def _bert_logits(
    model: Any, labels: torch.Tensor | None, loss_func: Callable[..., Any], output_tensor: Any
) -> tuple[Any, ...]:
    logits, order_logits = output_tensor
    every: dict[str, Any] = {"prediction_logits": model.all_logits(logits), "seq_relationship_logits": order_logits}
    if labels is None:
        return None, every
    losses = model.compute_language_model_loss(labels, logits.transpose(0, 1).clone())
    *found, report = loss_func((losses, order_logits))
    return *found, {**report, **every}


class T5TrainStep(_WordsStep):
    """Train an encoder and a decoder to say the target."""

    output_class = "Seq2SeqLMOutput"

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__(accelerator, args, "T5TrainStep")
        self.loss_func = self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()

    @staticmethod
    def attn_mask_postprocess(attention_mask: torch.Tensor) -> torch.Tensor:
        """Return True where a word is not looked at, `[b, 1, s, s]`, of a mask with 1 where it is, `[b, s, s]`."""
        return attention_mask.unsqueeze(1) < 0.5

    @staticmethod
    def get_decoder_mask(seq_length: int, device: torch.device | str) -> torch.Tensor:
        """Return 1 where a word of the decoder may look, `[1, s, s]`: at itself and at what was before."""
        return torch.ones(1, seq_length, seq_length, device=device).tril()

    @staticmethod
    def get_enc_dec_mask(attention_mask: torch.Tensor, dec_seq_length: int, device: torch.device | str) -> torch.Tensor:
        """Return 1 where a word of the decoder may look at one of the encoder, `[b, decoder, encoder]`."""
        rows = torch.ones(attention_mask.shape[0], dec_seq_length, 1, device=device)
        return rows * attention_mask.to(device)[:, None, :]

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return the function that gives encoder and decoder tokens, loss mask, labels and three masks."""
        given = self.replaced(accelerator, "custom_get_batch_function")
        if given is not None:
            return given

        def get_batch(data_iterator: Iterator[Batch]) -> tuple[Any, ...]:
            batch = next(data_iterator)
            if "text_enc" in batch:  # of Megatron's own data
                words, decoder = batch["text_enc"], batch["text_dec"]
                names = {"attention_mask": batch["enc_mask"], "decoder_attention_mask": batch["dec_mask"]}
                targets = batch["labels"].clamp(min=0)
                return words, decoder, batch["loss_mask"].float(), targets, *self._masks(names, words, decoder)
            tokens, labels = batch["input_ids"], batch.get("labels")
            targets, loss_mask = split_labels(labels)
            decoder = batch.get("decoder_input_ids")
            if decoder is None and labels is not None:
                decoder = self._shifted(labels)
            if decoder is None:
                raise UsageError(
                    f"The batch has {', '.join(map(repr, batch))}, but a T5 needs 'labels' or 'decoder_input_ids' too. Add one."
                )
            return tokens, decoder, loss_mask, targets, *self._masks(batch, tokens, decoder)

        return get_batch

    def _masks(self, batch: Batch, tokens: torch.Tensor, decoder: torch.Tensor) -> tuple[torch.Tensor, ...]:
        padding = batch.get("attention_mask")
        padding = _ones(tokens) if padding is None else padding
        own = self.get_decoder_mask(decoder.shape[1], tokens.device)
        if (decoder_padding := batch.get("decoder_attention_mask")) is not None:
            own = own * decoder_padding[:, None, :]
        length = tokens.shape[1]
        return tuple(
            self.attn_mask_postprocess(mask)
            for mask in (
                self.get_enc_dec_mask(padding, length, tokens.device),
                own,
                self.get_enc_dec_mask(padding, decoder.shape[1], tokens.device),
            )
        )

    def _shifted(self, labels: torch.Tensor) -> torch.Tensor:
        """Return what the decoder has seen before each label."""
        shifted = labels.roll(1, dims=1)
        shifted[:, 0] = self.args.decoder_start_token_id
        return shifted.masked_fill(shifted == IGNORED, self.args.pad_token_id)

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return the function that runs the model on a batch."""

        def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[Any, Callable[..., Any]]:
            tokens, decoder, loss_mask, labels, *masks = self.get_batch(data_iterator)
            if labels is not None and not self.wants_logits:
                output = model(tokens, decoder, *masks, lm_labels=labels)
                return output, partial(self.loss_func, loss_mask)
            logits = model(tokens, decoder, *masks)
            loss_of = partial(self.loss_func, loss_mask)
            return logits, partial(_with_logits, inner_model(model), labels, loss_of)

        return forward_step
