"""Big models: made empty, dispatched over CPU, disk and stand-in accelerators, and run with the same result."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.support.logs import logged
from torch import nn

import accelerate.big_modeling as big_modeling
from accelerate.big_modeling import (
    attach_layerwise_casting_hooks,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
)
from accelerate.config.env import patch_environment
from accelerate.hooks import AlignDevicesHook, remove_hook_from_submodules
from accelerate.hooks.offloaded import get_state_dict_offloaded_model
from accelerate.offload.places import lookup

META = torch.device("meta")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("shift", torch.rand(4))
        self.register_buffer("hidden", torch.rand(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x * self.scale)) + self.shift + self.hidden


class Net(nn.Module):
    """Blocks between an embedding and a head that share a weight, and one tensor at the root."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(1))
        self.embed = nn.Linear(4, 4, bias=False)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(4, 4)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(x) * self.gain
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x)}


X = torch.arange(8.0).reshape(2, 4) / 8


def made() -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    model = Net().eval()
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.0)
    return model, model(X)["logits"].detach()


MAPS: list[dict[str, str]] = [
    {"": "disk"},
    {"gain": "cpu", "embed": "cpu", "blocks": "disk", "head": "cpu"},
    {"gain": "cpu", "embed": "disk", "blocks.0": "cpu", "blocks.1": "disk", "blocks.2": "disk", "head": "disk"},
    {"gain": "disk", "embed": "cpu", "blocks.0": "cpu", "blocks.1": "cpu", "head": "disk"}
    | {f"blocks.2.{part}": "disk" for part in ("scale", "linear", "norm", "shift", "hidden")},
]


@pytest.mark.parametrize("device_map", MAPS)
@pytest.mark.parametrize("offload_buffers", [False, True])
def test_a_model_on_cpu_and_disk_gives_the_same_output(
    device_map: dict[str, str], offload_buffers: bool, tmp_path: Path
) -> None:
    model, plain = made()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert dispatch_model(model, device_map, offload_dir=tmp_path, offload_buffers=offload_buffers) is model
    assert model.hf_device_map == device_map
    on_disk = [name for name, place in device_map.items() if place == "disk" and "." not in name and name != "gain"]
    for name in on_disk:
        assert {parameter.device for parameter in model.get_submodule(name).parameters()} == {META} or name == ""
    for _ in range(2):
        assert torch.equal(model(X)["logits"], plain)
    found = get_state_dict_offloaded_model(model)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


OVERRIDING: list[dict[str, str]] = [
    {"": "cpu", "embed": "disk"},
    {"embed": "disk", "": "cpu"},
    {"": "disk", "embed": "cpu", "head": "cpu"},
    {"": "disk", "blocks": "cpu", "blocks.1": "disk"},
    {"": "cpu", "blocks": "disk", "blocks.1.linear": "cpu"},
    {"": "cpu", "blocks.1.linear.bias": "disk"},
    {"": "disk", "blocks.1.scale": "cpu", "blocks.2": "disk"},
]


@pytest.mark.parametrize("device_map", OVERRIDING, ids=str)
@pytest.mark.parametrize("load", [False, True])
def test_an_entry_overrides_the_one_above_it(device_map: dict[str, str], load: bool, tmp_path: Path) -> None:
    model, plain = made()
    expected = {
        name: lookup(device_map, name)
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.BatchNorm1d))
    }
    if load:
        save_file({name: value.clone() for name, value in model.state_dict().items()}, tmp_path / "model.safetensors")
        hidden = [block.hidden for block in model.blocks]
        with init_empty_weights():
            model = Net().eval()
        for block, buffer in zip(model.blocks, hidden, strict=True):
            block.hidden = buffer
        load_checkpoint_and_dispatch(model, tmp_path, device_map, offload_folder=tmp_path / "offload")
    else:
        dispatch_model(model, device_map, offload_dir=tmp_path)
    assert model.hf_device_map == device_map
    for _ in range(2):
        assert torch.equal(model(X)["logits"], plain)
    for name, place in expected.items():
        assert (model.get_submodule(name).weight.device == META) == (place == "disk"), name


def test_one_device_needs_no_hooks_unless_forced() -> None:
    model, plain = made()
    dispatch_model(model, {"": "cpu"})
    assert not hasattr(model, "_hf_hook")
    assert torch.equal(model(X)["logits"], plain)
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert isinstance(model._hf_hook, AlignDevicesHook)
    assert torch.equal(model(X)["logits"], plain)
    dispatch_model(made()[0], {"": torch.device("meta")})


