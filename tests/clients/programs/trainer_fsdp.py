"""Train a tiny Llama with Transformers' Trainer as replicas and under both versions of FSDP, resume it, and save it whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from shared import attempt, counting_rows, files_of, fingerprint_of, history, run, tiny_llama, tokenizer
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

TRAIN, EVALUATION = counting_rows(90, seed=7), counting_rows(21, seed=8)
SAVE_AT, STEPS = 3, 6


def make_trainer(folder: Path, shards: dict[str, Any] | None, seed: int = 0) -> Trainer:
    layers = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=5e-3,
        logging_steps=1,
        save_steps=SAVE_AT,
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
        **({} if shards is None else {"fsdp": True, "fsdp_config": {**layers, **shards}}),
    )
    return Trainer(
        model=tiny_llama(seed),
        args=arguments,
        train_dataset=TRAIN,
        eval_dataset=EVALUATION,
        data_collator=DataCollatorForLanguageModeling(tokenizer(), mlm=False),
    )


def outcome(trainer: Trainer, folder: Path, resume: Path | None = None) -> dict[str, Any]:
    trained = trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        # The Trainer writes a model of which each rank has a part only where the plugin says that it is made whole.
        plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(folder))
    trainer.accelerator.wait_for_everyone()
    return {
        **history(trainer, "loss", "learning_rate", "grad_norm"),
        "steps": trained.global_step,
        "evaluated": trainer.evaluate()["eval_loss"],
        "weights": fingerprint_of(load_file(folder / "model.safetensors")),
    }


def straight_and_resumed(folder: Path, shards: dict[str, Any] | None) -> dict[str, Any]:
    straight = make_trainer(folder, shards)
    parts = {"type": straight.accelerator.distributed_type.value, "straight": outcome(straight, folder / "final")}
    checkpoint = folder / f"checkpoint-{SAVE_AT}"
    # Other weights and another random state: everything must come from the checkpoint.
    resumed = outcome(make_trainer(folder, shards, seed=1), folder / "resumed", checkpoint)
    return {**parts, "resumed": resumed, "files": [*files_of(checkpoint), *files_of(folder / "final")]}


def main(folder: Path) -> dict[str, Any]:
    versions: dict[str, Any] = {
        "replicas": None,
        "FSDP 1": {"version": 1, "state_dict_type": "FULL_STATE_DICT"},
        "FSDP 2": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
    }
    return {name: attempt(straight_and_resumed, folder / name, shards) for name, shards in versions.items()}


if __name__ == "__main__":
    run(main)
