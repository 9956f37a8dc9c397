"""The public operations, the metrics and the checked mode on real groups of processes."""

from __future__ import annotations

import warnings
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.support.processes import ProcessGroupFailure, run_group
from transformers import BatchEncoding
from transformers.modeling_outputs import SequenceClassifierOutput

from accelerate import Accelerator, PartialState
from accelerate._base.errors import DistributedOperationException, WrongTypeError
from accelerate._base.helpers import reset_warnings
from accelerate.collectives import checked, ops
from accelerate.collectives.base import communicator
from accelerate.collectives.metrics import gather_for_metrics_rows, weighted_mean
from accelerate.runtime import current
from accelerate.state import AcceleratorState

pytestmark = pytest.mark.multiprocess


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Share:
    rows: int | None
    real: int | None
    full: int | None = None


@dataclass
class Scored:
    score: torch.Tensor
    names: list[str]


def rank() -> int:
    return current.runtime().rank


def world() -> int:
    return current.runtime().world_size


def gathers_nested_structures() -> None:
    own = torch.tensor([rank()])
    expected = list(range(world()))
    found = ops.gather({"a": [own, (own, Pair(own, own[0]))], "m": UserDict(b=own), "d": Scored(own, [])})
    assert found["a"][0].tolist() == found["a"][1][0].tolist() == expected
    assert (type(found["a"][1][1]), found["a"][1][1].right.tolist()) == (Pair, expected)
    assert (type(found["m"]), found["m"]["b"].tolist()) == (UserDict, expected)
    assert found["d"].score.tolist() == expected
    encoding = ops.gather(BatchEncoding({"ids": own}))
    assert (type(encoding), encoding["ids"].tolist()) == (BatchEncoding, expected)
    output = ops.gather(SequenceClassifierOutput(logits=own))
    assert (type(output), output.logits.tolist()) == (SequenceClassifierOutput, expected)


def gather_refuses_what_is_no_tensor() -> None:
    for data in ("text", {"a": 1}, [torch.ones(1), None]):
        with pytest.raises(WrongTypeError, match="use `gather_object`"):
            ops.gather(data)
        with pytest.raises(WrongTypeError, match="broadcast_object_list"):
            ops.broadcast(data)
    with pytest.raises(WrongTypeError, match="pass a list"):
        ops.broadcast_object_list((1, 2))  # type: ignore[arg-type]


def gather_object_joins_lists() -> None:
    assert ops.gather_object([rank(), "x"]) == [item for r in range(world()) for item in (r, "x")]
    assert ops.gather_object([{"r": rank()}]) == [{"r": r} for r in range(world())]
    with pytest.raises(WrongTypeError, match="wrap the value in a list"):
        ops.gather_object(5)
    with pytest.raises(WrongTypeError, match="on rank 0"):
        ops.gather_object(None if rank() == 0 else [1])
    with pytest.warns(UserWarning, match="characters of a string"):
        assert ops.gather_object("ab") == ["a", "b"] * world()
    with pytest.warns(UserWarning, match="keys of a mapping"):
        assert ops.gather_object({"k": 1}) == ["k"] * world()


def reduces_and_broadcasts() -> None:
    total = sum(range(world()))
    data = {"x": torch.tensor([float(rank())]), "n": torch.tensor(rank())}
    assert ops.reduce(data)["x"].tolist() == [total / world()]
    assert ops.reduce(data)["n"].item() == total / world()
    assert ops.reduce(data, "sum")["n"].item() == ops.reduce(data, "none")["n"].item() == total
    assert ops.reduce(data, "max")["n"].item() == world() - 1
    assert ops.reduce(data, "min")["n"].item() == 0
    sent = ops.broadcast(data, from_process=world() - 1)
    assert sent["x"].tolist() == data["x"].tolist() == [world() - 1.0]
    listed = [rank(), {"r": rank()}]
    assert ops.broadcast_object_list(listed, from_process=world() - 1) is listed
    assert listed == [world() - 1, {"r": world() - 1}]
    with pytest.raises(ValueError, match=f"processes 0 to {world() - 1}"):
        ops.broadcast(torch.ones(1), from_process=world())


