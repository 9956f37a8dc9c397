"""One process with big batches, several with small ones and accumulation train to the same weights as plain PyTorch."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch
from tests.support.training import (
    FEATURES,
    SEED,
    Layout,
    Outcome,
    Recipe,
    assert_same_outcome,
    assert_same_weights,
    copy_weights,
    fresh_accelerator,
    group_once,
    make_data,
    make_model,
    train,
    train_plain,
)
from torch.utils.data import DataLoader

from accelerate.utils import DataLoaderConfiguration

pytestmark = pytest.mark.multiprocess

WORLD_SIZES = (1, 2, 3)
RECIPES = {
    f"{optimizer}-{'clip' if clip else 'free'}-{'shuffled' if shuffle else 'in order'}": Recipe(
        optimizer, clip, shuffle
    )
    for optimizer, clip, shuffle in (
        ("sgd", None, False),
        ("sgd", 0.3, True),
        ("adamw", None, True),
        ("adamw", 0.3, False),
    )
}
UNEVEN = {name: Recipe(r.optimizer, r.clip, r.shuffle, samples=31) for name, r in RECIPES.items()}


def layouts(world_size: int) -> dict[str, Layout]:
    """Return the ways to bring 12 samples into each optimizer step."""
    whole, half = 12 // world_size, 6 // world_size
    return {
        "batches": Layout(whole),
        "accumulation": Layout(half, 2),
        "accumulation and evaluation": Layout(half, 2, evaluates=True),
        "accumulation, exchange each batch": Layout(half, 2, plugin={"sync_each_batch": True}),
        "accumulation, window mean": Layout(half, 2, plugin={"normalize": "window"}),
        "split": Layout(12, loaders={"split_batches": True}),
        "split and accumulation": Layout(6, 2, loaders={"split_batches": True}),
        "dispatch": Layout(whole, loaders={"dispatch_batches": True}),
        "dispatch and split": Layout(12, loaders={"dispatch_batches": True, "split_batches": True}),
        "dispatch, accumulation and evaluation": Layout(half, 2, loaders={"dispatch_batches": True}, evaluates=True),
        "global batch size": Layout(whole, global_batch_size=12),
    }


UNEVEN_LAYOUTS = {
    "one batch a step": Layout(12, global_batch_size=12),
    "batches that do not divide": Layout(5, global_batch_size=12),
    "small batches": Layout(2, global_batch_size=12),
    "with evaluation": Layout(5, global_batch_size=12, evaluates=True),
}
STREAMS = {
    "stream": lambda world: Layout(12 // world, streams=True),
    "sharded stream": lambda world: Layout(12 // world, loaders={"dispatch_batches": False}, streams=True),
    "stream and accumulation": lambda world: Layout(6 // world, 2, streams=True),
    "stream, global batch size": lambda world: Layout(5, global_batch_size=12, streams=True),
}


def train_two_models() -> dict[str, Any]:
    """Train two models with two optimizers, two losses and two loaders of one `prepare`."""
    accelerator = fresh_accelerator(
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=SEED),
    )
    world = accelerator.num_processes
    first, second = make_model(0), make_model(1, out_features=FEATURES)
    sgd = torch.optim.SGD(first.parameters(), lr=0.05, momentum=0.9)
    adamw = torch.optim.AdamW(second.parameters(), lr=0.02)
    loader = DataLoader(make_data(36), batch_size=6 // world)
    other = DataLoader(make_data(36), batch_size=6 // world, shuffle=True)
    sgd, loader, first, adamw, second, other = accelerator.prepare(sgd, loader, first, adamw, second, other)
    for _ in range(2):
        for (inputs, targets), (noise, _) in zip(loader, other, strict=True):
            with accelerator.accumulate(first, second):
                made = second(noise)
                accelerator.backward((made - inputs).square().mean())
                accelerator.backward(torch.nn.functional.mse_loss(first(inputs + made.detach()), targets))
                for optimizer in (sgd, adamw):
                    optimizer.step()
                    optimizer.zero_grad()
    return {
        name: copy_weights(accelerator.unwrap_model(model)) for name, model in (("first", first), ("second", second))
    }


def train_two_plain_models() -> dict[str, Any]:
    first, second = make_model(0), make_model(1, out_features=FEATURES)
    sgd = torch.optim.SGD(first.parameters(), lr=0.05, momentum=0.9)
    adamw = torch.optim.AdamW(second.parameters(), lr=0.02)
    data, in_order, shuffled = make_data(36), Recipe(), Recipe(shuffle=True)
    for epoch in range(2):
        for own, mixed in zip(in_order.steps(epoch), shuffled.steps(epoch), strict=True):
            (inputs, targets), (noise, _) = data[own], data[mixed]
            made = second(noise)
            (made - inputs).square().mean().backward()
            torch.nn.functional.mse_loss(first(inputs + made.detach()), targets).backward()
            for optimizer in (sgd, adamw):
                optimizer.step()
                optimizer.zero_grad()
    return {"first": copy_weights(first), "second": copy_weights(second)}


def train_everything(world_size: int) -> dict[str, Any]:
    """Train all recipes in all layouts on this process's share."""
    found: dict[str, Any] = {}
    for (name, recipe), (form, layout) in itertools.product(RECIPES.items(), layouts(world_size).items()):
        found[f"{name}/{form}"] = train(recipe, layout)
    for (name, recipe), (form, layout) in itertools.product(UNEVEN.items(), UNEVEN_LAYOUTS.items()):
        found[f"uneven {name}/{form}"] = train(recipe, layout)
    for form, make in STREAMS.items():
        found[form] = train(Recipe(samples=31 if "global" in form else 36), make(world_size))
    found["two models"] = train_two_models()
    return found


def results(world_size: int) -> list[dict[str, Any]]:
    return group_once(train_everything, world_size, world_size)


@cache
def plain(recipe: Recipe) -> Outcome:
    return train_plain(recipe)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("form", layouts(1))
@pytest.mark.parametrize("name", RECIPES)
def test_every_layout_trains_as_plain_pytorch(name: str, form: str, world_size: int) -> None:
    for found in results(world_size):
        assert_same_outcome(found[f"{name}/{form}"], plain(RECIPES[name]))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("form", UNEVEN_LAYOUTS)
@pytest.mark.parametrize("name", UNEVEN)
def test_an_uneven_last_batch_counts_by_its_samples(name: str, form: str, world_size: int) -> None:
    for found in results(world_size):
        assert_same_outcome(found[f"uneven {name}/{form}"], plain(UNEVEN[name]))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("form", STREAMS)
def test_iterable_datasets_train_as_plain_pytorch(form: str, world_size: int) -> None:
    recipe = Recipe(samples=31 if "global" in form else 36)
    for found in results(world_size):
        assert_same_outcome(found[form], plain(recipe))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_several_models_and_optimizers_train_together(world_size: int) -> None:
    expected = train_two_plain_models()
    for found in results(world_size):
        for name in ("first", "second"):
            assert_same_weights(found["two models"][name], expected[name])


def test_the_comparison_can_fail() -> None:
    """A different seed, clipping or optimizer gives other weights, so equality above means something."""
    runs = [plain(recipe) for recipe in (Recipe(), Recipe(clip=0.3), Recipe(shuffle=True), Recipe("adamw"))]
    for left, right in itertools.combinations(runs, 2):
        with pytest.raises(AssertionError):
            assert_same_weights(left.weights, right.weights, 1e-6)
