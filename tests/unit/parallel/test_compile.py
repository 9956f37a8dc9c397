"""Models that are really compiled: dynamo's own counters say so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.processes import run_group
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from accelerate import Accelerator
from accelerate.config.env import patch_environment
from accelerate.config.plugins.training import TorchDynamoPlugin
from accelerate.parallel.compile import compile_regions, compile_regions_fsdp2, has_repeated_blocks
from accelerate.parallel.unwrap import extract_model_from_parallel, has_compiled_regions, is_compiled_module

# torch's own tracer looks at the gradient of an activation, where warnings are not errors for it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Model(torch.nn.Module):
    """Three blocks of one class, and something around them."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = torch.nn.Linear(2, 4)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.outlet = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.outlet(x)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def graphs() -> tuple[int, int]:
    """Return how many graphs were compiled, and how many calls of modules or functions were captured."""
    return counters["stats"]["unique_graphs"], counters["stats"]["calls_captured"]


def train(accelerator: Accelerator, model: torch.nn.Module, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(3, 2)).square().mean())
        optimizer.step()


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def trained_eagerly(model: Model) -> torch.Tensor:
    import copy

    twin = copy.deepcopy(model)
    train(Accelerator(), twin)
    return weights(twin)


def test_a_plugin_compiles_the_whole_model() -> None:
    model = Model()
    expected = trained_eagerly(model)
    accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin(backend="aot_eager"))  # type: ignore[arg-type]
    prepared = accelerator.prepare(model)
    assert is_compiled_module(prepared)
    assert accelerator.prepare(prepared) is prepared
    assert graphs() == (0, 0)
    train(accelerator, prepared)
    assert graphs()[0] == 1
    torch.testing.assert_close(weights(model), expected)
    assert accelerator.unwrap_model(prepared) is prepared
    assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is model


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, when it loads its compiler
def test_inductor_by_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "0")  # the compiler sets it and leaves it
    model = Model()
    expected = trained_eagerly(model)
    accelerator = Accelerator(dynamo_backend="inductor")
    prepared = accelerator.prepare(model)
    train(accelerator, prepared)
    assert graphs()[0] == 1
    assert counters["inductor"]  # the real compiler ran
    torch.testing.assert_close(weights(model), expected, rtol=1e-4, atol=1e-5)


def test_a_model_of_torch_itself_is_compiled_too() -> None:
    """`Module.compile()` would silently stay eager for a forward that lives in torch.nn."""
    accelerator = Accelerator(dynamo_backend="aot_eager")
    prepared = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()))
    train(accelerator, prepared)
    assert graphs()[0] == 1


@pytest.mark.parametrize("options", [{}, {"backend": "no"}, {"backend": "aot_eager", "disable": True}])
def test_no_compiler(options: dict[str, Any]) -> None:
    model = Model()
    accelerator = Accelerator(dynamo_plugin=TorchDynamoPlugin(**options))
    assert accelerator.prepare(model) is model


def test_the_environment_asks_for_a_compiler() -> None:
    with patch_environment(accelerate_dynamo_backend="aot_eager", accelerate_dynamo_use_regional_compilation="true"):
        prepared = Accelerator().prepare(Model())
    assert has_compiled_regions(prepared)


def test_blocks_share_one_compilation() -> None:
    model = Model()
    expected = trained_eagerly(model)
    names = list(model.state_dict())
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)  # type: ignore[arg-type]
    accelerator = Accelerator(dynamo_plugin=plugin)
    prepared = accelerator.prepare(model)
    assert has_compiled_regions(prepared)
    assert not is_compiled_module(prepared)
    assert not has_compiled_regions(model)  # the user's own stays as it was
    assert [is_compiled_module(block) for block in prepared.blocks] == [True] * 3
    assert [id(left) for left in prepared.parameters()] == [id(right) for right in model.parameters()]
    train(accelerator, prepared)
    assert graphs()[0] == 3  # one for the three blocks, and one for each layer around them
    torch.testing.assert_close(weights(model), expected)
    assert list(model.state_dict()) == names
    assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is model
    assert accelerator.unwrap_model(prepared) is prepared
    assert accelerator.prepare(prepared) is prepared


def test_regions_with_autocast() -> None:
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)  # type: ignore[arg-type]
    accelerator = Accelerator(dynamo_plugin=plugin, mixed_precision="bf16")
    model = Model()
    prepared = accelerator.prepare(model)
    outputs = prepared(torch.ones(1, 2))
    assert outputs.dtype is torch.float32
    assert graphs()[0] == 3  # the forward that is wrapped runs the compiled modules, not the original ones


def test_a_model_without_repeated_blocks_is_compiled_as_a_whole() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert not has_repeated_blocks(model)
    compiled = compile_regions(model, backend="aot_eager")
    assert is_compiled_module(compiled)
    compiled(torch.ones(1, 2))
    assert graphs()[0] == 1


def test_the_modes_of_a_twin_and_its_original() -> None:
    model = Model()
    twin = compile_regions(model, backend="aot_eager")
    twin.eval()
    assert not any(block.training for block in twin.modules())
    assert not model.blocks[0].training  # the blocks are the same objects