def the_gradient_of_a_reduction_is_that_of_the_own_share() -> None:
    for reduction, expected in (("sum", 3.0), ("mean", 3.0 / world())):
        weight = torch.tensor(float(rank() + 1), requires_grad=True)
        ops.reduce(weight * 3, reduction).backward()
        assert weight.grad is not None
        assert weight.grad.item() == pytest.approx(expected)


def pads_to_the_largest() -> None:
    widest = world() + 1
    own = torch.full((2, rank() + 2), rank() + 1)
    found = ops.pad_across_processes({"a": own, "v": torch.ones(rank()), "s": torch.tensor(1)}, dim=1, pad_index=-1)
    assert found["a"].shape == (2, widest)
    assert found["a"][0].tolist() == [rank() + 1] * (rank() + 2) + [-1] * (world() - 1 - rank())
    assert found["v"].shape == (rank(),)
    assert found["s"].dim() == 0
    first = ops.pad_across_processes(own, dim=-1, pad_first=True)
    assert first[1].tolist() == [0] * (world() - 1 - rank()) + [rank() + 1] * (rank() + 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls nested tensors a prototype
        jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for _ in range(2):
        with pytest.warns(ops.CannotPadNestedTensorWarning):
            assert ops.pad_across_processes(jagged) is jagged
    with pytest.raises(DistributedOperationException, match="built alike"):
        ops.pad_across_processes([torch.ones(1)] * (1 + (rank() == 0)))


def copies_from_the_rank_that_has_it() -> None:
    own = torch.ones(2, 3, dtype=torch.float16) * 7 if rank() == world() - 1 else None
    assert ops.copy_tensor_to_devices(own).tolist() == [[7.0] * 3] * 2
    shape, code = ops.gather_tensor_shape(own)
    assert (shape.tolist(), code) == ([2, 3], 3)


def batch_of(step_rows: int, real_total: int) -> tuple[list[int], Share]:
    """Return the sample numbers of this rank's padded last batch, and its share; padding repeats sample 0."""
    start = rank() * step_rows
    numbers = [number if number < real_total else 0 for number in range(start, start + step_rows)]
    return numbers, Share(step_rows, max(0, min(step_rows, real_total - start)))


def metrics_of_tensors_count_every_sample_once() -> None:
    for real_total in range(1, 4 * world() + 1):
        numbers, share = batch_of(4, real_total)
        column = torch.tensor(numbers)
        data = {"logits": column[:, None].repeat(1, 2), "pair": [column.bool(), Pair(column.half(), column)]}
        found = gather_for_metrics_rows(data, share)
        every = list(range(real_total))
        assert found["logits"].tolist() == [[number, number] for number in every]
        assert found["pair"][0].tolist() == [bool(number) for number in every]
        assert found["pair"][1].right.tolist() == every
        flat = gather_for_metrics_rows(column.repeat_interleave(3), share)
        assert flat.tolist() == [number for number in every for _ in range(3)]


def metrics_of_any_size_count_every_sample_once() -> None:
    # Small tensors travel in one exchange with their shapes, larger ones in one buffer, the largest by themselves.
    for width in (1, 300, 100_000):
        for real_total in (1, 4 * world() - 2, 4 * world()):
            numbers, share = batch_of(4, real_total)
            column = torch.tensor(numbers)
            data = {"wide": column[:, None].repeat(1, width), "odd": column.to(torch.uint8), "empty": column[:0]}
            for given in (data, {"wide": data["wide"]}):
                found = gather_for_metrics_rows(given, share)
                assert found["wide"].shape == (real_total, width)
                assert found["wide"][:, -1].tolist() == list(range(real_total))
            found = gather_for_metrics_rows(data, share)
            assert (found["odd"].tolist(), found["empty"].tolist()) == (list(range(real_total)), [])
        gathered = ops.gather(data)
        assert gathered["wide"].shape == (4 * world(), width)
        assert gathered["odd"].tolist() == list(range(4 * world()))
    assert gather_for_metrics_rows({}, None) == ops.gather({}) == {}


def metrics_of_other_objects_count_every_sample_once() -> None:
    for real_total in (1, 3, 4 * world() - 3, 4 * world()):
        numbers, share = batch_of(4, real_total)
        names = [f"sample {number}" for number in numbers]
        every = [f"sample {number}" for number in range(real_total)]
        assert gather_for_metrics_rows(names, share) == every
        assert gather_for_metrics_rows(tuple(names), share) == every
        assert gather_for_metrics_rows(numbers, share) == list(range(real_total))
        assert gather_for_metrics_rows([{"id": n} for n in numbers], share) == [{"id": n} for n in range(real_total)]
        mixed = {"id": names, "score": torch.tensor(numbers), "array": np.array(numbers), "step": 7}
        found = gather_for_metrics_rows(mixed, share)
        assert list(found) == ["id", "score", "array", "step"]
        assert found["id"] == every
        assert found["score"].tolist() == found["array"].tolist() == list(range(real_total))
        assert found["step"] == [7] * world()
        assert gather_for_metrics_rows({"id": names, "past": None}, share) == {"id": every, "past": None}
        absent = gather_for_metrics_rows({"score": torch.tensor(numbers), "past": None}, share)
        assert (absent["score"].tolist(), absent["past"]) == (list(range(real_total)), None)
        scored = gather_for_metrics_rows(Scored(torch.tensor(numbers), names), share)
        assert (type(scored), scored.score.tolist(), scored.names) == (Scored, list(range(real_total)), every)
        boxes = [{"box": torch.full((n % 3, 4), float(n))} for n in numbers]
        found = gather_for_metrics_rows(boxes, share)
        assert [entry["box"].shape for entry in found] == [(n % 3, 4) for n in range(real_total)]


def metrics_of_lists_of_batched_tensors_are_merged_by_entry() -> None:
    for rows in (1, 2, 3, 4):  # lists of 1 to 4 entries: shorter than the batch, as long as it, and longer
        for real_total in (rows * world() - 1, rows * world()):
            numbers, share = batch_of(rows, real_total)
            column, every = torch.tensor(numbers), list(range(real_total))
            pair = gather_for_metrics_rows([column, {"y": column}], share)
            assert [pair[0].tolist(), pair[1]["y"].tolist()] == [every, every]
            for length in (1, 2, 3, 4):
                heads = [{"h": column + 10 * i, "two": column[:, None]} for i in range(length)]
                found = gather_for_metrics_rows({"out": heads}, share)["out"]
                assert [head["h"].tolist() for head in found] == [[n + 10 * i for n in every] for i in range(length)]
                assert all(head["two"].shape == (real_total, 1) for head in found)
            names = [f"sample {number}" for number in numbers]
            mixed: Any = [{"h": column, "name": names}, {"h": column, "absent": None}, None]
            first, second, third = gather_for_metrics_rows(mixed, share)
            assert first["h"].tolist() == second["h"].tolist() == every
            assert first["name"] == [f"sample {number}" for number in every]
            assert (second["absent"], third) == (None, None)
    assert [h["h"].shape for h in gather_for_metrics_rows([{"h": torch.ones(3)}] * 2, None)] == [(3 * world(),)] * 2


def metrics_of_one_mapping_per_sample_are_joined() -> None:
    numbers, share = batch_of(2, 2 * world() - 1)
    every = list(range(2 * world() - 1))
    sizes = [{"size": torch.tensor([n, n]), "box": torch.full((n + 3, 4), n)} for n in numbers]  # a size looks batched
    assert [sample["box"].shape[0] for sample in gather_for_metrics_rows(sizes, share)] == [n + 3 for n in every]
    # On rank 0 every sample has as many boxes as the batch has samples, and on the others it has more.
    boxes = {"boxes": [{"box": torch.full((2 + rank(), 4), n)} for n in numbers]}
    found = gather_for_metrics_rows(boxes, share)["boxes"]
    assert [sample["box"].shape[0] for sample in found] == [2 + n // 2 for n in every]
    assert [int(sample["box"][0, 0]) for sample in found] == every
    # One entry per box, of any number: the ranks have lists of different lengths.
    found = gather_for_metrics_rows([{"box": torch.full((2,), rank())}] * (2 * rank() + 1), Share(2, 2))
    assert [int(box["box"][0]) for box in found] == [r for r in range(world()) for _ in range(2 * r + 1)]


def metrics_with_use_gather_object() -> None:
    numbers, share = batch_of(4, 4 * world() - 1)
    rows = [torch.full((n % 3 + 1,), n) for n in numbers]
    found = gather_for_metrics_rows(rows, share, use_gather_object=True)
    assert [row.tolist() for row in found] == [[n] * (n % 3 + 1) for n in range(4 * world() - 1)]
    found = gather_for_metrics_rows(torch.tensor(numbers), share, use_gather_object=True)
    assert [int(row) for row in found] == list(range(4 * world() - 1))
    boxes = [{"box": torch.full((4,), n)} for n in numbers]
    found = gather_for_metrics_rows(boxes, share, use_gather_object=True)
    assert [int(sample["box"][0]) for sample in found] == list(range(4 * world() - 1))


def metrics_of_unequal_shapes_come_as_samples() -> None:
    numbers, share = batch_of(2, 2 * world() - 1)
    logits = torch.tensor(numbers)[:, None].repeat(1, rank() + 1)
    with pytest.warns(UserWarning, match=r"\['logits'\] with rows of different shapes.*pad_across_processes"):
        found = gather_for_metrics_rows({"logits": logits}, share)["logits"]
    assert [row.tolist() for row in found] == [[n] * (n // 2 + 1) for n in range(2 * world() - 1)]
    again = gather_for_metrics_rows({"logits": logits}, share)["logits"]
    assert len(again) == 2 * world() - 1


def metrics_of_scalars_warn_where_a_rank_is_padded() -> None:
    numbers, share = batch_of(2, 2 * world())
    assert gather_for_metrics_rows({"loss": torch.tensor(1.0)}, share)["loss"].shape == (world(),)
    numbers, share = batch_of(2, 2 * world() - 1)
    with pytest.warns(UserWarning, match=r"the entry \['loss'\].*weighted_mean"):
        found = gather_for_metrics_rows({"loss": torch.tensor(1.0), "n": torch.tensor(numbers)}, share)
    assert (found["loss"].shape, len(found["n"])) == ((world(),), 2 * world() - 1)
    gather_for_metrics_rows({"loss": torch.tensor(1.0)}, share)


def metrics_without_a_share_keep_everything() -> None:
    ragged = torch.full((rank(),), rank())
    for share in (None, Share(None, None)):
        assert gather_for_metrics_rows(ragged, share).tolist() == [r for r in range(world()) for _ in range(r)]
        assert gather_for_metrics_rows(["x"] * rank(), share) == ["x"] * sum(range(world()))


def metrics_agree_though_ranks_differ_in_structure() -> None:
    # An empty list says nothing of its items: the ranks must still take the same way.
    own: list[Any] = [] if rank() == 0 else [{"r": rank()}]
    assert gather_for_metrics_rows(own, None) == [{"r": r} for r in range(1, world())]
    with pytest.raises(WrongTypeError, match="another structure on each process"):
        gather_for_metrics_rows({"a": 1} if rank() == 0 else {"b": 1}, None)


def the_weighted_mean_is_the_mean_over_samples() -> None:
    samples = [[1.0, 2.0, 3.0], [10.0], []][rank()] if world() == 3 else [[1.0, 2.0, 3.0], [10.0]][rank()]
    own = torch.tensor(samples).mean()  # nan where there are none
    found = weighted_mean({"loss": own, "both": [own, 1]}, len(samples))
    assert found["loss"].item() == found["both"][0].item() == 4.0
    assert found["both"][1].item() == 1.0
    vector = weighted_mean(torch.tensor([rank(), 1]), torch.tensor(1))
    assert vector.tolist() == [sum(range(world())) / world(), 1.0]


CHECKS: list[Callable[[], None]] = [
    gathers_nested_structures,
    gather_refuses_what_is_no_tensor,
    gather_object_joins_lists,
    reduces_and_broadcasts,
    the_gradient_of_a_reduction_is_that_of_the_own_share,
    pads_to_the_largest,
    copies_from_the_rank_that_has_it,
    metrics_of_tensors_count_every_sample_once,
    metrics_of_any_size_count_every_sample_once,
    metrics_of_other_objects_count_every_sample_once,
    metrics_of_lists_of_batched_tensors_are_merged_by_entry,
    metrics_of_one_mapping_per_sample_are_joined,
    metrics_with_use_gather_object,
    metrics_of_unequal_shapes_come_as_samples,
    metrics_of_scalars_warn_where_a_rank_is_padded,
    metrics_without_a_share_keep_everything,
    metrics_agree_though_ranks_differ_in_structure,
    the_weighted_mean_is_the_mean_over_samples,
]


def every_check() -> list[str]:
    passed = []
    for check in CHECKS:
        reset_warnings()
        check()
        passed.append(check.__name__)
    return passed


@pytest.mark.parametrize("world_size", [2, 3])
def test_operations(world_size: int) -> None:
    for passed in run_group(every_check, world_size):
        assert passed == [check.__name__ for check in CHECKS]


def mismatches() -> dict[str, str]:
    own = torch.ones(2 + rank(), 3)
    calls: dict[str, Callable[[], Any]] = {
        "shape": lambda: ops.gather({"logits": [own]}),
        "reduce": lambda: ops.reduce(own),
        "dtype": lambda: ops.broadcast(torch.ones(1, dtype=[torch.int64, torch.float32][rank()])),
        "operation": lambda: ops.gather(torch.ones(1)) if rank() == 0 else ops.reduce(torch.ones(1)),
        "tensors": lambda: ops.gather({"a": torch.ones(1)} if rank() == 0 else {"b": torch.ones(1)}),
        "dims": lambda: ops.pad_across_processes(torch.ones([1] * (rank() + 1))),
        "metrics": lambda: gather_for_metrics_rows(own, None) if rank() == 0 else ops.gather_object([1]),
    }
    messages = {}
    for name, call in calls.items():
        with pytest.raises(DistributedOperationException) as caught:
            call()
        messages[name] = str(caught.value)
    assert ops.gather(torch.tensor([rank()])).tolist() == [0, 1]
    assert len(ops.pad_across_processes(own)) == 3

    @checked.chained_operation
    def evaluate() -> None:
        checked.verify_operation(own_gather)(own)

    with pytest.raises(DistributedOperationException, match="while evaluate was running: own_gather was called"):
        evaluate()
    return messages


def own_gather(tensor: torch.Tensor) -> torch.Tensor:
    return communicator().gather(tensor)


def test_checked_mode_names_what_differs_on_every_rank() -> None:
    first, second = run_group(mismatches, 2, env={"ACCELERATE_DEBUG_MODE": "true"})
    for messages in (first, second):
        assert "the shape of the entry ['logits'][0] differs: rank 0 has (2, 3), rank 1 has (3, 3)" in messages["shape"]
        assert messages["reduce"].startswith("reduce was called with values that do not fit together: the shape")
        assert "the dtype of the tensor differs: rank 0 has torch.int64, rank 1 has torch.float32" in messages["dtype"]
        assert "the operation differs: rank 0 has gather, rank 1 has reduce" in messages["operation"]
        assert """rank 0 has ["['a']"], rank 1 has ["['b']"]""" in messages["tensors"]
        assert "number of dimensions" in messages["dims"]
        assert "rank 0 has gather_for_metrics, rank 1 has gather_object" in messages["metrics"]
        lines = Path(__file__).read_text().splitlines()
        line = next(number for number, text in enumerate(lines, 1) if '"shape": lambda' in text)
        assert f"rank 1: {__file__}:{line}" in messages["shape"]


def switch_by_the_program() -> list[str]:
    """Set the mode through each of the objects that show it, and switch it off again."""
    accelerator = Accelerator()
    states: list[Any] = [PartialState(), AcceleratorState(), accelerator.state]
    raised = []
    for state in states:
        state.debug = True
        assert all(other.debug for other in states)
        with pytest.raises(DistributedOperationException) as caught:
            accelerator.reduce(torch.ones(2 + rank()))
        raised.append(str(caught.value))
        state.debug = False
        assert not any(other.debug for other in states)
        assert accelerator.reduce(torch.ones(2)).tolist() == [2.0, 2.0]
    return raised


def test_a_program_may_switch_the_checked_mode() -> None:
    first, second = run_group(switch_by_the_program, 2)
    assert first == second
    assert len(first) == 3
    assert all("rank 0 has (2,), rank 1 has (3,)" in message for message in first)


def fail_on_the_last_rank() -> None:
    communicator()
    if rank() == 1:
        raise RuntimeError("the reason")
    communicator().barrier()


def test_a_failure_in_a_group_names_rank_and_reason() -> None:
    with pytest.raises(ProcessGroupFailure, match=r"rank 1 failed:\n(.*\n)*RuntimeError: the reason"):
        run_group(fail_on_the_last_rank, 2)
