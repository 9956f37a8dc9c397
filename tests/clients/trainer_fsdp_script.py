"""Train tiny random models with Transformers' Trainer under FSDP and write what each rank saw to a JSON file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from trainer_script import CLIENTS, SAVE_AT, StepCounter, arguments_of, fingerprint, objects_of
from transformers import Trainer, set_seed

import accelerate

BLOCKS = {"bert": "BertLayer", "gpt2": "GPT2Block"}


def run_client(name: str, output: Path, version: int, kind: str, resume: bool, evaluates_first: bool) -> dict[str, Any]:
    """Train one client, from the start or from its checkpoint, save its model, and return what can be compared."""
    model, train, evaluation = objects_of(name, resume)
    arguments = arguments_of(
        name,
        output,
        fsdp=True,
        fsdp_config={
            "version": version,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": [BLOCKS[name]],
            "state_dict_type": kind,
        },
    )
    counter = StepCounter()
    trainer = Trainer(model=model, args=arguments, train_dataset=train, eval_dataset=evaluation, callbacks=[counter])
    if evaluates_first:
        trainer.evaluate()
    set_seed(arguments.seed)  # loaders of an evaluation draw from the same random state as dropout
    checkpoint = str(output / name / f"checkpoint-{SAVE_AT}")
    trained = trainer.train(resume_from_checkpoint=checkpoint if resume else None)
    evaluated = trainer.evaluate()
    # The Trainer writes a model of which each rank has a part only where the plugin says that it is made whole.
    trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(str(output / name / "final"))
    whole = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    plugin = trainer.accelerator.state.fsdp_plugin
    local = [entry.to_local() if hasattr(entry, "to_local") else entry for entry in trainer.model_wrapped.parameters()]
    return {
        "type": str(trainer.accelerator.distributed_type),
        "version": plugin.fsdp_version,
        "numbers here": sum(entry.numel() for entry in local),
        "numbers": sum(entry.numel() for entry in model_of(name).parameters()),
        "steps": trained.global_step,
        "steps_run": counter.steps,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "eval_loss": evaluated["eval_loss"],
        "weights": {key: fingerprint(value) for key, value in whole.items()},
    }


def model_of(name: str) -> torch.nn.Module:
    return CLIENTS[name][0]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--version", type=int, required=True)
    parser.add_argument("--kind", default="FULL_STATE_DICT")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--evaluate-first", action="store_true")
    options = parser.parse_args()
    results: dict[str, Any] = {
        name: run_client(name, options.output, options.version, options.kind, options.resume, options.evaluate_first)
        for name in CLIENTS
    }
    state = accelerate.PartialState()
    results["package"] = str(Path(accelerate.__file__).resolve())
    stage = "resumed" if options.resume else "evaluated" if options.evaluate_first else "straight"
    (options.output / f"{stage}-{state.process_index}.json").write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
