"""Which device each module gets, and why."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from accelerate import dispatch_model
from accelerate.offload.memory import compute_module_sizes, get_max_layer_size
from accelerate.offload.places import (
    check_device_map,
    clean_device_map,
    lookup,
)
from accelerate.offload.plan import (
    Planner,
    fallback_allocate,
    get_module_size_with_ties,
    infer_auto_device_map,
)
from accelerate.offload.tensors import ModuleTree

TraceFunction = Callable[[FrameType, str, object], object]


class Net(nn.Module):
    """linear1 64 bytes, batchnorm 72, linear2 100: 236 in all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)


def linear(count: int) -> nn.Module:
    """A layer of `count` bytes."""
    return nn.Linear(count // 4, 1, bias=False)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ({0: 250}, {"linear1": 0, "batchnorm": 0, "linear2": 0}),
        ({0: 200, 1: 200}, {"linear1": 0, "batchnorm": 1, "linear2": 1}),  # 100 of the first wait for linear2
        ({"cpu": 236}, {"linear1": "cpu", "batchnorm": "cpu", "linear2": "cpu"}),
        ({"cpu": 100}, {"linear1": "disk", "batchnorm": "disk", "linear2": "disk"}),
        ({0: 240, 1: 60, "cpu": 1000}, {"linear1": 0, "batchnorm": 0, "linear2": 0}),
        ({0: 170, "cpu": 200}, {"linear1": 0, "batchnorm": "cpu", "linear2": "cpu"}),
    ],
)
def test_devices_are_filled_in_order_with_room_for_the_largest_layer(
    memory: dict[int | str, int], expected: dict[str, int | str]
) -> None:
    assert infer_auto_device_map(Net(), memory, clean_result=False, offload_buffers=True) == expected


def test_every_choice_has_a_reason_and_verbose_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()
    plan = Planner(model, {0: 200, 1: 200}, compute_module_sizes(model), set()).run()
    assert plan.choices["linear1"].reason == "64 bytes fit in 100"
    assert plan.used == {0: 64, 1: 172, "disk": 0}
    infer_auto_device_map(model, {0: 200, 1: 200}, verbose=True)
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "linear1: on 0, 64 bytes fit in 100 bytes",
        "batchnorm: not on 0, 72 bytes do not fit in 36 bytes",
        "0: 100 bytes are kept for the largest layer that comes later, which may visit it",
        "batchnorm: on 1, 72 bytes fit in 200 bytes",
        "linear2: on 1, 100 bytes fit in 128 bytes",
    ]


def test_what_stays_whole_is_tied_or_has_buffers_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    block = nn.Sequential(linear(2048), linear(2048))
    model = nn.ModuleDict({"embed": linear(1024), "block": block, "norm": nn.BatchNorm1d(4), "head": linear(1024)})
    model["head"].weight = model["embed"].weight
    limits: dict[int | str, int | str] = {0: 5150, "cpu": 500}
    infer_auto_device_map(model, limits, ["Sequential"], verbose=True)
    printed = capsys.readouterr().out.splitlines()
    assert "embed: on 0, 1.0 KB fit in 1.03 KB" in printed
    assert "head: on 0, tied to embed" in printed
    assert "block: stays whole, Sequential is one of no_split_module_classes" in printed
    assert "norm: 40 bytes of buffers stay on the device that runs it" in printed
    infer_auto_device_map(model, limits, ["Sequential"], verbose=True, offload_buffers=True)
    assert "norm: 40 bytes of buffers go there too, by offload_buffers" in capsys.readouterr().out.splitlines()
    infer_auto_device_map(model, {0: 4000, "cpu": 500}, verbose=True, offload_buffers=True)
    assert "block: split, 4.0 KB do not fit in 2.84 KB on 0" in capsys.readouterr().out.splitlines()


def test_a_container_is_split_unless_its_class_stays_whole() -> None:
    model = nn.Sequential(nn.Sequential(linear(40), linear(40)), linear(40))
    assert infer_auto_device_map(model, {0: 80, 1: 80}) == {"0.0": 0, "0.1": 1, "1": 1}
    whole = infer_auto_device_map(model, {0: 80, 1: 80}, no_split_module_classes=["Sequential"])
    assert whole == {"0": 1, "1": "disk"}