def train_in_a_group(regional: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)  # type: ignore[arg-type]
    accelerator = Accelerator(dynamo_plugin=plugin)
    prepared = accelerator.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        accelerator.backward(prepared(torch.ones(2, 2) * (accelerator.process_index + 1)).square().mean())
        optimizer.step()
    inner = accelerator.unwrap_model(prepared)
    bare = accelerator.unwrap_model(prepared, keep_torch_compile=False)
    wrapper = prepared.get_submodule("_orig_mod") if is_compiled_module(prepared) else prepared
    return {
        "graphs": graphs()[0],
        "ddp": isinstance(wrapper, DistributedDataParallel),
        "still": isinstance(prepared, OptimizedModule) is not regional,
        "inner": is_compiled_module(inner) or has_compiled_regions(inner),
        "inner_has_no_wrapper": not any(isinstance(child, DistributedDataParallel) for child in inner.modules()),
        "bare": bare is model,
        "parameters": [id(entry) for entry in inner.parameters()] == [id(entry) for entry in model.parameters()],
        "weights": weights(model).tolist(),
    }


def expected_in_a_group() -> list[float]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (sum(model(torch.ones(2, 2) * (rank + 1)).square().mean() for rank in range(2)) / 2).backward()
        optimizer.step()
    return weights(model).tolist()


@pytest.mark.parametrize("regional", [False, True])
def test_training_a_compiled_model_in_a_group(regional: bool) -> None:
    # Not forked: other tests may have started autograd's threads.
    for found in run_group(train_in_a_group, 2, regional, start_method="spawn"):
        assert found.pop("graphs") >= 1
        torch.testing.assert_close(torch.tensor(found.pop("weights")), torch.tensor(expected_in_a_group()))
        assert found == dict.fromkeys(found, True)


def test_children_are_unwrapped_on_request() -> None:
    inner = torch.nn.Linear(2, 2)
    outer = torch.nn.Sequential(torch.nn.DataParallel(inner))
    assert isinstance(extract_model_from_parallel(outer)[0], torch.nn.DataParallel)  # type: ignore[index]
    assert extract_model_from_parallel(outer, recursive=True)[0] is inner  # type: ignore[index]


def test_blocks_of_an_inner_model_are_compiled() -> None:
    outer = torch.nn.Sequential(Model(), torch.nn.Identity())
    compiled = compile_regions(outer, backend="eager")
    assert [is_compiled_module(block) for block in compiled[0].blocks] == [True] * 3
    assert not has_compiled_regions(outer)
    assert compiled[0].blocks[0]._orig_mod is outer[0].blocks[0]


class Deep(torch.nn.Module):
    """Blocks in an inner model, a container without a forward, and single modules."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Block()
        self.inner = Model()
        self.mixed = torch.nn.ModuleList([torch.nn.Linear(1, 4), Block()])
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for module in self.mixed:
            x = module(x)
        return self.table(x) * self.scale


COMPILED = {
    *(
        "table",
        "inner.inlet",
        "inner.blocks.0",
        "inner.blocks.1",
        "inner.blocks.2",
        "inner.outlet",
        "mixed.0",
        "mixed.1",
    ),
}


def test_modules_outside_of_the_blocks_are_compiled_too() -> None:
    model = Deep()
    compiled = compile_regions(model, backend="aot_eager")
    assert {name for name, module in compiled.named_modules() if isinstance(module, OptimizedModule)} == COMPILED
    assert not any(isinstance(module, OptimizedModule) for module in model.modules())
    torch.testing.assert_close(compiled(torch.ones(3, 2)), model(torch.ones(3, 2)))
    # The blocks of one class share a graph, also outside of their list; each layer of torch has its own.
    assert graphs()[0] == 4


class Shared(torch.nn.Module):
    """The same block three times, a module with two names, and one that was removed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block()] * 3)
        self.outlet = self.last = torch.nn.Linear(4, 4)
        self.dropout: torch.nn.Module | None = torch.nn.Dropout()
        self.dropout = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.last(self.outlet(x))
        return x if self.dropout is None else self.dropout(x)


def test_shared_modules_keep_all_their_names() -> None:
    model, x = Shared(), torch.ones(2, 4)
    compiled = compile_regions(model, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))
    assert compiled.blocks[0] is compiled.blocks[2]
    assert compiled.outlet is compiled.last
    assert len(list(compiled.parameters())) == len(list(model.parameters()))
    assert len(compiled.state_dict()) == len(model.state_dict())


def test_modules_outside_of_the_blocks_are_compiled_in_place() -> None:
    model = Deep()
    expected = model(torch.ones(3, 2))
    assert compile_regions_fsdp2(model, backend="aot_eager") is model
    assert {name for name, module in model.named_modules() if module._compiled_call_impl is not None} == COMPILED
    torch.testing.assert_close(model(torch.ones(3, 2)), expected)
    assert graphs()[0] > 0
    whole = Block()
    assert compile_regions_fsdp2(whole, backend="aot_eager")._compiled_call_impl is not None
    assert whole.linear._compiled_call_impl is None
