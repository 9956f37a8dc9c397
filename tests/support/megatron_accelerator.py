"""Models that Megatron trains as it does on an accelerator, on the host.

megatron-core asks for memory of a GPU by name. Where that name means the host, all of it runs here but its kernels.
"""

from __future__ import annotations

import functools
import inspect
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tests.support.megatron import make_model, make_rows
from tests.support.processes import close_process_group, run_group
from tests.support.training import fresh_accelerator

from accelerate.checkpointing.files import FolderWriter
from accelerate.checkpointing.parts import LoadOptions, Part
from accelerate.runtime import current
from accelerate.strategies.megatron.configs import _ON_CPU, translate
from accelerate.strategies.megatron.groups import make_groups
from accelerate.strategies.megatron.options import core, quiet_imports
from accelerate.strategies.megatron.wrappers import MegatronLMOptimizerWrapper, carry_optimizer
from accelerate.utils import MegatronLMPlugin

with quiet_imports():
    from accelerate.strategies.megatron.accelerator_checkpoint import MegatronOptimizerPart
    from accelerate.strategies.megatron.accelerator_optimizer import EngineOptimizer, freeze_others, make_optimizer
    from accelerate.strategies.megatron.accelerator_passes import MegatronPasses, seed_generators
    from accelerate.strategies.megatron.carried import carry
    from accelerate.strategies.megatron.checkpoint import PiecesPart
    from accelerate.strategies.megatron.engine import MegatronEngine, RunView

DEVICE = "cuda"


def placed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if DEVICE in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return call