def test_tied_weights_stay_one_tensor_on_one_device() -> None:
    model, _ = made()
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert model.embed.weight is model.head.weight
    other, _ = made()
    dispatch_model(other, {"embed": "meta", "head": "meta", "gain": "meta", "blocks": "meta"}, force_hooks=True)
    assert other.embed.weight is other.head.weight


def test_modules_on_the_cpu_visit_the_accelerator() -> None:
    """The meta device stands in for an accelerator: what is placed there shows where everything runs."""
    model, _ = made()
    dispatch_model(model, {"gain": "meta", "embed": "meta", "blocks": "cpu", "head": "meta"})
    hook = model.blocks[0].linear._hf_hook
    assert hook.offload
    assert hook.execution_device == "meta"
    assert model.blocks[0].linear.weight.device == META
    assert hook.weights_map["weight"].device.type == "cpu"
    assert model.blocks[0].shift.device == META  # buffers are where they are used
    assert model.blocks[0](X).device == META
    remove_hook_from_submodules(model)
    assert model.blocks[0].linear.weight.device.type == "cpu"


def test_the_output_comes_back_to_the_device_of_the_input() -> None:
    model, _ = made()
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert model._hf_hook.io_same_device
    assert model(X)["logits"].device.type == "cpu"


def test_moving_a_dispatched_model_warns_or_is_refused(tmp_path: Path) -> None:
    model, plain = made()
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    with logged(r"`\.to\(\)`"):
        model.to("cpu")
    with logged(r"`\.cpu\(\)`"):
        model.cpu()
    remove_hook_from_submodules(model)
    assert torch.equal(model.to("cpu")(X)["logits"], plain)
    offloaded, _ = made()
    dispatch_model(offloaded, {"": "disk"}, offload_dir=tmp_path)
    with pytest.raises(RuntimeError, match="offloaded weights"):
        offloaded.to("cpu")


def test_a_disk_without_a_folder_and_an_empty_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="offload_dir"):
        dispatch_model(made()[0], {"": "disk"})
    with init_empty_weights():
        empty = Net()
    with pytest.raises(ValueError, match=r"embed\.weight"):
        dispatch_model(empty, {"": "disk"}, offload_dir=tmp_path)


def test_weights_are_read_in_place_from_safetensors(tmp_path: Path) -> None:
    model, plain = made()
    file = tmp_path / "w.safetensors"
    save_file({name: value.clone() for name, value in model.state_dict().items()}, file)
    index = {
        name: {"safetensors_file": str(file), "weight_name": name, "dtype": "float32"} for name in model.state_dict()
    }
    dispatch_model(model, {"": "disk"}, offload_index=index)
    assert torch.equal(model(X)["logits"], plain)
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


@pytest.mark.parametrize("head", ["cpu", "disk"])
def test_a_tied_weight_is_found_under_its_other_name(head: str, tmp_path: Path) -> None:
    source, plain = made()
    state = {name: value.clone() for name, value in source.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "w.safetensors")
    index = {name: {"safetensors_file": str(tmp_path / "w.safetensors"), "dtype": "float32"} for name in state}
    device_map = {"gain": "cpu", "embed": "disk", "blocks": "cpu", "head": head}
    source.embed.weight = source.head.weight = nn.Parameter(torch.empty(4, 4, device="meta"))
    source.head.bias = nn.Parameter(torch.empty(4, device="meta"))
    dispatch_model(source, device_map, offload_index=index)
    assert torch.equal(source(X)["logits"], plain)


def test_the_check_of_a_map_can_be_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = made()
    with pytest.raises(ValueError, match="no device for"):
        dispatch_model(model, {"embed": "cpu"})
    monkeypatch.setattr(big_modeling, "check_device_map", lambda *args, **kwargs: None)
    dispatch_model(model, {"embed": "cpu"})


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_weights_kept_on_the_cpu_or_the_disk_give_the_same_output(offload_buffers: bool, tmp_path: Path) -> None:
    model, plain = made()
    assert cpu_offload(model, offload_buffers=offload_buffers) is model
    assert {parameter.device for parameter in model.parameters()} == {META}
    assert torch.equal(model(X)["logits"], plain)
    remove_hook_from_submodules(model)
    assert torch.equal(model(X)["logits"], plain)
    disk_offload(model, tmp_path, offload_buffers=offload_buffers)
    assert torch.equal(model(X)["logits"], plain)
    written = (tmp_path / "index.json").stat().st_mtime_ns
    again, _ = made()
    with torch.no_grad():
        again.gain.zero_()
    disk_offload(again, tmp_path, execution_device="cpu")  # the folder is used as it is
    assert torch.equal(again(X)["logits"], plain)
    assert (tmp_path / "index.json").stat().st_mtime_ns == written


