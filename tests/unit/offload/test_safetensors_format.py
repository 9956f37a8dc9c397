"""The format as this library writes and reads it, beside the package of that name."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from accelerate.offload.safetensors_format import (
    BITS,
    clean_state_dict_for_safetensors,
    dtype_name,
    make_header,
    read_header,
    torch_dtype,
    write_safetensors,
)


def tensors() -> dict[str, torch.Tensor]:
    return {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(3, dtype=torch.int16), "empty": torch.empty(0, 2)}


def test_the_bytes_are_those_of_the_package() -> None:
    stream = io.BytesIO()
    write_safetensors(stream, tensors(), {"format": "pt"})
    assert stream.getvalue() == save(tensors(), {"format": "pt"})


def test_tensors_can_be_read_while_they_are_written(tmp_path: Path) -> None:
    shapes = {name: tensor.to("meta") for name, tensor in tensors().items()}
    with (tmp_path / "file.safetensors").open("wb") as file:
        write_safetensors(file, shapes, {}, lambda names: ((name, tensors()[name]) for name in names))
    found = load_file(tmp_path / "file.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors().items())


@pytest.mark.parametrize("alignment", [8, 64])
def test_a_header_is_read_as_it_was_made(tmp_path: Path, alignment: int) -> None:
    header = make_header(tensors(), {"format": "pt"}, alignment=alignment)
    path = tmp_path / "file.safetensors"
    path.write_bytes(header.to_bytes())
    assert read_header(path) == header
    assert header.data_start == len(header.to_bytes())
    assert header.data_start % alignment == 0
    assert header.file_size == header.data_start + 6 * 4 + 3 * 2


@pytest.mark.parametrize("content", [b"", b"short", bytes(8), (9).to_bytes(8, "little") + b"{}", b"\xff" * 16])
def test_what_is_no_such_file_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=r"file' cannot be read: .*Save or download it again"):
        read_header(tmp_path / "file")


def test_names_of_dtypes_go_both_ways() -> None:
    known = {name: torch_dtype(name) for name in BITS}
    assert [name for name, dtype in known.items() if dtype is None] == ["F4", "F6_E2M3", "F6_E3M2"]
    for name, dtype in known.items():
        if dtype is not None:
            assert dtype_name(dtype) == name
            assert dtype.itemsize * 8 == BITS[name]
    assert dtype_name(torch.complex128) is None


def test_cleaning_happens_in_place() -> None:
    whole = torch.arange(4.0).reshape(2, 2)
    state: dict[str, Any] = {"turned": whole.T, "word": "kept"}
    assert clean_state_dict_for_safetensors(state) is state
    assert state["turned"].is_contiguous()
    assert state["word"] == "kept"
