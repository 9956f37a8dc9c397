"""Single tensors of a module: placed, cast, tied and brought back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from accelerate._base.errors import ConfigurationError
from accelerate.offload.tensors import (
    check_device_same,
    check_tied_parameters_in_config,
    copy_to_host,
    find_tied_parameters,
    get_non_persistent_buffers,
    id_tensor_storage,
    move_module,
    moves_in_place,
    named_module_tensors,
    prune_tied_cache,
    resolve_dtype,
    retie_parameters,
    set_module_tensor_to_device,
    tied_cache,
)

META = torch.device("meta")


def with_buffers() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].register_buffer("scratch", torch.zeros(1), persistent=False)
    return model


def test_a_tensor_goes_to_meta_and_comes_back_with_a_value() -> None:
    layer = nn.Linear(2, 3)
    layer.weight.requires_grad_(False)
    layer.weight.tag = "kept"  # type: ignore[attr-defined]
    set_module_tensor_to_device(layer, "weight", "meta")
    assert layer.weight.device == META
    value = torch.ones(3, 2, dtype=torch.float64)
    set_module_tensor_to_device(layer, "weight", "cpu", value=value)
    assert isinstance(layer.weight, nn.Parameter)
    assert not layer.weight.requires_grad
    assert layer.weight.dtype == torch.float32
    assert torch.equal(layer.weight, torch.ones(3, 2))
    assert layer.weight.tag == "kept"  # type: ignore[attr-defined]


def test_dotted_names_buffers_and_parameter_classes_are_kept() -> None:
    class Special(nn.Parameter):
        pass

    model = with_buffers()
    model[0].weight = Special(torch.ones(2, 2))
    set_module_tensor_to_device(model, "0.weight", "meta")
    assert type(model[0].weight) is Special
    set_module_tensor_to_device(model, "1.running_mean", "cpu", value=torch.full((2,), 3.0))
    assert torch.equal(model.state_dict()["1.running_mean"], torch.full((2,), 3.0))
    assert "0.scratch" not in model.state_dict()


def test_dtypes_of_new_values() -> None:
    layer = nn.Linear(2, 2)
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(2, 2), dtype=torch.float16)
    assert layer.weight.dtype == torch.float16
    set_module_tensor_to_device(layer, "bias", "cpu", dtype="bfloat16")
    assert layer.bias.dtype == torch.bfloat16
    quantised = torch.ones(2, 2, dtype=torch.int8)
    set_module_tensor_to_device(layer, "weight", "cpu", value=quantised, dtype=torch.float16)
    assert layer.weight.dtype == torch.int8
    assert not layer.weight.requires_grad


def test_nothing_changes_for_a_tensor_that_is_there() -> None:
    layer = nn.Linear(2, 2)
    weight = layer.weight
    set_module_tensor_to_device(layer, "weight", "cpu")
    assert layer.weight is weight


@pytest.mark.parametrize(
    ("name", "device", "value", "message"),
    [
        ("nothing", "cpu", None, "'nothing'"),
        ("gone.weight", "cpu", None, "'gone.weight'"),
        ("weight", "cpu", torch.ones(5), r"\(5,\).*\(2, 2\)"),
        ("weight", "disk", None, "'disk'"),
    ],
)
def test_impossible_placements_are_refused(name: str, device: str, value: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        set_module_tensor_to_device(nn.Linear(2, 2), name, device, value=value)


def test_meta_without_a_value_is_refused() -> None:
    with pytest.raises(ValueError, match="no data"):
        set_module_tensor_to_device(nn.Linear(2, 2, device="meta"), "weight", "cpu")


def test_a_tied_weight_is_copied_to_a_device_once() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    cache = tied_cache([first.weight])
    set_module_tensor_to_device(first, "weight", "meta", tied_params_map=cache)
    set_module_tensor_to_device(second, "weight", "meta", tied_params_map=cache)
    assert first.weight is second.weight
    prune_tied_cache(cache, [])
    assert cache == {}


def test_names_of_tensors() -> None:
    model = with_buffers()
    assert get_non_persistent_buffers(model, recurse=True) == {"scratch"}
    assert get_non_persistent_buffers(model, recurse=True, fqns=True) == {"0.scratch"}
    names = [name for name, _ in named_module_tensors(model, recurse=True, remove_non_persistent=True)]
    assert names == [*list(dict(model.named_parameters())), "1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert [name for name, _ in named_module_tensors(model[0])] == ["weight", "bias", "scratch"]
    assert [name for name, _ in named_module_tensors(model[0], include_buffers=False)] == ["weight", "bias"]


def test_devices_and_storages_are_compared() -> None:
    assert check_device_same(torch.device("cpu"), torch.device("cpu:0"))
    assert not check_device_same(torch.device("meta:1"), torch.device("meta"))
    tensor = torch.ones(4)
    assert id_tensor_storage(tensor[:2]) == id_tensor_storage(tensor)
    assert id_tensor_storage(tensor) != id_tensor_storage(tensor.clone())
    assert id_tensor_storage(torch.ones(4, device="meta")) == (META, 0, 16)


def test_ties_are_found_and_made_again() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("c", "a", "b")})
    assert find_tied_parameters(model) == []
    model["a"].weight = model["c"].weight
    model["b"].bias = model["c"].bias
    assert find_tied_parameters(model) == [["a.weight", "c.weight"], ["b.bias", "c.bias"]]
    model["a"].weight = nn.Parameter(torch.ones(2, 2, device="meta"))
    retie_parameters(model, [["a.weight", "c.weight"]])
    assert model["a"].weight is model["c"].weight
    assert model["c"].weight.device.type == "cpu"


def test_a_state_dict_on_the_host_keeps_its_ties() -> None:
    weight = torch.ones(3)
    copied = copy_to_host({"a": weight, "b": weight, "c": torch.ones(3)})
    assert copied["a"] is copied["b"]
    assert copied["c"] is not copied["a"]


def test_a_parameter_that_was_none_gets_a_value() -> None:
    layer = nn.Linear(2, 2, bias=False)
    set_module_tensor_to_device(layer, "bias", "cpu", value=torch.ones(2))
    assert isinstance(layer.bias, nn.Parameter)
    assert torch.equal(layer(torch.zeros(1, 2)), torch.ones(1, 2))


def test_the_storage_of_a_split_tensor_is_that_of_its_local_part() -> None:
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        split = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)))
        assert id_tensor_storage(split) == id_tensor_storage(split.to_local())
        assert id_tensor_storage(split) != id_tensor_storage(torch.ones(4))
    finally:
        dist.destroy_process_group()


def test_tensors_without_an_address_are_copied_by_name() -> None:
    weight = torch.eye(3).to_sparse()
    found = copy_to_host({"a": weight, "b": torch.eye(3).to_sparse()})
    assert found["a"] is weight
    assert found["b"] is not weight


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"no dtype 'float17'.*torch has no such name.*'float16'"):
        resolve_dtype("float17")
    assert resolve_dtype("torch.float16") is resolve_dtype("float16") is torch.float16


class PreTrainedModel(nn.Module):
    """What a model of Transformers shows of its ties."""

    def __init__(self, head: nn.Module | None = None, **config: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.head = head

    def get_output_embeddings(self) -> nn.Module | None:
        return self.head


class TiesItself(nn.Linear):
    def _tie_weights(self) -> None: ...


@pytest.mark.parametrize(
    ("model", "tied"),
    [
        (nn.Linear(2, 2), False),
        (PreTrainedModel(), False),
        (PreTrainedModel(tie_word_embeddings=True), False),
        (PreTrainedModel(nn.Linear(2, 2), tie_word_embeddings=True), True),
        (PreTrainedModel(nn.Linear(2, 2), tie_word_embeddings=False), False),
        (PreTrainedModel(is_encoder_decoder=True, tie_encoder_decoder=True), True),
        (PreTrainedModel(is_encoder_decoder=True), False),
        (PreTrainedModel(TiesItself(2, 2)), True),
    ],
)
def test_the_configuration_of_a_model_says_whether_weights_are_tied(model: nn.Module, tied: bool) -> None:
    assert check_tied_parameters_in_config(model) is tied


def test_a_move_keeps_ties_and_what_is_noted_on_parameters() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    model["a"].weight.mark = "kept"
    model["a"].weight.requires_grad_(False)
    model.register_buffer("nothing", None)
    before = model["a"].weight
    assert moves_in_place(model, torch.device("cpu"))
    assert move_module(model, torch.device("cpu")) is model
    assert model["a"].weight is before
    # torch makes a new parameter for each name there, as on XLA devices and those that are registered from outside.
    assert not moves_in_place(model, META)
    assert move_module(model, META) is model
    assert model["a"].weight is model["b"].weight is not before
    assert (model["a"].weight.device, model["a"].weight.mark) == (META, "kept")
    assert not model["a"].weight.requires_grad
    assert moves_in_place(model, META)
