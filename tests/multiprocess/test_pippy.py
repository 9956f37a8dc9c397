"""Models cut into stages over real processes give what the whole model gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.processes import run_group
from torch import nn

from accelerate._base.errors import ConfigurationError
from accelerate.inference import (
    build_pipeline,
    find_pippy_batch_size,
    generate_device_map,
    pippy_forward,
    prepare_pippy,
)
from accelerate.offload.memory import compute_module_sizes
from accelerate.runtime import current

pytestmark = pytest.mark.multiprocess


def rank() -> int:
    return current.runtime().rank


def world() -> int:
    return current.runtime().world_size


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x)) * scale


class Tower(nn.Module):
    """Blocks that all read one input, a value from the first that the last one needs, and a nested output."""

    def __init__(self, width: int = 8, depth: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.register_buffer("shift", torch.arange(width, dtype=torch.float32))
        self.last = nn.Linear(width, 3)

    def forward(
        self, x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None, twice: bool = False
    ) -> dict[str, Any]:
        start = self.first(x)
        hidden = start
        for block in self.blocks:
            hidden = block(hidden, scale)
        out = self.last(hidden + start + self.shift)
        if bias is not None:
            out = out + bias
        return {"out": 2 * out if twice else out, "pair": (start, hidden), "word": "same"}


def tower() -> Tower:
    torch.manual_seed(0)
    return Tower().eval()


def inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 4, generator=generator), torch.rand(rows, 1, generator=generator)


def assert_same(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    assert found["word"] == expected["word"]
    torch.testing.assert_close(found["out"], expected["out"], rtol=0, atol=1e-6)
    torch.testing.assert_close(found["pair"], expected["pair"], rtol=0, atol=1e-6)


def last_rank_gets_the_output() -> None:
    whole, model = tower(), prepare_pippy(tower(), example_args=inputs(2))
    batch = inputs(2 * world())
    found = model(*batch)
    if rank() != world() - 1:
        assert found is None
    else:
        with torch.no_grad():
            assert_same(found, whole(*batch))


def any_number_of_rows() -> None:
    whole, model = tower(), prepare_pippy(tower(), num_chunks=4, gather_output=True)
    for rows in (8, 7, 1, 5):
        batch = inputs(rows)
        found = model(*batch)
        assert found["out"].shape == (rows, 3)
        with torch.no_grad():
            assert_same(found, whole(*batch))


def keyword_inputs_and_whole_tensors() -> None:
    whole, model = tower(), prepare_pippy(tower(), num_chunks=3, gather_output=True)
    x, scale = inputs(6)
    bias = torch.tensor([[1.0, 2.0, 3.0]])  # one row for all samples: it goes whole into every chunk
    found = model(x, bias=bias, scale=scale, twice=True)
    with torch.no_grad():
        assert_same(found, whole(x, scale, bias, twice=True))


def only_the_inputs_of_the_first_process_are_read() -> None:
    whole, model = tower(), prepare_pippy(tower(), gather_output=True)
    batch = inputs(4)
    found = model(*batch) if rank() == 0 else model()
    with torch.no_grad():
        assert_same(found, whole(*batch))


def named_cuts() -> None:
    names = [f"blocks.{index}" for index in range(1, world())]
    model = prepare_pippy(tower(), split_points=names, gather_output=True)
    assert model.hf_split_points == names
    batch = inputs(3)
    with torch.no_grad():
        assert_same(model(*batch), tower()(*batch))


def a_change_of_weights_is_seen() -> None:
    whole, model = tower(), prepare_pippy(tower(), gather_output=True)
    batch = inputs(4)
    model(*batch)
    with torch.no_grad():
        for changed in (whole, model):
            changed.last.weight.mul_(3)  # type: ignore[union-attr]
        assert_same(model(*batch), whole(*batch))


def parts_by_hand() -> None:
    model = tower()
    names = [f"blocks.{index}" for index in range(1, world())]
    stage = build_pipeline(model, names, inputs(2), {}, 2)
    found = pippy_forward(stage, 2, True, *inputs(4))
    with torch.no_grad():
        assert_same(found, tower()(*inputs(4)))
    with pytest.raises(ConfigurationError, match="num_chunks=3"):
        pippy_forward(stage, 3, True, *inputs(4))


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(self.two(self.one(x))).mean()


def errors_reach_every_process() -> None:
    model = prepare_pippy(tower(), gather_output=True)
    with pytest.raises(ConfigurationError, match="no tensor has rows"):
        model()
    with pytest.raises(ConfigurationError, match=r"The input \[1\]\['scale'\] is a set"):
        model(inputs(2)[0], scale={1})
    with pytest.raises(ConfigurationError, match="no row for each sample"):
        prepare_pippy(WithLoss(), split_points=["two", "three"][: world() - 1])(torch.ones(2, 4))
    with pytest.raises(ConfigurationError, match=r"names \['blocks.9'\]"):
        prepare_pippy(tower(), split_points=["blocks.9"])
    with pytest.raises(ConfigurationError, match=f"there are {world()} processes"):
        prepare_pippy(tower(), split_points=["blocks.1", "blocks.2", "blocks.3"])
    with pytest.raises(ConfigurationError, match="cannot be cut into"):
        prepare_pippy(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ConfigurationError, match="num_chunks=0"):
        prepare_pippy(tower(), num_chunks=0)
    # What was asked in vain leaves the group as it was.
    with torch.no_grad():
        assert_same(model(*inputs(2)), tower()(*inputs(2)))


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    config = GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(2)
    config = BertConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, vocab_size=64, num_labels=3
    )
    return BertForSequenceClassification(config).eval()


def transformers_models() -> None:
    generator = torch.Generator().manual_seed(0)
    for make, options in ((gpt2, {"use_cache": False}), (bert, {})):
        whole, model = make(), prepare_pippy(make(), no_split_module_classes=["GPT2Block"], gather_output=True)
        for rows, length in ((4, 8), (3, 8), (2, 11)):
            ids = torch.randint(1, 64, (rows, length), generator=generator)
            mask = torch.ones_like(ids)
            mask[0, length // 2 :] = 0
            found = model(input_ids=ids, attention_mask=mask, **options)
            with torch.no_grad():
                expected = whole(input_ids=ids, attention_mask=mask, **options)
            assert type(found) is type(expected)
            torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-5)


def tied_weights_stay_one() -> None:
    model = prepare_pippy(gpt2(), gather_output=True)
    model(torch.ones(2, 4, dtype=torch.long), use_cache=False)
    assert model.lm_head.weight is model.transformer.wte.weight
    with pytest.raises(ConfigurationError, match="use_cache=False"):
        model(torch.ones(2, 4, dtype=torch.long), use_cache=True)


def run_all(checks: list[Callable[[], None]]) -> None:
    for check in checks:
        check()


def a_forward_of_the_instance_is_traced() -> None:
    whole, model = WithRows(), WithRows()
    model.load_state_dict(whole.state_dict())
    for changed in (whole, model):
        plain = changed.forward
        changed.forward = lambda x, plain=plain: 2 * plain(x)
    names = ["two", "three"][: world() - 1]
    prepare_pippy(model, split_points=names, gather_output=True)
    batch = torch.ones(2 * world(), 4)
    with torch.no_grad():
        torch.testing.assert_close(model(batch), whole(batch))


class WithRows(WithLoss):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.three(self.two(self.one(x)))


def examples_and_cuts_that_do_not_fit_are_told() -> None:
    names = ["two", "three"][: world() - 1]
    with pytest.raises(ConfigurationError, match=r"is a set"):
        prepare_pippy(WithRows(), split_points=names, example_args=({1},))


PLAIN = [
    a_forward_of_the_instance_is_traced,
    examples_and_cuts_that_do_not_fit_are_told,
    last_rank_gets_the_output,
    any_number_of_rows,
    keyword_inputs_and_whole_tensors,
    only_the_inputs_of_the_first_process_are_read,
    named_cuts,
    a_change_of_weights_is_seen,
    parts_by_hand,
    errors_reach_every_process,
]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_plain_model(world_size: int) -> None:
    run_group(run_all, world_size, PLAIN)


def test_models_of_transformers() -> None:
    pytest.importorskip("transformers")
    run_group(run_all, 2, [transformers_models, tied_weights_stay_one])


def test_one_process_runs_the_model_as_it_is() -> None:
    model = prepare_pippy(tower())
    with torch.no_grad():
        assert_same(model(*inputs(3)), tower()(*inputs(3)))
    assert model.hf_split_points == []


def test_shares_are_as_even_as_blocks_allow() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(7)))
    device_map = generate_device_map(model, 3)
    sizes = compute_module_sizes(model)
    shares = [sum(sizes[name] for name, place in device_map.items() if place == stage) for stage in range(3)]
    one = sizes["0"]
    assert sorted(shares) == [one, 3 * one, 3 * one] or sorted(shares) == [2 * one, 2 * one, 3 * one]
    assert generate_device_map(model) == {"": 0}
    limited = generate_device_map(model, 2, max_memory={0: 2 * one, 1: 10 * one})
    assert [limited[str(index)] for index in range(7)] == [0, 0, 1, 1, 1, 1, 1]


def test_batch_size_is_found_in_arguments_then_keywords() -> None:
    assert find_pippy_batch_size((torch.ones(3, 2),), {"x": torch.ones(4)}) == 3
    assert find_pippy_batch_size((1, {"a": [torch.ones(5)]}), None) == 5
    assert find_pippy_batch_size((), {"x": torch.ones(4)}) == 4
    assert find_pippy_batch_size(None, {"x": "text"}) is None


def test_memory_that_is_too_small_is_told() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert generate_device_map(model, 2, max_memory={0: 80, 1: 100}) == {"0": 0, "1": 1}
    with pytest.raises(
        ConfigurationError, match=r"max_memory=\{0: 80, 1: 10\} has no room for \['1'\].*Give more memory"
    ):
        generate_device_map(model, 2, max_memory={0: 80, 1: 10})
