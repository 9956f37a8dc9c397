"""DeepSpeed's plugin: its configuration, filled, compared and looked up without the package."""

from __future__ import annotations

import base64
import copy
import dataclasses
import json
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from accelerate._base import imports
from accelerate._base.errors import ConfigurationError, MissingPackageError
from accelerate._base.helpers import reset_warnings
from accelerate._base.imports import deepspeed_required
from accelerate.config.plugins.deepspeed import DeepSpeedPlugin, HfDeepSpeedConfig

ZERO = {"zero_optimization": {"stage": 2}}
AUTO = {
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {
        "stage": "auto",
        "offload_optimizer": {"device": "auto", "nvme_path": "auto"},
        "offload_param": {"device": "auto"},
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
}
FIELDS = "ACCELERATE_CONFIG_DS_FIELDS"


@pytest.fixture(autouse=True)
def clean() -> None:
    reset_warnings()


def plugin(config: dict[str, Any] | None = None, **options: Any) -> DeepSpeedPlugin:
    return DeepSpeedPlugin(hf_ds_config={**ZERO, **(config or {})}, **options)


def test_options_become_a_configuration() -> None:
    made = DeepSpeedPlugin(
        zero_stage=3,
        offload_optimizer_device="nvme",
        offload_optimizer_nvme_path="/disk",
        offload_param_device="cpu",
        offload_param_nvme_path="/unused",
        gradient_accumulation_steps=4,
        gradient_clipping=1.0,
        zero3_save_16bit_model=True,
    )
    assert made.deepspeed_config == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 4,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"},
            "offload_param": {"device": "cpu", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_clipping": 1.0,
        "steps_per_print": float("inf"),
    }
    assert made.deepspeed_config is made.hf_ds_config.config
    assert made.hf_ds_config.is_zero3()
    assert made.hf_ds_config.is_offload()
    assert made.is_zero3_init_enabled()


def test_auto_is_filled_from_the_options() -> None:
    before = copy.deepcopy(AUTO)
    made = DeepSpeedPlugin(
        hf_ds_config=AUTO, zero_stage=3, gradient_accumulation_steps=2, offload_optimizer_device="cpu"
    )
    assert before == AUTO
    config = made.deepspeed_config
    assert config["gradient_accumulation_steps"] == 2
    assert config["gradient_clipping"] == "auto"
    assert config["train_batch_size"] == "auto"
    assert config["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "nvme_path": "none"},
        "offload_param": {"device": "none"},
        "stage3_gather_16bit_weights_on_model_save": False,
    }
    assert made.hf_ds_config.is_zero3()
    assert made.is_zero3_init_enabled()


def test_values_of_the_configuration_are_taken_over() -> None:
    own = {"gradient_accumulation_steps": 8, "gradient_clipping": 2.0, "zero_optimization": {"stage": 1}}
    own["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}  # type: ignore[index]
    made = DeepSpeedPlugin(hf_ds_config=own, zero_stage=1, gradient_accumulation_steps="auto")
    assert (made.zero_stage, made.gradient_accumulation_steps, made.gradient_clipping) == (1, 8, 2.0)
    assert made.offload_optimizer_device == "cpu"
    assert made.zero3_init_flag is False


def test_an_option_that_contradicts_the_configuration_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"gradient_clipping": 2.0, "zero_optimization": {"stage": 1}}))
    with pytest.raises(ConfigurationError) as caught:
        DeepSpeedPlugin(hf_ds_config=str(file), zero_stage=3, gradient_clipping=1.0)
    told = str(caught.value)
    assert told.startswith(f"{file} has 2 faults:")
    assert "gradient_clipping=2.0 contradicts 1.0, which DeepSpeedPlugin(gradient_clipping=1.0) gives" in told
    assert "zero_optimization.stage=1 contradicts 3, which DeepSpeedPlugin(zero_stage=3) gives" in told
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    with pytest.raises(ConfigurationError, match=r"contradicts 2, which the variable ACCELERATE_DEEPSPEED_ZERO_STAGE"):
        DeepSpeedPlugin(hf_ds_config=str(file))
    assert DeepSpeedPlugin(hf_ds_config=str(file), zero_stage=1).zero_stage == 1


def test_options_say_what_the_configuration_leaves_out() -> None:
    made = plugin(
        gradient_clipping=0.5,
        gradient_accumulation_steps=4,
        zero3_save_16bit_model=True,
        offload_optimizer_device="nvme",
        offload_optimizer_nvme_path="/disk",
    )
    assert made.deepspeed_config == {
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": 4,
        "steps_per_print": float("inf"),
    }
    assert made.hf_ds_config.is_offload()


