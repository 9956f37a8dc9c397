"""Tune a tiny language model with four trainers of TRL: supervised, by preferences, by rewards, and a reward model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from shared import files_of, history, llama_config, run, sentences, tiny_llama, tokenizer
from transformers import LlamaForSequenceClassification, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from accelerate import PartialState


def options(folder: Path, **others: Any) -> dict[str, Any]:
    """Return the arguments that all trainers have."""
    return {
        "output_dir": str(folder),
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "seed": 1,
        "gradient_checkpointing": False,
        **others,
    }


def supervised(folder: Path) -> dict[str, Any]:
    config = SFTConfig(**options(folder, max_length=16, packing=False, eval_strategy="steps", eval_steps=4))
    rows = Dataset.from_dict({"text": sentences(40)})
    trainer = SFTTrainer(
        tiny_llama(), config, train_dataset=rows, eval_dataset=rows.select(range(9)), processing_class=tokenizer()
    )
    trainer.train()
    trainer.save_model()
    return {**history(trainer, "loss", "eval_loss"), "files": files_of(folder)}


def pairs(count: int) -> Dataset:
    chosen, rejected = sentences(count, seed=4), sentences(count, seed=5)
    return Dataset.from_dict({"prompt": ["the cat"] * count, "chosen": chosen, "rejected": rejected})


def preferences(folder: Path) -> dict[str, Any]:
    trainer = DPOTrainer(
        tiny_llama(),
        ref_model=tiny_llama(),
        args=DPOConfig(**options(folder, max_length=24)),
        train_dataset=pairs(24),
        processing_class=tokenizer(),
    )
    trainer.train()
    return history(trainer, "loss", "rewards/margins")


def short_words(completions: list[str], **_: Any) -> list[float]:
    """Reward short words."""
    return [-float(len(completion)) / 10 for completion in completions]


def rewards(folder: Path) -> dict[str, Any]:
    config = GRPOConfig(
        **options(folder, num_generations=2, max_completion_length=6, generation_batch_size=8, beta=0.1, max_steps=2)
    )
    rows = Dataset.from_dict({"prompt": sentences(16, seed=6, length=3)})
    model = folder.parent / "model"
    with PartialState(cpu=True).main_process_first():
        if not model.exists():
            tiny_llama().save_pretrained(model)
    set_seed(2)
    trainer = GRPOTrainer(str(model), short_words, args=config, train_dataset=rows, processing_class=tokenizer())
    trainer.train()
    return history(trainer, "loss", "reward")


def reward_model(folder: Path) -> dict[str, Any]:
    set_seed(0)
    trainer = RewardTrainer(
        LlamaForSequenceClassification(llama_config(num_labels=1)),
        args=RewardConfig(**options(folder, max_length=24)),
        train_dataset=pairs(24),
        processing_class=tokenizer(),
    )
    trainer.train()
    return history(trainer, "loss")


def main(folder: Path) -> dict[str, Any]:
    programs = {"sft": supervised, "dpo": preferences, "grpo": rewards, "reward": reward_model}
    return {name: program(folder / name) for name, program in programs.items()}


if __name__ == "__main__":
    run(main)
