"""Hooks on modules: put on, run, joined, taken off."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import fx, nn

from accelerate.hooks import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)

META = torch.device("meta")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers."""
        return self.linear2(self.batchnorm(self.linear1(x)))


class AddOne(ModelHook):
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (args[0] + 1, *args[1:]), kwargs


class TimesTwo(ModelHook):
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output * 2


class Recorder(ModelHook):
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def init_hook(self, module: Any) -> Any:
        self.log.append(f"init {self.name}")
        return module

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        self.log.append(f"pre {self.name}")
        return args, kwargs

    def post_forward(self, module: Any, output: Any) -> Any:
        self.log.append(f"post {self.name}")
        return output

    def detach_hook(self, module: Any) -> Any:
        self.log.append(f"detach {self.name}")
        return module


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def test_a_hook_is_put_on_and_taken_off(model: Net) -> None:
    x = torch.randn(2, 3)
    plain, hook = model(x), AddOne()
    assert add_hook_to_module(model, hook) is model
    assert model._hf_hook is hook
    assert hasattr(model, "_old_forward")
    assert model.forward.__name__ == "forward"
    assert model.forward.__doc__ == "Run the layers."
    assert not torch.allclose(model(x), plain)
    assert torch.equal(model(x - 1), model._old_forward(x - 1 + 1))
    assert remove_hook_from_module(model) is model
    assert torch.equal(model(x), plain)
    assert not {"_hf_hook", "_old_forward", "forward"} & model.__dict__.keys()


def test_hooks_replace_each_other_or_join(model: Net) -> None:
    x = torch.randn(2, 3)
    plain = model(x)
    add_hook_to_module(model, TimesTwo())
    add_hook_to_module(model, TimesTwo())
    assert torch.allclose(model(x), 2 * plain)
    add_hook_to_module(model, TimesTwo(), append=True)
    assert isinstance(model._hf_hook, SequentialHook)
    assert len(model._hf_hook.hooks) == 2
    assert torch.allclose(model(x), 4 * plain)
    remove_hook_from_module(model)
    assert torch.allclose(model(x), plain)


def test_the_phases_come_in_order(model: Net) -> None:
    log: list[str] = []
    add_hook_to_module(model, SequentialHook(Recorder(log, "a"), Recorder(log, "b")))
    model(torch.randn(2, 3))
    remove_hook_from_module(model)
    assert log == [f"{phase} {name}" for phase in ("init", "pre", "post", "detach") for name in "ab"]


def test_appending_prepares_only_the_new_hook(model: Net) -> None:
    log: list[str] = []
    add_hook_to_module(model, Recorder(log, "a"))
    add_hook_to_module(model, Recorder(log, "b"), append=True)
    assert log == ["init a", "init b"]


def test_no_grad_is_kept(model: Net) -> None:
    hook = ModelHook()
    hook.no_grad = True
    add_hook_to_module(model, hook)
    assert not model(torch.randn(2, 3)).requires_grad


def test_a_forward_of_the_instance_comes_back() -> None:
    layer = nn.Linear(2, 2)
    layer.forward = lambda x: x + 5  # type: ignore[method-assign]
    add_hook_to_module(layer, TimesTwo())
    assert torch.equal(layer(torch.zeros(1)), torch.full((1,), 10.0))
    remove_hook_from_module(layer)
    assert torch.equal(layer(torch.zeros(1)), torch.full((1,), 5.0))


def test_hooked_modules_are_copied_and_unhooked_ones_pickled(model: Net) -> None:
    add_hook_to_module(model, TimesTwo())
    twin = copy.deepcopy(model)
    x = torch.randn(2, 3)
    with torch.no_grad():
        twin.linear2.bias += 1
    assert torch.allclose(twin(x), model(x) + 2, atol=1e-6)
    remove_hook_from_module(model)
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


def test_a_graph_module_is_hooked(model: Net) -> None:
    traced = fx.symbolic_trace(model)
    x = torch.randn(2, 3)
    plain = traced(x)
    add_hook_to_module(traced, TimesTwo())
    assert torch.allclose(traced(x), 2 * plain)
    remove_hook_from_module(traced)
    assert torch.equal(traced(x), plain)


