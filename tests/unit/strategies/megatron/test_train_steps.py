"""What the training steps take of a batch, how outputs become a loss, and what a program may put in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.megatron import draw
from tests.support.training import assert_near, fresh_accelerator

from accelerate._base.errors import ConfigurationError, UsageError
from accelerate._base.imports import is_package_available
from accelerate.strategies.megatron.train_steps import (
    AbstractTrainStep,
    BertTrainStep,
    GPTTrainStep,
    T5TrainStep,
    avg_losses_across_data_parallel_group,
    gather_across_data_parallel_groups,
)
from accelerate.utils import MegatronLMPlugin

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not is_package_available("megatron.core"), reason="needs megatron-core")
alone = pytest.mark.usefixtures("alone")

WORDS, ROWS, LENGTH = 21, 2, 6
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
POSITIONS = {"vocab_size": WORDS, "max_position_embeddings": 16}
IDS = torch.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) * 5 % WORDS


def gpt2() -> Any:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": WORDS, "n_positions": 16}
    drops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    return draw("GPT2LMHeadModel", "GPT2Config", **sizes, **drops, bos_token_id=1, eos_token_id=2).eval()


def llama() -> Any:
    return draw("LlamaForCausalLM", "LlamaConfig", **SIZES, **POSITIONS, num_key_value_heads=2).eval()


def bert(head: str = "PreTraining", **changes: Any) -> Any:
    drops = dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), 0.0)
    return draw(f"MegatronBertFor{head}", "MegatronBertConfig", **SIZES, **POSITIONS, **drops, **changes).eval()


def t5() -> Any:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS}
    return draw("T5ForConditionalGeneration", "T5Config", **sizes, dropout_rate=0.0, decoder_start_token_id=1).eval()


def prepare(model: Any, **options: Any) -> Any:
    return fresh_accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**options)).prepare(model)


def make(kind: type[Any], plugin: dict[str, Any] | None = None, **args: Any) -> Any:
    """Return a step without a model."""
    settings = {"custom_get_batch_function": None, "custom_loss_function": None, **(plugin or {})}
    accelerator = SimpleNamespace(state=SimpleNamespace(megatron_lm_plugin=SimpleNamespace(**settings)))
    return kind(accelerator, SimpleNamespace(**args))


def take(step: Any, **batch: Any) -> Any:
    return step.get_batch(iter([batch]))


# --- batches of a decoder ---------------------------------------------------------------------------------------------


def test_labels_are_shifted_and_those_that_are_ignored_count_nothing() -> None:
    labels = torch.tensor([[1, 2, -100, 4], [5, 6, 7, -100]])
    tokens, targets, loss_mask, hidden, positions = take(make(GPTTrainStep), input_ids=labels + 1, labels=labels)
    assert torch.equal(tokens, labels + 1)
    assert targets.tolist() == [[2, 0, 4, 0], [6, 7, 0, 0]]
    assert loss_mask.tolist() == [[1, 0, 1, 0], [1, 1, 0, 0]]
    assert hidden is None
    assert positions.tolist() == [[0, 1, 2, 3]] * 2
    # Without labels there is no loss, and without padding no mask.
    assert take(make(GPTTrainStep), input_ids=IDS, attention_mask=torch.ones_like(IDS))[1:4] == (None, None, None)


def test_a_mask_hides_padding_and_what_is_later() -> None:
    hidden = take(make(GPTTrainStep), input_ids=IDS[:, :3], attention_mask=torch.tensor([[1, 1, 1], [0, 1, 1]]))[3]
    assert hidden.shape == (2, 1, 3, 3)
    assert hidden[0, 0].tolist() == [[False, True, True], [False, False, True], [False, False, False]]
    assert hidden[1, 0].tolist() == [[True, True, True], [True, False, True], [True, False, False]]


@pytest.mark.parametrize("flag", [False, True])
def test_labels_of_megatrons_data_are_shifted_already(flag: bool) -> None:
    step = make(GPTTrainStep, megatron_dataset_flag=flag)
    labels, mask = IDS + 1, torch.ones_like(IDS)
    mask[0, 0] = 0
    hidden = torch.ones(ROWS, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    rest = {"attention_mask": hidden, "position_ids": torch.zeros_like(IDS)}
    batch = {"tokens": IDS, "labels": labels, "loss_mask": mask, **rest}
    found = take(step, **batch)
    assert all(torch.equal(one, other) for one, other in zip(found, batch.values(), strict=True))
    assert found[2].dtype == torch.float


def test_megatrons_data_may_have_less() -> None:
    targets = take(make(GPTTrainStep, megatron_dataset_flag=True), input_ids=IDS, labels=IDS)[1]
    assert torch.equal(targets[:, :-1], IDS[:, 1:])
    _, labels, loss_mask, hidden, positions = take(make(GPTTrainStep), tokens=IDS, labels=IDS)
    assert (labels.tolist(), loss_mask.tolist(), hidden) == (IDS.tolist(), [[1.0] * LENGTH] * ROWS, None)
    assert positions.tolist() == [list(range(LENGTH))] * ROWS


def test_positions_that_do_not_count_are_refused_where_they_are_rotated() -> None:
    counted = torch.arange(LENGTH).expand_as(IDS)
    rotating = make(GPTTrainStep, position_embedding_type="rope")
    assert torch.equal(take(rotating, input_ids=IDS, position_ids=counted)[4], counted)
    for batch in ({"input_ids": IDS}, {"tokens": IDS}):
        with pytest.raises(UsageError, match="position_ids were given that do not count from 0"):
            take(rotating, **batch, position_ids=counted.flip(1))
    learned = make(GPTTrainStep, position_embedding_type="learned_absolute")
    assert torch.equal(take(learned, input_ids=IDS, position_ids=counted.flip(1))[4], counted.flip(1))


# --- batches of an encoder, and of both -------------------------------------------------------------------------------


def test_an_encoder_takes_a_batch_of_transformers() -> None:
    labels = torch.where(IDS % 2 == 0, IDS, -100)
    order, types, padding = torch.tensor([0, 1]), torch.ones_like(IDS), torch.ones_like(IDS).tril()
    rest = {"token_type_ids": types, "next_sentence_label": order, "attention_mask": padding}
    found = take(make(BertTrainStep), input_ids=IDS, labels=labels, **rest)
    expected = (IDS, types, order, (IDS % 2 == 0).float(), labels.clamp(min=0), padding)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_an_encoder_fills_in_what_a_batch_leaves_out() -> None:
    _, types, order, loss_mask, labels, padding = take(make(BertTrainStep), input_ids=IDS)
    assert (order, loss_mask, labels) == (None, None, None)
    assert (types.tolist(), padding.tolist()) == ([[0] * LENGTH] * ROWS, [[1] * LENGTH] * ROWS)
    classes = take(make(BertTrainStep, pretraining_flag=False), input_ids=IDS, labels=torch.tensor([2, 0]))
    assert (classes[3], classes[4].tolist()) == (None, [2, 0])


def test_an_encoder_takes_a_batch_of_megatrons_data() -> None:
    batch = {"text": IDS, "types": IDS % 2, "is_random": torch.tensor([1, 0]), "loss_mask": IDS % 3}
    found = take(make(BertTrainStep), **batch, labels=IDS - 1, padding_mask=IDS % 4)
    expected = (*batch.values(), (IDS - 1).clamp(min=0), IDS % 4)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_the_decoder_of_a_t5_sees_the_labels_before() -> None:
    step = make(T5TrainStep, decoder_start_token_id=9, pad_token_id=8)
    labels = torch.tensor([[3, 4, 5], [6, -100, -100]])
    _, decoder, loss_mask, targets, *_ = take(step, input_ids=IDS, labels=labels)
    assert decoder.tolist() == [[9, 3, 4], [9, 6, 8]]
    assert targets.tolist() == [[3, 4, 5], [6, 0, 0]]
    assert loss_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    given = torch.tensor([[1, 2, 3], [1, 2, 3]])
    assert torch.equal(take(step, input_ids=IDS, labels=labels, decoder_input_ids=given)[1], given)
    with pytest.raises(UsageError, match="has 'input_ids', but a T5 needs 'labels' or 'decoder_input_ids' too"):
        take(step, input_ids=IDS)


def test_the_masks_of_a_t5_hide_padding_and_what_is_later() -> None:
    padding, decoder_padding = torch.tensor([[1, 1, 0], [1, 1, 1]]), torch.tensor([[1, 1], [0, 1]])
    batch = {"input_ids": IDS[:, :3], "decoder_input_ids": IDS[:, :2], "attention_mask": padding}
    own, later, other = take(make(T5TrainStep), **batch, decoder_attention_mask=decoder_padding)[4:]
    assert own[:, 0].tolist() == [[[False, False, True]] * 3, [[False] * 3] * 3]
    assert other[:, 0].tolist() == [[[False, False, True]] * 2, [[False] * 3] * 2]
    assert later[:, 0].tolist() == [[[False, True], [False, False]], [[True, True], [True, False]]]
    assert {mask.dtype for mask in (own, later, other)} == {torch.bool}
    # Programs call what makes them.
    assert T5TrainStep.get_decoder_mask(3, "cpu").tolist() == [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]
    mask = T5TrainStep.get_enc_dec_mask(padding, 2, "cpu")
    assert mask.tolist() == [[[1, 1, 0]] * 2, [[1, 1, 1]] * 2]
    assert torch.equal(T5TrainStep.attn_mask_postprocess(mask), other)


def test_a_t5_takes_a_batch_of_megatrons_data() -> None:
    """Its masks say where the words are, one for the encoder and one for the decoder."""
    step, padding = make(T5TrainStep), torch.ones_like(IDS)
    padding[0, -2:] = 0
    rest = {"loss_mask": IDS % 2, "labels": IDS - 1, "enc_mask": padding, "dec_mask": padding}
    *found, own, later, other = take(step, text_enc=IDS, text_dec=IDS + 1, **rest)
    expected = (IDS, IDS + 1, IDS % 2, (IDS - 1).clamp(min=0))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    batch = {"input_ids": IDS, "decoder_input_ids": IDS, "attention_mask": padding, "decoder_attention_mask": padding}
    assert all(torch.equal(one, other) for one, other in zip((own, later, other), take(step, **batch)[4:], strict=True))


# --- outputs are those of Transformers --------------------------------------------------------------------------------


def visible(*, first: int = 0, last: int = LENGTH) -> torch.Tensor:
    """Return a mask whose second row is padded."""
    mask = torch.ones_like(IDS)
    mask[1] = (torch.arange(LENGTH) >= first) & (torch.arange(LENGTH) < last)
    return mask


LEFT, RIGHT = {"attention_mask": visible(first=2)}, {"attention_mask": visible(last=4)}
LABELLED = {**RIGHT, "labels": torch.where((visible(last=4) > 0) & (IDS % 3 > 0), IDS, -100)}
SENTENCES = {"token_type_ids": IDS % 2, "next_sentence_label": torch.tensor([1, 0])}
masked, classes = partial(bert, "MaskedLM"), partial(bert, "SequenceClassification")
SAME_OUTPUTS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "gpt2 padded on the left": (gpt2, LEFT),
    "gpt2": (gpt2, LABELLED),
    "llama padded on the left": (llama, LEFT),
    "llama": (llama, LABELLED),
    "bert padded on the left": (masked, LEFT),
    "bert": (masked, LABELLED),
    "bert with two heads": (bert, {**LABELLED, **SENTENCES}),
    "one of several classes": (partial(classes, num_labels=3), {**RIGHT, "labels": torch.tensor([2, 0])}),
    "several classes at once": (partial(classes, num_labels=3), {**RIGHT, "labels": torch.eye(3)[:ROWS]}),
    "a number": (partial(classes, num_labels=1), {**RIGHT, "labels": torch.tensor([0.5, -2.0])}),
    "t5": (t5, LABELLED),
    "t5 with two paddings": (t5, {**RIGHT, "decoder_input_ids": IDS, "decoder_attention_mask": visible(first=2)}),
}


@alone
@pytest.mark.parametrize(("maker", "batch"), SAME_OUTPUTS.values(), ids=SAME_OUTPUTS)
def test_outputs_are_those_of_transformers(maker: Callable[[], Any], batch: dict[str, Any]) -> None:
    """Where there are words: padding says nothing that counts, but is finite."""
    model = maker()
    with torch.no_grad():
        expected = model(input_ids=IDS, **batch)
    found = prepare(model).eval()(input_ids=IDS, **batch)
    names = [name for name in expected if name == "loss" or name.endswith("logits")]
    assert [name for name in found if found[name] is not None] == names
    assert ("loss" in names) == ("labels" in batch)
    seen = batch.get("decoder_attention_mask", batch["attention_mask"]).bool()
    for name in names:
        assert found[name].isfinite().all()
        one, other = (output[name][seen] if output[name].dim() == 3 else output[name] for output in (found, expected))
        assert_near(name, one, other, 1e-4)


@alone
def test_logits_are_returned_in_training_where_they_are_asked_for() -> None:
    model = gpt2()
    with torch.no_grad():
        expected = model(input_ids=IDS, labels=IDS)
    without = prepare(model).train()(input_ids=IDS, labels=IDS)
    assert (without.logits, without.loss.requires_grad) == (None, True)
    found = prepare(gpt2(), return_logits=True).train()(input_ids=IDS, labels=IDS)
    assert_near("logits", found.logits, expected.logits, 1e-4)
    for loss in (without.loss, found.loss):
        assert_near("loss", loss.detach(), expected.loss, 1e-5)


@alone
def test_a_model_that_returns_tuples_goes_on_to_do_so() -> None:
    model = gpt2()
    model.config.return_dict = False
    engine = prepare(model).eval()
    loss, logits = engine(input_ids=IDS, labels=IDS)
    assert (loss.shape, logits.shape) == ((), (ROWS, LENGTH, WORDS))
    assert len(engine(input_ids=IDS)) == 1
    assert torch.equal(engine(input_ids=IDS, return_dict=True).logits, logits)


# --- what a program puts in their place -------------------------------------------------------------------------------


@alone
def test_a_program_takes_batches_and_sums_losses_of_its_own() -> None:
    weights = torch.linspace(0, 1, LENGTH)

    def get_batch(data_iterator: Iterator[Any]) -> tuple[Any, ...]:
        words = next(data_iterator)["text"]
        positions = torch.arange(LENGTH).expand_as(words[:, 1:])
        return words[:, :-1], words[:, 1:], torch.ones(ROWS, LENGTH), None, positions

    def loss_func(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[Any, ...]:
        return (losses * loss_mask * weights).mean(), {}

    functions = {"custom_get_batch_function": get_batch, "custom_loss_function": loss_func}
    model, text = gpt2(), torch.cat([IDS, IDS[:, :1]], dim=1)
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), text[:, 1:], reduction="none")
    found = prepare(model, **functions).train()(text=text)
    assert_near("loss", found.loss.detach(), (losses * weights).mean(), 1e-5)


@pytest.mark.parametrize("kind", [GPTTrainStep, BertTrainStep, T5TrainStep])
def test_every_step_takes_the_functions_of_a_program(kind: type[Any]) -> None:
    step = make(kind, {"custom_get_batch_function": print, "custom_loss_function": repr})
    assert (step.get_batch, step.loss_func) == (print, repr)


class Scaled(AbstractTrainStep):
    """Train on the first words of each row, with a loss that is scaled."""

    def __init__(self, args: Any, scale: float, words: int = LENGTH) -> None:
        super().__init__("Scaled")
        self.args, self.scale, self.words = args, scale, words
        self.get_batch = self.get_batch_func(None, False)
        self.forward_step = self.get_forward_step_func()

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        return lambda data_iterator: next(data_iterator)["input_ids"][:, : self.words]

    def get_forward_step_func(self) -> Callable[..., Any]:
        def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Any, Callable[..., Any]]:
            ids = self.get_batch(data_iterator)
            positions = torch.arange(ids.shape[1]).expand_as(ids)
            return model(ids, positions, None, labels=ids), self.get_loss_func(None)

        return forward_step

    def get_loss_func(self, accelerator: Any) -> Callable[..., Any]:
        return lambda losses: (losses.mean() * self.scale, {"loss": losses.detach().mean()})


@alone
def test_a_step_of_a_programs_own_trains_with_its_arguments() -> None:
    losses: dict[float, list[float]] = {}
    for scale in (1.0, 3.0):
        plugin = MegatronLMPlugin(custom_train_step_class=Scaled, custom_train_step_kwargs={"scale": scale, "words": 4})
        accelerator = fresh_accelerator(cpu=True, megatron_lm_plugin=plugin)
        model = gpt2()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        assert (model.train_step_handler.name, model.train_step_handler.args.num_layers) == ("Scaled", 2)
        losses[scale] = []
        model.train()
        for _ in range(4):
            loss = model(input_ids=IDS)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[scale].append(loss.item())
        assert losses[scale] == sorted(losses[scale], reverse=True)
    assert losses[3.0][0] == pytest.approx(3 * losses[1.0][0], rel=1e-5)


@alone
def test_a_step_that_asks_for_the_accelerator_gets_it() -> None:
    class WithAccelerator(GPTTrainStep):
        def __init__(self, accelerator: Any, args: Any, **kwargs: Any) -> None:
            super().__init__(accelerator, args)
            self.plugin, self.kwargs = accelerator.state.megatron_lm_plugin, kwargs

    engine = prepare(gpt2(), custom_train_step_class=WithAccelerator, custom_train_step_kwargs={"word": 7})
    assert (engine.train_step_handler.kwargs, engine.train_step_handler.plugin) == ({"word": 7}, engine.plugin)
    assert engine.train()(input_ids=IDS, labels=IDS).loss.isfinite()


@alone
@pytest.mark.parametrize("wrong", [dict, GPTTrainStep.get_batch_func, "GPTTrainStep"])
def test_what_is_no_step_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="is no class of a training step"):
        prepare(gpt2(), custom_train_step_class=wrong)


@pytest.mark.parametrize("left_out", ["get_batch_func", "get_forward_step_func", "get_loss_func"])
def test_a_step_without_one_of_its_methods_cannot_be_made(left_out: str) -> None:
    methods = {name: getattr(Scaled, name) for name in AbstractTrainStep.__abstractmethods__ if name != left_out}
    with pytest.raises(TypeError, match=left_out):
        type("Incomplete", (AbstractTrainStep,), methods)("incomplete")
    assert type("Complete", (AbstractTrainStep,), {**methods, left_out: print})("complete").name == "complete"


@alone
def test_losses_of_one_replica_are_their_own_mean() -> None:
    prepare(gpt2())
    losses = [torch.tensor(1.0, requires_grad=True), torch.tensor([2.0])]
    found = avg_losses_across_data_parallel_group(losses)
    assert (found.tolist(), found.requires_grad, losses[0].item()) == ([1.0, 2.0], False, 1.0)
    gathered = gather_across_data_parallel_groups({"a": torch.tensor(3.0), "b": [torch.ones(2, 3)]})
    assert (gathered["a"].tolist(), gathered["b"][0].shape) == ([3.0], (2, 3))