def binding(real: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a stand-in that takes what the real function takes."""
    signature = inspect.signature(real)

    def call(*args: Any, **kwargs: Any) -> Any:
        signature.bind(*args, **kwargs)
        return answer(*args, **kwargs)

    return call


@contextmanager
def host_as_accelerator() -> Iterator[list[int]]:
    """Let megatron-core find the host where it asks for a GPU; yield the seeds that it is given."""
    tensor_parallel, module = core("tensor_parallel"), core("transformer.module")
    tracker = tensor_parallel.get_cuda_rng_tracker()
    seeds: list[int] = []

    def seed_all(seed: int) -> None:
        seeds.append(seed)
        tracker.set_states({"model-parallel-rng": torch.tensor([seed % 256], dtype=torch.uint8)})

    kind_of = torch.Tensor.type

    def as_on_device(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = kind_of(self, *args, **kwargs)
        return found if args or kwargs else found.replace("torch.", f"torch.{DEVICE}.")

    seeding = tensor_parallel.model_parallel_cuda_manual_seed
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning)
        for name in ("zeros", "tensor", "empty", "ones", "full"):
            stack.enter_context(patch.object(torch, name, placed(getattr(torch, name))))
        for owner, name, answer in (
            (torch.cuda, "current_device", lambda: torch.device("cpu")),
            (torch.cuda, "synchronize", lambda *_: None),
            (torch.Tensor, "cuda", lambda self, *_, **__: self),
            (torch.Tensor, "type", as_on_device),
            (module, "_FLOAT_TYPES", (torch.FloatTensor,)),
            (module, "_HALF_TYPES", (torch.HalfTensor,)),
            (module, "_BF16_TYPES", (torch.BFloat16Tensor,)),
            (tensor_parallel, "model_parallel_cuda_manual_seed", binding(seeding, seed_all)),
        ):
            stack.enter_context(patch.object(owner, name, answer))
        tracker.reset()
        try:
            yield seeds
        finally:
            tracker.reset()


@contextmanager
def accelerator_host() -> Iterator[list[int]]:
    """Do so, and take back what Megatron leaves: variables and a group of this process."""
    with patch.dict(os.environ), host_as_accelerator() as seeds:
        yield seeds
    close_process_group()


@dataclass
class Run:
    """A model that Megatron trains as it does on an accelerator."""

    engine: Any
    optimizer: Any
    accelerator: Any
    rows: list[dict[str, torch.Tensor]]

    @property
    def passes(self) -> MegatronPasses:
        found: MegatronPasses = self.engine.passes
        return found

    @property
    def held(self) -> EngineOptimizer:
        found: EngineOptimizer = self.optimizer.optimizer
        return found

    def batch(self, begin: int = 0, end: int = 8) -> dict[str, torch.Tensor]:
        rows = self.rows[begin:end]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def train(self, steps: int, clip: float | None = None) -> list[tuple[float, float]]:
        found = []
        for _ in range(steps):
            loss = self.engine(**self.batch()).loss
            self.accelerator.backward(loss)
            norm = 0.0 if clip is None else float(self.held.clip_grad_norm(clip))
            self.optimizer.step()
            self.optimizer.zero_grad()
            found.append((float(loss.detach()), norm))
        return found

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.engine.parameters()]


def make_optimizer_of_torch(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if kind == "groups":
        decays = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
        groups: list[dict[str, Any]] = [{"params": decays}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
        return torch.optim.AdamW(groups, lr=1e-2)
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def prepare(kind: str = "llama", precision: str = "no", optimizer: str = "adamw", **options: Any) -> Run:
    """Prepare as the strategy does; weights and attention are those of the CPU, and all else is an accelerator's."""
    others = {**_ON_CPU, **options.pop("other_megatron_args", {})}
    plugin = MegatronLMPlugin(other_megatron_args=others, **options)
    accelerator = fresh_accelerator(cpu=True, megatron_lm_plugin=plugin)
    runtime = current.runtime()
    model = make_model(kind)
    given = make_optimizer_of_torch(optimizer, model)
    configs = translate(
        plugin,
        model,
        device_type=DEVICE,
        mixed_precision=precision,
        micro_batch_size=8,
        world_size=runtime.world_size,
        optimizer=given,
    )
    make_groups(configs.degrees, runtime)
    seed_generators()
    carried = carry(model, configs, torch.device("cpu"), plugin)
    carry_optimizer(given, carried.replaced, dict(carried.module.named_parameters()), plugin)
    freeze_others(carried.module, given)
    engine = MegatronEngine(RunView(), carried, None, None)
    engine.passes = MegatronPasses(carried.module, configs, trains=True)
    engine.module = engine.passes.module
    engine.optimizer = MegatronLMOptimizerWrapper(make_optimizer(configs, engine.passes, given))
    carried.hand_over(engine)
    replica, replicas = (
        core("parallel_state").get_data_parallel_rank(),
        configs.degrees.data_parallel(runtime.world_size),
    )
    rows = make_rows(kind, 8)[replica * 8 // replicas : (replica + 1) * 8 // replicas]
    return Run(engine, engine.optimizer, accelerator, rows)


def plain_losses(kind: str, optimizer: str, steps: int, clip: float | None = None) -> list[tuple[float, float]]:
    """Train the model of Transformers, without anything of Megatron."""
    model = make_model(kind)
    made = make_optimizer_of_torch(optimizer, model)
    rows = make_rows(kind, 8)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    found = []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 if clip is None else clip)
        made.step()
        made.zero_grad()
        found.append((float(loss.detach()), 0.0 if clip is None else float(norm)))
    return found


# --- two processes ----------------------------------------------------------------------------------------------------

GROUPS: dict[str, dict[str, Any]] = {
    "replicas": {},
    "replicas, a distributed optimizer": {"use_distributed_optimizer": True},
    "replicas, mean of means": {"calculate_per_token_loss": False},
    "split layers and sequences": {"tp_degree": 2, "sequence_parallelism": True},
    "a pipeline": {"pp_degree": 2, "num_micro_batches": 2},
    "a pipeline whose words are tied": {"kind": "gpt2", "pp_degree": 2, "num_micro_batches": 2},
}


@functools.cache
def group_results() -> list[dict[str, Any]]:
    """Return what each of two processes finds for all groups."""
    with tempfile.TemporaryDirectory() as folder:
        # Not forked: a process that has computed with Megatron leaves threads that its children miss.
        return run_group(_train_groups, 2, folder, start_method="spawn")


def _train_groups(folder: str) -> dict[str, Any]:
    with host_as_accelerator():
        return {
            name: _train_and_resume(prepare(**options), Path(folder) / str(index))
            for index, (name, options) in enumerate(GROUPS.items())
        }


def _train_and_resume(run: Run, folder: Path) -> dict[str, Any]:
    first = run.train(2, clip=0.5)
    run.engine.eval()
    batch = run.batch()
    shown, silent = run.engine(**batch), run.engine(input_ids=batch["input_ids"])
    run.engine.train()
    folder.mkdir(exist_ok=True)
    parts: list[Part] = [PiecesPart(run.engine), MegatronOptimizerPart(run.engine)]
    writer = FolderWriter(folder)
    for part in parts:
        part.write(part.snapshot(), writer)
    writer.finish()
    writer.close()
    torch.distributed.barrier()
    last = run.train(2, clip=0.5)
    payloads = [part.read(folder, LoadOptions()) for part in parts]
    for part, payload in zip(parts, payloads, strict=True):
        part.restore(payload)
    return {
        "steps": first + last,
        "again": run.train(2, clip=0.5),
        "shape": tuple(shown.logits.shape[1:]),
        "has loss": (shown.loss is not None, silent.loss is not None),
        "same logits": torch.equal(shown.logits, silent.logits),
        "names": list(run.engine.carried.full_state_dict(keep=current.runtime().rank == 0)),
    }
