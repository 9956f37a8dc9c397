"""Options of loading models in 8 or 4 bits with bitsandbytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accelerate._base.enums import CustomDtype
from accelerate._base.errors import ConfigurationError
from accelerate._base.helpers import warn_once
from accelerate.config.knob import knob
from accelerate.config.settings import Settings

if TYPE_CHECKING:
    import torch

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_TYPES: dict[str, tuple[type, ...]] = {
    "load_in_8bit": (bool,),
    "llm_int8_threshold": (float, int),
    "load_in_4bit": (bool,),
    "bnb_4bit_use_double_quant": (bool,),
}


@dataclass
class BnbQuantizationConfig(Settings):
    """Say how weights are stored in 8 or 4 bits.

    Args:
        load_in_8bit: Store in 8 bits.
        llm_int8_threshold: Size from which a value is computed in 16 bits, with 8 bits.
        load_in_4bit: Store in 4 bits.
        bnb_4bit_quant_type: The 4-bit format: `"fp4"` or `"nf4"`.
        bnb_4bit_use_double_quant: Store the scales in fewer bits too.
        bnb_4bit_compute_dtype: What 4-bit weights are computed in: fp32, fp16, bf16 or a `torch.dtype`.
        torch_dtype: The type of all other weights; 16-bit floats, or the compute type with 4 bits.
        skip_modules: Names of modules that are left as they are.
        keep_in_fp32_modules: Names of modules that are left in 32 bits.

    Raises:
        ConfigurationError: Not exactly one of 8 and 4 bits is chosen, or a value is of a wrong kind.
    """

    load_in_8bit: bool = knob(False, help="Store in 8 bits.")
    llm_int8_threshold: float = knob(6.0, help="Size from which a value is computed in 16 bits.")
    load_in_4bit: bool = knob(False, help="Store in 4 bits.")
    bnb_4bit_quant_type: str = knob("fp4", help="Format of 4 bits.", choices=("fp4", "nf4"))
    bnb_4bit_use_double_quant: bool = knob(False, help="Store the scales in fewer bits too.")
    bnb_4bit_compute_dtype: str | torch.dtype = knob("fp16", help="Type that 4-bit weights are computed in.")
    torch_dtype: str | torch.dtype | None = knob(help="Type of all other weights.")
    skip_modules: list[str] | None = knob(help="Modules that are left as they are.")
    keep_in_fp32_modules: list[str] | None = knob(help="Modules that are left in 32 bits.")

    def normalise(self) -> None:
        """Check the kinds of the values, and turn names into types of torch."""
        import torch

        for name, types in _TYPES.items():
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
