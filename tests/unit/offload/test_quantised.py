"""Weights in 8 and 4 bits, by the real kernels of bitsandbytes and torchao."""

from __future__ import annotations

import copy
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import init_empty_weights
from accelerate._base import imports
from accelerate._base.errors import ConfigurationError
from accelerate.offload.store import scales_name
from accelerate.utils import BnbQuantizationConfig, has_4bit_bnb_layers, infer_auto_device_map, load_and_quantize_model
from accelerate.utils import bnb as ours

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")


class Model(nn.Module):
    """Layers that are quantised, one with a tied weight, a norm, attention and a head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 64)
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64, bias=False)
        self.norm = nn.LayerNorm(64)
        self.attention = nn.MultiheadAttention(64, 2, batch_first=True)
        self.middle = nn.Linear(64, 64)
        self.head = nn.Linear(64, 24, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        hidden = hidden + self.norm(self.down(torch.relu(self.up(hidden))))
        mixed, _ = self.attention(hidden, hidden, hidden, need_weights=False)
        return self.head(self.middle(hidden + mixed))


def placed(**places: str) -> dict[str, str]:
    """Return a map that puts everything on the CPU but the modules that are named."""
    return {**dict.fromkeys(("embed", "up", "down", "norm", "attention", "middle", "head"), "cpu"), **places}


IDS = torch.arange(24).reshape(4, 6)


def config(bits: int, **options: Any) -> BnbQuantizationConfig:
    """Return settings whose other layers stay in float32, so that the difference is that of the quantisation."""
    kind = {"load_in_8bit": True} if bits == 8 else {"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp32"}
    return BnbQuantizationConfig(**{**kind, "torch_dtype": torch.float32, **options})


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture
def checkpoint(model: Model, tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(model.state_dict(), path, metadata={"format": "pt"})
    return path


def empty() -> Model:
    with init_empty_weights():
        return Model().eval()


def kinds(model: nn.Module) -> dict[str, str]:
    return {name: type(module).__name__ for name, module in model.named_modules() if "Linear" in type(module).__name__}


@torch.no_grad()
def error(found: nn.Module, expected: nn.Module) -> float:
    return float((found(IDS).float() - expected(IDS)).abs().max())


@pytest.mark.parametrize(("bits", "layer", "bound"), [(8, "Linear8bitLt", 0.05), (4, "Linear4bit", 0.6)])
def test_an_empty_model_is_quantised_as_it_is_loaded(
    model: Model, checkpoint: Path, bits: int, layer: str, bound: float
) -> None:
    loaded = load_and_quantize_model(empty(), config(bits), checkpoint, device_map="auto")
    assert kinds(loaded) == {
        "up": layer,
        "down": layer,
        "middle": layer,
        "attention.out_proj": "NonDynamicallyQuantizableLinear",
        "head": "Linear",
    }
    assert loaded.up.weight.dtype == (torch.int8 if bits == 8 else torch.uint8)
    assert loaded.embed.weight.dtype == torch.float32
    assert has_4bit_bnb_layers(loaded) == (bits == 4)
    assert 0 < error(loaded, model) < bound
    assert not any(parameter.device.type == "meta" for parameter in loaded.parameters())


@pytest.mark.parametrize("bits", [8, 4])
def test_a_model_with_weights_gives_the_same_as_a_loaded_one(model: Model, checkpoint: Path, bits: int) -> None:
    here = load_and_quantize_model(copy.deepcopy(model), config(bits))
    loaded = load_and_quantize_model(empty(), config(bits), checkpoint)
    assert error(here, loaded) == 0
    assert torch.equal(here.up.weight, loaded.up.weight)


def test_quarter_the_bytes(model: Model, checkpoint: Path) -> None:
    loaded = load_and_quantize_model(empty(), config(4, bnb_4bit_quant_type="nf4"), checkpoint)
    assert loaded.up.weight.nbytes * 8 == model.up.weight.nbytes
    assert loaded.up.weight.quant_type == "nf4"


def test_skipped_modules_and_those_in_float32_are_left(model: Model, checkpoint: Path) -> None:
    settings = config(8, skip_modules=["up"], keep_in_fp32_modules=["middle", "norm"], torch_dtype=torch.bfloat16)
    loaded = load_and_quantize_model(empty(), settings, checkpoint)
    found = kinds(loaded)
    assert (found["up"], found["middle"], found["head"]) == ("Linear", "Linear", "Linear8bitLt")
    assert loaded.up.weight.dtype == torch.bfloat16
    assert loaded.middle.weight.dtype == loaded.norm.weight.dtype == torch.float32
    assert torch.equal(loaded.middle.weight, model.middle.weight)  # never rounded on its way


def test_an_empty_list_skips_nothing(checkpoint: Path) -> None:
    loaded = load_and_quantize_model(empty(), config(8, skip_modules=[]), checkpoint)
    assert kinds(loaded)["head"] == "Linear8bitLt"


def test_modules_with_a_shared_weight_are_left() -> None:
    assert set(ours.get_keys_to_not_convert(Model(tied=True))) == {"embed", "head"}
    assert ours.get_keys_to_not_convert(Model()) == ["head"]


def test_a_name_is_matched_by_whole_parts(model: Model) -> None:
    nested = nn.ModuleDict({"inner": model, "upper": nn.Linear(8, 8)})
    ours.replace_with_bnb_layers(nested, config(8), ["up"])
    assert kinds(nested)["inner.up"] == "Linear"
    assert kinds(nested)["upper"] == "Linear8bitLt"


def test_weights_on_the_disk_are_in_8_bits(model: Model, checkpoint: Path, tmp_path: Path) -> None:
    places = placed(up="disk", down="disk")
    loaded = load_and_quantize_model(
        empty(), config(8), checkpoint, device_map=places, offload_folder=tmp_path / "offload"
    )
    in_memory = load_and_quantize_model(empty(), config(8), checkpoint)
    assert loaded.up.weight.device.type == "meta"
    for _ in range(2):
        assert error(loaded, in_memory) == 0
    assert loaded.up.weight.device.type == "meta"
    assert loaded.up.state.CB is None
    written = sum(file.stat().st_size for file in (tmp_path / "offload").glob("up.*"))
    assert written < model.up.weight.nbytes / 2


def test_a_saved_model_in_8_bits_is_loaded_as_it_is(checkpoint: Path, tmp_path: Path) -> None:
    first = load_and_quantize_model(empty(), config(8), checkpoint)
    saved = tmp_path / "quantised.safetensors"
    save_file(first.state_dict(), saved, metadata={"format": "pt"})
    assert "up.SCB" in first.state_dict()
    again = load_and_quantize_model(empty(), config(8), saved)
    assert torch.equal(again.up.weight, first.up.weight)
    assert torch.equal(again.up.weight.SCB, first.up.weight.SCB)
    assert error(again, first) == 0


@pytest.mark.parametrize("options", [{}, {"bnb_4bit_use_double_quant": True, "bnb_4bit_quant_type": "nf4"}], ids=str)
def test_a_saved_model_in_4_bits_is_loaded_as_it_is(
    options: dict[str, Any], checkpoint: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    first = load_and_quantize_model(empty(), config(4, **options), checkpoint)
    saved = tmp_path / "quantised.safetensors"
    save_file(first.state_dict(), saved, metadata={"format": "pt"})
    again = load_and_quantize_model(empty(), config(4, **options), saved)
    assert again.up.weight.dtype == torch.uint8
    assert torch.equal(again.up.weight, first.up.weight)
    assert error(again, first) == 0
    assert not [
        warning for warning in recwarn if "not used" in str(warning.message)
    ]  # what lies beside is not unexpected


def test_a_packed_weight_alone_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    first = load_and_quantize_model(empty(), config(4), checkpoint)
    saved = tmp_path / "quantised.safetensors"
    alone = {name: value for name, value in first.state_dict().items() if ".weight." not in name}
    save_file(alone, saved, metadata={"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"\.weight.*nothing beside it"):
        load_and_quantize_model(empty(), config(4), saved)


def test_sizes_in_a_plan_are_quantised_ones(model: Model) -> None:
    ours.replace_with_bnb_layers(model, config(8), ["head"])
    # 101 kB, 162 kB if all were in float32; the CPU keeps room for the largest layer on the disk, too.
    assert ours.get_quantized_model_device_map(model, config(8), "sequential", {"cpu": "155KB"}) == {"": "cpu"}
    assert "disk" in infer_auto_device_map(Model(), {"cpu": "155KB"}).values()
    assert ours.get_quantized_model_device_map(model, config(8)) == {"": "cpu"}


def test_what_cannot_work_is_told(model: Model, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Pass the checkpoint as weights_location"):
        load_and_quantize_model(empty(), config(8))
    with pytest.raises(ConfigurationError, match="load_in_8bit=True, which may be offloaded"):
        load_and_quantize_model(empty(), config(4), checkpoint, device_map=placed(up="disk"))
    with pytest.raises(ConfigurationError, match="The device map 'even' is not known"):
        load_and_quantize_model(empty(), config(8), checkpoint, device_map="even")
    with pytest.raises(ConfigurationError, match="no linear layer to quantise"):
        load_and_quantize_model(nn.Sequential(nn.Conv1d(2, 2, 1)), config(8))
    with pytest.raises(ConfigurationError, match="has no parameters"):
        load_and_quantize_model(nn.ReLU(), config(8))


def test_layers_that_are_not_quantised_may_be_on_the_disk(model: Model, checkpoint: Path, tmp_path: Path) -> None:
    places = placed(embed="disk")
    loaded = load_and_quantize_model(empty(), config(4), checkpoint, places, offload_folder=tmp_path / "offload")
    in_memory = load_and_quantize_model(empty(), config(4), checkpoint)
    assert loaded.embed.weight.device.type == "meta"
    assert error(loaded, in_memory) == 0


def test_a_weight_is_quantised_and_written(model: Model, tmp_path: Path) -> None:
    ours.replace_with_bnb_layers(model, config(8), ["head"])
    index: dict[str, Any] = {}
    value = model.up.weight.data.clone()
    ours.quantize_and_offload_8bit(model, value, "up.weight", torch.float16, tmp_path, index, None)
    assert index["up.weight"] == {"dtype": "int8", "shape": [128, 64]}
    assert index["up.SCB"]["shape"] == [128]
    ours.quantize_and_offload_8bit(
        model, torch.ones(64, 128, dtype=torch.int8), "down.weight", None, tmp_path, index, torch.ones(64)
    )
    assert index["down.SCB"] == {"dtype": "float32", "shape": [64]}
    assert model.down.weight.device.type == "meta"


def test_only_weights_have_scales() -> None:
    assert scales_name("weights.fc.weight") == "weights.fc.SCB"
    assert scales_name("fc.bias") == ""


# The versions of torchao that fit torch 2.9 set a precision in a way that torch for CUDA warns of, and warn of themselves.
old_torchao = pytest.mark.filterwarnings(
    "ignore:Please use the new API settings to control TF32:UserWarning", "ignore:Config Deprecation:UserWarning"
)


@old_torchao
@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "IntxWeightOnlyConfig"])
def test_torchao_stores_weights_in_few_bits(model: Model, checkpoint: Path, name: str) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    loaded = load_and_quantize_model(empty(), getattr(quantization, name)(), checkpoint)
    assert type(loaded.up.weight.data).__name__ != "Tensor"
    assert type(loaded.head.weight.data).__name__ == "Tensor"
    assert 0 < error(loaded, model) < 0.1
    with pytest.raises(ConfigurationError, match="run where they are stored"):
        load_and_quantize_model(empty(), getattr(quantization, name)(), checkpoint, placed(up="disk"))


@pytest.mark.parametrize("bits", [8, 4])
def test_a_package_that_is_too_old_is_told(
    model: Model, checkpoint: Path, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1")
    monkeypatch.setattr(imports, "_distribution_version", imports._distribution_version.__wrapped__)
    with pytest.raises(ConfigurationError, match=rf"has no layers for {bits} bits.*pip install -U bitsandbytes"):
        load_and_quantize_model(model, config(bits), checkpoint)


def test_ties_that_a_model_makes_itself_count() -> None:
    class Late(Model):
        def tie_weights(self) -> None:
            self.head.weight = self.embed.weight

    assert "embed" in ours.get_keys_to_not_convert(Late())
    assert "embed" not in ours.get_keys_to_not_convert(Model())


@old_torchao
def test_torchao_takes_a_word_for_a_map(model: Model, checkpoint: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    loaded = load_and_quantize_model(empty(), quantization.Int8WeightOnlyConfig(), checkpoint, device_map="auto")
    assert type(loaded.up.weight.data).__name__ != "Tensor"
    assert 0 < error(loaded, model) < 0.1
