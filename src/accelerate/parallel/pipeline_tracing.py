"""A model traced for one shape of chunk, and cut into stages that hand tensors to the next."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.distributed.pipelining import SplitPoint, pipeline

from accelerate._base.errors import ConfigurationError
from accelerate.collectives.nested import leaves, recursively_apply
from accelerate.runtime.torch_private import traced_by_running

TensorSpec: TypeAlias = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_MODEL = "model"
_LOST_CONSTANT = "fake tensor in the exported program constant"


class TensorSlot:
    """The place of a tensor in a structure; not a dataclass, which would be taken for a container."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"<{self.index}>"


@dataclass(frozen=True)
class Structure:
    """Nested data with slots in the places of its tensors."""

    data: Any

    def unflatten(self, tensors: Sequence[Any]) -> Any:
        """Return the data with the tensors in their places."""
        return recursively_apply(
            lambda slot: tensors[slot.index], self.data, test_type=lambda value: isinstance(value, TensorSlot)
        )


def flatten(data: Any, what: str) -> tuple[list[torch.Tensor], Structure]:
    """Return the tensors of nested data, and its structure.

    Args:
        what: What the data is, for the error.

    Raises:
        ConfigurationError: If it holds objects that are neither tensors nor plain values.
    """
    for path, leaf in leaves(data):
        if not isinstance(leaf, (torch.Tensor, *_CONSTANTS)):
            raise ConfigurationError(
                f"{what}{path} is a {type(leaf).__name__}, which cannot travel between the stages of a pipeline: they "
                "exchange tensors, and plain values that never change. Leave it out; a cache of a Transformers model "
                "is left out by use_cache=False."
            )
    tensors: list[torch.Tensor] = []

    def put(tensor: torch.Tensor) -> TensorSlot:
        tensors.append(tensor)
        return TensorSlot(len(tensors) - 1)

    return tensors, Structure(recursively_apply(put, data))


@dataclass(frozen=True)
class ChunkSpec:
    """What a chunk of the inputs looks like; models are traced once for each.

    Args:
        specs: Shape and dtype of each tensor.
        structure: How the positional and keyword arguments are put together from them.
        rows: The samples of a chunk.
        cut: Which tensors have these rows; the others go whole into every chunk.
        training: Whether the model is in training mode.
    """

    specs: tuple[TensorSpec, ...]
    structure: Structure
    rows: int
    cut: tuple[bool, ...]
    training: bool

    @property
    def key(self) -> str:
        """Return a text that is equal for equal chunks."""
        return repr(self)


class _FlatModel(nn.Module):
    """A model that takes and gives flat lists of tensors, and tells the structure of its outputs.

    Args:
        tell: Called while the model is traced; what a trace writes on a module is taken back.
    """

    def __init__(self, model: nn.Module, inputs: Structure, tell: Callable[[Structure], object]) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs
        self.tell = tell

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        args, kwargs = self.inputs.unflatten(tensors)
        flat, outputs = flatten(self.model(*args, **kwargs), "The output of the model")
        self.tell(outputs)
        return flat


