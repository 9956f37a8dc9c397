from __future__ import annotations

import random
import zlib
from itertools import pairwise
from pathlib import Path

import pytest

from accelerate.checkpointing.checksum import _SEGMENT, Checksum, checksum

SIZES = [0, 1, 1000, _SEGMENT - 1, _SEGMENT, _SEGMENT + 1, 3 * _SEGMENT + 777]


def of(content: bytes, cuts: list[int] | None = None) -> str:
    total = Checksum()
    edges = [0, *sorted(cuts or []), len(content)]
    for begin, end in pairwise(edges):
        total.update(memoryview(content)[begin:end])
    return str(total)


@pytest.mark.parametrize("size", SIZES)
def test_it_does_not_depend_on_how_the_bytes_come(tmp_path: Path, size: int) -> None:
    content = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(content)
    expected = of(content)
    assert checksum(tmp_path / "file") == expected
    for seed in range(5):
        generator = random.Random(seed)
        cuts = [generator.randrange(size + 1) for _ in range(generator.randrange(20))]
        assert of(content, cuts) == expected


@pytest.mark.parametrize("size", SIZES[1:])
def test_every_kind_of_damage_changes_it(size: int) -> None:
    generator = random.Random(size)
    content = generator.randbytes(size)
    expected = of(content)
    for _ in range(20):
        damaged = bytearray(content)
        damaged[generator.randrange(size)] ^= 1 << generator.randrange(8)
        assert of(bytes(damaged)) != expected
    assert of(content[:-1]) != expected
    assert of(content + b"\0") != expected
    if size > 3 * 4096:
        pages = [content[begin : begin + 4096] for begin in range(0, size, 4096)]
        assert of(b"".join([pages[1], pages[0], *pages[2:]])) != expected
        assert of(b"".join([pages[0], bytes(4096), *pages[2:]])) != expected


def test_a_small_file_has_its_crc() -> None:
    assert of(b"some text") == f"column-sums:{zlib.crc32(b'some text'):08x}"