@pytest.mark.parametrize(
    "offload", [disk_offload, lambda model, folder: dispatch_model(model, {"": "disk"}, offload_dir=folder)]
)
def test_a_folder_with_other_weights_than_the_model_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, offload: Callable[[nn.Module, Path], nn.Module]
) -> None:
    first, plain = made()
    offload(first, tmp_path)
    offload(made()[0], tmp_path)
    assert not caplog.text  # the same weights
    with init_empty_weights():
        offload(Net(), tmp_path)
    assert not caplog.text  # none
    changed, _ = made()
    with torch.no_grad():
        changed.gain[-1] += 1
    offload(changed, tmp_path)
    (told,) = caplog.messages
    assert f"{str(tmp_path)!r} has an index, so its weights are used, and 1 of " in told
    assert "'gain' first" in told
    assert torch.equal(changed(X)["logits"], plain)


def test_offloaded_weights_train_nothing_but_give_gradients_to_inputs() -> None:
    model, _ = made()
    cpu_offload(model)
    x = X.clone().requires_grad_()
    model(x)["logits"].sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


def test_models_of_a_pipeline_take_turns() -> None:
    first, first_hook = cpu_offload_with_hook(nn.Linear(4, 4), "meta")
    second, second_hook = cpu_offload_with_hook(nn.Linear(4, 4), "meta", prev_module_hook=first_hook)
    assert first.weight.device.type == "cpu"
    assert second(X).device == META
    assert second.weight.device == META
    second_hook.remove()
    assert not hasattr(second, "_hf_hook")


def test_parameters_are_made_empty_and_buffers_only_if_asked() -> None:
    with init_empty_weights():
        model = Net()
    assert {parameter.device for parameter in model.parameters()} == {META}
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}
    assert model.head.weight is model.embed.weight
    with init_empty_weights(include_buffers=True):
        assert {tensor.device for tensor in Net().state_dict().values()} == {META}
    with patch_environment(ACCELERATE_INIT_INCLUDE_BUFFERS="1"), init_empty_weights():
        assert {tensor.device for tensor in Net().state_dict().values()} == {META}
    assert {tensor.device.type for tensor in Net().state_dict().values()} == {"cpu"}


def test_empty_parameters_keep_class_flags_and_attributes() -> None:
    class Special(nn.Parameter):
        pass

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = Special(torch.ones(2), requires_grad=False)
            weight.tag = 5  # type: ignore[attr-defined]
            weight._is_hf_initialized = True  # type: ignore[attr-defined]
            self.weight = weight
            self.register_parameter("none", None)

    with init_on_device("meta"):
        module = Module()
    assert type(module.weight) is Special
    assert not module.weight.requires_grad
    assert module.weight.tag == 5
    assert module.weight._is_hf_initialized


LAYERS = [
    lambda **given: nn.Linear(3, 4, **given),
    lambda **given: nn.Embedding(5, 3, padding_idx=1, **given),
    lambda **given: nn.LayerNorm(3, **given),
    lambda **given: nn.RMSNorm(3, **given),
    lambda **given: nn.GroupNorm(1, 3, **given),
    lambda **given: nn.Conv1d(3, 4, 2, **given),
    lambda **given: nn.Conv2d(3, 4, 2, **given),
    lambda **given: nn.Conv3d(3, 4, 2, **given),
    lambda **given: nn.ConvTranspose2d(3, 4, 2, **given),
    lambda **given: nn.Bilinear(3, 4, 2, **given),
]


@pytest.mark.parametrize("make", LAYERS)
@pytest.mark.parametrize("given", [{}, {"device": None}, {"device": "cpu"}, {"dtype": torch.float16}], ids=str)
def test_every_layer_of_torch_is_made_empty_with_the_same_shapes(
    make: Callable[..., nn.Module], given: dict[str, Any]
) -> None:
    usual = make(**given)
    before = torch.get_rng_state()
    with init_empty_weights():
        empty = make(**given)
    assert torch.equal(torch.get_rng_state(), before)  # no initialiser ran
    assert all(parameter.device == META for parameter in empty.parameters())
    described = [
        [(name, type(each), each.shape, each.dtype, each.requires_grad) for name, each in model.named_parameters()]
        for model in (usual, empty)
    ]
    assert described[0] == described[1]
    assert all(parameter.device.type == "cpu" for parameter in make(**given).parameters())


