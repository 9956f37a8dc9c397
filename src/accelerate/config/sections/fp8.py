"""Options of training in 8-bit floats, one recipe per library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from accelerate._base.errors import MissingPackageError
from accelerate._base.helpers import warn_once
from accelerate.config import env
from accelerate.config.knob import FLAGS, INTEGER, ONE_ZERO, TRUE_FALSE, UPPER, YES_NO, Ask, knob, shared, word_of
from accelerate.config.sections.launch_section import LaunchSection
from accelerate.config.settings import KwargsHandler

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

Backend = Literal["MSAMP", "TE"]
OptLevel = Literal["O1", "O2"]
FP8Format = Literal["HYBRID", "E4M3", "E5M2"]
AmaxComputeAlgorithm = Literal["max", "most_recent"]

_PREFIX = "ACCELERATE_FP8_"
_OVERRIDES = tuple(f"{_PREFIX}OVERRIDE_{part}" for part in ("FPROP", "DGRAD", "WGRAD"))
_LIBRARIES = ("ao", "te", "msamp")


@dataclass
class AORecipeKwargs(KwargsHandler):
    """Options of 8-bit training with torchao.

    Args:
        config: A whole `Float8LinearConfig`; made from the two last options where it is not given.
        module_filter_func: Called with a module and its name; says whether to convert it.
        pad_inner_dim: Pad matrices whose inner size is not a multiple of 16.
        enable_fsdp_float8_all_gather: Let FSDP gather weights in 8 bits.

    Raises:
        MissingPackageError: torchao is not installed.
    """

    config: Float8LinearConfig | None = knob(help="Whole configuration of torchao.")
    module_filter_func: Callable[..., bool] | None = knob(help="Says whether to convert a module.")
    pad_inner_dim: bool = knob(
        help="Pad matrices to a multiple of 16.", env=_PREFIX + "PAD_INNER_DIM", codec=YES_NO, fallback=True
    )
    enable_fsdp_float8_all_gather: bool = knob(
        help="Let FSDP gather weights in 8 bits.",
        env=_PREFIX + "ENABLE_FSDP_FLOAT8_ALL_GATHER",
        codec=YES_NO,
        fallback=True,
    )

    def normalise(self) -> None:
        """Make torchao's configuration where none was given."""
        # Here, because a launcher reads the declarations above and must start fast.
        from accelerate._base.imports import is_torchao_available, require

        if not is_torchao_available():
            raise MissingPackageError(
                "AORecipeKwargs() needs the package 'torchao' in version 0.6.1 or later, which is not installed. "
                'Install it with `pip install "accelerate[quantization]"`.'
            )
        if self.config is None:
            float8 = require("torchao.float8", why="Training in 8-bit floats", extra="quantization")
            self.config = float8.Float8LinearConfig(
                pad_inner_dim=self.pad_inner_dim, enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather
            )


@dataclass
class TERecipeKwargs(KwargsHandler):
    """Options of 8-bit training with TransformerEngine.

    Args:
        use_autocast_during_eval: Compute in 8 bits in evaluation too.
        margin: Margin of the scaling factor.
        interval: Steps between two computations of the scaling factor.
        fp8_format: The number format: HYBRID, E4M3 or E5M2.
        amax_history_len: Length of the history behind the scaling factor.
        amax_compute_algo: What is taken from the history: `"max"` or `"most_recent"`.
        override_linear_precision: Compute forward, gradient of inputs, gradient of weights in higher precision.
        use_mxfp8_block_scaling: Scale in blocks.

    Raises:
        MissingPackageError: TransformerEngine is not installed.
    """

    use_autocast_during_eval: bool = knob(
        help="Compute in 8 bits in evaluation too.",
        env=_PREFIX + "USE_AUTOCAST_DURING_EVAL",
        codec=YES_NO,
        fallback=False,
    )
    margin: int = knob(help="Margin of the scaling factor.", env=_PREFIX + "MARGIN", codec=INTEGER, fallback=0)
    interval: int = knob(
        help="Steps between two computations of the scaling factor.",
        env=_PREFIX + "INTERVAL",
        codec=INTEGER,
        fallback=1,
    )
    fp8_format: FP8Format = knob(
        help="Number format.",
        env=_PREFIX + "FORMAT",
        codec=UPPER,
        fallback="HYBRID",
        choices=("HYBRID", "E4M3", "E5M2"),
        flag="fp8_format",
    )
    amax_history_len: int = knob(
        help="Length of the history behind the scaling factor.",
        env=_PREFIX + "AMAX_HISTORY_LEN",
        codec=INTEGER,
        fallback=1024,
    )
    amax_compute_algo: AmaxComputeAlgorithm = knob(
        help="What is taken from the history.",
        env=_PREFIX + "AMAX_COMPUTE_ALGO",
        fallback="most_recent",
        choices=("max", "most_recent"),
    )
    override_linear_precision: tuple[bool, bool, bool] = knob(help="Parts that compute in higher precision.")
    use_mxfp8_block_scaling: bool = knob(
        help="Scale in blocks.", env=_PREFIX + "USE_MXFP8_BLOCK_SCALING", codec=YES_NO, fallback=False
    )

    def normalise(self) -> None:
        """Read the option that is spread over three variables, and check for the package."""
        from accelerate._base.imports import is_transformer_engine_available

        self._normalise_recipe()
        if not is_transformer_engine_available():
            raise MissingPackageError(
                f"{type(self).__name__}() needs the package 'transformer_engine', which is not installed. "
                "Install it with `pip install transformer_engine[pytorch]`."
            )

    def _normalise_recipe(self) -> None:
        self.fp8_format = UPPER.parse(self.fp8_format)  # type: ignore[assignment]
        if self.override_linear_precision is None:
            forward, inputs, weights = (env.flag(name) for name in _OVERRIDES)
            self.override_linear_precision = (forward, inputs, weights)


