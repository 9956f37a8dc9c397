"""Options of fewer bits: training in 8-bit floats, one recipe per library, and weights in 8 or 4 bits with bitsandbytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from accelerate._base.enums import CustomDtype
from accelerate._base.errors import ConfigurationError, MissingPackageError
from accelerate._base.helpers import warn_once
from accelerate._base.imports import (
    is_msamp_available,
    is_torchao_available,
    is_transformer_engine_available,
    require,
)
from accelerate.config import env
from accelerate.config.knob import TEXT, UPPER, KwargsHandler, Settings, knob, shared
from accelerate.config.sections.compute import FP8_OVERRIDES, Fp8Options

if TYPE_CHECKING:
    import torch
    from torchao.float8 import Float8LinearConfig

Backend = Literal["MSAMP", "TE"]
OptLevel = Literal["O1", "O2"]
FP8Format = Literal["HYBRID", "E4M3", "E5M2"]
AmaxComputeAlgorithm = Literal["max", "most_recent"]

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_BNB_TYPES: dict[str, tuple[type, ...]] = {
    "load_in_8bit": (bool,),
    "llm_int8_threshold": (float, int),
    "load_in_4bit": (bool,),
    "bnb_4bit_use_double_quant": (bool,),
}


@dataclass
class AORecipeKwargs(KwargsHandler):
    """Options of 8-bit training with torchao.

    Raises:
        MissingPackageError: torchao is not installed.
    """

    config: Float8LinearConfig | None = knob(
        help="A whole `Float8LinearConfig`; made from the two last options where it is not given."
    )
    module_filter_func: Callable[..., bool] | None = knob(
        help="Called with a module and its name; says whether to convert it."
    )
    pad_inner_dim: bool = shared(Fp8Options, "fp8_pad_inner_dim", fallback=True)
    enable_fsdp_float8_all_gather: bool = shared(Fp8Options, "fp8_enable_fsdp_float8_all_gather", fallback=True)

    def normalise(self) -> None:
        """Make torchao's configuration where none was given."""
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

    Raises:
        MissingPackageError: TransformerEngine is not installed.
    """

    use_autocast_during_eval: bool = shared(Fp8Options, "fp8_use_autocast_during_eval", fallback=False)
    margin: int = shared(Fp8Options, "fp8_margin", fallback=0)
    interval: int = shared(Fp8Options, "fp8_interval", fallback=1)
    fp8_format: FP8Format = shared(Fp8Options, "fp8_format", codec=UPPER, fallback="HYBRID")
    amax_history_len: int = shared(Fp8Options, "fp8_amax_history_len", fallback=1024)
    amax_compute_algo: AmaxComputeAlgorithm = shared(
        Fp8Options, "fp8_amax_compute_algo", codec=TEXT, fallback="most_recent"
    )
    # Of its three variables, each may be set alone: read in `normalise`.
    override_linear_precision: tuple[bool, bool, bool] = shared(Fp8Options, "fp8_override_linear_precision", env=None)
    use_mxfp8_block_scaling: bool = knob(
        help="Scale in blocks.", env="ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING", fallback=False
    )

    def normalise(self) -> None:
        """Read the option that is spread over three variables, and check for the package."""
        self._normalise_recipe()
        if not is_transformer_engine_available():
            raise MissingPackageError(
                f"{type(self).__name__}() needs the package 'transformer_engine', which is not installed. "
                'Install it with `pip install "transformer_engine[pytorch]"`.'
            )

    def _normalise_recipe(self) -> None:
        self.fp8_format = UPPER.parse(self.fp8_format)  # type: ignore[assignment]
        if self.override_linear_precision is None:
            forward, inputs, weights = (env.flag(name) for name in FP8_OVERRIDES)
            self.override_linear_precision = (forward, inputs, weights)


@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """Options of 8-bit training with MS-AMP."""

    opt_level: OptLevel = shared(
        Fp8Options,
        "fp8_opt_level",
        codec=TEXT,
        fallback="O2",
        help='`"O1"` keeps gradients in 8 bits, `"O2"` optimizer states too.',
    )


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """Options of both older recipes at once; deprecated in favour of the separate ones."""

    backend: Backend = shared(
        Fp8Options,
        "fp8_backend",
        codec=UPPER,
        choices=("MSAMP", "TE"),
        help="Which of the two libraries to use; MS-AMP where it is installed.",
    )

    def normalise(self) -> None:
        """Choose the library and check for the package of that one alone."""
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


@dataclass
class BnbQuantizationConfig(Settings):
    """Say how weights are stored in 8 or 4 bits.

    Raises:
        ConfigurationError: Not exactly one of 8 and 4 bits is chosen, or a value is of a wrong kind.
    """

    load_in_8bit: bool = knob(False, help="Store in 8 bits.")
    llm_int8_threshold: float = knob(6.0, help="Size from which a value is computed in 16 bits, with 8 bits.")
    load_in_4bit: bool = knob(False, help="Store in 4 bits.")
    bnb_4bit_quant_type: str = knob("fp4", help='The 4-bit format: `"fp4"` or `"nf4"`.', choices=("fp4", "nf4"))
    bnb_4bit_use_double_quant: bool = knob(False, help="Store the scales in fewer bits too.")
    bnb_4bit_compute_dtype: str | torch.dtype = knob(
        "fp16", help="What 4-bit weights are computed in: fp32, fp16, bf16 or a `torch.dtype`."
    )
    torch_dtype: str | torch.dtype | None = knob(
        help="The type of all other weights; 16-bit floats, or the compute type with 4 bits."
    )
    skip_modules: list[str] | None = knob(help="Names of modules that are left as they are.")
    keep_in_fp32_modules: list[str] | None = knob(help="Names of modules that are left in 32 bits.")

    def normalise(self) -> None:
        """Check the kinds of the values, and turn names into types of torch."""
        import torch

        for name, types in _BNB_TYPES.items():
            self._refuse(name, not isinstance(getattr(self, name), types), types[0].__name__)
        for name in ("skip_modules", "keep_in_fp32_modules"):
            self._refuse(name, not isinstance(getattr(self, name) or [], list), "list of names")
        if self.load_in_8bit == self.load_in_4bit:
            raise ConfigurationError(
                f"BnbQuantizationConfig(load_in_8bit={self.load_in_8bit!r}, load_in_4bit={self.load_in_4bit!r}) does "
                "not say in how many bits to store. Set one of them to True."
            )
        if self.load_in_4bit and self.llm_int8_threshold != 6.0:
            warn_once(
                f"BnbQuantizationConfig(llm_int8_threshold={self.llm_int8_threshold!r}) means nothing to 4 bits. "
                "Leave it out, or set load_in_8bit=True.",
                stacklevel=4,
            )
        self.bnb_4bit_compute_dtype = self._dtype("bnb_4bit_compute_dtype")
        if self.torch_dtype is None:
            self.torch_dtype = torch.float16 if self.load_in_8bit else self.bnb_4bit_compute_dtype
        self.torch_dtype = self._dtype("torch_dtype")
        self.target_dtype: torch.dtype | CustomDtype = torch.int8 if self.load_in_8bit else CustomDtype.INT4

    def _refuse(self, name: str, wrong: bool, wanted: str) -> None:
        if wrong:
            raise ConfigurationError(
                f"BnbQuantizationConfig({name}={getattr(self, name)!r}) cannot be used. Write a {wanted}."
            )

    def _dtype(self, name: str) -> Any:
        import torch

        value = getattr(self, name)
        found = getattr(torch, _DTYPES.get(str(value), ""), value)
        self._refuse(name, not isinstance(found, torch.dtype), f"torch.dtype or one of {', '.join(_DTYPES)}")
        return found
