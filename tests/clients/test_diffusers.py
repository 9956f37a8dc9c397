"""A Diffusers pipeline runs with its models offloaded by this package, and gives the same image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

pytest.importorskip("diffusers", reason="Diffusers is not installed")
pytest.importorskip("transformers", reason="Transformers is not installed")

from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from tests.clients.programs.tiny_pipeline import MODELS, make_pipeline

from accelerate import cpu_offload_with_hook, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.hooks import AlignDevicesHook, CpuOffload

pytestmark = pytest.mark.clients


def image(made: StableDiffusionPipeline) -> numpy.ndarray[Any, Any]:
    found = made("a cat", num_inference_steps=2, output_type="np", generator=torch.Generator().manual_seed(0))
    result: numpy.ndarray[Any, Any] = found.images
    return result


@pytest.fixture
def plain(tmp_path: Path) -> numpy.ndarray[Any, Any]:
    result = image(make_pipeline(tmp_path))
    assert result.std() > 0
    return result


def test_whole_models_wait_on_the_cpu(plain: numpy.ndarray[Any, Any], tmp_path: Path) -> None:
    made = make_pipeline(tmp_path)
    made.enable_model_cpu_offload(device="cpu")
    hooks = [getattr(made, name)._hf_hook for name in MODELS]
    assert all(isinstance(hook, CpuOffload) for hook in hooks)
    # Each model sends the one before it away: text encoder -> UNet -> VAE.
    assert hooks[1].prev_module_hook.model is made.text_encoder
    assert hooks[2].prev_module_hook.model is made.unet
    assert numpy.array_equal(image(made), plain)
    assert numpy.array_equal(image(made), plain)  # the pipeline took the hooks off and put them on again
    made.remove_all_hooks()
    assert not any(hasattr(getattr(made, name), "_hf_hook") for name in MODELS)
    assert numpy.array_equal(image(made), plain)


def test_layer_by_layer(plain: numpy.ndarray[Any, Any], tmp_path: Path) -> None:
    made = make_pipeline(tmp_path)
    made.enable_sequential_cpu_offload(device="cpu")
    for name in MODELS:
        model = getattr(made, name)
        assert isinstance(getattr(model, "_hf_hook", None), AlignDevicesHook) or hasattr(model._hf_hook, "hooks")
        assert all(parameter.device.type == "meta" for parameter in model.parameters())
    assert numpy.array_equal(image(made), plain)
    assert numpy.array_equal(image(made), plain)
    made.remove_all_hooks()
    assert not any(parameter.device.type == "meta" for name in MODELS for parameter in getattr(made, name).parameters())
    assert numpy.array_equal(image(made), plain)


def test_a_chain_of_hooks_by_hand(plain: numpy.ndarray[Any, Any], tmp_path: Path) -> None:
    made = make_pipeline(tmp_path)
    hook = None
    for name in MODELS:
        _, hook = cpu_offload_with_hook(getattr(made, name), "cpu", prev_module_hook=hook)
    assert numpy.array_equal(image(made), plain)
    assert hook is not None
    hook.offload()
    hook.remove()
    assert not hasattr(made.vae, "_hf_hook")


def test_a_unet_from_the_disk(plain: numpy.ndarray[Any, Any], tmp_path: Path) -> None:
    made = make_pipeline(tmp_path)
    made.unet.save_pretrained(tmp_path / "unet")
    with init_empty_weights():
        unet = UNet2DConditionModel.from_config(made.unet.config)
    made.unet = load_checkpoint_and_dispatch(
        unet.eval(),
        tmp_path / "unet" / "diffusion_pytorch_model.safetensors",
        device_map={"": "disk"},
        offload_folder=tmp_path / "offload",
    )
    assert all(parameter.device.type == "meta" for parameter in made.unet.parameters())
    assert numpy.array_equal(image(made), plain)


def test_a_saved_pipeline_is_loaded_on_a_device_map(plain: numpy.ndarray[Any, Any], tmp_path: Path) -> None:
    make_pipeline(tmp_path).save_pretrained(tmp_path / "pipeline")
    loaded = UNet2DConditionModel.from_pretrained(
        tmp_path / "pipeline" / "unet", device_map="auto", max_memory={"cpu": "20KB"}, offload_folder=tmp_path / "off"
    )
    assert "disk" in set(loaded.hf_device_map.values())
    made = StableDiffusionPipeline.from_pretrained(tmp_path / "pipeline", unet=loaded, safety_checker=None)
    made.set_progress_bar_config(disable=True)
    assert numpy.array_equal(image(made), plain)
