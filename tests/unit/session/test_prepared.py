"""What `prepare` accepts, refuses and gives back, and how it sorts its arguments."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.support.processes import run_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, SequentialSampler

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate._base.errors import ConfigurationError
from accelerate.devices import registry
from accelerate.offload.quantised import check_places
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.runtime import current
from accelerate.scheduler import AcceleratedScheduler
from accelerate.session.prepared import Bundle, ObjectKind


def parts() -> tuple[Any, Any, Any, Any]:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return model, optimizer, scheduler, torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_any_order(order: tuple[int, ...]) -> None:
    given = parts()
    accelerator = Accelerator()
    found = dict(zip(order, accelerator.prepare(*(given[index] for index in order)), strict=True))
    model, optimizer, scheduler, loader = (found[index] for index in range(4))
    assert model is given[0]
    assert isinstance(optimizer, AcceleratedOptimizer)
    assert optimizer.optimizer is given[1]
    assert isinstance(scheduler, AcceleratedScheduler)
    assert scheduler.optimizers == [optimizer]
    assert len(list(loader)) == 2


def test_several_of_a_kind_and_others_passed_through() -> None:
    first, second, accelerator = parts(), parts(), Accelerator()
    other = {"anything": 1}
    found = accelerator.prepare(*first, other, None, *second)
    assert found[4] is other
    assert found[5] is None
    assert found[2].optimizers == [found[1]]
    assert found[8].optimizers == [found[7]]
    assert accelerator._optimizers == [found[1], found[7]]
    assert accelerator.prepare(other) is other


def test_nothing_to_prepare() -> None:
    with pytest.raises(ConfigurationError, match="nothing to prepare"):
        Accelerator().prepare()


def test_prepared_objects_come_back_as_they_are() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    once = accelerator.prepare(*parts())
    forward = once[0].forward
    assert all(left is right for left, right in zip(accelerator.prepare(*once), once, strict=True))
    assert once[0].forward is forward
    kept = (accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders)
    assert [len(entries) for entries in kept] == [1, 1, 1, 1]


def learn_a_prompt(accelerator: Accelerator | None) -> torch.Tensor:
    """Train what is added to the inputs of a frozen model."""
    torch.manual_seed(0)
    model: Any = torch.nn.Linear(4, 4).requires_grad_(False)
    prompt = torch.nn.Parameter(torch.zeros(1, 4))
    optimizer: Any = torch.optim.AdamW([prompt], lr=0.1)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(3):
        loss = model(torch.ones(2, 4) + prompt).square().mean()
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return prompt.detach()


def test_parameters_of_no_model_are_trained_as_they_are_plainly() -> None:
    assert torch.equal(learn_a_prompt(Accelerator()), learn_a_prompt(None))


def test_an_optimizer_may_come_before_its_model_and_after_another() -> None:
    accelerator = Accelerator()
    accelerator.prepare(parts()[0])
    model, optimizer, scheduler, _ = parts()
    prepared = accelerator.prepare(optimizer)
    assert prepared.optimizer is optimizer
    assert accelerator.prepare(scheduler).optimizers == [prepared]
    accelerator.prepare(model)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    before = model.weight.detach().clone()
    prepared.step()
    assert not torch.equal(model.weight, before)


def test_an_optimizer_of_replaced_parameters_is_refused_and_nothing_was_touched(elsewhere: None) -> None:
    accelerator = Accelerator()
    model, stale, _, loader = parts()
    accelerator.prepare(model)  # on a device whose tensors are of another kind
    other = torch.nn.Linear(2, 1)
    with pytest.raises(ConfigurationError, match="preparing the model replaced them"):
        accelerator.prepare(loader, stale, other)
    assert other.weight.device.type == "cpu"
    assert len(accelerator._models) == 1
    assert not accelerator._dataloaders
    assert not hasattr(other, "_is_accelerate_prepared")


SPREAD = [{"0": "cpu", "1": "disk"}, {"": "disk"}, {"0": 0, "1": "disk"}]


def quantised(bits: int, places: dict[str, Any] | None) -> Any:
    """Return a model that says what Transformers' quantised models say of themselves."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    setattr(model, f"is_loaded_in_{bits}bit", True)
    if places is not None:
        model.hf_device_map = places
    return model


