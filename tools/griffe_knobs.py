"""Show options in the reference as they are at run time, where the source has their declarations."""

from __future__ import annotations

import ast
import importlib
import inspect
from typing import Any

import griffe


class Knobs(griffe.Extension):
    """Replace the value `knob(default, help=..., ...)` of an attribute by `default`, and document its class with its help.

    An attribute `View[type](holder, description)` gets its description and its type.
    """

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Change one attribute before its class's signature is made from it."""
        call = attr.value
        if isinstance(call, griffe.ExprCall) and str(call.function).split("[")[0] == "View":
            _document_view(attr, call)
            return
        if not isinstance(call, griffe.ExprCall) or str(call.function) not in ("knob", "shared"):
            return
        given = [argument for argument in call.arguments if not isinstance(argument, griffe.ExprKeyword)]
        # `shared(owner, name, default, ...)` names the declaration first.
        position = 0 if str(call.function) == "knob" else 2
        attr.value = given[position] if len(given) > position else "None"

    def on_class_instance(self, *, cls: griffe.Class, **_: Any) -> None:
        """Take the arguments' documentation, which a settings class makes from its declarations."""
        if cls.docstring is None or not cls.canonical_path.startswith("accelerate.config.plugins."):
            return
        made = getattr(importlib.import_module(cls.module.canonical_path), cls.name)
        cls.docstring.value = inspect.cleandoc(made.__doc__)


def _document_view(attr: griffe.Attribute, call: griffe.ExprCall) -> None:
    """Describe an attribute that shows what another object holds."""
    texts = [argument for argument in call.arguments if isinstance(argument, str)]
    if len(texts) > 1 and attr.docstring is None:
        attr.docstring = griffe.Docstring(ast.literal_eval(texts[1]), parent=attr)
    held = call.function if isinstance(call.function, griffe.ExprSubscript) else attr.annotation
    if isinstance(held, griffe.ExprSubscript):
        attr.annotation = held.slice
    attr.value = None
