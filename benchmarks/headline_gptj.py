"""Tokens from a Transformers model of the size of GPT-J-6B, 24 GB in fp32, on a machine with less memory than that.

    python benchmarks/headline_gptj.py --folder weights --tokens 4

The weights are random, written shard by shard, and removed afterwards unless --keep is given. The tokens are compared with
those of the same layers run one by one by hand, without this library: each block is read from its file, run on all tokens
so far, and dropped. Exits with 1 if they differ, or if the private memory of the process passes its budget.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from headline import MB, in_new_process, report, watch, write_random_checkpoint
from safetensors import safe_open

from accelerate import init_empty_weights, load_checkpoint_and_dispatch

BUDGET = 3000 * MB
PROMPT = [[464, 3280, 284, 1257, 318, 220, 3682, 13]]


def config(layers: int) -> Any:
    from transformers import GPTJConfig

    return GPTJConfig(n_layer=layers, attn_implementation="eager")


def empty_model(layers: int) -> Any:
    from transformers import GPTJForCausalLM

    with init_empty_weights():
        return GPTJForCausalLM(config(layers)).eval()


def write(folder: str, layers: int) -> tuple[int, int]:
    """Write the checkpoint; return its bytes and its number of parameters."""
    model = empty_model(layers)
    return write_random_checkpoint(model, Path(folder)), sum(p.numel() for p in model.parameters())


def from_disk(folder: str, layers: int, tokens: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as offload, watch() as whole:
        model = empty_model(layers)
        with watch() as loading:
            load_checkpoint_and_dispatch(model, folder, device_map={"": "disk"}, offload_folder=offload)
        with watch() as generating, torch.inference_mode():
            ids = torch.tensor(PROMPT)
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
    return {
        "tokens": found[0, len(PROMPT[0]) :].tolist(),
        "figures": {
            "peak": whole.peak,
            "before_loading": loading.before,
            "loading_seconds": loading.seconds,
            "seconds_per_token": generating.seconds / tokens,
        },
    }


class ByHand:
    """The model as a loop over its layers, each read from its file when it is its turn."""

    def __init__(self, folder: Path, layers: int) -> None:
        self.folder, self.config = folder, config(layers)
        self.files: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]

    def read(self, prefix: str) -> dict[str, torch.Tensor]:
        found = {}
        for name in [name for name in self.files if name.startswith(prefix)]:
            with safe_open(self.folder / self.files[name], framework="pt") as file:
                found[name.removeprefix(prefix)] = file.get_tensor(name)
        return found

    def next_token(self, ids: list[int]) -> int:
        from transformers.models.gptj.modeling_gptj import GPTJBlock

        with torch.inference_mode():
            hidden = torch.nn.functional.embedding(torch.tensor([ids]), self.read("transformer.wte.")["weight"])
            positions = torch.arange(len(ids))[None]
            mask = torch.full((1, 1, len(ids), len(ids)), torch.finfo(torch.float32).min).triu(1)
            for index in range(self.config.n_layer):
                with init_empty_weights():
                    block = GPTJBlock(self.config, layer_idx=index).eval()
                block.load_state_dict(self.read(f"transformer.h.{index}."), assign=True)
                result = block(hidden, position_ids=positions, attention_mask=mask)
                hidden = result if isinstance(result, torch.Tensor) else result[0]
                del block
            norm = self.read("transformer.ln_f.")
            hidden = torch.nn.functional.layer_norm(hidden[:, -1], (self.config.n_embd,), norm["weight"], norm["bias"])
            head = self.read("lm_head.")
            return int(torch.nn.functional.linear(hidden, head["weight"], head["bias"]).argmax())


def by_hand(folder: str, layers: int, tokens: int, threads: int) -> list[int]:
    torch.set_num_threads(threads)
    runner, ids = ByHand(Path(folder), layers), list(PROMPT[0])
    for _ in range(tokens):
        ids.append(runner.next_token(ids))
    return ids[len(PROMPT[0]) :]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="headline-gptj", help="where the weights are written")
    parser.add_argument("--keep", action="store_true", help="leave the weights there, and use those that are there")
    parser.add_argument("--layers", type=int, default=28, help="fewer than GPT-J's 28 for a trial")
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    folder, work = Path(args.folder), (args.layers, args.tokens, args.threads)
    rows: dict[str, object] = {}
    try:
        if not (args.keep and folder.exists()):
            size, parameters = in_new_process(write, str(folder), args.layers)
            rows |= {"parameters": parameters, "bytes of weights": size}
        ours = in_new_process(from_disk, str(folder), *work)
        expected = in_new_process(by_hand, str(folder), *work)
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    peak = ours["figures"]["peak"]
    equal = ours["tokens"] == expected
    rows |= {"tokens": ours["tokens"], "by hand": expected, **ours["figures"]}
    rows |= {"equal to the layers by hand": equal, "budget": BUDGET, "budget holds": peak < BUDGET}
    report(rows, args.json)
    return 0 if equal and peak < BUDGET else 1


if __name__ == "__main__":
    sys.exit(main())