@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """Options of 8-bit training with MS-AMP.

    Args:
        opt_level: `"O1"` keeps gradients in 8 bits, `"O2"` optimizer states too.
    """

    opt_level: OptLevel = knob(
        help="How much of the training is kept in 8 bits.",
        env=_PREFIX + "OPT_LEVEL",
        fallback="O2",
        choices=("O1", "O2"),
    )


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """Options of both older recipes at once; deprecated in favour of the separate ones.

    Args:
        backend: Which of the two libraries to use; MS-AMP where it is installed.
    """

    backend: Backend = knob(
        help="Library that computes.", env=_PREFIX + "BACKEND", codec=UPPER, choices=("MSAMP", "TE"), flag="fp8_backend"
    )

    def normalise(self) -> None:
        """Choose the library and check for the package of that one alone."""
        from accelerate._base.imports import is_msamp_available

        warn_once(
            "FP8RecipeKwargs is deprecated. Write TERecipeKwargs, MSAMPRecipeKwargs or AORecipeKwargs instead.",
            FutureWarning,
            stacklevel=4,
        )
        chosen: Any = self.backend or ("MSAMP" if is_msamp_available() else "TE")
        self.backend = UPPER.parse(chosen)  # type: ignore[assignment]
        if self.backend == "TE":
            super().normalise()
        else:
            self._normalise_recipe()


def _trains_in_8_bits(config: Mapping[str, Any]) -> bool:
    return bool(config["mixed_precision"] == "fp8")


def _asked_with(library: str, choices: tuple[str, ...] = ()) -> Ask:
    return Ask(choices=choices, only_if=lambda answers: bool(answers["fp8_backend"] == library))


@dataclass
class Fp8Options(LaunchSection):
    """How 8-bit training computes, at launch."""

    title: ClassVar[str] = "FP8 Arguments"
    file_key: ClassVar[str | None] = "fp8_config"
    prefix: ClassVar[str] = "fp8_"

    fp8_backend: str | None = shared(
        FP8RecipeKwargs,
        "backend",
        codec=word_of(*_LIBRARIES),
        choices=_LIBRARIES,
        flag=None,
        only_if=_trains_in_8_bits,
        ask=Ask(),
    )
    fp8_use_autocast_during_eval: bool = shared(
        TERecipeKwargs,
        "use_autocast_during_eval",
        False,
        codec=TRUE_FALSE,
        shape="switch",
        only_if=_trains_in_8_bits,
        ask=_asked_with("te"),
    )
    fp8_margin: int = shared(TERecipeKwargs, "margin", 0, only_if=_trains_in_8_bits, ask=_asked_with("te"))
    fp8_interval: int = shared(TERecipeKwargs, "interval", 1, only_if=_trains_in_8_bits, ask=_asked_with("te"))
    fp8_format: str = shared(
        TERecipeKwargs,
        "fp8_format",
        "HYBRID",
        codec=word_of("HYBRID", "E4M3", "E5M2", upper=True),
        flag=None,
        only_if=_trains_in_8_bits,
        ask=_asked_with("te", choices=("HYBRID", "E4M3", "E5M2")),
    )
    fp8_amax_history_len: int = shared(
        TERecipeKwargs,
        "amax_history_len",
        1024,
        old_keys=("fp8_amax_history_length",),
        only_if=_trains_in_8_bits,
        ask=_asked_with("te"),
    )
    fp8_amax_compute_algo: str = shared(
        TERecipeKwargs,
        "amax_compute_algo",
        "most_recent",
        codec=word_of("max", "most_recent"),
        old_keys=("fp8_amax_compute_algorithm",),
        only_if=_trains_in_8_bits,
        ask=_asked_with("te", choices=("most_recent", "max")),
    )
    fp8_override_linear_precision: tuple[bool, ...] = shared(
        TERecipeKwargs,
        "override_linear_precision",
        (False, False, False),
        codec=FLAGS,
        env=",".join(_OVERRIDES),
        only_if=_trains_in_8_bits,
        ask=_asked_with("te"),
    )
    fp8_opt_level: str = shared(
        MSAMPRecipeKwargs,
        "opt_level",
        "O2",
        codec=word_of("O1", "O2", upper=True),
        old_keys=("fp8_optimization_level",),
        only_if=_trains_in_8_bits,
        ask=_asked_with("msamp", choices=("O1", "O2")),
    )
    fp8_enable_fsdp_float8_all_gather: bool = shared(
        AORecipeKwargs,
        "enable_fsdp_float8_all_gather",
        True,
        codec=ONE_ZERO,
        only_if=_trains_in_8_bits,
        ask=_asked_with("ao"),
    )
    fp8_pad_inner_dim: bool = shared(
        AORecipeKwargs, "pad_inner_dim", True, codec=ONE_ZERO, only_if=_trains_in_8_bits, ask=_asked_with("ao")
    )
