"""Nested containers keep their types, and every operation on them reaches every tensor."""

from __future__ import annotations

import pickle
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import SequenceClassifierOutput

from accelerate._base.errors import ConfigurationError, WrongTypeError
from accelerate.collectives import nested
from accelerate.collectives.nested import ConvertOutputsToFp32, children, convert_outputs_to_fp32, leaves, rebuilt


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Sample:
    image: Any
    label: Any = None
    built: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.built += 1


@dataclass(frozen=True)
class Frozen:
    value: Any


CONTAINERS = st.recursive(
    st.one_of(
        st.integers(-5, 5).map(torch.tensor),
        st.lists(st.integers(-5, 5), max_size=3).map(lambda values: torch.tensor(values, dtype=torch.int64)),
        st.text(max_size=2),
        st.none(),
        st.integers(-5, 5),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(UserDict),
        inner.map(Frozen),
        st.tuples(inner, inner).map(lambda pair: Sample(*pair)),
    ),
    max_leaves=8,
)


def described(data: Any) -> Any:
    """Return something comparable: types, paths and values."""
    entries = children(data)
    if entries is not None:
        return type(data).__name__, [(step, described(value)) for step, value in entries]
    return ("tensor", data.dtype, data.tolist()) if isinstance(data, torch.Tensor) else data


@settings(max_examples=60, deadline=None)
@given(CONTAINERS)
def test_rebuilding_from_children_gives_the_same_structure(data: Any) -> None:
    entries = children(data)
    if entries is not None:
        assert described(rebuilt(data, [child.value for child in entries])) == described(data)


@settings(max_examples=60, deadline=None)
@given(CONTAINERS)
def test_apply_twice_there_and_back(data: Any) -> None:
    before = described(data)
    there = nested.recursively_apply(lambda tensor: tensor + 7, data)
    back = nested.recursively_apply(lambda tensor: tensor - 7, there)
    assert described(back) == before
    assert described(data) == before


@settings(max_examples=60, deadline=None)
@given(CONTAINERS)
def test_structure_and_back_keeps_shapes(data: Any) -> None:
    empty = nested.initialize_tensors(nested.get_data_structure(data))
    assert described(nested.get_shape(empty)) == described(nested.get_shape(data))


@settings(max_examples=60, deadline=None)
@given(CONTAINERS)
def test_sending_to_the_same_device_changes_nothing(data: Any) -> None:
    assert described(nested.send_to_device(data, "cpu")) == described(data)


@settings(max_examples=60, deadline=None)
@given(CONTAINERS)
def test_sending_reaches_every_tensor(data: Any) -> None:
    moved = nested.send_to_device(data, "meta")
    assert all(leaf.device.type == "meta" for _, leaf in leaves(moved) if isinstance(leaf, torch.Tensor))
    assert [path for path, _ in leaves(moved)] == [path for path, _ in leaves(data)]


def test_dataclasses_are_copied_without_running_post_init() -> None:
    sample = Sample(torch.ones(2), "cat")
    result = nested.recursively_apply(lambda tensor: tensor * 2, sample)
    assert (type(result), result.image.tolist(), result.label, result.built) == (Sample, [2.0, 2.0], "cat", 1)
    assert sample.image.tolist() == [1.0, 1.0]
    frozen = nested.recursively_apply(lambda tensor: tensor * 2, Frozen([torch.ones(1)]))
    assert frozen.value[0].tolist() == [2.0]


def test_a_dataclass_without_tensors_stays_the_same_object() -> None:
    settings_object = Frozen("text")
    assert nested.send_to_device([settings_object], "meta")[0] is settings_object


def test_batch_encoding_and_model_output_keep_their_types_and_attributes() -> None:
    encoding = BatchEncoding({"input_ids": torch.ones(2, 3)}, n_sequences=1)
    sent = nested.send_to_device(encoding, "meta", skip_keys="other")
    assert (type(sent), sent["input_ids"].device.type, sent.n_sequences) == (BatchEncoding, "meta", 1)
    assert encoding["input_ids"].device.type == "cpu"
    output = SequenceClassifierOutput(loss=torch.tensor(1.0), logits=torch.ones(2, 2).half())
    converted = nested.convert_to_fp32(output)
    assert type(converted) is SequenceClassifierOutput
    assert converted.logits.dtype == converted["logits"].dtype == torch.float32
    assert output.logits.dtype == torch.float16
    assert converted.hidden_states is None


def test_mappings_with_special_constructors() -> None:
    grouped = defaultdict(list, a=torch.ones(1))
    result = nested.recursively_apply(lambda tensor: tensor + 1, grouped)
    assert (type(result), result.default_factory, result["a"].tolist()) == (defaultdict, list, [2.0])
    proxy = nested.recursively_apply(lambda tensor: tensor + 1, MappingProxyType({"a": torch.ones(1)}))
    assert (type(proxy), proxy["a"].tolist()) == (MappingProxyType, [2.0])


def test_apply_passes_arguments_and_names_a_wrong_leaf() -> None:
    assert nested.recursively_apply(torch.add, [torch.tensor(1)], 2, alpha=3)[0].item() == 7
    with pytest.raises(WrongTypeError, match=r"add was given 'text' of type <class 'str'>.*is_torch_tensor"):
        nested.recursively_apply(torch.add, {"a": "text"}, error_on_other_type=True)
    counted = nested.recursively_apply(
        lambda value: value + 1, [1, "a"], test_type=lambda value: isinstance(value, int)
    )
    assert counted == [2, "a"]