def test_all_hooks_of_a_tree_are_removed(model: Net) -> None:
    for module in model.modules():
        add_hook_to_module(module, ModelHook())
    remove_hook_from_module(model)
    assert hasattr(model.linear1, "_hf_hook")
    assert remove_hook_from_submodules(model) is None
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_offloaded_weights_visit_only_for_the_forward(model: Net, offload_buffers: bool) -> None:
    x, during = torch.randn(2, 3), list[str]()
    plain, state = model(x), copy.deepcopy(model.state_dict())
    attach_align_device_hook(model, "cpu", offload=True, offload_buffers=offload_buffers)
    old = model.batchnorm._old_forward
    model.batchnorm._old_forward = lambda y: (during.append(model.batchnorm.weight.device.type), old(y))[1]
    assert {parameter.device for parameter in model.parameters()} == {META}
    assert (model.batchnorm.running_mean.device == META) is offload_buffers
    assert torch.equal(model(x), plain)
    assert during == ["cpu"]
    assert model.batchnorm.weight.device == META
    model.batchnorm._old_forward = old
    remove_hook_from_submodules(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(x), plain)


def test_weights_come_from_the_map_of_the_whole_model(model: Net) -> None:
    x = torch.randn(2, 3)
    plain = model(x)
    weights = {f"net.{name}": value.clone() for name, value in model.state_dict().items()}
    attach_align_device_hook(model, "cpu", offload=True, weights_map=weights, module_name="net")
    assert torch.equal(model(x), plain)
    weights["net.linear2.bias"] += 1
    assert torch.allclose(model(x), plain + 1)


def test_a_preloaded_module_brings_its_children(model: Net) -> None:
    class Shortcut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.inner.weight  # the child is not called, so its own hook would not run

    outer = nn.Sequential(Shortcut())
    x = torch.randn(2, 3)
    plain = outer(x)
    attach_align_device_hook(outer, "cpu", offload=True, preload_module_classes=["Shortcut"])
    assert not hasattr(outer[0].inner, "_hf_hook")
    assert outer[0].inner.weight.device == META
    assert torch.equal(outer(x), plain)


def test_a_module_with_two_parents_gets_one_hook() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    x = torch.randn(1, 2)
    plain = model(x)
    attach_align_device_hook(model, "cpu", offload=True)
    assert isinstance(shared._hf_hook, AlignDevicesHook)
    assert torch.equal(model(x), plain)


