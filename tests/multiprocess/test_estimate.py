"""The estimate for sharded and split training is what torch allocates on a rank."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tests.support.gpt import TinyGPT, make_tokens
from tests.support.processes import run_group
from tests.support.training import fresh_accelerator
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from accelerate import ParallelismConfig
from accelerate.commands.estimate import estimate_command, estimate_command_parser
from accelerate.offload.estimate import ModelTensors, per_rank, tensors_of_model
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

pytestmark = pytest.mark.multiprocess


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def local_bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.nbytes


def train_one_step() -> tuple[int, int, int]:
    """Return the bytes of weights with buffers, gradients and moments that this rank holds after a step."""
    dist.init_process_group("gloo")
    try:
        model = network()
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        model(torch.ones(4, 5)).sum().backward()
        optimizer.step()
        moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        return (
            sum(local_bytes(tensor) for tensor in [*model.parameters(), *model.buffers()]),
            sum(local_bytes(parameter.grad) for parameter in model.parameters() if parameter.grad is not None),
            sum(local_bytes(moment) for moment in moments),
        )
    finally:
        dist.destroy_process_group()


def test_fsdp_holds_what_the_estimate_says() -> None:
    expected = per_rank(ModelTensors(tuple(tensors_of_model(network()))), "float32", 2)["FSDP"]
    first, second = run_group(train_one_step, 2)
    assert first == (expected.weights, expected.gradients, expected.optimizer)
    assert second < first


LAYOUTS = {"tp": (1, 4), "fsdp and tp": (2, 2), "fsdp": (4, 1)}


def resident(fsdp: int, tp: int) -> int:
    """Return the bytes of weights, gradients and moments that this rank holds after a step in a layout."""
    options = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)} if fsdp > 1 else {}
    sizes = ParallelismConfig(dp_shard_size=fsdp, tp_size=tp)
    accelerator = fresh_accelerator(parallelism_config=sizes, **options)
    model = TinyGPT(torch.float32)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), foreach=False))
    tokens = make_tokens(2)
    accelerator.backward(model(tokens[:, :-1], tokens[:, 1:]))
    optimizer.step()
    held = [*model.parameters(), *(parameter.grad for parameter in model.parameters())]
    held += [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return sum(local_bytes(tensor) for tensor in held)


def every_layout() -> dict[str, int]:
    return {name: resident(*sizes) for name, sizes in LAYOUTS.items()}


def test_a_layout_holds_what_the_command_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(TinyGPT(torch.float32).state_dict(), tmp_path / "model.safetensors")
    ranks = run_group(every_layout, 4)
    for name, (fsdp, tp) in LAYOUTS.items():
        words = [str(tmp_path), "--dtypes", "float32", "--json", "--fsdp", str(fsdp), "--tp", str(tp)]
        estimate_command(estimate_command_parser().parse_args(words))
        found = json.loads(capsys.readouterr().out)
        assert found["num_processes"] == 4
        (said,) = found["per_rank"]["float32"].values()
        assert max(rank[name] for rank in ranks) == pytest.approx(said["total"] - said["working"], rel=0.1)


# --- DeepSpeed -------------------------------------------------------------------------------------------------------

WIDTH, LAYERS = 500, 32


class Held(TorchDispatchMode):
    """Count the bytes of all tensors that are made in a block and still there, and the most that there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._note, result)
        return result

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) in self._known or storage.device.type != "cpu":
            return
        self._known.add(id(storage))
        weakref.finalize(storage, self._drop, id(storage), storage.nbytes())
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)

    def _drop(self, known: int, size: int) -> None:
        self._known.discard(known)
        self.now -= size


def deep_network() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def under_deepspeed(stage: int, precision: str) -> dict[str, int]:
    """Return the bytes of the parts that this rank holds, and the most at once in a step that is not the first."""
    # A bucket is a setting, which the estimate leaves out: as small as a layer.
    config = {
        "zero_optimization": {"stage": stage, "reduce_bucket_size": WIDTH * WIDTH},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
    }
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = fresh_accelerator(cpu=True, mixed_precision=precision, deepspeed_plugin=plugin)
    gradients: list[int] = []
    with Held() as held:
        model = deep_network()
        engine, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))

        def note_gradients(*_: Any) -> None:
            gradients.append(size_of([p.grad for p in engine.parameters() if p.grad is not None]))

        engine.module[0].register_full_backward_hook(note_gradients)
        for _ in range(2):
            loss = engine(torch.ones(2, WIDTH, requires_grad=True)).square().mean()
            held.peak = held.now
            accelerator.backward(loss)
            averaged = getattr(engine.optimizer, "averaged_gradients", {}).values()
            gradients.append(size_of([gradient for group in averaged if group for gradient in group]))
            optimizer.step()
            optimizer.zero_grad()
    weights = [getattr(parameter, "ds_tensor", parameter) for parameter in engine.parameters()]
    states = [value for state in engine.basic_optimizer.state.values() for value in state.values()]
    masters = [parameter for group in engine.basic_optimizer.param_groups for parameter in group["params"]]
    masters += getattr(engine.optimizer, "fp32_partitioned_groups_flat", [])
    return {
        "weights": size_of(weights),
        "gradients": max(gradients),
        # Without ZeRO, in full precision, the optimizer steps the weights themselves.
        "optimizer": size_of([*states, *masters, *weights]) - size_of(weights),
        "at once": held.peak,
    }


def size_of(tensors: list[torch.Tensor]) -> int:
    """Return the bytes that tensors take together; those that share memory count once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


ENGINES = [(stage, precision) for precision in ("no", "bf16") for stage in range(4)]


def every_engine() -> list[dict[str, int]]:
    return [under_deepspeed(*engine) for engine in ENGINES]


# DeepSpeed 0.19 calls torch.distributed by names that torch 2.13 warns about.
@pytest.mark.filterwarnings("ignore:`torch.distributed.* is deprecated:FutureWarning")
def test_deepspeed_holds_what_the_estimate_says() -> None:
    if find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    first, _ = run_group(every_engine, 2, env={"ACCELERATE_USE_CPU": "true"})
    tensors = ModelTensors(tuple(tensors_of_model(deep_network())))
    for (stage, precision), found in zip(ENGINES, first, strict=True):
        dtype = "float32" if precision == "no" else "bfloat16"
        said = per_rank(tensors, dtype, 2)[f"ZeRO-{stage}" if stage else "DDP"]
        assert found["at once"] == pytest.approx(said.total, rel=0.1), (stage, precision)
        held = found["weights"] + found["gradients"] + found["optimizer"]
        assert held == pytest.approx(said.total - said.working, rel=0.1), (stage, precision)
        if stage:
            assert found["weights"] == pytest.approx(said.weights, rel=0.1), (stage, precision)
            assert found["gradients"] == pytest.approx(said.gradients, rel=0.1), (stage, precision)
            assert found["optimizer"] == pytest.approx(said.optimizer, rel=0.1), (stage, precision)
