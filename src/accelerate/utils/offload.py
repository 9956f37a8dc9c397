"""Offloaded weights under their public path."""

from __future__ import annotations

from accelerate.offload.store import OffloadedWeightsLoader as OffloadedWeightsLoader
from accelerate.offload.store import PrefixedDataset as PrefixedDataset
from accelerate.offload.store import extract_submodules_state_dict as extract_submodules_state_dict
from accelerate.offload.store import load_offloaded_weight as load_offloaded_weight
from accelerate.offload.store import offload_state_dict as offload_state_dict
from accelerate.offload.store import offload_weight as offload_weight
from accelerate.offload.store import save_offload_index as save_offload_index
