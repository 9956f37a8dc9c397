"""Draw the pictures of the pages on layouts: memory by number of processes, and the order of the steps.

python tools/draw_layouts.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from pathlib import Path

from accelerate.offload.estimate import ModelTensors, TensorInfo, in_layout, per_rank

ASSETS = Path(__file__).resolve().parents[1] / "docs" / "assets"
GIB = 2**30
# The shapes of a well-known model of 6.7 billion parameters.
WIDTH, INNER, BLOCKS, VOCABULARY = 4096, 11008, 32, 32000
MATRICES = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "o": (WIDTH, WIDTH)}
MATRICES |= {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
COUNTS = (1, 2, 4, 8, 16, 32, 64)
COLOURS = ("#455a64", "#d84315", "#1565c0", "#2e7d32", "#6a1b9a")
DEVICES = (24, 80)

# Name of the step in the code, what it does, and why it stands there. Kept in order by a test.
STEPS = (
    ("convert", "layers of the number format", "fp8 only: which ones is decided on the whole model"),
    ("split_over_ranks", "split layers", "tensor parallel: what follows acts on the part that a rank has"),
    ("raise_precision", "weights in float32", "where mixed precision computes in 16 bits"),
    ("wrap_forward", "autocast", "innermost, so that all that is around it sees float32"),
    ("checkpoint_activations", "activation checkpoints", "before the compiler, which then sees through them"),
    ("compile_blocks", "compile blocks", "before sharding, so that exchanges stay outside of a graph"),
    ("shard", "shard", "each compiled block gathers its weights as one"),
    ("compile_whole", "compile the whole", "only where blocks are not compiled one by one"),
)


def large_model() -> ModelTensors:
    """Return the tensors of the model that the chart is about."""
    return ModelTensors(tuple(_entries()))


def _entries() -> Iterator[TensorInfo]:
    def entry(name: str, shape: tuple[int, ...], layer: str) -> TensorInfo:
        return TensorInfo(name, shape, 32, floating=True, trainable=True, layer=layer)

    for name in ("embedding", "head"):
        yield entry(f"{name}.weight", (VOCABULARY, WIDTH), name)
    for index in range(BLOCKS):
        layer = f"blocks.{index}"
        for name, shape in MATRICES.items():
            yield entry(f"{layer}.{name}.weight", shape, layer)
        for name in ("norm1", "norm2"):
            yield entry(f"{layer}.{name}.weight", (WIDTH,), layer)


def curves() -> dict[str, list[tuple[int, float]]]:
    """Return the GiB of a process by number of processes, for each way of laying them out."""
    model = large_model()

    def point(count: int, fsdp: int, tp: int) -> tuple[int, float]:
        return count, in_layout(model, "bfloat16", fsdp=fsdp, tp=tp).total / GIB

    return {
        "replicas (DDP)": [(count, per_rank(model, "bfloat16", count)["DDP"].total / GIB) for count in COUNTS],
        "replicas of 8 shards (HSDP)": [point(count, min(count, 8), 1) for count in COUNTS],
        "shards (FSDP)": [point(count, count, 1) for count in COUNTS],
        "split layers (TP)": [point(count, 1, count) for count in COUNTS if count <= 8],
        "shards of layers split over 8": [point(count, count // 8, 8) for count in COUNTS if count >= 8],
    }


def draw_memory() -> str:
    """Return the chart of memory by number of processes."""
    left, top, width, height, low, high = 60, 40, 420, 300, 1.0, 256.0

    def place(count: float, size: float) -> tuple[float, float]:
        across = math.log2(count) / math.log2(COUNTS[-1])
        up = (math.log2(size) - math.log2(low)) / (math.log2(high) - math.log2(low))
        return round(left + across * width, 1), round(top + (1 - up) * height, 1)

    parts = [_text(left, 22, "GiB of a process, 6.7 billion parameters, Adam, bf16, without activations", size=13)]
    for size in (1, 4, 16, 64, 256):
        across, up = place(1, size)
        parts.append(f'<path d="M{across} {up}h{width}" stroke="#90a4ae" stroke-width="0.5"/>')
        parts.append(_text(left - 8, up + 4, str(size), anchor="end"))
    for count in COUNTS:
        across, _ = place(count, low)
        parts.append(_text(across, top + height + 18, str(count), anchor="middle"))
    parts.append(_text(left + width / 2, top + height + 38, "processes", anchor="middle"))
    for device in DEVICES:
        across, up = place(1, device)
        parts.append(f'<path d="M{across} {up}h{width}" stroke="#f9a825" stroke-dasharray="6 4"/>')
        parts.append(_text(left + width + 6, up + 4, f"a device of {device}"))
    for index, (name, points) in enumerate(curves().items()):
        colour = COLOURS[index]
        spots = [place(*point) for point in points]
        line = "L".join(f"{across} {up}" for across, up in spots)
        parts.append(f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{across}" cy="{up}" r="3" fill="{colour}"/>' for across, up in spots]
        row = top + 190 + 22 * index
        parts.append(f'<path d="M{left + width + 6} {row}h18" stroke="{colour}" stroke-width="3"/>')
        parts.append(_text(left + width + 30, row + 4, name))
    return _page(720, 395, parts)


def draw_steps() -> str:
    """Return the picture of the steps that turn a model into its sharded form, in order."""
    parts = []
    for index, (name, title, reason) in enumerate(STEPS):
        row = 14 + 58 * index
        parts.append(f'<rect x="10" y="{row}" width="220" height="40" rx="6" fill="none" stroke="{COLOURS[2]}"/>')
        parts.append(_text(20, row + 17, f"{index + 1}. {title}", size=13))
        parts.append(_text(20, row + 33, name, size=11, family="monospace"))
        parts.append(_text(246, row + 25, reason))
        if index + 1 < len(STEPS):
            parts.append(f'<path d="M120 {row + 40}v12m-5 -6l5 6l5 -6" fill="none" stroke="{COLOURS[2]}"/>')
    return _page(720, 14 + 58 * len(STEPS), parts)


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", family: str = "sans-serif") -> str:
    style = f'font-size="{size}" font-family="{family}" text-anchor="{anchor}" fill="#546e7a"'
    return f'<text x="{round(x, 1)}" y="{round(y, 1)}" {style}>{escape(text)}</text>'


def _page(width: int, height: int, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return "\n".join([head, *parts, "</svg>"]) + "\n"


PICTURES = {"layout-memory.svg": draw_memory, "order-of-steps.svg": draw_steps}


def main() -> None:
    """Write the pictures."""
    for name, draw in PICTURES.items():
        (ASSETS / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
