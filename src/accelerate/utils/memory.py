"""Memory helpers under their public path."""

from __future__ import annotations

from accelerate.collectives.out_of_memory import find_executable_batch_size as find_executable_batch_size
from accelerate.runtime.memory import clear_device_cache as clear_device_cache
from accelerate.runtime.memory import release_memory as release_memory
from accelerate.runtime.memory import should_reduce_batch_size as should_reduce_batch_size