def test_a_plugin_made_again_from_its_own_values_is_the_same() -> None:
    for made in (plugin(AUTO, zero_stage=3), plugin(), DeepSpeedPlugin(zero_stage=3, offload_param_device="cpu")):
        again = dataclasses.replace(made)
        assert again.get_value("zero_optimization.stage") == made.get_value("zero_optimization.stage")
        assert again.zero3_init_flag == made.zero3_init_flag


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            {"train_micro_batch_size_per_gpu": 0},
            r"hf_ds_config: train_micro_batch_size_per_gpu=0 is not a whole number",
        ),
        ({"zero_optimization": {"stage": "four"}}, r"zero_optimization.stage='four' is not a stage of ZeRO"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "auto"}}},
            r"needs a folder",
        ),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, r"exclude each other"),
    ],
)
def test_a_faulty_configuration_is_refused_when_the_plugin_is_made(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        plugin(config)


def test_a_stage_in_quotes_is_a_stage() -> None:
    made = plugin({"zero_optimization": {"stage": "3"}})
    assert made.hf_ds_config.is_zero3()
    assert made.get_value("zero_optimization.stage") == 3


def test_the_old_name_of_bf16_is_not_overlooked() -> None:
    made = plugin({"bfloat16": {"enabled": True}})
    made.set_mixed_precision("no")
    assert made.deepspeed_config["bf16"] == {"enabled": True}
    assert "bfloat16" not in made.deepspeed_config
    empty = plugin({"bf16": None})
    empty.set_mixed_precision("bf16")
    assert empty.deepspeed_config["bf16"] == {"enabled": True}


def test_weights_are_offloaded_by_stage_3_alone(caplog: pytest.LogCaptureFixture) -> None:
    made = DeepSpeedPlugin(offload_param_device="cpu")
    assert made.get_value("zero_optimization.offload_param.device") == "none"
    assert "DeepSpeedPlugin(offload_param_device='cpu') works with ZeRO 3 only, but zero_stage=2" in caplog.text


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"gradient_accumulation_steps": 0}, r"DeepSpeedPlugin: gradient_accumulation_steps=0 is not a whole number"),
        ({"gradient_clipping": -1.0}, r"DeepSpeedPlugin: gradient_clipping=-1.0 is not a number from 0 on"),
        ({"offload_optimizer_device": "gpu"}, r"device='gpu' is not a place to offload to"),
    ],
)
def test_a_wrong_option_is_refused(option: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        DeepSpeedPlugin(**option)


@pytest.mark.parametrize(
    ("said", "gathers"),
    [
        ({}, None),
        ({"zero3_save_16bit_model": True}, True),
        ({"zero3_save_16bit_model": False}, False),
        ({"hf_ds_config": {"zero_optimization": {"stage": 3}}}, None),
        ({"hf_ds_config": AUTO}, None),
        ({"hf_ds_config": AUTO, "zero3_save_16bit_model": False}, False),
        (
            {"hf_ds_config": {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": False}}},
            False,
        ),
    ],
)
def test_gathering_of_weights_is_known_to_be_said(said: dict[str, Any], gathers: bool | None) -> None:
    assert DeepSpeedPlugin(**said).gathers_16bit_weights is gathers


def test_gathering_of_weights_may_be_said_by_a_variable_or_later(monkeypatch: pytest.MonkeyPatch) -> None:
    made = DeepSpeedPlugin()
    made.deepspeed_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    assert made.gathers_16bit_weights is True
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "false")
    assert DeepSpeedPlugin().gathers_16bit_weights is False


def test_what_nobody_said_is_open(tmp_path: Path) -> None:
    made = plugin()
    assert made.deepspeed_config["gradient_accumulation_steps"] == 1
    assert made.open_config()["gradient_accumulation_steps"] == "auto"
    assert plugin({"gradient_accumulation_steps": 1}).open_config()["gradient_accumulation_steps"] == 1
    assert plugin(gradient_accumulation_steps=1).open_config()["gradient_accumulation_steps"] == 1
    made.deepspeed_config["gradient_accumulation_steps"] = 3
    assert made.open_config()["gradient_accumulation_steps"] == 3
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(ZERO))
    assert (made.place, DeepSpeedPlugin(hf_ds_config=file).place) == ("hf_ds_config", str(file))


def test_what_the_configuration_leaves_out_is_written_down() -> None:
    made = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {}, "steps_per_print": 5}, zero_stage=1)
    assert made.deepspeed_config == {
        "zero_optimization": {"stage": 1},
        "gradient_accumulation_steps": 1,
        "steps_per_print": float("inf"),
    }