def test_inputs_go_to_the_device_of_the_module_and_outputs_back(model: Net) -> None:
    add_hook_to_module(model.linear1, AlignDevicesHook(execution_device="meta"))
    assert model.linear1.weight.device == META
    assert model.linear1(torch.randn(2, 3)).device == META

    class Echo(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.zeros(1)  # made on another device than the input

    echo = Echo()
    add_hook_to_module(echo, AlignDevicesHook(io_same_device=True))
    assert echo(torch.ones(1, device="meta")).device == META


def test_skipped_arguments_stay() -> None:
    class Probe(nn.Module):
        def forward(self, **kwargs: torch.Tensor) -> dict[str, torch.device]:
            return {name: value.device for name, value in kwargs.items()}

    probe = Probe()
    add_hook_to_module(probe, AlignDevicesHook(execution_device="meta", skip_keys="cache"))
    assert probe(cache=torch.ones(1), x=torch.ones(1)) == {"cache": torch.device("cpu"), "x": META}


def test_blocks_get_their_own_devices(model: Net) -> None:
    offload = {"linear1": False, "batchnorm": True, "linear2": False}
    attach_align_device_hook_on_blocks(model, dict.fromkeys(offload, "meta"), offload)
    assert isinstance(model._hf_hook, AlignDevicesHook)
    assert model._hf_hook.io_same_device
    assert model.linear1._hf_hook.place_submodules
    assert not model.linear1._hf_hook.offload
    assert model.batchnorm._hf_hook.offload
    assert model.linear1(torch.ones(2, 3)).device == META


def test_one_device_for_all_blocks(model: Net) -> None:
    attach_align_device_hook_on_blocks(model, "meta")
    assert {value.device for value in model.state_dict().values()} == {META}
    assert not hasattr(model.linear1, "_hf_hook")


def test_execution_hooks_fill_the_gaps(model: Net) -> None:
    log: list[str] = []
    outer = nn.Sequential(model, nn.ReLU())
    add_hook_to_module(model.linear1, Recorder(log, "own"))
    attach_execution_device_hook(outer, "cpu")
    assert isinstance(model.linear1._hf_hook, Recorder)
    assert isinstance(model.linear2._hf_hook, AlignDevicesHook)
    assert isinstance(outer._hf_hook, AlignDevicesHook)
    assert not hasattr(outer[1], "_hf_hook")  # nothing in it has to be where its input is
    other = nn.Sequential(Net(), nn.ReLU())
    attach_execution_device_hook(other, "cpu", preload_module_classes=["Net"])
    assert hasattr(other[0], "_hf_hook")
    assert not hasattr(other[0].linear1, "_hf_hook")


def test_a_tied_weight_is_shared_while_two_modules_use_it() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = nn.Parameter(torch.ones(2, 2))
            self.inner = nn.Linear(2, 2, bias=False)
            self.inner.weight = self.outer
            self.seen: list[bool] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = self.inner
            hook = inner._hf_hook
            hook.pre_forward(inner)
            self.seen.append(inner.weight is self.outer)
            hook.post_forward(inner, None)
            return inner(x @ self.outer)

    model = Twice()
    weight = model.outer.detach()
    cache: dict[int, dict[torch.device, torch.Tensor]] = {weight.data_ptr(): {}}
    attach_align_device_hook(
        model, "cpu", offload=True, weights_map={"outer": weight, "inner.weight": weight}, tied_params_map=cache
    )
    assert torch.equal(model(torch.ones(1, 2)), torch.full((1, 2), 4.0))
    assert model.seen == [True]
    assert cache == {weight.data_ptr(): {}}  # nothing stays on the device


def test_a_model_waits_on_the_cpu_and_makes_room() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    hook = CpuOffload(execution_device="cpu")
    add_hook_to_module(first, hook)
    handle = UserCpuOffloadHook(first, hook)
    assert first(torch.ones(1, 2)).device.type == "cpu"
    add_hook_to_module(second, CpuOffload(execution_device="meta", prev_module_hook=handle))
    assert second.weight.device.type == "cpu"
    assert second(torch.ones(1, 2)).device == META
    assert second.weight.device == META
    handle.offload()
    handle.remove()
    assert not hasattr(first, "_hf_hook")


def test_weights_are_stored_small_and_computed_large() -> None:
    layer, seen = nn.Linear(2, 2), list[torch.dtype]()
    add_hook_to_module(layer, LayerwiseCastingHook(torch.float8_e4m3fn, torch.float32, non_blocking=False))
    layer._old_forward = lambda x: (seen.append(layer.weight.dtype), nn.functional.linear(x, layer.weight))[1]
    assert layer.weight.dtype == torch.float8_e4m3fn
    assert layer(torch.ones(1, 2)).dtype == torch.float32
    assert seen == [torch.float32]
    assert layer.weight.dtype == torch.float8_e4m3fn


def test_a_compiled_model_keeps_its_hooks(model: Net) -> None:
    x = torch.randn(2, 3)
    plain = model(x)
    attach_align_device_hook(model, "cpu", offload=True)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        assert torch.allclose(compiled(x), plain)
        assert torch.allclose(compiled(x), plain)
    assert model.linear1.weight.device == META
    torch.compiler.reset()


@pytest.mark.parametrize("offload", [True, {"linear1": True, "linear2": False}])
def test_blocks_are_offloaded_on_one_device(offload: bool | dict[str, bool]) -> None:
    model, inputs = Net().eval(), torch.rand(2, 3)
    expected = model(inputs)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    attach_align_device_hook_on_blocks(model, "cpu", offload, weights_map=weights)
    assert model.linear1.weight.device == META
    assert (model.linear2.weight.device == META) is (offload is True)
    assert torch.equal(model(inputs), expected)
    assert model.linear1.weight.device == META


def test_a_forward_that_fails_sends_weights_back_with_several_hooks() -> None:
    layer = nn.Linear(3, 3)
    add_hook_to_module(layer, AlignDevicesHook(execution_device="cpu", offload=True))
    add_hook_to_module(layer, AddOne(), append=True)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        layer(torch.rand(2, 5))
    assert layer.weight.device == META
    assert layer(torch.rand(2, 3)).shape == (2, 3)


def test_a_hook_shows_how_it_was_made() -> None:
    hook = AlignDevicesHook(execution_device="cpu", offload=True, skip_keys="cache")
    assert repr(hook) == (
        "AlignDevicesHook(execution_device='cpu', offload=True, io_same_device=False, offload_buffers=False, "
        "place_submodules=False, skip_keys='cache')"
    )
