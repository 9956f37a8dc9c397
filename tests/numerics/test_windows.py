"""What the gradients of an accumulation window are divided by: its steps, its own length, or its items."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.training import fresh_accelerator, group_once, run_checks
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator
from accelerate._base.errors import UsageError
from accelerate.utils import GradientAccumulationPlugin, GradScalerKwargs

pytestmark = pytest.mark.multiprocess

WORLD_SIZES = (1, 2, 3)
BATCH = 2
FEATURES = 3
Gradients = list[torch.Tensor]


class Sentences(Dataset[Any]):
    """Sentences of 1 to 7 tokens; a token is a row of features and a target."""

    def __init__(self, count: int, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(1, 8, (count,), generator=generator).tolist()
        self.rows = [torch.randn(length, FEATURES + 1, generator=generator).to(dtype) for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def tokens_of(sentences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.cat(sentences)
    return rows[:, :FEATURES], rows[:, FEATURES:]


def make_line(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    line = torch.nn.Linear(FEATURES, 1, dtype=dtype)
    with torch.no_grad():
        line.weight.copy_(torch.tensor([[0.5, -1.0, 0.25]]))
        line.bias.fill_(0.125)
    return line


def error_sum(model: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (model(tokens) - targets).square().sum()


def one_big_batch(sentences: list[torch.Tensor]) -> torch.Tensor:
    """Return the gradient of the mean over all tokens, by plain PyTorch."""
    line = make_line()
    tokens, targets = tokens_of(sentences)
    (error_sum(line, tokens, targets) / len(tokens)).backward()
    return flat(line)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).clone()  # type: ignore[union-attr]


def sentence_loader(accelerator: Accelerator, steps: int, windows: float, dtype: torch.dtype = torch.float64) -> Any:
    count = int(BATCH * accelerator.num_processes * steps * windows)
    return DataLoader(Sentences(count, dtype), batch_size=BATCH, collate_fn=list)


def backward_whole(accelerator: Accelerator, model: torch.nn.Module, batch: list[torch.Tensor]) -> None:
    tokens, targets = tokens_of(batch)
    accelerator.backward(error_sum(model, tokens, targets), num_items=len(tokens))


def backward_in_halves(accelerator: Accelerator, model: torch.nn.Module, batch: list[torch.Tensor]) -> None:
    for sentence in batch:
        tokens, targets = tokens_of([sentence])
        accelerator.backward(error_sum(model, tokens, targets), num_items=torch.tensor(len(tokens)))


def backward_two_losses(accelerator: Accelerator, model: torch.nn.Module, batch: list[torch.Tensor]) -> None:
    """Two losses over the same tokens: they are counted once."""
    tokens, targets = tokens_of(batch)
    accelerator.backward(error_sum(model, tokens, targets) * 0.75, num_items=len(tokens))
    accelerator.backward(error_sum(model, tokens, targets) * 0.25, num_items=0)


def collect(
    backward: Callable[[Accelerator, torch.nn.Module, list[torch.Tensor]], None],
    steps: int,
    windows: float = 3,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Gradients:
    """Return the gradient of each window as the optimizer sees it."""
    accelerator = fresh_accelerator(gradient_accumulation_steps=steps, **options)
    model = make_line(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, sentence_loader(accelerator, steps, windows, dtype)
    )
    gradients = []
    for batch in loader:
        with accelerator.accumulate(model):
            backward(accelerator, model, batch)
            if accelerator.sync_gradients:
                accelerator.unscale_gradients()
                gradients.append(flat(model))
            optimizer.step()
            optimizer.zero_grad()
    return gradients


def tokens_in_windows_of_three() -> Gradients:
    return collect(backward_whole, 3)


def tokens_in_windows_of_one() -> Gradients:
    return collect(backward_whole, 1)


def tokens_with_a_short_window() -> Gradients:
    return collect(backward_whole, 3, windows=7 / 3)


def tokens_by_two_backward_calls() -> Gradients:
    return collect(backward_in_halves, 3)


def tokens_under_two_losses() -> Gradients:
    return collect(backward_two_losses, 3)


def tokens_in_float16() -> Gradients:
    return collect(
        backward_whole,
        3,
        dtype=torch.float32,
        mixed_precision="fp16",
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)],
    )


def tokens_without_accumulate() -> Gradients:
    accelerator = fresh_accelerator()
    model, loader = accelerator.prepare(make_line(), sentence_loader(accelerator, 1, 3))
    gradients = []
    for batch in loader:
        backward_whole(accelerator, model, batch)
        gradients.append(flat(model))
        model.zero_grad()
    return gradients


def tokens_without_accumulate_after_a_loop_with_it() -> Gradients:
    accelerator = fresh_accelerator()
    model, loader = accelerator.prepare(make_line(), sentence_loader(accelerator, 1, 3))
    gradients = []
    for epoch in range(2):
        for batch in loader:
            if epoch == 0:
                with accelerator.accumulate(model):
                    backward_whole(accelerator, model, batch)
            else:
                backward_whole(accelerator, model, batch)
                gradients.append(flat(model))
            model.zero_grad()
    return gradients


def tokens_in_a_global_batch() -> Gradients:
    """Ranks hold different numbers of sentences, in the last window some hold none."""
    accelerator = fresh_accelerator(global_batch_size=6)
    loader = DataLoader(Sentences(14), batch_size=BATCH, collate_fn=list)
    model, loader = accelerator.prepare(make_line(), loader)
    gradients = []
    for batch in loader:
        with accelerator.accumulate(model):
            backward_whole(accelerator, model, batch)
            if accelerator.sync_gradients:
                gradients.append(flat(model))
                model.zero_grad()
    return gradients


def means_of_windows(normalize: str) -> Gradients:
    """Return the gradients of windows of 4, 4 and 1 batches, of losses that are means over a batch."""
    accelerator = fresh_accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4, normalize=normalize)
    )
    values = torch.arange(1.0, 1 + 9 * BATCH * accelerator.num_processes, dtype=torch.float64)
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    model, loader = accelerator.prepare(model, DataLoader(values[:, None], batch_size=BATCH))
    gradients = []
    for batch in loader:
        with accelerator.accumulate(model):
            # Two backward calls make one micro-batch, not two.
            accelerator.backward(model(batch).mean() * 0.75)
            accelerator.backward(model(batch).mean() * 0.25)
            if accelerator.sync_gradients:
                gradients.append(flat(model))
                model.zero_grad()
    return gradients


def window_means() -> Gradients:
    return means_of_windows("window")


def step_means() -> Gradients:
    return means_of_windows("steps")


def mixtures() -> list[str]:
    """Return what is said when only some backward passes of a window name their items, in either order."""
    said = []
    for normalize in ("steps", "window"):
        for kinds in (({}, {"num_items": 2}), ({"num_items": 2}, {})):
            accelerator = fresh_accelerator(
                gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, normalize=normalize)
            )
            model = accelerator.prepare(make_line())
            with pytest.raises(UsageError) as caught:
                for kind in kinds:
                    with accelerator.accumulate(model):
                        accelerator.backward(model(torch.ones(2, FEATURES).double()).sum(), **kind)
            said.append(str(caught.value))
    # The next windows may be of another kind, each as a whole.
    accelerator = fresh_accelerator()
    model = accelerator.prepare(make_line())
    for kind in ({}, {"num_items": 2}, {}):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, FEATURES).double()).sum(), **kind)
    return said


TOKENS = {
    "tokens_in_windows_of_three": 3,
    "tokens_in_windows_of_one": 1,
    "tokens_by_two_backward_calls": 3,
    "tokens_under_two_losses": 3,
    "tokens_without_accumulate": 1,
    "tokens_without_accumulate_after_a_loop_with_it": 1,
}
CHECKS = [globals()[name] for name in TOKENS] + [
    tokens_with_a_short_window,
    tokens_in_float16,
    tokens_in_a_global_batch,
    window_means,
    step_means,
    mixtures,
]


def results(world_size: int) -> list[dict[str, Any]]:
    return group_once(run_checks, world_size, *CHECKS)


def assert_gradients(found: Gradients, windows: list[list[torch.Tensor]], tolerance: float = 1e-12) -> None:
    assert len(found) == len(windows)
    for gradient, sentences in zip(found, windows, strict=True):
        expected = one_big_batch(sentences)
        torch.testing.assert_close(gradient.double(), expected, rtol=tolerance, atol=tolerance)


def cut(sentences: list[torch.Tensor], size: int) -> list[list[torch.Tensor]]:
    return [sentences[begin : begin + size] for begin in range(0, len(sentences), size)]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", TOKENS)
def test_items_give_the_gradient_of_one_big_batch(name: str, world_size: int) -> None:
    size = BATCH * world_size * TOKENS[name]
    for found in results(world_size):
        assert_gradients(found[name], cut(Sentences(size * 3).rows, size))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_items_of_a_short_window_are_divided_by_their_own_number(world_size: int) -> None:
    size = BATCH * world_size * 3
    for found in results(world_size):
        assert_gradients(found["tokens_with_a_short_window"], cut(Sentences(size // 3 * 7).rows, size))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_items_are_counted_under_a_gradient_scaler(world_size: int) -> None:
    size = BATCH * world_size * 3
    for found in results(world_size):
        assert_gradients(found["tokens_in_float16"], cut(Sentences(size * 3).rows, size), tolerance=5e-3)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_items_are_counted_over_the_samples_of_a_global_batch(world_size: int) -> None:
    for found in results(world_size):
        assert_gradients(found["tokens_in_a_global_batch"], cut(Sentences(14).rows, 6))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("name", "last_share"), [("window_means", 1.0), ("step_means", 0.25)])
def test_a_short_window_is_divided_as_asked(name: str, last_share: float, world_size: int) -> None:
    size = BATCH * world_size * 4
    values = torch.arange(1.0, 1 + 9 * BATCH * world_size, dtype=torch.float64)
    means = [window.mean() for window in values.split(size)]
    expected = torch.stack([means[0], means[1], means[2] * last_share])
    for found in results(world_size):
        torch.testing.assert_close(torch.cat(found[name]), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_window_with_and_without_items_is_refused(world_size: int) -> None:
    for found in results(world_size):
        assert len(found["mixtures"]) == 4
        assert all("num_items" in message for message in found["mixtures"])