def test_send_returns_tensors_that_are_in_place_already() -> None:
    tensor = torch.ones(2)
    assert nested.send_to_device(tensor, torch.device("cpu")) is tensor
    batch = {"x": tensor, "y": tensor}
    sent = nested.send_to_device(batch, torch.device("cpu"))
    assert sent is not batch
    assert sent["x"] is tensor
    assert nested.send_to_device((tensor, "a"), "cpu") == (tensor, "a")


def test_send_skips_keys_at_any_depth() -> None:
    batch = {"a": torch.ones(1), "b": {"a": torch.ones(1), "c": torch.ones(1)}}
    sent = nested.send_to_device(batch, "meta", skip_keys=["a"])
    assert [leaf.device.type for _, leaf in leaves(sent)] == ["cpu", "cpu", "meta"]
    assert nested.send_to_device([{"a": torch.ones(1)}], "meta", skip_keys="a")[0]["a"].device.type == "cpu"


def test_send_uses_the_to_of_an_object() -> None:
    class Movable:
        where = "here"

        def to(self, device: torch.device) -> Movable:
            self.where = str(device)
            return self

    assert nested.send_to_device([Movable()], "meta", non_blocking=True)[0].where == "meta"
    packed = nested.send_to_device(pack_sequence([torch.ones(2)]), "meta")
    assert packed.data.device.type == "meta"
    assert nested.send_to_device(Movable, "meta") is Movable


def test_shapes_devices_and_batch_sizes() -> None:
    data = {"name": "x", "scalar": torch.tensor(1), "rows": [torch.ones(3, 2)]}
    assert nested.get_shape(data) == {"name": "x", "scalar": [], "rows": [[3, 2]]}
    assert nested.find_batch_size(data) == 3
    assert nested.find_device(data) == torch.device("cpu")
    assert nested.find_device(["a"]) is None
    assert nested.get_data_structure([torch.ones(2, dtype=torch.int8)]) == [
        nested.TensorInformation(torch.Size([2]), torch.int8)
    ]
    with pytest.raises(TypeError, match="holds no tensor"):
        nested.find_batch_size(["a"])
    for empty in ([], {}, torch.tensor(1.0)):
        with pytest.raises(ConfigurationError, match="is empty or has only tensors"):
            nested.find_batch_size(empty)
        assert nested.ignorant_find_batch_size(empty) is None


def test_listify_slice_and_concatenate() -> None:
    data = {"a": torch.ones(2, dtype=torch.bfloat16), "b": ("s", torch.tensor(1))}
    assert nested.listify(data) == {"a": [1.0, 1.0], "b": ("s", 1)}
    assert nested.slice_tensors({"a": torch.arange(4), "s": "x"}, slice(1, 3))["a"].tolist() == [1, 2]
    joined = nested.concatenate(
        [Pair(torch.ones(1), {"s": torch.tensor(1)}), Pair(torch.zeros(2), {"s": torch.tensor(2)})]
    )
    assert (type(joined), joined.left.tolist(), joined.right["s"].tolist()) == (Pair, [1.0, 0.0, 0.0], [1, 2])
    assert nested.concatenate([Sample(torch.ones(1, 2)), Sample(torch.ones(1, 3))][:1]).image.shape == (1, 2)
    wide = nested.concatenate([torch.ones(1, 2), torch.ones(1, 3)], dim=1)
    assert wide.shape == (1, 5)
    assert nested.concatenate(["a"]) == "a"
    with pytest.raises(WrongTypeError, match="concatenate was given 'a'"):
        nested.concatenate(["a", "b"])


@pytest.mark.parametrize(("batch", "parts", "expected"), [(1, 4, 4), (3, 4, 4), (5, 4, 8), (8, 4, 8), (7, 2, 8)])
def test_padding_inputs_to_a_multiple(batch: int, parts: int, expected: int) -> None:
    padded = nested.pad_input_tensors({"x": torch.ones(batch, 2), "other": torch.ones(batch + 1)}, batch, parts)
    assert padded["x"].shape == (expected, 2)
    assert padded["x"].sum() == 2 * batch
    assert padded["other"].shape == (batch + 1,)


class Half(torch.nn.Module):
    def forward(self, x: torch.Tensor, scale: int = 2) -> dict[str, torch.Tensor]:
        """Scale."""
        return {"y": (x * scale).half()}


def test_a_wrapped_forward_converts_pickles_and_unwraps() -> None:
    import inspect

    model = Half()
    model.forward = convert_outputs_to_fp32(model.forward)
    assert convert_outputs_to_fp32(model.forward) is model.forward
    assert model(torch.ones(2))["y"].dtype == torch.float32
    assert list(inspect.signature(model.forward).parameters) == ["x", "scale"]
    assert model.forward.__wrapped__.__func__ is Half.forward
    again = pickle.loads(pickle.dumps(model))
    assert isinstance(again.forward, ConvertOutputsToFp32)
    assert again(torch.ones(2), scale=3)["y"].tolist() == [3.0, 3.0]
    assert again.forward.__wrapped__.__self__ is again