def test_direct_tensors_of_a_split_container_get_a_place() -> None:
    model = nn.Sequential(nn.Sequential(linear(40), linear(40)), linear(40))
    model[0].scale = nn.Parameter(torch.ones(2))
    model[0].register_buffer("shift", torch.ones(2))
    device_map = infer_auto_device_map(model, {0: 90, 1: 100}, clean_result=False)
    assert device_map == {"0.scale": 0, "0.0": 0, "0.1": 1, "0.shift": 1, "1": 1}
    check_device_map(model, device_map)


def test_dtypes_make_a_model_smaller() -> None:
    model = Net()
    assert infer_auto_device_map(model, {0: 130}, offload_buffers=True) == {"": "disk"}
    assert infer_auto_device_map(model, {0: 130}, dtype=torch.float16) == {"": 0}
    special = {"linear2.weight": torch.float32}
    heavy = infer_auto_device_map(model, {0: 130}, None, "float16", special, offload_buffers=True)
    assert set(heavy.values()) == {0, "disk"}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(10, 10, bias=False)
        self.body = linear(80)
        self.head = nn.Linear(10, 10, bias=False)
        self.head.weight = self.embed.weight


def test_tied_modules_go_to_one_device() -> None:
    device_map = infer_auto_device_map(Tied(), {0: 500, "cpu": 1000}, clean_result=False)
    assert device_map == {"embed": 0, "head": 0, "body": 0}
    split = infer_auto_device_map(Tied(), {0: 100, 1: 450, "cpu": 1000}, clean_result=False)
    assert split["embed"] == split["head"] == 1


def test_only_the_tied_part_of_a_container_comes_along() -> None:
    rest = nn.ModuleList([linear(400), nn.Linear(10, 10)])
    model = nn.ModuleDict({"first": nn.Linear(10, 10, bias=False), "rest": rest, "last": linear(400)})
    model["rest"][1].weight = model["first"].weight
    device_map = infer_auto_device_map(model, {0: 850, "cpu": 2000})
    assert device_map == {"first": 0, "rest.1": 0, "rest.0": "cpu", "last": "cpu"}


def test_sizes_with_ties_count_a_shared_weight_once() -> None:
    model = Tied()
    sizes = compute_module_sizes(model)
    size, names, modules = get_module_size_with_ties(
        ["head.weight"], sizes["embed"], sizes, [("body", model.body), ("head", model.head)]
    )
    assert (size, names, modules) == (400, ["head"], [model.head])


def test_fallback_takes_any_part_that_fits() -> None:
    model = nn.ModuleDict({"big": linear(400), "box": nn.Sequential(linear(200), linear(40))})
    sizes = compute_module_sizes(model)
    name, module, rest = fallback_allocate(list(model.named_children()), sizes, 50)
    assert (name, module) == ("box.1", model["box"][1])
    assert [key for key, _ in rest] == ["big", "box.0"]
    assert fallback_allocate(list(model.named_children()), sizes, 10)[:2] == (None, None)
    kept, _, _ = fallback_allocate(list(model.named_children()), sizes, 50, no_split_module_classes=["Sequential"])
    assert kept is None


def test_fallback_fills_a_device_that_would_stay_empty() -> None:
    model = nn.Sequential(linear(400), linear(40), linear(40))
    limits: dict[int | str, int | str] = {0: 0, 1: 60, "cpu": 10_000}
    assert set(infer_auto_device_map(model, limits).values()) == {"cpu"}
    assert infer_auto_device_map(model, limits, fallback_allocation=True) == {"1": 1, "0": "cpu", "2": "cpu"}


@pytest.mark.parametrize(
    ("limit", "on_first"), [(160, []), (410, []), (439, []), (440, ["1"]), (460, ["1"]), (500, ["0"])]
)
def test_fallback_leaves_room_for_the_module_that_does_not_fit(limit: int, on_first: list[str]) -> None:
    # It runs on the first device all the same, and brings its weights there.
    model = nn.Sequential(linear(400), linear(40), linear(100))
    device_map = infer_auto_device_map(model, {0: limit, "cpu": 10_000}, fallback_allocation=True, clean_result=False)
    assert [name for name, place in device_map.items() if place == 0] == on_first


