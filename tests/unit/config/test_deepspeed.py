"""DeepSpeed's configuration as data: faulty ones are named, open entries are filled, and a launch says who fills them."""

from __future__ import annotations

import base64
import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerate._base.errors import ConfigurationError
from accelerate._base.imports import is_deepspeed_available
from accelerate.config.deepspeed import Completed, Fact, complete, hidden_size_facts, read
from accelerate.config.deepspeed_rules import ENTRIES, SCHEDULERS, ZERO_ENTRIES, check

PLACE = "ds.json"
ZERO = {"stage": 2}
LOADER = {"train_micro_batch_size_per_gpu": Fact(3, "the batch size of the prepared loader", binding=False)}


def zero(**entries: Any) -> dict[str, Any]:
    return {"zero_optimization": {**ZERO, **entries}}


def refused(config: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        check(config, PLACE)
    return str(caught.value)


# --- faults -----------------------------------------------------------------------------------------------------------

# What stands in the configuration, the entry and value that the message names, and the remedy.
FAULTS: list[tuple[dict[str, Any], str, str]] = [
    (zero(stage=[2]), "zero_optimization.stage=[2]", "Write 0, 1, 2 or 3"),
    (zero(stage=4), "zero_optimization.stage=4", "Write 0, 1, 2 or 3"),
    (zero(stage="two"), "zero_optimization.stage='two'", "Write 0, 1, 2 or 3"),
    (zero(stage=None), "zero_optimization.stage=None", "Write 0, 1, 2 or 3"),
    ({"zero_optimization": [2]}, "zero_optimization=[2]", '{"stage": 2}'),
    ({"zero_optimization": True}, "zero_optimization=True", '{"stage": 2}'),
    ({"zero_optimization": "auto"}, "zero_optimization='auto'", '{"stage": 2}'),
    ({"train_batch_size": 8}, "'train_batch_size', but not 'zero_optimization'", '{"stage": 2}'),
    ({"zero_optimisation": ZERO}, "zero_optimisation is no entry", "Write 'zero_optimization'"),
    ({**zero(), "train_micro_batch_size": 4}, "train_micro_batch_size=4", "Write 'train_micro_batch_size_per_gpu'"),
    (zero(offload_optimiser={}), "zero_optimization.offload_optimiser", "Write 'offload_optimizer'"),
    *(
        ({**zero(), "train_micro_batch_size_per_gpu": value}, f"train_micro_batch_size_per_gpu={value!r}", "from 1 on")
        for value in (0, -1, 1.5, True, "4", "four", [4])
    ),
    ({**zero(), "train_batch_size": "8"}, "train_batch_size='8'", "from 1 on"),
    ({**zero(), "gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0", "from 1 on"),
    ({**zero(), "gradient_accumulation_steps": "many"}, "gradient_accumulation_steps='many'", 'or "auto"'),
    ({**zero(), "gradient_clipping": -1}, "gradient_clipping=-1", "0 to clip nothing"),
    ({**zero(), "gradient_clipping": "1.0"}, "gradient_clipping='1.0'", "such as 1.0"),
    ({**zero(), "communication_data_type": "fp64"}, "communication_data_type='fp64'", '"fp16", "bf16" or "fp32"'),
    ({**zero(), "gradient_allreduce_op": "max"}, "gradient_allreduce_op='max'", '"mean" or "sum"'),
    (zero(offload_optimizer="cpu"), "zero_optimization.offload_optimizer='cpu'", '{"device": "cpu"}'),
    (zero(offload_optimizer={"device": "gpu"}), "offload_optimizer.device='gpu'", '"none", "cpu" or "nvme"'),
    (zero(offload_optimizer={"device": "nvme"}), "offload_optimizer.nvme_path is None", "Add the path of a folder"),
    (
        zero(stage=3, offload_param={"device": "nvme", "nvme_path": "none"}),
        "offload_param.nvme_path is 'none'",
        "Add the path",
    ),
    (zero(reduce_bucket_size="5e8"), "zero_optimization.reduce_bucket_size='5e8'", "500000000"),
    (zero(reduce_bucket_size=0), "zero_optimization.reduce_bucket_size=0", "from 1 on"),
    (zero(overlap_comm="maybe"), "zero_optimization.overlap_comm='maybe'", "true, false"),
    ({**zero(), "fp16": True}, "fp16=True", '{"enabled": "auto"}'),
    ({**zero(), "fp16": {"enabled": "maybe"}}, "fp16.enabled='maybe'", "true, false"),
    ({**zero(), "bf16": {"enabled": None}}, "bf16.enabled=None", "true, false"),
    ({**zero(), "fp16": {"loss_scale": -1}}, "fp16.loss_scale=-1", "0 for a scale that adapts"),
    (
        {**zero(), "fp16": {"enabled": True}, "bf16": {"enabled": "true"}},
        "fp16.enabled=True and bf16.enabled='true'",
        "Set one",
    ),
    ({**zero(), "optimizer": "AdamW"}, "optimizer='AdamW'", '{"type": "AdamW"}'),
    ({**zero(), "optimizer": {"params": {"lr": 1}}}, "optimizer={'params': {'lr': 1}} has no type", '"type": "AdamW"'),
    ({**zero(), "optimizer": {"type": "auto"}}, "optimizer.type='auto'", 'such as "AdamW"'),
    (
        {**zero(), "optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}},
        "optimizer.params.max_grad_norm=1",
        "Write gradient_clipping",
    ),
    ({**zero(), "scheduler": {}}, "scheduler={} has no type", '"type": "WarmupLR"'),
    ({**zero(), "scheduler": {"type": "WarmUpLR"}}, "scheduler.type='WarmUpLR'", "Write 'WarmupLR'"),
    ({**zero(), "scheduler": {"type": "auto"}}, "scheduler.type='auto'", '"WarmupLR"'),
    (
        {
            **zero(),
            "train_batch_size": 7,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
        },
        "train_batch_size=7 is no multiple of train_micro_batch_size_per_gpu=2 times gradient_accumulation_steps=2",
        'as "auto"',
    ),
    ({**zero(), "train_batch_size": 2, "gradient_accumulation_steps": 4}, "train_batch_size=2 is no multiple", "auto"),
]


@pytest.mark.parametrize(("config", "named", "remedy"), FAULTS, ids=[named for _, named, _ in FAULTS])
def test_a_faulty_configuration_is_refused(config: dict[str, Any], named: str, remedy: str) -> None:
    told = refused(config)
    assert told.startswith(f"{PLACE}: ")
    assert named in told
    assert remedy in told


def test_every_fault_is_named_at_once() -> None:
    told = refused({**zero(stage=9), "gradient_clipping": "x", "optimizer": 3})
    assert told.startswith("ds.json has 3 faults:\n- ")
    assert all(part in told for part in ("stage=9", "gradient_clipping='x'", "optimizer=3"))


# What DeepSpeed takes, and so do we.
ACCEPTED: list[dict[str, Any]] = [
    zero(stage="2"),
    zero(stage=2.0),
    zero(stage=0),
    {"zero_optimization": {}},
    {**zero(), "train_batch_size": None, "gradient_accumulation_steps": None},
    {**zero(), "train_micro_batch_size_per_gpu": 2.0},
    {**zero(), "gradient_clipping": 0},
    zero(offload_optimizer=None),
    zero(offload_optimizer={"device": "none", "nvme_path": None}),
    zero(stage=3, offload_param={"device": "nvme", "nvme_path": "/disk"}),
    zero(stage=2, offload_param={"device": "cpu"}),
    zero(reduce_bucket_size=5e8, allgather_bucket_size="500", sub_group_size=0),
    {**zero(), "fp16": {"enabled": "yes", "loss_scale": "0"}},
    {**zero(), "fp16": {"enabled": 0}, "bf16": {"enabled": 1}},
    {**zero(), "bf16": None},
    {**zero(), "optimizer": {"type": "Adam", "params": {"lr": 0.1}}},
    {**zero(), "scheduler": {"type": "StepLR", "params": {"step_size": 3}}},
    {**zero(), "communication_data_type": "FP32"},
    {**zero(), "something_of_a_later_version": {"x": "auto"}},
]


@pytest.mark.parametrize("config", ACCEPTED, ids=str)
def test_what_deepspeed_takes_is_not_refused(config: dict[str, Any]) -> None:
    check(config, PLACE)


def test_every_entry_may_wait_for_its_value() -> None:
    config: dict[str, Any] = dict.fromkeys(("train_batch_size", "gradient_clipping", "communication_data_type"), "auto")
    offload = {"device": "auto", "nvme_path": "auto"}
    check({**config, **zero(stage="auto", offload_param=offload, reduce_bucket_size="auto")}, PLACE)


_ASK_DEEPSPEED = """
import json, logging, sys
import deepspeed, torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
logging.disable(logging.CRITICAL)
refused = []
for config in json.loads(sys.argv[1]):
    sizes = {} if config.get("train_micro_batch_size_per_gpu") else {"train_micro_batch_size_per_gpu": 1}
    try:
        DeepSpeedConfig({**config, **sizes})
    except Exception as error:
        refused.append([config, str(error)])
asked = set()
class Recorded(dict):
    # Notes every entry that DeepSpeed looks for.
    def get(self, name, default=None):
        asked.add(name)
        return super().get(name, default)
    def __getitem__(self, name):
        asked.add(name)
        return super().__getitem__(name)
    def __contains__(self, name):
        asked.add(name)
        return super().__contains__(name)
    def keys(self):
        return self
    def __deepcopy__(self, memo):
        return self
DeepSpeedConfig(Recorded(train_micro_batch_size_per_gpu=1))
fields = DeepSpeedZeroConfig.model_fields
schedules = lr_schedules.VALID_LR_SCHEDULES + torch.optim.lr_scheduler.__all__
print("ANSWER", json.dumps([refused, [fields[name].alias or name for name in fields], schedules, sorted(asked)]))
"""


@pytest.mark.skipif(not is_deepspeed_available(), reason="asks DeepSpeed itself")
def test_the_tables_are_those_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    command = [sys.executable, "-W", "ignore", "-c", _ASK_DEEPSPEED, json.dumps(ACCEPTED)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    answers = [line.removeprefix("ANSWER ") for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert answers, done.stderr
    not_taken, fields, schedules, asked = json.loads(answers[0])
    assert not_taken == []
    assert set(fields) <= set(ZERO_ENTRIES)
    # The rest is of older versions, and `msamp` is read by the integration of MS-AMP.
    assert len(asked) > 50
    assert set(ENTRIES) - set(asked) == {"allgather_size", "msamp", "sequence_parallel_size"}
    assert set(asked) <= set(ENTRIES)
    assert set(schedules) == set(SCHEDULERS)


def test_known_entries_are_not_taken_for_each_other() -> None:
    check({name: "auto" for name in ENTRIES if name not in {"fp16", "bf16", "bfloat16"}} | SECTIONS, PLACE)


SECTIONS = {"zero_optimization": ZERO, "optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}}


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"a": 1,\n "b": }', r"it is no JSON, in line 2, column 7: .*\. Correct it there"),
        ("", r"it is no JSON, in line 1, column 1"),
        ("[1]", r"it holds a list. Write an object"),
        ('{"a": {"b": 1, "b": 2}}', r"the entry 'b' stands in it twice. Remove one"),
        (b"\xff\xfe\x00", r"the file holds no text"),
    ],
)
def test_a_file_that_holds_no_configuration(content: str | bytes, told: str, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigurationError, match=rf"ds.json' is not a configuration of DeepSpeed: {told}"):
        read(str(file))


@pytest.mark.parametrize(
    ("given_value", "told"),
    [
        ("missing.json", "no such file, and no JSON. Write the path of a JSON file that exists"),
        ("", "it is a folder"),
        ("{not json", "in line 1, column 2"),
        (5, "it is of type int"),
    ],
)
def test_what_is_no_configuration_is_named(given_value: Any, told: str, tmp_path: Path) -> None:
    value = str(tmp_path) if given_value == "" else given_value
    with pytest.raises(ConfigurationError) as caught:
        read(value)
    assert str(caught.value).startswith(f"{value!r} is not a configuration of DeepSpeed: ")
    assert told in str(caught.value)


def test_each_form_is_read_with_its_place(tmp_path: Path) -> None:
    file, text = tmp_path / "ds.json", json.dumps(zero())
    file.write_text(text)
    assert read(file) == (zero(), str(file))
    assert read(text) == (zero(), "hf_ds_config")
    assert read(base64.urlsafe_b64encode(text.encode()).decode()) == (zero(), "hf_ds_config")
    own = zero()
    config, _ = read(own)
    config["zero_optimization"]["stage"] = 0
    assert own == zero()


# --- completing -------------------------------------------------------------------------------------------------------


def completed(config: dict[str, Any], facts: dict[str, Fact] | None = None, num_replicas: int = 2) -> Completed:
    before = copy.deepcopy(config)
    made = complete(config, {**LOADER, **(facts or {})}, num_replicas=num_replicas, place=PLACE)
    assert config == before
    return made


def not_completed(config: dict[str, Any], facts: dict[str, Fact], num_replicas: int = 2) -> str:
    with pytest.raises(ConfigurationError) as caught:
        complete(config, facts, num_replicas=num_replicas, place=PLACE)
    return str(caught.value)


def test_open_entries_are_filled_and_the_origin_is_kept() -> None:
    config = {
        **zero(reduce_bucket_size="auto", stage3_prefetch_bucket_size="auto", sub_group_size=5),
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "steps_per_print": float("inf"),
    }
    facts = {
        "gradient_accumulation_steps": Fact(4, "Accelerator(gradient_accumulation_steps=4)"),
        "optimizer.params.lr": Fact(0.5, "DummyOptim(lr=0.5)", binding=False),
        **hidden_size_facts(10, stage=2),
    }
    made = completed(config, facts)
    assert made.config == {
        **zero(reduce_bucket_size=100, sub_group_size=5),
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
        "steps_per_print": float("inf"),
    }
    assert made.origins == {
        "zero_optimization.stage": PLACE,
        "zero_optimization.reduce_bucket_size": "the model's hidden size of 10",
        "zero_optimization.sub_group_size": PLACE,
        "train_batch_size": "train_micro_batch_size_per_gpu times gradient_accumulation_steps times 2 processes",
        "train_micro_batch_size_per_gpu": "the batch size of the prepared loader",
        "gradient_accumulation_steps": "Accelerator(gradient_accumulation_steps=4)",
        "optimizer.type": PLACE,
        "optimizer.params.lr": "DummyOptim(lr=0.5)",
        "steps_per_print": PLACE,
    }


def test_sizes_from_the_hidden_size() -> None:
    sizes = {name.split(".")[1]: fact.value for name, fact in hidden_size_facts(64, stage=3).items()}
    assert sizes == {
        "reduce_bucket_size": 4096,
        "stage3_prefetch_bucket_size": 3686,
        "stage3_param_persistence_threshold": 640,
    }
    assert list(hidden_size_facts(64, stage=1)) == ["zero_optimization.reduce_bucket_size"]
    made = completed(zero(stage=3, reduce_bucket_size=7), hidden_size_facts(64, stage=3))
    assert made.config["zero_optimization"] == {"stage": 3, "reduce_bucket_size": 7}


@pytest.mark.parametrize(
    "name",
    ["scheduler.params.total_num_steps", "scheduler.params.warmup_max_lr", "optimizer.params.lr", "foo.bar"],
)
def test_an_entry_that_nothing_fills_is_an_error(name: str) -> None:
    section, *rest = name.split(".")
    entry: dict[str, Any] = {rest[-1]: "auto"}
    config = {**zero(), section: {"type": {"scheduler": "WarmupLR"}.get(section, "AdamW"), "params": entry}}
    if section == "foo":
        config[section] = entry
    told = not_completed(config, LOADER)
    assert told.startswith(f"{PLACE}: {name}='auto', and nothing gives its value. Write ")
    assert "auto" not in str(completed(config, {name: Fact(1, "the program")}).config)


def test_words_of_deepspeed_stay() -> None:
    config = {**zero(), "data_types": {"keep_in_fp32_modules": "auto"}, "pipeline": {"stages": "auto"}}
    made = completed(config)
    assert made.config["data_types"] == {"keep_in_fp32_modules": "auto"}
    assert made.config["pipeline"] == {"stages": "auto"}


def test_all_contradictions_are_named_with_both_places() -> None:
    config = {**zero(), "gradient_clipping": 2.0, "optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.99]}}}
    facts = {
        "gradient_clipping": Fact(1.0, "flag --gradient_clipping"),
        "zero_optimization.stage": Fact(3, "the variable ACCELERATE_DEEPSPEED_ZERO_STAGE"),
        "optimizer.params.betas": Fact((0.9, 0.99), "DummyOptim"),
        "zero_optimization.reduce_bucket_size": Fact(5, "nobody asked"),
    }
    told = not_completed(config, {**LOADER, **facts})
    assert told == (
        "ds.json has 2 faults:\n- gradient_clipping=2.0 contradicts 1.0, which flag --gradient_clipping gives. Leave one of "
        'the two out, or write "auto" in ds.json.\n- zero_optimization.stage=2 contradicts 3, which the variable '
        'ACCELERATE_DEEPSPEED_ZERO_STAGE gives. Leave one of the two out, or write "auto" in ds.json.'
    )


def test_a_fact_that_does_not_bind_only_fills() -> None:
    made = completed({**zero(), "gradient_clipping": 2.0}, {"gradient_clipping": Fact(1.0, "a guess", binding=False)})
    assert made.config["gradient_clipping"] == 2.0


def test_precision_that_facts_make_contradictory_is_refused() -> None:
    config = {**zero(), "fp16": {"enabled": True}, "bf16": {"enabled": "auto"}}
    told = not_completed(config, {**LOADER, "bf16.enabled": Fact(True, "mixed_precision")})
    assert "exclude each other" in told


TOTAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("said", "facts", "sizes"),
    [
        ({MICRO: 4}, {}, (8, 4, 1)),
        ({MICRO: 4, STEPS: 3}, {}, (24, 4, 3)),
        ({TOTAL: 8}, {}, (8, 4, 1)),
        ({TOTAL: 24, STEPS: 3}, {}, (24, 4, 3)),
        ({TOTAL: 24, MICRO: 4}, {}, (24, 4, 3)),
        ({TOTAL: 24, MICRO: 4, STEPS: 3}, {}, (24, 4, 3)),
        ({TOTAL: "auto", MICRO: "auto", STEPS: "auto"}, {MICRO: 4}, (8, 4, 1)),
        ({}, {MICRO: 4, STEPS: 3}, (24, 4, 3)),
        ({TOTAL: 24}, {MICRO: 4}, (24, 4, 3)),
        ({TOTAL: 24, STEPS: "auto"}, {MICRO: 4, STEPS: 3}, (24, 4, 3)),
        ({MICRO: 4.0}, {}, (8, 4, 1)),
    ],
)
def test_batch_sizes_follow_from_each_other(
    said: dict[str, Any], facts: dict[str, int], sizes: tuple[int, int, int]
) -> None:
    given_facts = {name: Fact(value, "the program") for name, value in facts.items()}
    made = complete({**zero(), **said}, given_facts, num_replicas=2)
    assert (made.config[TOTAL], made.config[MICRO], made.config[STEPS]) == sizes
    assert {TOTAL, MICRO, STEPS} <= made.origins.keys()


def test_a_fixed_total_wins_over_a_default_of_the_program() -> None:
    facts = {MICRO: Fact(4, "the loader", binding=False), STEPS: Fact(1, "default", binding=False)}
    assert complete({**zero(), TOTAL: 24}, facts, num_replicas=2).config[STEPS] == 3


def test_batch_sizes_that_cannot_hold_are_named_with_their_origins() -> None:
    facts = {MICRO: Fact(3, "the batch size of the prepared loader"), STEPS: Fact(2, "Accelerator(...)")}
    told = not_completed({**zero(), TOTAL: 8}, facts)
    assert (
        "train_batch_size=8 (ds.json), train_micro_batch_size_per_gpu=3 (the batch size of the prepared loader), "
        "gradient_accumulation_steps=2 (Accelerator(...)) cannot hold together on 2 processes"
    ) in told
    assert "a train_batch_size that is 12." in told
    assert "a multiple of 4." in not_completed({**zero(), TOTAL: 6, MICRO: 2}, {})


@pytest.mark.parametrize("config", [zero(), {**zero(), MICRO: "auto", STEPS: 2}])
def test_an_unknown_batch_size_asks_for_a_loader(config: dict[str, Any]) -> None:
    told = not_completed(config, {STEPS: Fact(2, "the program")})
    assert told.startswith("ds.json: train_micro_batch_size_per_gpu='auto' cannot be filled")
    assert "Give a loader with a batch size to prepare(), or set train_micro_batch_size_per_gpu" in told


OPEN = {
    **zero(stage="auto", reduce_bucket_size="auto", overlap_comm="auto", offload_optimizer={"device": "auto"}),
    TOTAL: "auto",
    MICRO: "auto",
    STEPS: "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto", "loss_scale": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": "auto"}},
}
VALUES: dict[str, Any] = {
    "zero_optimization.stage": st.integers(0, 3),
    "zero_optimization.reduce_bucket_size": st.integers(1, 10**9),
    "zero_optimization.offload_optimizer.device": st.sampled_from(["none", "cpu"]),
    STEPS: st.integers(1, 64),
    "gradient_clipping": st.floats(0, 10),
    "fp16.enabled": st.booleans(),
    "optimizer.params.eps": st.floats(0, 1),
}


@given(
    values=st.fixed_dictionaries(
        {"zero_optimization.stage": VALUES["zero_optimization.stage"], MICRO: st.integers(1, 512)},
        optional={name: drawn for name, drawn in VALUES.items() if name != "zero_optimization.stage"},
    ),
    num_replicas=st.integers(1, 64),
)
def test_completing_leaves_nothing_open_and_nothing_to_do(values: dict[str, Any], num_replicas: int) -> None:
    facts = {name: Fact(value, f"fact {name}") for name, value in values.items()}
    facts["optimizer.params.lr"] = Fact(0.1, "DummyOptim")
    made = complete(OPEN, facts, num_replicas=num_replicas)
    assert "auto" not in json.dumps(made.config)
    assert made.config[TOTAL] == made.config[MICRO] * made.config[STEPS] * num_replicas
    assert all(made.origins[name] == f"fact {name}" for name in values)
    again = complete(made.config, facts, num_replicas=num_replicas)
    assert again.config == made.config
    check(made.config, PLACE)


# --- texts of others --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": ' * 200 + "1" + "}" * 200, "it is no JSON: it is nested too deeply"),
        ('{"a": ' * 100_000, "it is no JSON: it is nested too deeply"),
        ('{"train_batch_size": ' + "9" * 5000 + "}", "it is no JSON: a number in it has too many digits"),
        ('{"a": "' + "x" * 1_000_000 + '"}', "it has more than 1000000 characters"),
    ],
)
def test_a_text_without_end_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(text)
    for given_as in (text, str(tmp_path / "ds.json"), base64.urlsafe_b64encode(text.encode()).decode()):
        with pytest.raises(ConfigurationError, match=message):
            read(given_as)


def test_names_with_dots_in_them_are_names() -> None:
    config = {**zero(), "train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"a.b": "auto", "lr": "auto"}}}
    made = complete(config, {"optimizer.params.lr": Fact(0.1, "a test")}, num_replicas=2)
    assert made.config["optimizer"]["params"] == {"lr": 0.1}


def test_of_many_unknown_names_some_are_looked_at() -> None:
    said = refused({**zero(), **{f"gradient_clippin{number}": 1 for number in range(5000)}})
    assert said.count("Write 'gradient_clipping'") == 100
