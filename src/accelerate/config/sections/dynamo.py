"""Options of `torch.compile`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from accelerate._base.constants import TORCH_DYNAMO_MODES
from accelerate._base.enums import DynamoBackend
from accelerate._base.errors import ConfigurationError
from accelerate.config.knob import TRUE_FALSE, YES_NO, Ask, knob, member_of, shared, word_of
from accelerate.config.sections.launch_section import LaunchSection
from accelerate.config.settings import KwargsHandler

_PREFIX = "ACCELERATE_DYNAMO_"
_COMPILERS = tuple(member.value.lower() for member in DynamoBackend)


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Say how models are compiled; what is not given comes from the `ACCELERATE_DYNAMO_*` variables.

    Args:
        backend: The compiler; `"no"` compiles nothing.
        mode: A preset of `torch.compile`, such as `"reduce-overhead"`.
        fullgraph: Refuse models that cannot be captured whole.
        dynamic: Compile for changing shapes; None lets torch decide.
        options: Options of the backend.
        disable: Turn compiling into a no-op, for a test.
        use_regional_compilation: Compile repeated blocks once each, instead of the whole model.
    """

    backend: DynamoBackend = knob(
        help="Compiler of torch.compile.",
        env=_PREFIX + "BACKEND",
        codec=member_of(DynamoBackend, upper=True),
        fallback=DynamoBackend.NO,
    )
    mode: str = knob(help="Preset of torch.compile.", env=_PREFIX + "MODE", fallback="default")
    fullgraph: bool = knob(
        help="Refuse models that cannot be captured whole.",
        env=_PREFIX + "USE_FULLGRAPH",
        codec=YES_NO,
        fallback=False,
    )
    dynamic: bool | None = knob(help="Compile for changing shapes.", env=_PREFIX + "USE_DYNAMIC", codec=YES_NO)
    options: Any = knob(help="Options of the compiler.")
    disable: bool = knob(False, help="Turn compiling into a no-op.", codec=YES_NO)
    use_regional_compilation: bool = knob(
        help="Compile repeated blocks once each, instead of the whole model.",
        env=_PREFIX + "USE_REGIONAL_COMPILATION",
        codec=YES_NO,
        fallback=False,
    )

    def normalise(self) -> None:
        """Turn the backend's name, in any case, into its enum."""
        try:
            self.backend = DynamoBackend(str(self.backend).upper())
        except ValueError as error:
            raise ConfigurationError(
                f"TorchDynamoPlugin(backend={self.backend!r}) names no known compiler. "
                f"Write one of {', '.join(name.lower() for name in DynamoBackend.list())}."
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of the values, the backend as torch writes it."""
        values = super().to_dict()
        # Plugins may be edited after construction, so the backend may be text again.
        values["backend"] = str(values["backend"]).lower()
        return values

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `torch.compile` that were set."""
        values = super().to_kwargs()
        values.pop("use_regional_compilation", None)
        return values


def _compiles(answers: Mapping[str, Any]) -> bool:
    return bool(answers["dynamo_backend"] != "no")


@dataclass
class DynamoOptions(LaunchSection):
    """How models are compiled, at launch."""

    title: ClassVar[str] = "Resource Selection Arguments"
    file_key: ClassVar[str | None] = "dynamo_config"
    prefix: ClassVar[str] = "dynamo_"

    dynamo_backend: str | None = shared(
        TorchDynamoPlugin,
        "backend",
        # The last spelling is the one that launchers have always taken.
        codec=word_of(*_COMPILERS, written_upper=True, aliases={"torhchxla_trace_once": "torchxla_trace_once"}),
        choices=_COMPILERS,
        fallback="no",
        ask=Ask("Compiler for models (torch.compile)"),
    )
    dynamo_mode: str = shared(
        TorchDynamoPlugin,
        "mode",
        "default",
        codec=word_of(*TORCH_DYNAMO_MODES),
        choices=tuple(TORCH_DYNAMO_MODES),
        ask=Ask(only_if=_compiles),
    )
    dynamo_use_fullgraph: bool = shared(
        TorchDynamoPlugin, "fullgraph", False, codec=TRUE_FALSE, shape="switch", ask=Ask(only_if=_compiles)
    )
    dynamo_use_dynamic: bool = shared(
        TorchDynamoPlugin, "dynamic", False, codec=TRUE_FALSE, shape="switch", ask=Ask(only_if=_compiles)
    )
    dynamo_use_regional_compilation: bool = shared(
        TorchDynamoPlugin,
        "use_regional_compilation",
        False,
        codec=TRUE_FALSE,
        shape="switch",
        ask=Ask(only_if=_compiles),
    )
