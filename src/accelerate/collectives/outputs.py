"""Wrap a forward so that what it returns in half precision comes out in fp32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from accelerate.collectives.nested import convert_to_fp32


class ConvertOutputsToFp32:
    """Call a forward and convert its fp16 and bf16 outputs to fp32; the wrapped one is `__wrapped__`.

    It pickles if the forward does.
    """

    __wrapped__: Callable[..., Any]

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        functools.update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> dict[str, Any]:
        return {"model_forward": self.model_forward}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A bound method's owner may be half restored here (it holds this object): look at no attribute of it yet.
        self.model_forward = self.__wrapped__ = state["model_forward"]


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> ConvertOutputsToFp32:
    """Return a forward whose half-precision outputs are fp32; one that is wrapped already is returned as it is."""
    if isinstance(model_forward, ConvertOutputsToFp32):
        return model_forward
    return ConvertOutputsToFp32(model_forward)
