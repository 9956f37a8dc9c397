"""What a program holds in the place of a model that Megatron trains."""

from __future__ import annotations

import inspect
import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from accelerate._base.errors import ConfigurationError, UsageError
from accelerate.runtime import current
from accelerate.strategies.megatron.train_steps import (
    IGNORED,
    AbstractTrainStep,
    BertTrainStep,
    GPTTrainStep,
    T5TrainStep,
)

if TYPE_CHECKING:
    from accelerate.strategies.megatron.carried import CarriedModel

_LOG = logging.getLogger(__name__)
_LARGEST = 700.0
"""Beyond this loss a perplexity is no float any more."""
Batch = Mapping[str, Any]
_STEPS: dict[str, type[Any]] = {"gpt": GPTTrainStep, "bert": BertTrainStep, "t5": T5TrainStep}
# What a batch is padded with, where ranks share the positions of a sequence.
_PADDING = {
    "attention_mask": 0,
    "decoder_attention_mask": 0,
    "decoder_input_ids": 0,
    "input_ids": 0,
    "labels": IGNORED,
    "loss_mask": 0,
    "position_ids": 0,
    "token_type_ids": 0,
    "tokens": 0,
}
_NOT_COMPUTED = ("past_key_values", "inputs_embeds", "encoder_outputs", "output_attentions", "output_hidden_states")


class RunView:
    """The part of an `Accelerator` that steps look at."""

    @property
    def state(self) -> SimpleNamespace:
        """Return what `AcceleratorState` shows."""
        return SimpleNamespace(**current.ACCELERATOR)

    @property
    def device(self) -> torch.device:
        """Return the device of this process."""
        return current.runtime().device


