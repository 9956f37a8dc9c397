"""Train tiny random models under DeepSpeed and beside replicas: by Transformers' Trainer, with PEFT, by TRL, by a plain loop.

What each rank saw comes into a JSON file. A run is named by program, engine, whose optimizer and schedule it has, over how many
batches it accumulates, and its number format: `trainer:zero3:json:2:fp32`.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from trainer_script import Rows, StepCounter, fingerprint, language_rows
from transformers import LlamaForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import accelerate
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin

STEPS, SAVE_AT, RATE, WARMUP, BATCH = 6, 3, 5e-3, 2, 4
AUTO = "auto"
ADAPTERS = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}


@dataclass(frozen=True)
class Case:
    """One run: which program, on which engine, with whose optimizer and schedule, over how many batches a step."""

    program: str
    engine: str
    optimizer: str
    accumulation: str
    precision: str
    folder: Path
    resume: bool

    @property
    def path(self) -> Path:
        return self.folder / f"{self.program}-{self.engine}-{self.optimizer}-{self.accumulation}-{self.precision}"

    def config(self) -> str | None:
        """Return the path of DeepSpeed's configuration, in which everything is left open that the Trainer can fill."""
        if not self.engine.startswith("zero"):
            return None
        stage = int(self.engine.removeprefix("zero"))
        config: dict[str, Any] = {
            "train_batch_size": AUTO,
            "train_micro_batch_size_per_gpu": AUTO,
            "gradient_accumulation_steps": AUTO,
            "gradient_clipping": AUTO,
            "fp16": {"enabled": AUTO},
            "bf16": {"enabled": AUTO},
            "zero_optimization": {"stage": stage, "contiguous_gradients": True, "reduce_bucket_size": AUTO},
        }
        if stage == 3:
            config["zero_optimization"] |= {
                "stage3_prefetch_bucket_size": AUTO,
                "stage3_param_persistence_threshold": AUTO,
                "stage3_gather_16bit_weights_on_model_save": True,
            }
        if self.optimizer == "json":
            open_values = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), AUTO)
            # DeepSpeed's own optimizers would be compiled first.
            config["optimizer"] = {"type": "AdamW", "params": {**open_values, "torch_adam": True}}
            names = ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
            config["scheduler"] = {"type": "WarmupDecayLR", "params": dict.fromkeys(names, AUTO)}
        self.path.mkdir(exist_ok=True)
        # Each rank has a file of its own: another one may be reading.
        path = self.path / f"deepspeed-{accelerate.PartialState().process_index}.json"
        path.write_text(json.dumps(config))
        return str(path)

    def options(self) -> dict[str, Any]:
        """Return the arguments that all trainers have."""
        return {
            "output_dir": str(self.path),
            "per_device_train_batch_size": BATCH,
            "per_device_eval_batch_size": BATCH,
            "gradient_accumulation_steps": int(self.accumulation),
            "max_steps": STEPS,
            "learning_rate": RATE,
            "warmup_steps": WARMUP,
            "logging_steps": 1,
            "save_steps": SAVE_AT,
            "eval_strategy": "steps",
            "eval_steps": SAVE_AT,
            "report_to": [],
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "seed": 0,
            "bf16": self.precision == "bf16",
            "use_cpu": self.precision == "bf16",  # without it the Trainer refuses bf16
            "deepspeed": self.config(),
        }


def rows() -> tuple[Rows, Rows]:
    """Return the rows to train on and those to evaluate on."""
    generator = torch.Generator().manual_seed(7)
    return language_rows(70, generator), language_rows(21, generator)


