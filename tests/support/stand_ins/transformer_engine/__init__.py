"""A stand-in for TransformerEngine: its documented interface, with layers that compute on any device.

Under `autocast` a layer rounds inputs and weights to 8-bit floats, so that a test sees whether it ran in 8 bits.
"""

from transformer_engine import common, pytorch

__all__ = ["common", "pytorch"]