def test_layers_made_empty_may_be_subclassed_and_given_values() -> None:
    class Scaled(nn.Linear):
        def __init__(self, size: int) -> None:
            super().__init__(size, size, False, None)  # all by position
            self.register_buffer("scale", torch.full((size,), 2.0))

    values = torch.rand(5, 3)
    with init_empty_weights():
        model, given = Scaled(3), nn.Embedding(5, 3, _weight=values)
        lazy = nn.LazyLinear(4)
    assert model.weight.device == given.weight.device == META
    assert model.scale.tolist() == [2.0, 2.0, 2.0]
    assert isinstance(lazy.weight, nn.UninitializedParameter)
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_the_context_ends_after_an_error() -> None:
    register, normal = nn.Module.register_parameter, nn.init.normal_
    with pytest.raises(ZeroDivisionError), init_empty_weights():
        raise ZeroDivisionError
    assert nn.Module.register_parameter is register
    assert nn.init.normal_ is normal


def test_a_parameter_under_two_names_stays_one_and_bad_names_are_refused() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = nn.Parameter(torch.ones(2))
            self.first = weight
            self.second = weight
            self.other = nn.Parameter(torch.ones(2))

    with init_empty_weights():
        module = Module()
        assert module.first is module.second
        assert module.first is not module.other
        for name in ("", "a.b", "forward"):
            with pytest.raises(KeyError):
                module.register_parameter(name, nn.Parameter(torch.ones(1)))


def test_initialisers_pass_over_what_has_no_data_and_fill_what_has() -> None:
    with init_empty_weights():
        state = torch.get_rng_state()
        layer = nn.Linear(3, 3)
        assert nn.init.normal_(layer.weight) is layer.weight
        assert torch.equal(torch.get_rng_state(), state)
        assert nn.init.ones_(torch.empty(2)).sum() == 2
        assert nn.init.constant_(tensor=torch.empty(2), val=3.0).sum() == 6


@pytest.mark.parametrize("device_map", [None, "auto", "balanced", "balanced_low_0", "sequential", *MAPS])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_checkpoint_is_loaded_and_dispatched(
    device_map: str | dict[str, str] | None, name: str, tmp_path: Path
) -> None:
    source, plain = made()
    state = {key: value.clone() for key, value in source.state_dict().items()}
    if name.endswith("safetensors"):
        del state["head.weight"]  # safetensors does not hold one tensor twice
        save_file(state, tmp_path / name)
    else:
        torch.save(state, tmp_path / name)
    hidden = [block.hidden.clone() for block in source.blocks]
    with init_empty_weights():
        model = Net().eval()
    for block, buffer in zip(model.blocks, hidden, strict=True):
        block.hidden.copy_(buffer)  # not in a state dict
    model = load_checkpoint_and_dispatch(
        model, tmp_path, device_map, max_memory={"cpu": 250}, offload_folder=tmp_path / "offload", strict=True
    )
    assert torch.equal(model(X)["logits"], plain)
    if isinstance(device_map, str):
        assert "disk" in model.hf_device_map.values()
        assert json.loads((tmp_path / "offload" / "index.json").read_text())


def test_an_unknown_word_for_a_map_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'evenly'.*'auto'"):
        load_checkpoint_and_dispatch(made()[0], tmp_path, "evenly")


def test_layers_are_cast_by_class_and_name() -> None:
    model, plain = made()
    attach_layerwise_casting_hooks(
        model,
        torch.bfloat16,
        torch.float32,
        skip_modules_pattern="^(head|embed)$",
        skip_modules_classes=(nn.BatchNorm1d,),
    )
    assert model.blocks[0].linear.weight.dtype == torch.bfloat16
    assert model.blocks[0].norm.weight.dtype == model.head.bias.dtype == torch.float32
    output = model(X)["logits"]
    assert output.dtype == torch.float32
    assert torch.allclose(output, plain, atol=0.1)
    assert model.blocks[0].linear.weight.dtype == torch.bfloat16


def test_a_dispatched_model_is_pickled() -> None:
    model, plain = made()
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert torch.equal(pickle.loads(pickle.dumps(model))(X)["logits"], plain)