def in_shards(model: torch.nn.Module) -> bool:
    """Say whether each rank holds a part of every weight only; adapters are put beside them later, whole."""
    entries = [entry for name, entry in model.named_parameters() if "lora_" not in name]
    return all(hasattr(entry, "ds_id") and entry.numel() == 0 for entry in entries)


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all weights, gathered by DeepSpeed where it holds them in shards."""
    import deepspeed

    entries = dict(model.named_parameters())
    with deepspeed.zero.GatheredParameters([entry for entry in entries.values() if hasattr(entry, "ds_id")]):
        return {name: entry.detach().clone() for name, entry in entries.items()}


def fingerprints(weights: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    return {name: fingerprint(value) for name, value in weights.items()}


def history(trainer: Trainer) -> dict[str, Any]:
    """Return what the Trainer logged."""
    logged = trainer.state.log_history
    return {
        name: [entry[name] for entry in logged if name in entry]
        for name in ("loss", "grad_norm", "learning_rate", "eval_loss")
    }


def trained(case: Case, build: Callable[[], Any]) -> tuple[Trainer, dict[str, Any]]:
    """Train a model by the Trainer, save it, and return what can be compared."""
    arguments = TrainingArguments(**case.options())
    set_seed(int(case.resume))  # a resumed run may not lean on the seed
    model = build()  # after the arguments: with ZeRO 3 it is built in shards
    found = {"built in shards": in_shards(model)}
    train, evaluation = rows()
    optimizers: tuple[Any, Any] = (None, None)
    if (case.engine, case.optimizer) == ("ddp", "json"):
        from deepspeed.runtime.lr_schedules import WarmupDecayLR

        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
        optimizers = (optimizer, WarmupDecayLR(optimizer, STEPS, 0, RATE, WARMUP))
    counter = StepCounter()
    trainer = Trainer(model, arguments, None, train, evaluation, callbacks=[counter], optimizers=optimizers)
    trainer.train(resume_from_checkpoint=case.resume or None)
    trainer.save_model(str(case.path / "final"))
    trainer.accelerator.wait_for_everyone()
    found |= {
        "type": str(trainer.accelerator.distributed_type),
        "steps": counter.steps,
        "optimizer": type(trainer.optimizer).__name__,
        "schedule": type(trainer.lr_scheduler).__name__,
        **history(trainer),
    }
    return trainer, found


def run_trainer(case: Case) -> dict[str, Any]:
    # A resumed run may not lean on the weights it starts with either: they must come from the checkpoint.
    base = case.folder / ("other" if case.resume else "base")
    trainer, found = trained(case, lambda: LlamaForCausalLM.from_pretrained(base))
    weights = whole(trainer.model)
    unset_hf_deepspeed_config()
    saved = dict(LlamaForCausalLM.from_pretrained(case.path / "final", dtype="auto").named_parameters())
    found["saved is trained"] = weights.keys() == saved.keys() and all(
        torch.equal(weights[name], value) for name, value in saved.items()
    )
    return {**found, "weights": fingerprints(weights)}


def with_adapters(case: Case) -> Any:
    return get_peft_model(LlamaForCausalLM.from_pretrained(case.folder / "base"), LoraConfig(**ADAPTERS))


def adapters_of(case: Case, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return how the weights of a model with adapters stand beside those that it began with, and those that were saved."""
    unset_hf_deepspeed_config()
    base = LlamaForCausalLM.from_pretrained(case.folder / "base")
    saved = dict(PeftModel.from_pretrained(base, case.path / "final").named_parameters())
    adapters = {name: value for name, value in weights.items() if "lora_" in name}
    return {
        "base is unchanged": all(
            torch.equal(value, saved[name]) for name, value in weights.items() if name not in adapters
        ),
        "adapters are trained": all(value.abs().sum() > 0 for value in adapters.values()),
        "saved is trained": all(torch.equal(value, saved[name]) for name, value in adapters.items()),
        "weights": fingerprints(adapters),
    }


def run_lora(case: Case) -> dict[str, Any]:
    trainer, found = trained(case, lambda: with_adapters(case))
    return {**found, **adapters_of(case, whole(trainer.model))}


def run_loop(case: Case) -> dict[str, Any]:
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = DeepSpeedPlugin(zero_stage=3, zero3_save_16bit_model=True) if case.engine == "zero3" else None
    accelerator = accelerate.Accelerator(cpu=True, deepspeed_plugin=plugin)
    set_seed(0)
    model = with_adapters(case)
    found: dict[str, Any] = {"type": str(accelerator.distributed_type), "built in shards": in_shards(model)}
    optimizer = torch.optim.AdamW([entry for entry in model.parameters() if entry.requires_grad], lr=RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=2 * STEPS)
    loader = DataLoader(rows()[0], batch_size=BATCH)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses, norms = [], []
    for _, batch in zip(range(STEPS), loader, strict=False):
        loss = model(**batch).loss
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    inner = accelerator.unwrap_model(model)
    state = accelerator.get_state_dict(model)
    inner.save_pretrained(case.path / "final", is_main_process=accelerator.is_main_process, state_dict=state)
    accelerator.wait_for_everyone()
    return {**found, "loss": losses, "grad_norm": norms, **adapters_of(case, whole(inner))}


def run_sft(case: Case) -> dict[str, Any]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(**case.options(), gradient_checkpointing=False, max_length=12)
    set_seed(0)
    model = LlamaForCausalLM.from_pretrained(case.folder / "base")
    train, evaluation = (Dataset.from_dict({"input_ids": part.columns["input_ids"].tolist()}) for part in rows())
    trainer = SFTTrainer(model, config, train_dataset=train, eval_dataset=evaluation, processing_class=tokenizer())
    trainer.train()
    trainer.save_model(str(case.path / "final"))
    return {"type": str(trainer.accelerator.distributed_type), **history(trainer)}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(token): token for token in range(32)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="0", unk_token="0")


PROGRAMS = {"trainer": run_trainer, "lora": run_lora, "loop": run_loop, "sft": run_sft}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("stage")
    parser.add_argument("cases", nargs="+")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for name in options.cases:
        case = Case(*name.split(":"), options.output, options.stage == "resumed")
        results[name] = PROGRAMS[case.program](case)
        # What one run told Transformers is not for the next.
        unset_hf_deepspeed_config()
        gc.collect()
    results["package"] = str(Path(accelerate.__file__).resolve())
    state = accelerate.PartialState()
    (options.output / f"{options.stage}-{state.process_index}.json").write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