@pytest.mark.parametrize("form", ["path", "text", "base64", "variable", "object"])
def test_forms_of_a_configuration(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"zero_optimization": {"stage": 1}})
    file = tmp_path / "ds.json"
    file.write_text(text)
    forms: dict[str, Any] = {
        "path": str(file),
        "text": text,
        "base64": base64.urlsafe_b64encode(text.encode()).decode(),
        "variable": None,
        "object": HfDeepSpeedConfig(json.loads(text)),
    }
    if form == "variable":
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    made = DeepSpeedPlugin(hf_ds_config=forms[form])
    assert made.zero_stage == 1
    if form == "object":
        assert made.hf_ds_config is forms[form]


def test_a_given_configuration_wins_over_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "/not/there.json")
    assert plugin().zero_stage == 2
    with pytest.raises(ConfigurationError, match=r"'/not/there.json' is not a configuration"):
        DeepSpeedPlugin()


@pytest.mark.parametrize("given", [5, "/not/there.json", "[1]", {"train_batch_size": 1}])
def test_an_unusable_configuration_is_refused(given: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"is not a configuration of DeepSpeed|'zero_optimization', which says"
    ):
        DeepSpeedPlugin(hf_ds_config=given)


@pytest.mark.parametrize("stage", [7, "two", -1])
def test_an_unknown_stage_is_refused(stage: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"is not a stage of ZeRO. Write 0, 1, 2 or 3"):
        DeepSpeedPlugin(zero_stage=stage)


def test_doubles_of_the_launchers_file_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FIELDS, "deepspeed_config_file,zero3_init_flag")
    assert plugin().zero_stage == 2
    monkeypatch.setenv(FIELDS, "deepspeed_config_file,zero_stage,mixed_precision")
    assert DeepSpeedPlugin().zero_stage == 2
    with pytest.raises(ConfigurationError, match=r"gives zero_stage, mixed_precision, which DeepSpeed's own"):
        plugin()