class StageModule(nn.Module):
    """One stage: it takes the tensors that are alive at its start, and gives those that are alive at its end.

    A value that only a later stage needs is handed through, so stages talk to their neighbours alone.
    """

    def __init__(
        self, node: fx.Node, module: nn.Module, alive_before: Sequence[str], alive_after: Sequence[str]
    ) -> None:
        super().__init__()
        self.module = module
        self.arguments = [arg.name if isinstance(arg, fx.Node) else arg for arg in node.args]
        self.by_name = [isinstance(arg, fx.Node) for arg in node.args]
        self.results = _results(node)
        self.alive_before, self.alive_after = list(alive_before), list(alive_after)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the stage on one chunk."""
        values: dict[str, Any] = dict(zip(self.alive_before, tensors, strict=True))
        arguments = [
            values[str(arg)] if named else arg for arg, named in zip(self.arguments, self.by_name, strict=True)
        ]
        made = self.module(*arguments)
        for name, index in self.results.items():
            values[name] = made if index is None else made[index]
        return tuple(values[name].contiguous() for name in self.alive_after)


@dataclass(frozen=True)
class TracedStages:
    """A traced model: its stages, what passes between them, and what comes out."""

    modules: tuple[StageModule, ...]
    passed: tuple[tuple[TensorSpec, ...], ...]
    """The tensors before each stage, and after the last one."""
    outputs: Structure


def _results(node: fx.Node) -> dict[str, int | None]:
    """Return the names under which others use what a stage makes, each with its position."""
    picks = {user.name: user.args[1] for user in node.users if user.target is operator.getitem}
    return picks or {node.name: None}  # type: ignore[return-value]


def trace(model: nn.Module, points: Sequence[str], chunk: ChunkSpec) -> TracedStages:
    """Trace a model for one kind of chunk and cut it before the named modules.

    Raises:
        ConfigurationError: If torch cannot trace it, or a cut does not make a stage.
    """
    outputs: list[Structure] = []
    flat = _FlatModel(model, chunk.structure, outputs.append)
    examples = tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in chunk.specs)
    spec = {f"{_MODEL}.{name}": SplitPoint.BEGINNING for name in points}
    try:
        traced = _trace_with_retries(partial(pipeline, flat, mb_args=examples, split_spec=spec), model, points)
    except ConfigurationError:
        raise
    except RuntimeError as error:
        cause = error.__cause__ or error
        if isinstance(cause, ConfigurationError):
            raise cause from None
        raise ConfigurationError(
            f"{type(model).__name__} cannot be cut into stages: torch.export does not trace it "
            f"({(str(cause).strip() or type(cause).__name__).splitlines()[0]}). Give inputs that take no branches on "
            "values, such as use_cache=False, or use `dispatch_model` instead."
        ) from error
    return _assemble(model, traced.split_gm, points, chunk, outputs[-1])


def _trace_with_retries(attempt: Callable[[], Any], model: nn.Module, points: Sequence[str]) -> Any:
    for is_last in (False, False, True):
        with _cut_marks_removed(model, points), warnings.catch_warnings(), torch.no_grad(), traced_by_running():
            # torch 2.13 warns about its own use of LeafSpec while it copies what it traced.
            warnings.filterwarnings("ignore", message=".*treespec", category=FutureWarning)
            try:
                return attempt()
            except RuntimeError as error:
                # Now and then torch 2.13 loses the value of a constant on the way, and another attempt does not.
                if is_last or _LOST_CONSTANT not in str(error.__cause__ or error):
                    raise
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def _cut_marks_removed(model: nn.Module, points: Sequence[str]) -> Iterator[None]:
    """Take away what tracing leaves on the modules that start a stage: a second trace would mark them twice."""
    modules = [model.get_submodule(name) for name in points]
    before = [module.__dict__.get("forward") for module in modules]
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            module.__dict__.pop("_orig_forward", None)
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward


def _assemble(
    model: nn.Module, split: fx.GraphModule, points: Sequence[str], chunk: ChunkSpec, outputs: Structure
) -> TracedStages:
    nodes = [node for node in split.graph.nodes if node.op == "call_module"]
    if len(nodes) != len(points) + 1:
        raise ConfigurationError(
            f"The cuts {list(points)!r} make {len(nodes)} stages instead of {len(points) + 1}: the forward pass of "
            f"{type(model).__name__} does not reach some of these modules, or reaches them in another order. "
            "Name modules that run one after the other."
        )
    inputs = [node.name for node in split.graph.nodes if node.op == "placeholder"]
    last = next(node for node in split.graph.nodes if node.op == "output")
    wanted = [node.name for node in last.args[0]]
    specs = dict(zip(inputs, chunk.specs, strict=True))
    alive = _alive(nodes, inputs, wanted)
    modules = []
    for index, node in enumerate(nodes):
        module = split.get_submodule(str(node.target))
        _use_weights_of(model, module)
        modules.append(StageModule(node, module, alive[index], alive[index + 1]))
        specs.update(_specs_of_results(node, module))
    passed = tuple(tuple(specs[name] for name in names) for names in alive)
    return TracedStages(tuple(modules), passed, outputs)


def _alive(nodes: Sequence[fx.Node], inputs: Sequence[str], wanted: Sequence[str]) -> list[list[str]]:
    """Return the values before each stage that it or a later one needs; the last entry is what comes out."""
    made = list(inputs)
    before = []
    for index, node in enumerate(nodes):
        needed = {arg.name for later in nodes[index:] for arg in later.args if isinstance(arg, fx.Node)}
        needed |= set(wanted)
        before.append(list(inputs) if index == 0 else [name for name in made if name in needed])
        made += _results(node)
    return [*before, list(wanted)]


def _specs_of_results(node: fx.Node, module: nn.Module) -> dict[str, TensorSpec]:
    graph: fx.Graph = module.graph  # type: ignore[assignment]
    output = next(inner for inner in graph.nodes if inner.op == "output").args[0]
    values = output if isinstance(output, (tuple, list)) else (output,)
    found = {}
    for name, index in _results(node).items():
        value = values[index or 0].meta["val"]
        found[name] = (tuple(value.shape), value.dtype)
    return found


def _use_weights_of(model: nn.Module, stage: nn.Module) -> None:
    """Make a stage hold the very parameters of the model: tracing copies those that several stages use."""
    own = dict(model.named_parameters(remove_duplicate=False))
    for path, module in stage.named_modules():
        for name in module._parameters:
            source = own.get(f"{path}.{name}".removeprefix(f"{_MODEL}."))
            if source is not None:
                module._parameters[name] = source