@pytest.mark.parametrize(
    ("limit", "buffers", "on_accelerator", "warns"),
    [  # as the release that this one follows decides
        (600, 40, [], False),  # beside the largest layer of 480 bytes, 120 are free for 80 of buffers
        (600, 240, [], True),
        (990, 40, ["a"], True),
        (1000, 40, ["a"], False),
        (1100, 240, [], True),
        (1300, 240, ["a"], True),
        (1500, 40, ["a", "b", "c"], False),
    ],
)
def test_buffers_of_offloaded_modules_are_warned_about(
    limit: int, buffers: int, on_accelerator: list[str], warns: bool, recwarn: pytest.WarningsRecorder
) -> None:
    model = nn.ModuleDict({name: nn.Linear(10, 10) for name in "abc"})
    for name in "bc":
        model[name].register_buffer("table", torch.zeros(buffers // 4))
    device_map = infer_auto_device_map(model, {0: limit, "cpu": 10**6}, clean_result=False)
    assert [name for name, place in device_map.items() if place == 0] == on_accelerator
    assert [f"{2 * buffers} bytes" in str(warning.message) for warning in recwarn] == [True] * warns
    infer_auto_device_map(model, {0: limit, "cpu": 10**6}, offload_buffers=True)
    assert len(recwarn) == warns


@pytest.mark.parametrize("fallback", [False, True])
def test_the_log_says_what_empty_devices_would_have_needed(fallback: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(linear(40_400), linear(440), linear(440))
    with caplog.at_level("INFO", logger="accelerate"):
        infer_auto_device_map(model, {0: 100, 1: 100, "cpu": 10**6}, fallback_allocation=fallback)
        (record,) = [record for record in caplog.records if record.levelname == "INFO"]
        assert "insufficient memory" in record.getMessage()
        # The first runs what is offloaded, so it keeps room for the largest layer that comes later.
        assert re.findall(r"(\w+) \(at least (\d+) bytes", record.getMessage()) == [("0", "40840"), ("1", "40400")]
        caplog.clear()
        infer_auto_device_map(model, {0: 40_840, 1: 440, "cpu": 10**6}, fallback_allocation=fallback)
        assert "insufficient" not in caplog.text


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    def make(depth: int) -> nn.Module:
        if depth == 0 or draw(st.booleans()):
            return linear(4 * draw(st.integers(1, 30)))
        return nn.Sequential(*[make(depth - 1) for _ in range(draw(st.integers(1, 3)))])

    model = nn.Sequential(*[make(draw(st.integers(0, 3))) for _ in range(draw(st.integers(1, 4)))])
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if len(layers) > 1 and draw(st.booleans()):
        first, second = draw(st.permutations(layers))[:2]
        second.weight = first.weight
    return model


@settings(max_examples=60, deadline=None)
@given(models(), st.lists(st.integers(0, 300), max_size=3), st.integers(0, 600), st.booleans())
def test_a_plan_covers_the_model_and_respects_every_limit(
    model: nn.Module, accelerators: list[int], host: int, fallback: bool
) -> None:
    limits: dict[int | str, int] = {**dict(enumerate(accelerators)), "cpu": host}
    sizes = compute_module_sizes(model)
    plan = Planner(model, limits, sizes, set(), fallback).run()
    check_device_map(model, plan.device_map)
    used = {device: sum(sizes.get(n, 0) for n, c in plan.choices.items() if c.value == device) for device in limits}
    assert all(used[device] <= limit for device, limit in limits.items())
    short = clean_device_map(plan.device_map)
    assert {name: lookup(short, name) for name in plan.choices} == plan.device_map


def lines_run(work: Callable[[], object]) -> int:
    """Return how many lines of Python a call runs: work, where time would depend on the machine."""
    count, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, arg: object) -> TraceFunction:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def many_layers(count: int) -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(1, 1), nn.ReLU()) for _ in range(count)])


def many_ties(count: int) -> nn.Module:
    """Boxes whose second layers are tied to single layers before them, from the last one on."""
    firsts = [nn.Linear(1, 1, bias=False) for _ in range(count)]
    boxes = [nn.Sequential(nn.Linear(9, 9), nn.Linear(1, 1, bias=False)) for _ in range(count)]
    for first, box in zip(firsts, reversed(boxes), strict=True):
        box[1].weight = first.weight
    return nn.Sequential(*firsts, *boxes)