def test_sharded_building_needs_stage_3(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DeepSpeedPlugin(zero_stage=3).zero3_init_flag is True
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO3_INIT", "false")
    assert DeepSpeedPlugin(zero_stage=3).zero3_init_flag is False
    assert DeepSpeedPlugin(zero_stage=3, zero3_init_flag=True).zero3_init_flag is True
    with pytest.warns(UserWarning, match=r"works with ZeRO 3 only, but zero_stage=2") as seen:
        assert DeepSpeedPlugin(zero3_init_flag=True).zero3_init_flag is False
        DeepSpeedPlugin(zero3_init_flag=True)
    assert len(seen) == 1
    assert seen[0].filename == __file__


def test_msamp_is_part_of_the_configuration() -> None:
    made = DeepSpeedPlugin(enable_msamp=True, msamp_opt_level="O2")
    assert made.deepspeed_config["msamp"] == {"enabled": True, "opt_level": "O2"}
    with pytest.raises(ConfigurationError, match=r"cannot work with zero_stage=3"):
        DeepSpeedPlugin(enable_msamp=True, zero_stage=3)


@pytest.mark.parametrize(
    ("config", "precision", "fp16", "bf16"),
    [
        ({}, "fp16", {"enabled": True, "auto_cast": True}, {"enabled": False}),
        ({}, "bf16", {"enabled": False}, {"enabled": True}),
        ({}, "fp8", {"enabled": False}, {"enabled": True}),
        ({}, "no", {"enabled": False}, {"enabled": False}),
        ({"fp16": {"enabled": "auto"}}, "fp16", {"enabled": True}, {"enabled": False}),
        ({"fp16": {"enabled": True}}, "no", {"enabled": True}, {"enabled": False}),
        (
            {"bf16": {"enabled": False, "x": 1}},
            "fp16",
            {"enabled": True, "auto_cast": True},
            {"enabled": False, "x": 1},
        ),
    ],
)
def test_precision(config: dict[str, Any], precision: str, fp16: dict[str, Any], bf16: dict[str, Any]) -> None:
    made = plugin(copy.deepcopy(config))
    made.set_mixed_precision(precision)
    assert (made.deepspeed_config["fp16"], made.deepspeed_config["bf16"]) == (fp16, bf16)


@pytest.mark.parametrize(("on", "asked"), [("bf16", "fp16"), ("fp16", "bf16"), ("fp16", "fp8")])
def test_precision_that_contradicts_is_refused_and_nothing_is_changed(on: str, asked: str) -> None:
    made = plugin({on: {"enabled": True}})
    before = copy.deepcopy(made.deepspeed_config)
    with pytest.raises(ConfigurationError, match=rf"mixed_precision='{asked}' contradicts.*turns {on} on"):
        made.set_mixed_precision(asked)
    assert made.deepspeed_config == before


def test_entries_are_looked_up_by_dotted_name() -> None:
    made = plugin({"a": "auto", "b": {"c": 5, "d": {"e": "auto"}, "zero": 0}})
    assert made.get_value("b.c") == 5
    assert made.get_value("b.c.deeper", 9) == 9
    assert made.get_value("x.y", 9) == 9
    assert made.is_auto("a")
    assert made.is_auto("b.d.e")
    assert not made.is_auto("b.c")
    config = made.hf_ds_config
    assert (config.is_true("b.c"), config.is_false("b.c")) == (True, False)
    assert (config.is_true("b.zero"), config.is_false("b.zero")) == (False, True)
    assert (config.is_true("x"), config.is_false("x")) == (False, False)
    config.del_config_sub_tree("b.d")
    assert "d" not in config.config["b"]
    config.del_config_sub_tree("b.d")
    with pytest.raises(ConfigurationError, match=r"'b.d' is not in DeepSpeed's configuration"):
        config.del_config_sub_tree("b.d", must_exist=True)


def test_one_entry_is_filled_or_its_difference_noted() -> None:
    made = plugin({"a": "auto", "b": {"c": 5}})
    noted: list[str] = []
    made.fill_match("a", noted, a=3)
    made.fill_match("b.c", noted, **{"b.c": 6})
    made.fill_match("b.c", noted, **{"b.c": 5})
    made.fill_match("b.c", noted, must_match=False, **{"b.c": 7})
    made.fill_match("b.missing", noted, **{"b.missing": 1})
    assert made.deepspeed_config["a"] == 3
    assert made.deepspeed_config["b"] == {"c": 5}
    assert noted == ["- ds b.c=5 vs arg b.c=6"]


def test_the_whole_is_filled() -> None:
    made = plugin({"a": "auto", "b": {"c": 5, "d": {"e": "auto"}}, "list": [1]})
    made.deepspeed_config_process(**{"a": 1, "b.c": 5, "b.d.e": 2})
    assert made.deepspeed_config["a"] == 1
    assert made.deepspeed_config["b"] == {"c": 5, "d": {"e": 2}}


def test_all_mismatches_are_told_at_once() -> None:
    config = {"a": 1, "b": {"c": 5}}
    with pytest.raises(ConfigurationError, match=r"ds a=1 vs arg a=2\n- ds b.c=5 vs arg b.c=6\nSet these.*'auto'"):
        plugin(config).deepspeed_config_process(**{"a": 2, "b.c": 6})
    made = plugin(config)
    made.deepspeed_config_process(must_match=False, **{"a": 2, "b.c": 6})
    assert (made.get_value("a"), made.get_value("b.c")) == (1, 5)


def test_an_entry_that_waits_for_nothing_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"entry 'b.c' of DeepSpeed's configuration is 'auto'.*keyword"):
        plugin({"b": {"c": "auto"}}).deepspeed_config_process(a=1)


def test_only_the_state_selects() -> None:
    made = plugin()
    assert made.selected is False
    with pytest.raises(ConfigurationError, match=r"select_deepspeed_plugin"):
        made.select()
    with pytest.raises(NotImplementedError, match=r"select_deepspeed_plugin"):
        made.selected = True
    made.select(_from_accelerator_state=True)
    assert made.selected is True
    made._unselect()
    assert made.selected is False


def test_sharded_building_is_turned_off_inside_a_block() -> None:
    made = DeepSpeedPlugin(zero_stage=3)
    with made.zero3_init_context_manager(enable=False):
        assert not made.is_zero3_init_enabled()
    assert made.is_zero3_init_enabled()
    with pytest.raises(KeyError), made.zero3_init_context_manager(enable=False):
        raise KeyError
    assert made.is_zero3_init_enabled()


def test_what_needs_the_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deepspeed", "deepspeed.utils"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    monkeypatch.setattr(imports, "has_package", lambda name: name != "deepspeed")
    made = DeepSpeedPlugin(zero_stage=3)
    with pytest.raises(
        MissingPackageError, match=r"zero3_init_flag=True\) needs the package 'deepspeed'.*accelerate\[deep"
    ):
        made.select(_from_accelerator_state=True)
    moe = DeepSpeedPlugin(transformer_moe_cls_names="Linear")
    with pytest.raises(MissingPackageError, match=r"deepspeed.utils"):
        moe.set_moe_leaf_modules(nn.Linear(1, 1))
    off = DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False)
    with pytest.raises(MissingPackageError), off.zero3_init_context_manager(enable=True):
        pass
    assert off.zero3_init_flag is False

    @deepspeed_required
    def start() -> None: ...

    with pytest.raises(MissingPackageError, match=r"start needs the package 'deepspeed'"):
        start()


