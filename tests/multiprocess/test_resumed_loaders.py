"""Loaders that resume inside an epoch on real processes, compared with the run that never stopped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.processes import run_group
from tests.support.resuming import RestoredStream
from torch.utils.data import DataLoader, RandomSampler

from accelerate import Accelerator
from accelerate.data_loader import skip_first_batches
from accelerate.utils import DataLoaderConfiguration

# These samplers draw from their generator once more after the last index.
DRAWING_AT_THE_END: dict[str, Callable[[torch.Generator], DataLoader]] = {
    "shuffled": lambda generator: DataLoader(range(12), batch_size=2, shuffle=True, generator=generator),
    "repeated": lambda generator: DataLoader(
        range(6), batch_size=2, sampler=RandomSampler(range(6), num_samples=12, generator=generator)
    ),
}


def prepared(loader: DataLoader, **options: Any) -> Any:
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options)).prepare(loader)


def next_epochs_that_differ(dispatches: bool) -> list[str]:
    """Return the loaders whose order changes in the epoch after a resumed one."""
    differ = []
    for kind, make in DRAWING_AT_THE_END.items():
        loader, *others = (
            prepared(make(torch.Generator().manual_seed(3)), dispatch_batches=dispatches) for _ in range(4)
        )
        states = [loader.state_dict() for _ in loader]
        following = [batch.tolist() for batch in loader]
        for resumed, state in zip(others, states, strict=True):
            resumed.load_state_dict(state)
            if state["samples"]:
                list(resumed)
            if [batch.tolist() for batch in resumed] != following:
                differ.append(f"{kind} after {state['samples']} samples")
    return differ


@pytest.mark.parametrize("dispatches", [False, True])
def test_the_epoch_after_a_resumed_one_has_the_same_order(dispatches: bool) -> None:
    assert run_group(next_epochs_that_differ, 2, dispatches) == [[]] * 2


def restored_epochs_that_differ() -> list[str]:
    """Return the dispatched epochs whose rest changes if their dataset restores its own position."""
    differ = []
    for stateful in (False, True):
        for left_out in (0, 1):

            def make(stateful: bool = stateful, left_out: int = left_out) -> Any:
                loader = skip_first_batches(DataLoader(RestoredStream(11), batch_size=2), left_out)
                return prepared(loader, dispatch_batches=True, use_stateful_dataloader=stateful)

            loader = make()
            whole = [(batch.tolist(), loader.state_dict()) for batch in loader]
            for done in range(1, len(whole)):
                resumed = make()
                resumed.load_state_dict(whole[done - 1][1])
                rest = [batch.tolist() for batch in resumed]
                if rest != [batch for batch, _ in whole[done:]]:
                    differ.append(f"{stateful=}, {left_out=}, {done=}: {rest}")
    return differ


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("count", [2, 3])
def test_a_dataset_that_restores_itself_completes_the_last_step_from_the_first_batch(count: int) -> None:
    assert run_group(restored_epochs_that_differ, count) == [[]] * count
