"""Patches that axolotl, ms-swift and unsloth apply to release 1.15 take effect here, or one warning names them."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest import mock

import pytest
import torch
from tests.support.logs import logged
from tests.support.processes import run_group
from tests.support.sharding import BY_CLASS, Block, Words, loss_of, make_text, make_words
from tests.support.training import fresh_accelerator, group_once, run_checks
from torch import nn
from torch.utils.data import DataLoader

import accelerate
import accelerate.accelerator
from accelerate import Accelerator, DistributedType, ParallelismConfig, PartialState, big_modeling, dispatch_model
from accelerate import data_loader as loaders
from accelerate._base.errors import ConfigurationError
from accelerate._base.passing_names import NEVER_CALLED, PASSING_NAMES
from accelerate.hooks import _accelerate_added_attributes
from accelerate.state import AcceleratorState
from accelerate.utils import AORecipeKwargs, FullyShardedDataParallelPlugin, fsdp_utils, infer_auto_device_map, modeling

PACKAGE = Path(accelerate.__file__).parent


# --- functions of modules --------------------------------------------------------------------------------------------


def test_hooks_of_a_dispatch_can_be_replaced() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with mock.patch.object(big_modeling, "attach_align_device_hook_on_blocks") as replacement:
        dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_index={}, force_hooks=True)
    assert replacement.call_args.args[0] is model
    assert not hasattr(model[1], "_hf_hook")
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert hasattr(model, "_hf_hook")


def test_a_wrapper_of_the_float8_conversion_excludes_layers() -> None:
    pytest.importorskip("torchao")
    module: Any = accelerate.accelerator
    original = module.convert_model_to_fp8_ao

    @functools.wraps(original)
    def without_gates(model: nn.Module, config: Any = None, module_filter_func: Any = None) -> None:
        original(model, config=config, module_filter_func=lambda layer, name: "gate" not in name)

    model = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("first", "gate", "body", "last")})
    with mock.patch.object(module, "convert_model_to_fp8_ao", without_gates):
        Accelerator(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()], cpu=True).prepare(model)
    assert {name: type(layer).__name__ for name, layer in model.items()} == {
        "first": "Float8Linear",
        "gate": "Linear",
        "body": "Float8Linear",
        "last": "Float8Linear",
    }


def test_a_replacement_may_call_the_original_through_another_module() -> None:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return accelerate.data_loader.prepare_data_loader(*args, **kwargs)

    calls: list[Any] = []
    with mock.patch("accelerate.accelerator.prepare_data_loader", counted):
        prepared = Accelerator(cpu=True).prepare(DataLoader([1, 2]))
    assert [len(calls), [batch.item() for batch in prepared]] == [1, [1, 2]]


@pytest.mark.parametrize("was_read", [True, False])
def test_a_patch_is_removed_completely(was_read: bool) -> None:
    original, namespace = loaders.prepare_data_loader, vars(accelerate.accelerator)
    namespace.pop("prepare_data_loader", None)
    if was_read:
        accelerate.accelerator.prepare_data_loader  # type: ignore[attr-defined]  # noqa: B018
    preparer = importlib.import_module("accelerate.session.prepared")
    with mock.patch("accelerate.accelerator.prepare_data_loader") as replacement:
        assert preparer.prepare_data_loader is replacement
        with mock.patch("accelerate.data_loader.prepare_data_loader") as second:
            assert preparer.prepare_data_loader is second
        assert loaders.prepare_data_loader is original
    assert preparer.prepare_data_loader is original
    assert accelerate.accelerator.prepare_data_loader is original  # type: ignore[attr-defined]


def test_a_replacement_that_nothing_calls_is_named_once() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with mock.patch("accelerate.accelerator.save_fsdp_model"):
                pass
        with mock.patch("accelerate.utils.fsdp_utils.save_fsdp_model"):
            pass  # programs call it there themselves
    assert [warning.filename for warning in caught] == [mock.__file__]
    assert "accelerate.accelerator.save_fsdp_model" in str(caught[0].message)


def test_the_list_of_names_that_nothing_calls_is_exact() -> None:
    used: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name):
                    used.add(name)
                case ast.ImportFrom(names=names):
                    used |= {alias.name for alias in names if alias.asname}
    found = set()
    for module, homes in PASSING_NAMES.items():
        for name in " ".join(homes.values()).split():
            value = getattr(importlib.import_module(module), name)
            if isinstance(value, FunctionType | type) and not {name, value.__name__} & used:
                found.add(name)
    assert found == set(NEVER_CALLED.split())


# --- names that other libraries read ---------------------------------------------------------------------------------


def test_methods_that_a_dispatch_adds_are_listed() -> None:
    assert {"to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa"} <= set(_accelerate_added_attributes)
    model = dispatch_model(nn.Sequential(nn.Linear(2, 2)), {"": "cpu"}, force_hooks=True)
    added = {name for name in vars(model) if callable(vars(model)[name]) and name in dir(nn.Module)} - {"forward"}
    assert added <= set(_accelerate_added_attributes)


def test_dtypes_are_found_by_name() -> None:
    find: Callable[[Any], torch.dtype] = modeling._get_proper_dtype  # type: ignore[attr-defined]
    assert [find("float16"), find("torch.bfloat16"), find(torch.int8)] == [torch.float16, torch.bfloat16, torch.int8]


def test_a_filter_of_the_logger_hides_messages() -> None:
    logger: logging.Logger = modeling.logger  # type: ignore[attr-defined]
    assert logger is logging.getLogger("accelerate.utils.modeling")
    memory: dict[int | str, int | str] = {"cpu": "1GB", 97: "1GB"}
    with logged("97"):
        infer_auto_device_map(nn.Linear(2, 2), max_memory=memory)

    def hide(record: logging.LogRecord) -> bool:
        return "97" not in record.getMessage()

    logger.addFilter(hide)
    try:
        with logged("97", times=0):
            infer_auto_device_map(nn.Linear(2, 2), max_memory=memory)
    finally:
        logger.removeFilter(hide)


# --- methods ---------------------------------------------------------------------------------------------------------


def test_the_source_of_prepare_runs_in_another_module() -> None:
    source = inspect.getsource(Accelerator.prepare).split("\n")
    indent = source[0].find("def")
    namespace: dict[str, Any] = {}
    exec("\n".join(line[indent:] for line in source), namespace)
    with mock.patch.object(Accelerator, "prepare", namespace["prepare"]):
        assert type(Accelerator(cpu=True).prepare(torch.optim.SGD([torch.ones(1)]))).__name__ == "AcceleratedOptimizer"


def run_without_a_group() -> tuple[int, str, bool]:
    def no_group(self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None) -> Any:
        return None, DistributedType.NO

    PartialState._prepare_backend = no_group  # type: ignore[method-assign]
    accelerator = Accelerator(cpu=True)
    return accelerator.num_processes, accelerator.distributed_type.value, torch.distributed.is_initialized()


@pytest.mark.multiprocess
def test_each_process_runs_alone_where_no_backend_is_chosen() -> None:
    assert run_group(run_without_a_group, 2) == [(1, "NO", False)] * 2


# --- axes ------------------------------------------------------------------------------------------------------------


def test_sizes_are_one_with_the_attributes() -> None:
    config = ParallelismConfig(tp_size=2)
    config._sizes["dp_shard"] = 4
    config.cp_size = 3
    assert (config.dp_shard_size, config._sizes["cp"], config.total_size) == (4, 3, 24)
    assert config._get_mesh() == (("dp_shard", "cp", "tp"), (4, 3, 2))
    assert ParallelismConfig()._get_mesh() == ()
    config._set_size("tp", 8)
    assert config.tp_size == 8
    with pytest.raises(ConfigurationError, match="'xx'"):
        config._set_size("xx", 2)
    config._sizes = {**config._sizes, "cp": 1}
    assert config.cp_size == 1


@pytest.fixture
def added_axis(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    originals = {name: vars(ParallelismConfig).get(name) for name in AXIS_PATCHES}
    add_axis([])
    monkeypatch.setenv("PARALLELISM_CONFIG_EP_SIZE", "2")
    yield
    for name, value in originals.items():
        if value is None:
            delattr(ParallelismConfig, name)
        else:
            setattr(ParallelismConfig, name, value)


def axes_of(*names: str) -> property:
    return property(lambda self: [name for name in names if self._sizes[name] > 1])


AXIS_PATCHES: dict[str, Any] = {
    "total_size": property(lambda self: functools.reduce(int.__mul__, self._sizes.values())),
    "dp_dim_names": axes_of("dp_replicate", "ep", "dp_shard"),
    "dp_shard_cp_dim_names": axes_of("ep", "dp_shard", "cp"),
    "dp_cp_dim_names": axes_of("dp_replicate", "ep", "dp_shard", "cp"),
    "non_dp_dim_names": axes_of("tp", "cp", "sp"),
    "__post_init__": None,
    "_get_mesh": None,
    "_validate_accelerator": None,
}


def add_axis(validated: list[Any]) -> None:
    """Add an axis of experts to `ParallelismConfig`, as axolotl 0.19 does."""
    post_init = ParallelismConfig.__post_init__

    def with_experts(self: Any) -> None:
        post_init(self)
        self.ep_size = int(os.environ.get("PARALLELISM_CONFIG_EP_SIZE", "1"))
        self._sizes["ep"] = self.ep_size

    def mesh(self: Any) -> Any:
        order = ("dp_replicate", "dp_shard", "cp", "ep", "sp", "tp")
        sizes = {name: self._sizes[name] for name in self.active_mesh_dims}
        return tuple(zip(*sorted(sizes.items(), key=lambda item: order.index(item[0])), strict=True))

    methods = {
        "__post_init__": with_experts,
        "_get_mesh": mesh,
        "_validate_accelerator": lambda self, accelerator: validated.append(accelerator.num_processes),
    }
    for name, value in {**AXIS_PATCHES, **methods}.items():
        setattr(ParallelismConfig, name, value)


@pytest.mark.usefixtures("added_axis")
def test_an_axis_of_another_library_counts() -> None:
    config = ParallelismConfig(dp_shard_size=3)
    assert (config.total_size, config.sizes["ep"]) == (6, 2)
    assert config._get_mesh() == (("dp_shard", "ep"), (3, 2))
    config.fit(6)
    with pytest.raises(ConfigurationError, match="ep_size=2"):
        config.fit(3)


# --- sharded runs ----------------------------------------------------------------------------------------------------


def sharded(**sizes: int) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="FULL_STATE_DICT", transformer_cls_names_to_wrap=["Block"], **BY_CLASS
    )
    return fresh_accelerator(
        cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(**sizes) if sizes else None
    )


def train(accelerator: Accelerator) -> tuple[float, Any]:
    model = make_words()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for _ in range(2):
        loss = loss_of(model, *make_text()[:4])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), model


def sharding_is_replaced() -> list[Any]:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    def prepare_model(accelerator: Any, model: nn.Module) -> nn.Module:
        seen.append((type(accelerator), accelerator.state.fsdp_plugin.fsdp_version, accelerator.num_processes))
        for module in model.modules():
            if isinstance(module, Block):
                fully_shard(module)
        return fully_shard(model)

    def prepare(self: Accelerator, *args: Any) -> Any:
        seen.append([type(arg).__name__ for arg in args])
        return original(self, *args)

    seen: list[Any] = []
    expected, _ = train(sharded())
    original = Accelerator._prepare_fsdp2
    with (
        mock.patch.object(accelerate.accelerator, "fsdp2_prepare_model", prepare_model),
        mock.patch.object(Accelerator, "_prepare_fsdp2", prepare),
    ):
        loss, model = train(sharded())
    return [seen, loss == expected, isinstance(model, FSDPModule), isinstance(model, Words)]


def one_model_is_sharded() -> bool:
    prepared = sharded()._prepare_fsdp2(make_words())
    return isinstance(prepared, tuple) and type(prepared[0].head.weight).__name__ == "DTensor"


def state_dicts_are_replaced() -> list[Any]:
    import tempfile

    from torch.distributed.tensor import DTensor

    module: Any = fsdp_utils
    get, put = module._get_model_state_dict, module._set_model_state_dict
    accelerator = sharded()
    _, model = train(accelerator)
    plugin = accelerator.state.fsdp_plugin
    seen: list[Any] = []

    def get_doubled(model: nn.Module, adapter_only: bool = False, sd_options: Any = None) -> Any:
        seen.append(sd_options.full_state_dict)
        return {name: 2 * value for name, value in get(model, adapter_only, sd_options).items()}

    def put_negative(model: nn.Module, state_dict: Any, adapter_only: bool = False, sd_options: Any = None) -> Any:
        return put(model, {name: -value for name, value in state_dict.items()}, adapter_only, sd_options)

    before = {name: value.full_tensor() for name, value in model.state_dict().items() if isinstance(value, DTensor)}
    folder = accelerate.utils.broadcast_object_list([tempfile.mkdtemp()])[0]
    with mock.patch.object(fsdp_utils, "_get_model_state_dict", get_doubled):
        fsdp_utils.save_fsdp_model(plugin, accelerator, model, folder)
    with mock.patch.object(fsdp_utils, "_set_model_state_dict", put_negative):
        fsdp_utils.load_fsdp_model(plugin, accelerator, model, folder)
    after = {name: value.full_tensor() for name, value in model.state_dict().items() if name in before}
    seen.append(all(torch.equal(after[name], -2 * value) for name, value in before.items()))
    put(model, {name: value / 2 for name, value in model.state_dict().items()})
    kept = {name: value.full_tensor() for name, value in model.state_dict().items() if name in before}
    return [*seen, all(torch.equal(kept[name], -value) for name, value in before.items())]


def an_axis_is_added() -> list[Any]:
    """Runs last: what it patches stays in this process."""

    def with_experts(*args: Any, **kwargs: Any) -> Any:
        mesh = kwargs.pop("torch_device_mesh")
        share = {"num_processes": mesh["ep"].size(), "process_index": mesh.get_local_rank("ep")}
        return prepare(*args, **{**kwargs, **share})

    prepare = loaders.prepare_data_loader
    loaders.prepare_data_loader = with_experts
    accelerate.accelerator.prepare_data_loader = with_experts  # type: ignore[attr-defined]
    expected, _ = train(sharded())
    validated: list[Any] = []
    add_axis(validated)
    os.environ["PARALLELISM_CONFIG_EP_SIZE"] = "2"
    accelerator = sharded(dp_replicate_size=1)
    mesh = AcceleratorState().device_mesh
    loss, model = train(accelerator)
    loader = accelerator.prepare(DataLoader(range(8), batch_size=2))  # type: ignore[arg-type]
    return [
        validated,
        mesh.mesh_dim_names,
        model.head.weight.device_mesh.size(),
        loss == expected,
        [batch.tolist() for batch in loader],
    ]


def context_parallelism_is_replaced() -> list[Any]:
    from contextlib import contextmanager

    def prepare(self: Any, *args: Any) -> Any:
        @contextmanager
        def nothing(buffers: Any = None, buffer_seq_dims: Any = None, no_restore_buffers: Any = None) -> Iterator[None]:
            seen.append((len(buffers), buffer_seq_dims))
            yield

        self._cp_context = nothing
        return args

    seen: list[Any] = []
    tokens = torch.arange(8).reshape(1, 8)
    accelerator = sharded(cp_size=2)
    with accelerator.maybe_context_parallel([tokens], [1], {tokens}):
        lengths = [tokens.shape[1]]
    with mock.patch.object(Accelerator, "_prepare_cp", prepare):
        accelerator = sharded(cp_size=2)
        accelerator.prepare(make_words())
        tokens = torch.arange(8).reshape(1, 8)
        with accelerator.maybe_context_parallel([tokens], [1]):
            lengths.append(tokens.shape[1])
    return [lengths, seen]


CHECKS: tuple[Callable[[], Any], ...] = (
    sharding_is_replaced,
    one_model_is_sharded,
    state_dicts_are_replaced,
    context_parallelism_is_replaced,
    an_axis_is_added,
)


def every_check() -> dict[str, Any]:
    return run_checks(*CHECKS)


def results(check: Callable[[], Any]) -> list[Any]:
    return [rank[check.__name__] for rank in group_once(every_check, 2)]


@pytest.mark.multiprocess
def test_a_replaced_function_shards_the_model() -> None:
    seen = [["Words", "AdamW"], (Accelerator, 2, 2)]
    assert results(sharding_is_replaced) == [[seen, True, True, True]] * 2


@pytest.mark.multiprocess
def test_one_model_is_sharded_by_the_private_method() -> None:
    assert results(one_model_is_sharded) == [True, True]


@pytest.mark.multiprocess
def test_replaced_functions_give_and_take_the_weights() -> None:
    assert results(state_dicts_are_replaced) == [[True, True, True]] * 2


@pytest.mark.multiprocess
def test_a_replaced_method_decides_how_sequences_are_split() -> None:
    assert results(context_parallelism_is_replaced) == [[[4, 8], [(1, [1])]]] * 2


@pytest.mark.multiprocess
def test_a_mesh_with_an_axis_of_another_library_trains() -> None:
    batches = [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert results(an_axis_is_added) == [[[2], ("ep",), 2, True, batches[rank]] for rank in range(2)]