def test_expert_layers_must_be_there() -> None:
    DeepSpeedPlugin().set_moe_leaf_modules(nn.Linear(1, 1))
    with pytest.raises(ConfigurationError, match=r"names Experts, but Linear has no layer"):
        DeepSpeedPlugin(transformer_moe_cls_names="Linear, Experts").set_moe_leaf_modules(nn.Linear(1, 1))


def test_the_configuration_may_be_replaced() -> None:
    made = plugin()
    made.deepspeed_config = {"zero_optimization": {"stage": 0}}
    assert made.get_value("zero_optimization.stage") == 0


def test_a_plain_plugin_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plugin()
        DeepSpeedPlugin()


# --- with stand-ins for the packages ----------------------------------------------------------------------------------


@pytest.fixture
def integration(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Put stand-ins in the place of DeepSpeed and of what Transformers knows of it."""
    transformers_side = Mock()
    transformers_side.HfDeepSpeedConfig.side_effect = lambda config: ("registered", config)
    monkeypatch.setitem(sys.modules, "deepspeed", Mock())
    monkeypatch.setitem(sys.modules, "deepspeed.utils", Mock())
    monkeypatch.setitem(sys.modules, "transformers.integrations.deepspeed", transformers_side)
    return transformers_side


def test_transformers_is_told_to_build_in_shards(integration: Mock) -> None:
    made = DeepSpeedPlugin(zero_stage=3)
    made.select(_from_accelerator_state=True)
    word, config = made.dschf
    assert word == "registered"
    assert config["zero_optimization"]["stage"] == 3
    assert config["train_micro_batch_size_per_gpu"] == 1  # asked for before the loaders say it
    assert "auto" not in config.values()
    with made.zero3_init_context_manager(enable=True):  # it is on already
        assert made.dschf == (word, config)
    with made.zero3_init_context_manager(enable=False):
        assert made.dschf is None
        integration.unset_hf_deepspeed_config.assert_called_once_with()
    assert made.dschf == (word, config)


def test_nobody_is_told_where_transformers_is_missing(integration: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.config.plugins.deepspeed.is_transformers_available", lambda: False)
    made = DeepSpeedPlugin(zero_stage=3)
    made.select(_from_accelerator_state=True)
    assert made.dschf is None
    integration.HfDeepSpeedConfig.assert_not_called()


def test_a_batch_size_for_all_processes_is_enough_to_build_in_shards(integration: Mock) -> None:
    made = plugin({"train_batch_size": 16, "zero_optimization": {"stage": 3}}, zero3_init_flag=True)
    made.select(_from_accelerator_state=True)
    assert "train_micro_batch_size_per_gpu" not in made.dschf[1]


def test_expert_layers_are_named_to_deepspeed(integration: Mock) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    DeepSpeedPlugin(transformer_moe_cls_names="Linear, ReLU").set_moe_leaf_modules(model)
    stand_in: Any = sys.modules["deepspeed.utils"]
    stand_in.set_z3_leaf_modules.assert_called_once_with(model, [nn.Linear, nn.ReLU])


def test_amd_devices_sum_bf16_gradients_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    made = plugin()
    made.set_mixed_precision("bf16")
    assert made.deepspeed_config["communication_data_type"] == "fp32"


def test_a_configuration_that_the_program_registered_with_transformers_stays_below_stage_3() -> None:
    integration = pytest.importorskip("transformers.integrations.deepspeed")
    registered = integration.HfDeepSpeedConfig({"zero_optimization": {"stage": 2}})
    try:
        made = DeepSpeedPlugin(zero_stage=2)
        made.select(_from_accelerator_state=True)
        assert integration.deepspeed_config() is registered.config
    finally:
        integration.unset_hf_deepspeed_config()


def test_another_selection_forgets_the_configuration_of_stage_3() -> None:
    integration = pytest.importorskip("transformers.integrations.deepspeed")
    made = DeepSpeedPlugin(zero_stage=3)
    made.dschf = integration.HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    assert integration.is_deepspeed_zero3_enabled()
    made._unselect()
    assert not integration.is_deepspeed_zero3_enabled()