@pytest.mark.parametrize("places", SPREAD, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_model_that_is_offloaded_is_refused(bits: int, places: dict[str, Any]) -> None:
    accelerator = Accelerator()
    with pytest.raises(ConfigurationError, match=r"hf_device_map=.*are offloaded"):
        accelerator.prepare(quantised(bits, places))
    with pytest.raises(ConfigurationError, match="are offloaded"):
        accelerator.prepare_model(quantised(bits, places), evaluation_mode=True)
    plain: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    plain.hf_device_map = places
    assert accelerator.prepare(plain) is plain


@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_model_may_be_partly_on_the_cpu(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = quantised(bits, {"0": 0, "1": "cpu"})
    assert "multi_backend" in bitsandbytes.features
    assert Accelerator().prepare(model) is model
    monkeypatch.setattr(bitsandbytes, "features", set())  # as in versions that compute on CUDA alone
    with pytest.raises(ConfigurationError, match=r"'1': 'cpu'"):
        Accelerator().prepare(quantised(bits, {"0": 0, "1": "cpu"}))


@pytest.mark.parametrize("places", [{"": 1}, {"": "cuda:1"}, {"": torch.device("cuda:1")}], ids=str)
def test_a_quantised_model_on_another_device_than_the_cpu_of_the_process_is_refused(places: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"hf_device_map=.*trains on 'cpu'"):
        Accelerator().prepare(quantised(8, places))


@pytest.mark.parametrize(
    "places",
    [
        *(None, {"": "cpu"}, {"": torch.device("cpu")}, {"0": "cpu", "1": "cpu"}),
        *({"": 0}, {"": "cuda:0"}, {"0": 0, "1": 1}),  # which release 1.15 takes too
    ],
    ids=str,
)
def test_a_quantised_model_on_the_device_of_the_process_is_prepared(places: dict[str, Any] | None) -> None:
    model = quantised(4, places)
    assert Accelerator().prepare(model) is model


@pytest.mark.parametrize(
    ("places", "refused"),
    [
        ({"": torch.device("cuda:1")}, None),
        ({"": "cuda:1"}, None),
        ({"0": "cuda:1", "1": torch.device("cuda:1")}, None),
        ({"0": "cuda:0", "1": "cuda:1"}, None),  # spread over accelerators, for one process
        ({"": torch.device("cuda:0")}, "trains on 'cuda:1'"),
        ({"": "cuda"}, "trains on 'cuda:1'"),
        ({"": "cpu"}, "are offloaded"),
    ],
    ids=str,
)
def test_a_quantised_model_has_to_lie_on_the_device_of_its_process(places: dict[str, Any], refused: str | None) -> None:
    with pytest.raises(ConfigurationError, match=refused) if refused else nullcontext():
        check_places(quantised(8, places), torch.device("cuda:1"))


def test_the_single_preparers() -> None:
    model, optimizer, scheduler, loader = parts()
    accelerator = Accelerator()
    assert accelerator.prepare_model(model, evaluation_mode=True) is model
    prepared = accelerator.prepare_optimizer(optimizer)
    assert accelerator.prepare_scheduler(scheduler).optimizers == [prepared]
    assert accelerator.prepare_data_loader(loader) in accelerator._dataloaders


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """Let the default device be another than the CPU."""
    from accelerate._base.enums import DistributedType
    from accelerate.devices.registry import CpuBackend

    registry.register(CpuBackend("meta", DistributedType.MULTI_GPU, "gloo", priority=1000))
    yield
    registry.unregister("meta")


def test_placement_of_each_object(elsewhere: None) -> None:
    accelerator = Accelerator()
    first, second, third = (torch.nn.Linear(2, 1) for _ in range(3))
    loader = torch.utils.data.DataLoader(torch.ones(4, 2))
    *models, loader = accelerator.prepare(first, second, third, loader, device_placement=[True, False, None, False])
    assert [model.weight.device.type for model in models] == ["meta", "cpu", "meta"]
    assert next(iter(loader)).device.type == "cpu"
    with pytest.raises(ConfigurationError, match="1 entries for 2"):
        accelerator.prepare(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), device_placement=[True])


def test_a_model_spread_over_devices_stays_where_it_is(elsewhere: None) -> None:
    accelerator = Accelerator()
    model, inner = torch.nn.Sequential(torch.nn.Linear(2, 1)), {"0": "cpu", "1": "disk"}
    assert not accelerator.verify_device_map(model)
    model[0].hf_device_map = {"": 0}  # type: ignore[assignment]
    assert not accelerator.verify_device_map(model)
    model[0].hf_device_map = inner  # type: ignore[assignment]
    assert accelerator.verify_device_map(model)
    assert accelerator.prepare(model)[0].weight.device.type == "cpu"


class PlainLoader:
    """Batches from somewhere, in no class of torch."""

    batch_size = 2

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(8.0).reshape(4, 2))

    def __len__(self) -> int:
        return 4


def test_loaders_of_custom_classes(elsewhere: None) -> None:
    own = PlainLoader()
    assert Accelerator().prepare(own) is own
    current.reset()
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(custom_classes=(PlainLoader,)))
    prepared = accelerator.prepare(own)
    assert [batch.device.type for batch in prepared] == ["meta"] * 4
    assert accelerator._dataloaders == [prepared]
    assert accelerator.prepare(prepared) is prepared


@pytest.mark.parametrize("name", ["free_memory", "clear"])
def test_what_was_prepared_is_forgotten(name: str) -> None:
    accelerator = Accelerator()
    model, optimizer, scheduler, loader = accelerator.prepare(*parts())
    seen = [weakref.ref(entry) for entry in (model, optimizer, scheduler, loader)]
    accelerator.step = 3
    model, optimizer, scheduler, loader = getattr(accelerator, name)(model, optimizer, scheduler, loader)
    assert (model, optimizer, scheduler, loader) == (None, None, None, None)
    gc.collect()
    assert [reference() for reference in seen] == [None] * 4
    assert accelerator.step == 0
    assert accelerator.free_memory() == []


