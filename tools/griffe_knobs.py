"""Show an option's default in the reference, where the source has its whole declaration."""

from __future__ import annotations

from typing import Any

import griffe


class Knobs(griffe.Extension):
    """Replace the value `knob(default, help=..., ...)` of an attribute by `default`."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Change one attribute before its class's signature is made from it."""
        call = attr.value
        if not isinstance(call, griffe.ExprCall) or str(call.function) != "knob":
            return
        first = call.arguments[0] if call.arguments else None
        attr.value = "None" if first is None or isinstance(first, griffe.ExprKeyword) else first
