"""The FSDP flags of `accelerate launch` reach the plugin of a script, and the script trains as they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.launching import launch, launch_warm

pytestmark = pytest.mark.multiprocess

SCRIPT = """
import json, sys
from pathlib import Path

import torch
from torch import nn

from accelerate import Accelerator


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, rows):
        return torch.relu(self.linear(rows))


torch.manual_seed(0)
accelerator = Accelerator()
model = nn.Sequential(Layer(), Layer(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True)), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for _ in range(6):
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
folder = Path(sys.argv[1])
accelerator.save_state(folder / "state")
plugin = accelerator.state.fsdp_plugin
text = lambda value: getattr(value, "name", None) or (value if isinstance(value, (bool, int, str)) else str(value))
names = [type(module).__name__ for module in model.modules()]
facts = {
    "strategy": accelerator.strategy.name,
    "losses": losses,
    "units": sum("FSDP" in name or "FullyShardedDataParallel" in name for name in names),
    "checkpointed": sum("CheckpointWrapper" in name for name in names),
    "files": sorted(path.name for path in (folder / "state").iterdir()),
    "version": plugin.fsdp_version,
    "state_dict_type": text(plugin.state_dict_type),
    "reshard": text(plugin.reshard_after_forward),
    "sharding": text(plugin.sharding_strategy),
    "offload": type(plugin.cpu_offload).__name__ if plugin.fsdp_version == 2 else plugin.cpu_offload.offload_params,
    "activation_checkpointing": plugin.activation_checkpointing,
    "use_orig_params": plugin.use_orig_params,
    "ram_efficient": plugin.cpu_ram_efficient_loading,
    "prefetch": text(plugin.backward_prefetch),
    "forward_prefetch": plugin.forward_prefetch,
    "classes": list(plugin.transformer_cls_names_to_wrap or ()),
    "min_num_params": plugin.min_num_params,
}
if accelerator.is_main_process:
    (folder / "facts.json").write_text(json.dumps(facts))
accelerator.end_training()
"""
BY_CLASS = ["--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", "--fsdp_transformer_layer_cls_to_wrap", "Layer"]
CASES: dict[str, tuple[list[str], dict[str, Any], set[str]]] = {
    "version 2, shards, activations again": (
        [
            "--fsdp_version",
            "2",
            *BY_CLASS,
            "--fsdp_state_dict_type",
            "SHARDED_STATE_DICT",
            "--fsdp_activation_checkpointing",
            "true",
            "--fsdp_reshard_after_forward",
            "false",
            "--fsdp_cpu_ram_efficient_loading",
            "false",
        ],
        {
            "strategy": "fsdp2",
            "version": 2,
            "units": 3,
            "checkpointed": 2,
            "state_dict_type": "SHARDED_STATE_DICT",
            "reshard": False,
            "activation_checkpointing": True,
            "ram_efficient": False,
            "classes": ["Layer"],
        },
        {"pytorch_model_fsdp_0", "optimizer_0"},
    ),
    "version 2, whole, offloaded": (
        [
            "--fsdp_version",
            "2",
            *BY_CLASS,
            "--fsdp_state_dict_type",
            "FULL_STATE_DICT",
            "--fsdp_offload_params",
            "true",
        ],
        {
            "strategy": "fsdp2",
            "units": 3,
            "checkpointed": 0,
            "state_dict_type": "FULL_STATE_DICT",
            "reshard": True,
            "offload": "CPUOffloadPolicy",
            "ram_efficient": True,
        },
        {"pytorch_model_fsdp.bin", "optimizer.bin"},
    ),
    "version 1, whole, activations again": (
        [
            "--fsdp_version",
            "1",
            *BY_CLASS,
            "--fsdp_state_dict_type",
            "FULL_STATE_DICT",
            "--fsdp_activation_checkpointing",
            "true",
            "--fsdp_sharding_strategy",
            "SHARD_GRAD_OP",
            "--fsdp_reshard_after_forward",
            "SHARD_GRAD_OP",
            "--fsdp_backward_prefetch",
            "BACKWARD_POST",
            "--fsdp_forward_prefetch",
            "true",
        ],
        {
            "strategy": "fsdp1",
            "version": 1,
            "units": 3,
            "checkpointed": 2,
            "state_dict_type": "FULL_STATE_DICT",
            "sharding": "SHARD_GRAD_OP",
            "prefetch": "BACKWARD_POST",
            "forward_prefetch": True,
            "use_orig_params": True,
        },
        {"pytorch_model_fsdp.bin", "optimizer.bin"},
    ),
    "version 1, shards, by size": (
        [
            "--fsdp_version",
            "1",
            "--fsdp_auto_wrap_policy",
            "SIZE_BASED_WRAP",
            "--fsdp_min_num_params",
            "60",
            "--fsdp_state_dict_type",
            "SHARDED_STATE_DICT",
            "--fsdp_use_orig_params",
            "false",
            "--fsdp_offload_params",
            "true",
        ],
        {
            "strategy": "fsdp1",
            "units": 3,
            "state_dict_type": "SHARDED_STATE_DICT",
            "min_num_params": 60,
            "use_orig_params": False,
            "offload": True,
        },
        {"pytorch_model_fsdp_0", "optimizer_0"},
    ),
}


# This one goes through the launcher as a program; the others are planned by it and start at once.
STARTED = "version 2, shards, activations again"


@pytest.mark.parametrize("name", CASES)
def test_flags_reach_the_script(tmp_path: Path, name: str) -> None:
    flags, expected, files = CASES[name]
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = ["--cpu", "--num_processes", "2", "--use_fsdp", *flags]
    if name == STARTED:
        finished = launch(*options, str(script), str(tmp_path))
        assert finished.returncode == 0, finished.stderr[-4000:]
    else:
        launch_warm(options, script, [str(tmp_path)])
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert {key: facts[key] for key in expected} == expected
    assert files <= set(facts["files"])
    assert facts["losses"][-1] < 0.8 * facts["losses"][0]


def test_a_file_for_fsdp_trains_on_the_cpu_of_a_machine_without_accelerators(tmp_path: Path) -> None:
    script, file = tmp_path / "train.py", tmp_path / "fsdp.yaml"
    script.write_text(SCRIPT)
    file.write_text("distributed_type: FSDP\nnum_processes: 2\ngpu_ids: all\nfsdp_config:\n  fsdp_version: 2\n")
    finished = launch("--config_file", str(file), str(script), str(tmp_path))
    assert finished.returncode == 0, finished.stderr[-4000:]
    said = [line for line in finished.stderr.splitlines() if line.startswith("accelerate launch:")]
    assert len(said) == 1
    assert f"use_fsdp=True (file {file}: distributed_type) runs on the CPU" in said[0]
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert (facts["strategy"], facts["version"]) == ("fsdp2", 2)
    assert facts["losses"][-1] < 0.8 * facts["losses"][0]