def test_unwrap_restores_the_forward() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    model = torch.nn.Linear(2, 1)
    prepared = accelerator.prepare(model)
    assert "forward" in model.__dict__
    assert accelerator.unwrap_model(prepared) is model
    assert "forward" in model.__dict__
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is model
    assert "forward" not in model.__dict__
    assert model(torch.ones(1, 2)).dtype is torch.float32


def refused(function: Callable[[], Any]) -> str:
    try:
        function()
    except ConfigurationError as error:
        return str(error)
    return "nothing"


class SizedBatches:
    """Batches of a user who says how large they are."""

    batch_size = 4

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]])

    def __len__(self) -> int:
        return 3


def prepare_in_a_group() -> dict[str, Any]:
    accelerator = Accelerator()
    model, optimizer, scheduler, _ = parts()
    frozen = torch.nn.Linear(1, 1).requires_grad_(False)
    prepared, _, _, still = accelerator.prepare(model, optimizer, scheduler, frozen)
    spread = torch.nn.Sequential(torch.nn.Linear(1, 1))
    spread.hf_device_map = {"a": 0, "b": 1}  # type: ignore[assignment]
    splitting = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    odd = torch.utils.data.DataLoader(torch.ones(6, 1), batch_size=3)
    untouched = torch.nn.Linear(1, 1)
    return {
        "wrapped": isinstance(prepared, DistributedDataParallel) and prepared.module is model,
        "frozen": still is frozen,
        "unwrapped": accelerator.unwrap_model(prepared) is model,
        "evaluation": accelerator.prepare_model(torch.nn.Linear(1, 1), evaluation_mode=True).__class__.__name__,
        "again": accelerator.prepare(prepared) is prepared,
        "inner": refused(lambda: accelerator.prepare(model)),
        "inner_alone": refused(lambda: accelerator.prepare_model(model)),
        "spread": refused(lambda: accelerator.prepare(spread)),
        "odd": refused(lambda: splitting.prepare(untouched, odd)),
        "untouched": not splitting._models and not hasattr(untouched, "_is_accelerate_prepared"),
        "given": [
            [batch.tolist() for batch in splitting.prepare(torch.utils.data.DataLoader(range(10), batch_sampler=given))]
            for given in (BatchSampler(SequentialSampler(range(10)), 4, False), SizedBatches())
        ],
        "odd sampler": refused(
            lambda: splitting.prepare(
                torch.utils.data.DataLoader(range(10), batch_sampler=BatchSampler(range(10), 3, drop_last=False))
            )
        ),
        "unknown": refused(lambda: splitting.prepare(torch.utils.data.DataLoader(torch.ones(6, 1), batch_size=None))),
    }


def test_preparing_in_a_group() -> None:
    for rank, found in enumerate(run_group(prepare_in_a_group, 2)):
        inner, alone = found.pop("inner"), found.pop("inner_alone")
        assert "This Linear was already prepared" in inner
        assert alone == inner
        assert "spread over several devices" in found.pop("spread")
        assert "batch_size=3, which 2 processes cannot share equally" in found.pop("odd")
        assert "batch_size=3" in found.pop("odd sampler")
        assert found.pop("given") == [[[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [0, 1]]][rank]] * 2
        assert "batch_size=None" in found.pop("unknown")
        assert found.pop("evaluation") == "Linear"
        assert found == dict.fromkeys(found, True)


def one_of_each() -> list[Any]:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = torch.utils.data.DataLoader(torch.ones(2, 1))
    return [model, optimizer, scheduler, loader, "text"]


def test_kinds_and_order() -> None:
    given = one_of_each()
    bundle = Bundle(given)
    assert [slot.kind for slot in bundle.arguments] == [
        ObjectKind.MODEL,
        ObjectKind.OPTIMIZER,
        ObjectKind.SCHEDULER,
        ObjectKind.LOADER,
        ObjectKind.OTHER,
    ]
    assert [slot.given for slot in bundle.of(ObjectKind.LOADER, ObjectKind.MODEL)] == [given[0], given[3]]
    assert bundle.results() == tuple(given)
    assert Bundle(given[:1]).results() is given[0]


def test_flags_of_placement() -> None:
    given = one_of_each()
    assert [slot.device_placement for slot in Bundle(given, [True, False, None, None, None]).arguments][:2] == [
        True,
        False,
    ]
    with pytest.raises(ConfigurationError, match="2 entries for 5"):
        Bundle(given, [True, False])


@pytest.mark.parametrize("index", range(4))
def test_an_object_given_twice(index: int) -> None:
    given = one_of_each()
    with pytest.raises(ConfigurationError, match="given twice"):
        Bundle([*given, given[index]])


def test_other_objects_may_come_twice() -> None:
    assert Bundle(["text", "text", None, None]).results() == ("text", "text", None, None)


def test_classes_of_loaders() -> None:
    class Own: ...

    own = Own()
    assert Bundle([own]).arguments[0].kind is ObjectKind.OTHER
    assert Bundle([own], loader_classes=(Own,)).arguments[0].kind is ObjectKind.LOADER
