"""The public helpers under one roof; the names stand in the stubs beside this file, once each."""

from accelerate._base.lazy import attach_stub

# Not lazy: the sub-module and the function share their name, and importing the one would hide the other.
from accelerate.utils.tqdm import tqdm as tqdm

__getattr__, __dir__ = attach_stub(__name__)
