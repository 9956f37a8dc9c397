"""Layers and sequences that DeepSpeed splits over ranks are trained as by one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.nn
from tests.support.training import assert_near, fresh_accelerator, group_once
from tests.support.zero import quiet
from torch.utils.data import DataLoader

from accelerate import DeepSpeedPlugin, ParallelismConfig

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")
pytestmark = pytest.mark.multiprocess


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=64, attn_implementation="sdpa"))


def tokens_of(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.stack(batch), "labels": torch.stack(batch)}


def train_llama(
    way: str, stage: int = 0, *, stop: int | None = None, resumes: bool = False, folder: str = ""
) -> list[tuple[float, float]]:
    """Train with layers split over ranks, or sequences, or neither; every way sees the same batches.

    Args:
        stop: Save after so many batches, and end.
        resumes: Go on from what was saved.
    """
    options: dict[str, Any] = {}
    if way == "layers":
        config = {
            "tensor_parallel": {"autotp_size": 2},
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": stage},
        }
        options = {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config)}
    if way == "sequences":
        options = {
            "deepspeed_plugin": DeepSpeedPlugin(zero_stage=stage),
            "parallelism_config": ParallelismConfig(sp_size=2),
        }
    accelerator = fresh_accelerator(cpu=True, **options)
    generator = torch.Generator().manual_seed(1)
    data: Any = [torch.randint(0, 64, (16,), generator=generator) for _ in range(16)]
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=4, collate_fn=tokens_of)
    )
    found, rows = [], 0
    assert len(loader) == 4
    if resumes:
        accelerator.load_state(folder)
    for batch in loader:
        rows += 0 if way == "sequences" else len(accelerator.gather_for_metrics(batch["input_ids"]))
        if way == "sequences":
            wanted = batch.pop("shift_labels")
            logits = model(**batch).logits.flatten(0, 1).float()
            own = torch.nn.functional.cross_entropy(logits, wanted.flatten(), ignore_index=-100, reduction="sum")
            counts = torch.stack([own, (wanted != -100).sum().float()])
            total, count = torch.distributed.nn.functional.all_reduce(counts)
            loss = total / count
        else:
            loss = model(**batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), float(norm)))
        if len(found) == stop:
            accelerator.save_state(folder)
            break
    accelerator.free_memory()  # puts back the attention of Transformers
    return [*found, (float(rows), 0.0)]


def sequences_go_on(root: str) -> dict[str, Any]:
    """A run stops after the batch of one of two ranks that split sequences, and goes on with that of the other."""
    found: dict[str, Any] = {"whole": train_llama("sequences", 2)}
    found["head"] = train_llama("sequences", 2, stop=3, folder=f"{root}/sequences")
    found["rest"] = train_llama("sequences", 2, resumes=True, folder=f"{root}/sequences")
    return found


def work_of_two(root: str) -> dict[str, Any]:
    quiet()
    found: dict[str, Any] = {"go on": sequences_go_on(root)}
    for way in ("layers", "sequences"):
        found[way] = {stage: train_llama(way, stage) for stage in (0, 1, 2, 3)}
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("deepspeed"))


def two(what: str, folder: str) -> list[Any]:
    return [rank[what] for rank in group_once(work_of_two, 2, folder)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("way", ["layers", "sequences"])
def test_what_is_split_over_ranks_trains_as_one_process(way: str, stage: int, folder: str) -> None:
    expected = torch.tensor(group_once(llama_alone, 1)[0][:4])
    for found in two(way, folder):
        assert_near(way, torch.tensor(found[stage][:4]), expected, 2e-5)
        assert found[stage][4][0] == (16 if way == "layers" else 0)  # ranks of one model have the same rows


def llama_alone() -> list[tuple[float, float]]:
    quiet()
    return train_llama("alone")


def test_batches_of_ranks_that_split_sequences_go_on(folder: str) -> None:
    for found in two("go on", folder):
        assert found["head"][:-1] + found["rest"] == found["whole"]
