"""`save_model` on a group: one process writes, whoever calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.processes import run_group

from accelerate import Accelerator, load_checkpoint_in_model
from accelerate._base.errors import ConfigurationError
from accelerate.checkpointing.weight_folder import LocalFolder
from accelerate.config.plugins.training import ProjectConfiguration

pytestmark = pytest.mark.multiprocess


def network(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))


def save_from_all(folder: Path) -> dict[str, Any]:
    written: list[str] = []
    publish = LocalFolder.publish

    def noted(self: LocalFolder, *arguments: Any) -> None:
        written.append(Path(str(self)).name)
        publish(self, *arguments)

    LocalFolder.publish = noted  # type: ignore[method-assign]
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(network(accelerator.process_index))  # wrapping gives all the weights of rank 0
    accelerator.save_model(model, folder / "all", max_shard_size=300)
    if accelerator.is_main_process:
        accelerator.save_model(model, folder / "main only")
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        (folder / "file").write_text("mine")
    accelerator.wait_for_everyone()
    error = ""
    try:
        accelerator.save_model(model, folder / "file")
    except ConfigurationError as raised:
        error = str(raised)
    accelerator.project_configuration = ProjectConfiguration(save_on_each_node=True)
    accelerator.save_model(model, folder / "each machine")
    accelerator.wait_for_everyone()
    read = network(9)
    load_checkpoint_in_model(read, folder / "all", strict=True)
    same = all(torch.equal(value, state[name]) for name, value in read.state_dict().items())
    return {"written": written, "names": list(state), "error": error, "same": same}


def test_one_process_writes(tmp_path: Path) -> None:
    first, second = run_group(save_from_all, 2, tmp_path)
    assert first["written"] == ["all", "main only", "each machine"]
    assert second["written"] == []
    for rank in (first, second):
        assert rank["names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert rank["same"]
        assert "is a file" in rank["error"]


def save_on_two_machines(folder: Path) -> list[str]:
    """Each process is the first of its machine."""
    import os

    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(save_on_each_node=True))
    own = folder / str(accelerator.process_index)
    accelerator.save_model(accelerator.prepare(network(0)), own)
    return sorted(file.name for file in own.iterdir())


def test_one_copy_a_machine(tmp_path: Path) -> None:
    assert run_group(save_on_two_machines, 2, tmp_path) == [["model.safetensors"]] * 2