class MegatronEngine(torch.nn.Module):
    """A model that Megatron trains, called as the Transformers model is whose weights it has.

    In training the loss that it returns is averaged over the replicas of the model; its gradients are those of the batch
    of this process. In evaluation it returns logits beside the loss.

    Args:
        accelerator: What knows the plugin.
        model: The model that Megatron built, with what it was built from.
        optimizer: The optimizer of its parameters, None for a model that is not trained.
        scheduler: The schedule of the optimizer, if there is one.
    """

    module: torch.nn.Module
    carried: CarriedModel
    unwrapped_model: Any

    def __init__(self, accelerator: Any, model: CarriedModel, optimizer: Any, scheduler: Any) -> None:
        super().__init__()
        plugin = accelerator.state.megatron_lm_plugin
        self.plugin = plugin
        self.configs = model.configs
        self.module = model.module
        # No sub-module: its weights are in the module, and its names are those that programs save by.
        self.__dict__["carried"] = model
        self.__dict__["unwrapped_model"] = model.shell
        self.optimizer = optimizer
        self.scheduler = scheduler
        config = getattr(model.shell, "config", None)
        self.config = config
        names = ("decoder_start_token_id", "pad_token_id", "problem_type")
        tokens = {name: getattr(config, name, None) for name in names}
        self.args = SimpleNamespace(
            **{
                **tokens,
                **plugin.megatron_lm_default_args,
                "position_embedding_type": self.configs.model.position_embedding_type,
                "bert_binary_head": self.configs.model.add_binary_head,
                "padded_vocab_size": self.configs.model.padded_vocab_size,
            }
        )
        self._input_names: Mapping[str, str] = getattr(self.args, "input_names", None) or {}
        """Name of an argument of the program's model -> what Megatron's data calls it."""
        taken = inspect.signature(type(model.shell).forward).parameters
        self._argument_names = [name for name in taken if name != "self"]
        self.train_step_handler = self._make_step(accelerator)
        self._evaluated: deque[torch.Tensor] = deque(maxlen=10_000)
        """The losses of batches that were evaluated, for `log_eval_results`."""
        self.passes: Any = None
        """How batches go through the module and back; set by the strategy, which knows the device."""

    def _make_step(self, accelerator: Any) -> Any:
        kind = self.plugin.custom_train_step_class
        if kind is None:
            return _STEPS[self.configs.model.family](accelerator, self.args)
        if not (isinstance(kind, type) and issubclass(kind, AbstractTrainStep)):
            raise ConfigurationError(
                f"MegatronLMPlugin(custom_train_step_class={kind!r}) is no class of a training step. Pass a subclass of "
                "AbstractTrainStep, GPTTrainStep, BertTrainStep or T5TrainStep."
            )
        first = next(iter(inspect.signature(kind).parameters), None)
        given = (accelerator, self.args) if first == "accelerator" else (self.args,)
        return kind(*given, **(self.plugin.custom_train_step_kwargs or {}))

    # --- batches -----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **batch_data: Any) -> Any:
        """Return the outputs for a batch, as the program's model does."""
        if args or self._input_names:
            batch_data = self._named(args, batch_data)
        if self.training and torch.is_grad_enabled():
            return self.train_step(**batch_data)
        return self.eval_step(**batch_data)

    def train_step(self, **batch_data: Any) -> Any:
        """Return the outputs for a batch, with a loss that has gradients."""
        return self._outputs(batch_data, trains=True)

    def eval_step(self, **batch_data: Any) -> Any:
        """Return the outputs for a batch, logits among them."""
        with torch.no_grad():
            return self._outputs(batch_data, trains=False)

    def log_eval_results(self) -> None:
        """Log the mean loss and the perplexity of the batches that were evaluated since the last call."""
        losses = [loss.item() for loss in self._evaluated]
        self._evaluated.clear()
        if losses and current.runtime().rank == current.main_rank():
            mean = sum(losses) / len(losses)
            _LOG.info("validation loss: %.6f, perplexity: %.6f", mean, math.exp(min(mean, _LARGEST)))

    def _named(self, args: tuple[Any, ...], batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch with the names that steps know, from the arguments of the program's model."""
        if args:
            batch = {**dict(zip(self._argument_names, args, strict=False)), **batch}
        return {self._input_names.get(name, name): value for name, value in batch.items()}

    def get_batch_data_iterator(self, batch_data: Batch) -> Iterator[dict[str, Any]]:
        """Return the parts of a batch, one after another."""
        return iter(self._parts(batch_data))

    def _outputs(self, batch: dict[str, Any], *, trains: bool) -> Any:
        for name in _NOT_COMPUTED:
            if batch.get(name) is not None and batch[name] is not False:
                raise UsageError(f"{name} was given, which Megatron's models do not compute with. Leave it out.")
        returns_dict = batch.pop("return_dict", None)
        batch = {name: value for name, value in batch.items() if value is not None}
        length = _length(batch)
        step = self.train_step_handler
        step.wants_logits = not trains or bool(self.plugin.return_logits)
        outcome = self.passes.run(step.forward_step, self._parts(self._padded(batch)), trains=trains)
        if not trains and outcome.loss is not None:
            self._evaluated.append(outcome.loss)
        outputs = {name: _cut(value, length) for name, value in outcome.report.items() if name.endswith("logits")}
        return self._as_output(outcome.loss, outputs, returns_dict)

    def _as_output(self, loss: torch.Tensor | None, outputs: dict[str, Any], returns_dict: bool | None) -> Any:
        kind = getattr(self.train_step_handler, "model_output_class", None)
        if kind is None:
            return loss
        if returns_dict is None:
            returns_dict = getattr(self.args, "model_return_dict", True)
        if returns_dict is None:  # a model of the program's own, which returns the loss, or the scores without labels
            return loss if loss is not None else next(iter(outputs.values()), None)
        if "prediction_logits" in outputs and "logits" in kind.__dataclass_fields__:
            outputs = {"logits": outputs["prediction_logits"]}
        if returns_dict:
            return kind(loss=loss, **outputs)
        return tuple(value for value in (loss, *outputs.values()) if value is not None)

    def _padded(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch whose sequences the ranks of a layer, or those of a sequence, can share."""
        config, shares = self.configs.transformer, self.configs.degrees.context
        ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
        ranks *= 2 * shares if shares > 1 else 1
        if ranks == 1:
            return batch
        ids = batch.get("input_ids", batch.get("tokens"))
        if self.configs.model.family != "gpt" and ids is not None and "attention_mask" not in batch:
            batch = {**batch, "attention_mask": torch.ones_like(ids)}

        def pad(name: str, value: Any) -> Any:
            if name == "attention_mask" and value.dim() == 4:
                missing = -value.shape[-1] % ranks
                hidden = torch.finfo(value.dtype).min if value.is_floating_point() else 0
                return torch.nn.functional.pad(value, (0, missing, 0, missing), value=hidden)
            # Labels of classes are no sequence.
            is_sequence = value.dim() == 2 and (name != "labels" or self.configs.model.is_pretraining)
            missing = -value.shape[1] % ranks if name in _PADDING and is_sequence else 0
            return torch.nn.functional.pad(value, (0, missing), value=_PADDING[name]) if missing else value

        return {name: pad(name, value) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}

    def _parts(self, batch: Batch) -> list[dict[str, Any]]:
        """Return a batch in as many parts as it is to go through the model in."""
        count = self.configs.num_micro_batches
        if count == 1:
            return [dict(batch)]
        rows = next((value.shape[0] for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()), 0)
        size = -(-rows // count)
        cut = [slice(begin, begin + size) for begin in range(0, rows, size or 1)]
        return [
            {
                name: value[rows_of] if isinstance(value, torch.Tensor) and value.dim() else value
                for name, value in batch.items()
            }
            for rows_of in cut
        ] or [dict(batch)]

    # --- modes, gradients, files -------------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which gradients stay on this rank."""
        context: AbstractContextManager[None] = self.passes.no_sync()
        return context

    def get_module_config(self) -> Any:
        """Return the configuration of what Megatron built."""
        return self.configs.transformer

    def save_pretrained(self, save_directory: Any, **options: Any) -> None:
        """Save as the Transformers model does, in its format; all ranks call it."""
        self.unwrapped_model.save_pretrained(save_directory, **options)

    def save_checkpoint(self, output_dir: str) -> None:
        """Write weights and optimizer into a folder, for any number of ranks to go on from; all ranks call it."""
        from accelerate.strategies.megatron.checkpoint import save_engine

        save_engine(self, output_dir)

    def load_checkpoint(self, input_dir: str) -> None:
        """Go on from what `save_checkpoint` wrote; all ranks call it."""
        from accelerate.strategies.megatron.checkpoint import load_engine

        load_engine(self, input_dir)


def _length(batch: Batch) -> int | None:
    """Return the length of the sequences that logits are of."""
    for name in ("labels", "decoder_input_ids", "tokens", "input_ids"):
        value = batch.get(name)
        if isinstance(value, torch.Tensor) and value.dim() == 2:
            return int(value.shape[1])
    return None


def _cut(logits: Any, length: int | None) -> Any:
    """Return logits without the positions that padded a batch."""
    is_sequence = isinstance(logits, torch.Tensor) and logits.dim() == 3 and length is not None
    return logits[:, :length] if is_sequence else logits