@pytest.mark.parametrize("make", [many_layers, many_ties])
@pytest.mark.parametrize("memory", [{0: 20, "cpu": 60}, {0: 380, "cpu": 20}, {0: 1, "cpu": 1}])
def test_planning_is_linear_in_the_number_of_modules(
    make: Callable[[int], nn.Module], memory: dict[int | str, int]
) -> None:
    def lines(count: int) -> int:
        model, limits = make(count), {device: size * count for device, size in memory.items()}
        return lines_run(lambda: infer_auto_device_map(model, limits, offload_buffers=True))

    assert lines(240) <= 2.3 * lines(120)  # 2 for every walk, and a little for the height of the tree of maxima


def test_each_module_is_walked_a_fixed_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    model, walks = many_layers(10), 0
    add = ModuleTree._add

    def counted(self: ModuleTree, prefix: str, module: nn.Module, above: int) -> None:
        nonlocal walks
        walks += 1
        add(self, prefix, module, above)

    monkeypatch.setattr(ModuleTree, "_add", counted)
    infer_auto_device_map(model, {0: 1000, "cpu": 1000})
    assert walks == len(list(model.modules()))


def test_the_largest_layer_is_named() -> None:
    model = Net()
    sizes = compute_module_sizes(model)
    assert get_max_layer_size(list(model.named_children()), sizes, []) == (100, ["linear2"])
    nested = nn.Sequential(nn.Sequential(linear(40), linear(40)), linear(60))
    sizes = compute_module_sizes(nested)
    assert get_max_layer_size(list(nested.named_children()), sizes, None) == (60, ["1"])
    assert get_max_layer_size(list(nested.named_children()), sizes, ["Sequential"]) == (80, ["0"])


@pytest.mark.parametrize("limit", [100, 170, 1000])
def test_a_module_under_two_names_has_a_place_for_both(
    limit: int, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    layer, activation = nn.Linear(4, 4), nn.ReLU()
    model = nn.Sequential(layer, activation, layer, activation, nn.Linear(4, 4))
    expected = model(torch.ones(2, 4))
    device_map = infer_auto_device_map(model, {"cpu": limit}, clean_result=False)
    assert set(device_map) == {"0", "1", "2", "3", "4"}
    assert device_map["0"] == device_map["2"] == ("disk" if limit < 160 else "cpu")
    dispatch_model(model, device_map, offload_dir=tmp_path)
    assert torch.equal(model(torch.ones(2, 4)), expected)
    assert not recwarn.list


def test_tied_modules_that_fit_alone_and_not_together_move_on() -> None:
    model = nn.ModuleDict({"first": nn.Linear(10, 10, bias=False), "last": nn.Linear(10, 10)})
    model["last"].weight = model["first"].weight
    plan = Planner(model, {0: 465, 1: 410, 2: 450, "cpu": 1000}, compute_module_sizes(model), {"Linear"}).run()
    assert plan.device_map == {"first": 2, "last": 2}
    assert "first: not on 1, 440 bytes with last, tied to it, do not fit in 410" in plan.notes


def test_the_host_keeps_no_room_for_an_accelerator_in_its_own_memory() -> None:
    model = nn.Sequential(linear(40), linear(400), linear(400))
    assert infer_auto_device_map(model, {"mps": 450, "cpu": 450}) == {"0": "mps", "1": "cpu", "2": "disk"}
    assert infer_auto_device_map(model, {0: 450, "cpu": 450}) == {"0": 0, "1": "disk", "2": "disk"}


def test_fallback_looks_into_modules_that_are_split() -> None:
    box = nn.Sequential(nn.Linear(10, 10), linear(40))
    model = nn.ModuleDict({"first": nn.Linear(10, 10, bias=False), "big": linear(800), "box": box})
    box[0].weight = model["first"].weight
    device_map = infer_auto_device_map(model, {0: 1250, 1: 60, "cpu": 10_000}, fallback_allocation=True)
    assert device_map == {"first": 0, "box.0": 0, "box.1": 1, "big": "cpu"}
