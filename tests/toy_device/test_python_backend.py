"""A device type that torch's own helper registers, in Python alone: what stands at its name is a plain object."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.processes import run_group
from tests.support.training import fresh_accelerator
from torch.utils import backend_registration

from accelerate import Accelerator, PartialState, infer_auto_device_map
from accelerate._base.errors import ConfigurationError
from accelerate.devices import registry
from accelerate.utils import DistributedType, release_memory, set_seed


class Counting(backend_registration._DummyBackendModule):
    """The helper's own object, with three devices and an ear for seeds."""

    seeds: list[int]

    def device_count(self) -> int:
        return 3

    def manual_seed_all(self, seed: int) -> None:
        self.seeds.append(seed)


def check_recognised(has_own_module: bool, folder: Path) -> None:
    module = None
    if has_own_module:
        module = Counting()
        module.seeds = []
    backend_registration._setup_privateuseone_for_python_backend("warp", backend_module=module)
    chosen = registry.default()
    assert chosen.reason == "torch.accelerator reports 'warp'"
    assert (chosen.value.type, chosen.value.is_available()) == ("warp", True)
    assert chosen.value.device_count() == (3 if has_own_module else 1)
    assert chosen.value.device(4) == torch.device("warp", 1 if has_own_module else 0)
    assert not chosen.value.has_streams
    state = PartialState()
    assert (state.device, state.distributed_type) == (torch.device("warp"), DistributedType.NO)
    accelerator = Accelerator()
    assert accelerator.device == torch.device("warp")
    set_seed(7)
    assert module is None or set(module.seeds) == {7}
    assert release_memory("something") == [None]
    accelerator.wait_for_everyone()
    # It has no random state of its own.
    accelerator.save_state(folder / "checkpoint")
    drawn = torch.rand(3)
    accelerator.load_state(folder / "checkpoint")
    assert torch.equal(torch.rand(3), drawn)
    # It does not say how much memory is free.
    with pytest.raises(ConfigurationError, match=r"warp:0 does not say .*max_memory="):
        infer_auto_device_map(torch.nn.Linear(2, 2))
    # The helper brings no operators: torch says so, and what a program keeps on the CPU works.
    with pytest.raises(NotImplementedError, match="from the 'warp' backend"):
        accelerator.prepare(torch.nn.Linear(2, 2))
    layer = accelerator.prepare_model(torch.nn.Linear(2, 2), device_placement=False)
    assert layer(torch.ones(1, 2)).device.type == "cpu"
    with pytest.raises(ConfigurationError, match="'warp' devices here cannot compute in bfloat16"):
        fresh_accelerator(mixed_precision="bf16")


@pytest.mark.parametrize("has_own_module", [False, True])
def test_a_device_of_the_helper_of_torch_is_recognised(has_own_module: bool, tmp_path: Path) -> None:
    run_group(check_recognised, 1, has_own_module, tmp_path, start_method="forkserver", timeout=120)
