"""The user's model inside the wrappers of engines and compilers, and its structure."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Literal, overload

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from accelerate._base.imports import is_peft_available, require

NamedModule = tuple[str, torch.nn.Module]

CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module"
"""The name of a block inside of the wrapper that computes its activations again."""
_WRAPPER_NAMES = ("_fsdp_wrapped_module", CHECKPOINT_WRAPPER, "_orig_mod")


def plain_name(name: str) -> str:
    """Return the name of a parameter in the user's model, without the wrappers around its modules."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_NAMES)


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Return whether `module` is the shell that `torch.compile` returns."""
    # Importing the compiler takes seconds: where nobody has imported it, nothing is compiled.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def has_compiled_regions(module: torch.nn.Module) -> bool:
    """Return whether blocks inside `module` were compiled one by one."""
    return not is_compiled_module(module) and any(is_compiled_module(child) for child in module.modules())


def inner_block(module: torch.nn.Module) -> torch.nn.Module:
    """Return the block inside a checkpoint wrapper; another module comes back as it is."""
    # Children are read from the dictionary: the wrapper passes unknown names on to the block.
    while CHECKPOINT_WRAPPER in module._modules:
        module = module.get_submodule(CHECKPOINT_WRAPPER)
    return module


def extract_model_from_parallel(
    model: torch.nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> torch.nn.Module:
    """Return the model inside the wrappers that `prepare` put around it.

    Args:
        model: A model as `prepare` returned it.
        keep_fp32_wrapper: Keep the mixed-precision forward; False restores the original one.
        keep_torch_compile: Keep a compiled shell around the result; False takes it off too.
        recursive: Unwrap the children as well.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    shell: torch.nn.Module | None = None
    if is_compiled_module(model):
        shell, model = model, model.get_submodule("_orig_mod")
    if has_compiled_regions(model) and not keep_torch_compile and "_orig_mod" in model.__dict__:
        model = model.__dict__["_orig_mod"]
    wrappers = (DistributedDataParallel, DataParallel, FullyShardedDataParallel)
    while isinstance(model, wrappers) or _is_engine(model):
        model = model.get_submodule("module")
        if not keep_torch_compile and "_orig_mod" in model.__dict__:
            model = model.__dict__["_orig_mod"]
    if "unwrapped_model" in model.__dict__:  # an engine that trains another model in its place
        inner: torch.nn.Module = model.__dict__["unwrapped_model"]
        return inner
    if recursive:
        for name, child in list(model.named_children()):
            unwrapped = extract_model_from_parallel(child, keep_fp32_wrapper, keep_torch_compile, recursive=True)
            if unwrapped is not child:
                setattr(model, name, unwrapped)
    if not keep_fp32_wrapper:
        restore_forward(model)
    if shell is None or not keep_torch_compile:
        return model
    # A new shell around the inner model: the one that is being trained keeps its wrappers.
    return shell if shell.get_submodule("_orig_mod") is model else type(shell)(model, shell.dynamo_ctx)


def _is_engine(model: Any) -> bool:
    # Known by name, so that unwrapping does not import the engine.
    return any(base.__name__ == "DeepSpeedEngine" for base in type(model).__mro__)


def restore_forward(model: torch.nn.Module) -> None:
    """Take a mixed-precision forward off a model, also one that was wrapped by hand beside its `_original_forward`.

    What was put in its place since stays, and so do hooks around it.
    """
    original = model.__dict__.pop("_original_forward", None)
    if original is None:
        return
    if "_old_forward" in model.__dict__:  # what hooks are put around
        if _wraps(model._old_forward, original):
            model._old_forward = original
    elif _wraps(model.__dict__.get("forward"), original):
        del model.forward
        if model.forward != original:
            model.forward = original


def _wraps(function: Any, original: Any) -> bool:
    """Return whether a function leads to another one, bound or not, through the functions that it says it wraps."""
    wanted = (original, getattr(original, "__func__", original))
    while function is not None and function not in wanted:
        function = getattr(function, "__wrapped__", None)
    return function is not None


def is_prepared_inside(model: torch.nn.Module, prepared: torch.nn.Module) -> bool:
    """Return whether `model` is what `prepared` was made from."""
    return prepared is not model and extract_model_from_parallel(prepared, keep_torch_compile=False) is model


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer of torch inside its wrappers."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    plain: torch.optim.Optimizer = optimizer
    return plain


def is_peft_model(model: torch.nn.Module) -> bool:
    """Return whether a model, below what wraps it, has adapters of peft."""
    if not is_peft_available():
        return False
    peft = require("peft", why="Recognising a model with adapters")
    return isinstance(extract_model_from_parallel(model), peft.PeftModel)


@overload
def get_module_children_bottom_up(
    model: torch.nn.Module, return_fqns: Literal[False] = ...
) -> list[torch.nn.Module]: ...
@overload
def get_module_children_bottom_up(model: torch.nn.Module, return_fqns: Literal[True]) -> list[NamedModule]: ...
def get_module_children_bottom_up(
    model: torch.nn.Module, return_fqns: bool = False
) -> list[torch.nn.Module] | list[NamedModule]:
    """Return all modules of a model, children before their parents and the model itself last.

    Args:
        return_fqns: Return pairs of dotted name and module; the model's own name is empty.
    """
    named = list(_bottom_up(model, ""))
    return named if return_fqns else [module for _, module in named]


def _bottom_up(module: torch.nn.Module, name: str) -> Iterator[NamedModule]:
    for child_name, child in module.named_children():
        yield from _bottom_up(child, f"{name}.{child_name}" if name else child_name)
    yield name, module
